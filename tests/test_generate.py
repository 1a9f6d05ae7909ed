"""Sampling: hand numbers for the choice of a token, and the fast sampler against the naive one."""

import math

import pytest
import torch
from test_model import SETTINGS, a_model

from nanorl.generate import Sampling, check_prompts, choose, generate, generate_naive, left_pad, truncate

STOP, PAD = 7, 3
PROMPTS = [[5, 6, 0], [4], [9, 9, 8, 3, 1, 2], [1, 2]]
CONTEXT = 24


def sharp_model(setting="ours", seed=0):
    """A model whose distributions are neither flat nor one-sided, and that ends a response every few tokens."""
    model = a_model(setting, seed, vocab_size=10)
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0)
    return model


def uniforms_of(seed, rows, width):
    """The numbers that `generate` draws from a generator of this seed."""
    return torch.rand(rows, width, generator=torch.Generator().manual_seed(seed))


def run(model, prompts, sampling, group=1, seed=0, stop=STOP, pad=PAD, **more):
    return generate(model, prompts, sampling, stop, pad, group, torch.Generator().manual_seed(seed), **more)


def rows_of(done):
    return [ids[:n] for ids, n in zip(done.responses.tolist(), done.lengths.tolist(), strict=True)]


# ---- one token -------------------------------------------------------------------------------------------

P = torch.tensor([[0.1, 0.2, 0.7]])


def picks(probabilities, numbers, **sampling):
    chosen, logprobs = choose(probabilities.log().expand(len(numbers), -1), torch.tensor(numbers), Sampling(**sampling))
    assert logprobs.dtype == torch.float32
    return chosen.tolist(), logprobs.exp().tolist()


def test_choose_by_hand():
    chosen, probabilities = picks(P, [0.0, 0.09, 0.11, 0.29, 0.31, 0.999])
    assert chosen == [0, 0, 1, 1, 2, 2] and probabilities == pytest.approx([0.1, 0.1, 0.2, 0.2, 0.7, 0.7])


def test_choose_at_a_temperature_by_hand():
    # temperature 0.5 squares them: .01, .04, .49 of .54, so the borders are at 0.0185 and 0.0926
    chosen, probabilities = picks(P, [0.018, 0.019, 0.092, 0.093], temperature=0.5)
    assert chosen == [0, 1, 1, 2] and probabilities == pytest.approx([x / 0.54 for x in (0.01, 0.04, 0.04, 0.49)])


def test_choose_from_a_truncated_distribution_records_the_whole_one():
    # top-2 leaves .2 and .7, so the border is at 2/9; what is recorded is the probability before the cut
    chosen, probabilities = picks(P, [0.0, 0.22, 0.23, 0.99], top_k=2)
    assert chosen == [1, 1, 2, 2] and probabilities == pytest.approx([0.2, 0.2, 0.7, 0.7])


def test_greedy_takes_the_likeliest_whatever_the_number():
    chosen, probabilities = picks(P, [0.0, 0.5, 0.999], temperature=0)
    assert chosen == [2, 2, 2] and probabilities == pytest.approx([0.7] * 3)


Q = torch.tensor([[0.3, 0.5, 0.05, 0.15]])


@pytest.mark.parametrize("top_k, top_p, kept", [
    (0, 1.0, [0, 1, 2, 3]), (1, 1.0, [1]), (2, 1.0, [0, 1]), (9, 1.0, [0, 1, 2, 3]),
    (0, 0.01, [1]), (0, 0.49, [1]), (0, 0.51, [0, 1]), (0, 0.79, [0, 1]), (0, 0.81, [0, 1, 3]), (0, 0.96, [0, 1, 2, 3]),
    (2, 0.63, [0, 1]), (2, 0.62, [1]),  # of the two that top-k leaves, the first holds .5 / .8 = .625
])
def test_truncate_by_hand(top_k, top_p, kept):
    got = truncate(Q.log(), top_k, top_p)
    assert (got[0] > -math.inf).nonzero().flatten().tolist() == kept
    assert torch.equal(got[0, kept], Q.log()[0, kept])


def test_a_token_of_probability_0_is_never_chosen():
    """Not at the first and last tokens, not for the smallest and largest numbers that a generator draws."""
    g = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(2000, 30, generator=g)
    impossible = torch.rand(2000, 30, generator=g) < 0.7
    impossible[:, 15] = False
    impossible[::2, [0, 29]] = True
    logits[impossible] = -math.inf
    for u in (0.0, 2.0**-24, 0.5, 1 - 2.0**-24):
        for sampling in (Sampling(), Sampling(temperature=0.3), Sampling(top_k=5), Sampling(top_p=0.5)):
            chosen, logprobs = choose(logits, torch.full((2000,), u), sampling)
            assert torch.isfinite(logprobs).all()
            kept = truncate((logits / sampling.temperature).log_softmax(-1), sampling.top_k, sampling.top_p)
            assert torch.isfinite(kept.gather(-1, chosen[:, None])).all()


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7), Sampling(temperature=2.0, top_k=6),
                                      Sampling(top_p=0.8)])
def test_tokens_come_as_often_as_they_should(sampling):
    """20,000 numbers spread evenly give each token its share to within one of them."""
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(1))
    numbers = (torch.arange(20_000) + 0.5) / 20_000
    chosen, _ = choose(logits.expand(20_000, -1), numbers, sampling)
    kept = truncate((logits / sampling.temperature).log_softmax(-1), sampling.top_k, sampling.top_p)
    torch.testing.assert_close(chosen.bincount(minlength=12) / 20_000, kept.softmax(-1)[0], atol=2e-4, rtol=0)


# ---- whole responses -------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("sampling", [
    Sampling(12), Sampling(12, temperature=0.5), Sampling(12, temperature=2.0, top_k=5), Sampling(12, top_p=0.6),
    Sampling(12, temperature=1.3, top_k=20, top_p=0.9), Sampling(12, temperature=0), Sampling(1), Sampling(99),
], ids=str)
def test_fast_equals_naive_token_for_token(setting, sampling):
    """Unequal prompts and a group of 3: the same tokens and log-probs as one row at a time without a cache."""
    model, G = sharp_model(setting), 3
    done = run(model, PROMPTS, sampling, G, seed=5)
    longest = min(sampling.max_new_tokens, CONTEXT - 1)
    numbers = uniforms_of(5, len(PROMPTS) * G, longest).tolist()
    lengths = []
    for row in range(len(PROMPTS) * G):
        ids, logprobs = generate_naive(model, PROMPTS[row // G], sampling, STOP, numbers[row])
        n = len(ids)
        assert done.responses[row].tolist() == ids + [PAD] * (done.responses.size(1) - n)
        assert done.lengths[row] == n and done.ended[row] == (ids[-1] == STOP)
        torch.testing.assert_close(done.logprobs[row, :n], torch.tensor(logprobs), atol=1e-4, rtol=0)
        assert (done.logprobs[row, n:] == 0).all()
        lengths.append(n)
    assert done.responses.size(1) == max(lengths)
    if sampling.temperature and sampling.max_new_tokens > 1:
        assert len(set(lengths)) > 2  # unequal, or little was tested


def test_recorded_logprobs_are_those_of_the_whole_distribution_at_the_temperature():
    model = sharp_model()
    done = run(model, PROMPTS, Sampling(10, temperature=0.7, top_k=4, top_p=0.9), group=2)
    for row, ids in enumerate(rows_of(done)):
        prompt = PROMPTS[row // 2]
        logits = model(torch.tensor([prompt + ids]))[0, len(prompt) - 1 : -1]
        expected = (logits / 0.7).log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
        torch.testing.assert_close(done.logprobs[row, : len(ids)], expected.detach(), atol=1e-4, rtol=0)


def test_a_row_does_not_depend_on_its_neighbours():
    model = sharp_model()
    one = rows_of(run(model, [[5, 6], [8, 8, 8]], Sampling(12), group=4))
    other = rows_of(run(model, [[5, 6], [4]], Sampling(12), group=4))
    assert one[:4] == other[:4] and one[4:] != other[4:]


def test_the_end_token_is_part_of_the_response_and_ends_it():
    """Even where the padding is that same token."""
    done = run(sharp_model(), PROMPTS, Sampling(5), group=8, pad=STOP)
    rows = rows_of(done)
    assert 0 < done.ended.sum() < len(rows)  # both kinds
    for ids, ended in zip(rows, done.ended.tolist(), strict=True):
        assert STOP not in ids[:-1] and (ids[-1] == STOP) == ended and (ended or len(ids) == 5)


def test_a_pad_token_in_the_middle_is_a_token_like_any_other():
    model = sharp_model()
    rows = rows_of(run(model, PROMPTS, Sampling(12), group=8))
    common = max(set(sum(rows, [])) - {STOP}, key=sum(rows, []).count)
    again = run(model, PROMPTS, Sampling(12), group=8, pad=common)
    assert rows_of(again) == rows and any(common in ids[:-1] for ids in rows)


def test_finished_rows_leave_the_batch():
    model, sizes = sharp_model(), []
    model.register_forward_pre_hook(lambda module, inputs: sizes.append(tuple(inputs[0].shape)))
    done = run(model, PROMPTS, Sampling(15), group=10)
    assert sizes[0] == (4, 6)  # each prompt once
    counts = [rows for rows, _ in sizes[1:]]
    assert {width for _, width in sizes[1:]} == {1} and counts[0] <= 40
    for t, rows in enumerate(counts):
        writing = int((done.lengths > t + 1).sum())
        assert writing <= rows and rows * 0.9 <= writing or rows == writing
    assert counts == sorted(counts, reverse=True) and counts[-1] < 20
    assert len(counts) == int(done.lengths.max()) - 1  # the last token is not read


def test_rows_stop_where_they_fill_the_context():
    """Also where so few are full that they stay in the batch until more have finished."""
    model = sharp_model()
    for at in (0, 7, 19):
        prompts = [[4, i % 10] for i in range(20)]
        prompts[at] = [6] * (CONTEXT - 1)  # room for one token
        done = run(model, prompts, Sampling(50), stop=-1)
        assert done.lengths.tolist() == [1 if i == at else CONTEXT - 2 for i in range(20)]
        assert not done.ended.any()
        numbers = uniforms_of(0, 20, CONTEXT - 2).tolist()
        for i in (0, 7, 12, 19):
            assert rows_of(done)[i] == generate_naive(model, prompts[i], Sampling(50), -1, numbers[i])[0]


def test_padding_that_looks_like_the_end_token_ends_nothing():
    """The full row stays in the batch and goes on with padding while others write."""
    model, prompts = sharp_model(), [[6] * (CONTEXT - 1)] + [[4, i % 10] for i in range(19)]
    greedy = Sampling(50, temperature=0)
    never = min(set(range(10)) - set(sum(rows_of(run(model, prompts, greedy, stop=-1)), [])))
    done = run(model, prompts, greedy, stop=never, pad=never)
    assert not done.ended.any() and done.lengths.tolist() == [1] + [CONTEXT - 2] * 19


def test_greedy_needs_no_numbers():
    model = sharp_model()
    one, two = (run(model, PROMPTS, Sampling(9, temperature=0), group=2, seed=seed) for seed in (1, 2))
    assert torch.equal(one.responses, two.responses)
    for row, ids in enumerate(rows_of(one)):
        sequence = list(PROMPTS[row // 2])
        for token in ids:
            assert int(model(torch.tensor([sequence]))[0, -1].argmax()) == token
            sequence.append(token)


def test_first_tokens_come_as_often_as_the_model_says():
    """4,000 responses to one prompt: each share within 4 standard errors of the model's probability."""
    model, n = sharp_model(), 4000
    done = run(model, [[5, 6, 0]], Sampling(1, temperature=0.8), group=n)
    p = (model(torch.tensor([[5, 6, 0]]))[0, -1] / 0.8).softmax(-1).detach()
    shares = done.responses[:, 0].bincount(minlength=len(p)) / n
    assert ((shares - p).abs() <= 4 * (p * (1 - p) / n).sqrt() + 1e-3).all() and (shares > 0).sum() > 5


def test_sampling_leaves_everything_else_as_it_was():
    model = sharp_model().train()
    before = torch.get_rng_state()
    one, two = run(model, PROMPTS, Sampling(9)), run(model, PROMPTS, Sampling(9))
    assert torch.equal(one.responses, two.responses) and torch.equal(torch.get_rng_state(), before)
    assert model.training and all(p.grad is None for p in model.parameters())
    run(model.eval(), PROMPTS, Sampling(2))
    assert not model.training


def test_tokens_of_the_first_row_are_shown_as_they_come():
    seen = []
    done = run(sharp_model(), PROMPTS, Sampling(12), group=5, on_token=seen.append)
    assert seen == rows_of(done)[0] and len(seen) < int(done.lengths.max())


# ---- prompts and errors ----------------------------------------------------------------------------------


def test_prompts_are_padded_on_the_left():
    tokens, mask = left_pad([[1, 2, 3], [4]], pad=9, device=torch.device("cpu"))
    assert tokens.tolist() == [[1, 2, 3], [9, 9, 4]]
    assert mask.tolist() == [[True] * 3, [False, False, True]]


@pytest.mark.parametrize("prompts, message", [
    ([], "no prompts to complete; give at least one"),
    ([[1], []], "prompt 1 is empty; it needs at least one token"),
    ([[1], [2] * 24], "prompt 1 has 24 tokens, and the context holds 24, response included; shorten the prompt"),
])
def test_prompts_that_cannot_be_completed(prompts, message):
    model = sharp_model()
    for call in (lambda: check_prompts(prompts, 1, model.cfg), lambda: run(model, prompts, Sampling(3))):
        with pytest.raises(ValueError) as error:
            call()
        assert str(error.value) == message


@pytest.mark.parametrize("settings", [
    {"max_new_tokens": 0}, {"temperature": -0.1}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1},
])
def test_settings_that_make_no_sampling(settings):
    with pytest.raises(ValueError, match="must be at least") as error:
        Sampling(**settings)
    assert "\n" not in str(error.value) and str(*settings.values()) in str(error.value)
