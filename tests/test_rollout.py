"""Rollouts: the frame by hand, recorded against recomputed log-probs, and nothing lost on the way."""

import pytest
import torch
from test_generate import CONTEXT, PAD, PROMPTS, STOP, run, sharp_model

from nanorl.data.tinyworld import problems
from nanorl.generate import Completions, Sampling
from nanorl.objectives.logprobs import token_entropy, token_logprobs
from nanorl.rollout import Rollout, assemble, merge, pack_groups, problem_prompt, recompute_logprobs, score, that_fit
from nanorl.tokenizer import Tokenizer

G = 3
T, F = True, False


def sampled(prompts=PROMPTS, group=G, temperature=0.8, seed=0, pad=PAD, length=9, setting="ours"):
    """A model, and its completions of unequal prompts as a rollout."""
    model = sharp_model(setting)
    rollout = assemble(run(model, prompts, Sampling(length, temperature), group, seed, pad=pad), group)
    rollout.rewards = torch.arange(len(rollout.tokens)).float()
    rollout.parts = {"reward": rollout.rewards, "half": rollout.rewards / 2}
    rollout.texts = [f"text {i}" for i in range(len(rollout.tokens))]
    rollout.problems = [{"question": f"question {i}"} for i in range(len(prompts))]
    return model, rollout


def plain_rows(rollout):
    """(prompt, response) of each row, without padding."""
    width = rollout.prompt_width
    return [(row[:width][mask[:width]].tolist(), row[width : width + n].tolist())
            for row, mask, n in zip(rollout.tokens, rollout.mask, rollout.lengths.tolist(), strict=True)]


def by_row(model, rollout, temperature):
    """Log-probs and entropies of each row's response from that row alone, in full, the slow way."""
    for prompt, response in plain_rows(rollout):
        tokens = torch.tensor([prompt + response])
        logits = model(tokens)
        start = len(prompt) - 1
        yield (token_logprobs(logits, tokens, temperature)[0, start:],
               token_entropy(logits, temperature)[0, start:-1])


def assert_recorded(model, rollout, temperature=0.8):
    """What the model recomputes is what the rollout recorded."""
    logprobs, _ = recompute_logprobs(model, model.lm_head, rollout, temperature)
    torch.testing.assert_close(logprobs.detach(), rollout.logprobs, atol=1e-4, rtol=0)


# ---- the frame -------------------------------------------------------------------------------------------


def test_the_frame_by_hand():
    """Two prompts, a group of 2, and padding that is the end token 0: masks come from lengths alone.

    Row 0 ends at once, row 1 at the third token, row 2 writes the end token's id nowhere and was cut off, row 3
    ends at the second.
    """
    logprobs = torch.tensor([[-1.0, 0, 0], [-2, -3, -4], [-5, -6, -7], [-8, -9, 0]])
    done = Completions(
        prompts=torch.tensor([[0, 5], [6, 7]]), prompt_mask=torch.tensor([[F, T], [T, T]]),
        responses=torch.tensor([[0, 0, 0], [1, 2, 0], [3, 4, 5], [8, 0, 0]]), lengths=torch.tensor([1, 3, 3, 2]),
        logprobs=logprobs, ended=torch.tensor([T, T, F, T]),
    )
    r = assemble(done, group=2)
    assert (r.prompt_width, r.group) == (2, 2)
    assert r.tokens.tolist() == [[0, 5, 0, 0, 0], [0, 5, 1, 2, 0], [6, 7, 3, 4, 5], [6, 7, 8, 0, 0]]
    assert r.mask.tolist() == [[F, T, T, F, F], [F, T, T, T, T], [T, T, T, T, T], [T, T, T, T, F]]
    # index t speaks of token t+1: the response's first token, at 2, has index 1
    assert r.response_mask.tolist() == [[F, T, F, F], [F, T, T, T], [F, T, T, T], [F, T, T, F]]
    assert r.logprobs.tolist() == [[0, -1, 0, 0], [0, -2, -3, -4], [0, -5, -6, -7], [0, -8, -9, 0]]
    assert r.lengths.tolist() == [1, 3, 3, 2] and r.ended.tolist() == [T, T, F, T] and r.rewards.tolist() == [0] * 4

    tokens, documents = pack_groups(r)
    assert documents.tolist() == [[0, 1, 2, 2, 2, -1, -1], [0, 0, 1, 1, 1, 2, 2]]
    assert tokens[documents >= 0].tolist() == [5, 0, 1, 2, 0, 6, 7, 3, 4, 5, 8, 0]


# ---- log-probs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["gpt2", "llama", "ours"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_recorded_recomputed_and_written_out_agree(setting, temperature):
    model, rollout = sampled(setting=setting, temperature=temperature, group=6)
    assert len(set(rollout.lengths.tolist())) > 2
    assert_recorded(model, rollout, temperature)
    logprobs, entropy = recompute_logprobs(model, model.lm_head, rollout, temperature)
    assert logprobs.dtype == entropy.dtype == torch.float32 and logprobs.shape == rollout.response_mask.shape
    assert (logprobs[~rollout.response_mask] == 0).all() and (entropy[~rollout.response_mask] == 0).all()
    for i, (expected, expected_entropy) in enumerate(by_row(model, rollout, temperature)):
        where = rollout.response_mask[i]
        torch.testing.assert_close(logprobs[i][where], expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(entropy[i][where], expected_entropy, atol=1e-5, rtol=1e-5)


def test_gradients_are_those_of_the_rows_written_out():
    _, rollout = sampled()
    weights = torch.randn(rollout.logprobs.shape)

    def gradients(total_of):
        model = sharp_model()
        total_of(model).backward()
        return [p.grad for p in model.parameters()]

    def written_out(model):
        pairs = zip(by_row(model, rollout, 0.8), rollout.response_mask, weights, strict=True)
        return sum((logprobs * w[where]).sum() for (logprobs, _), where, w in pairs)

    got = gradients(lambda model: (recompute_logprobs(model, model.lm_head, rollout, 0.8)[0] * weights).sum())
    for a, b in zip(got, gradients(written_out), strict=True):
        assert float((a - b).norm() / b.norm()) < 1e-5


def test_entropies_carry_no_gradient():
    model, rollout = sampled()
    logprobs, entropy = recompute_logprobs(model, model.lm_head, rollout, 0.8)
    assert logprobs.requires_grad and not entropy.requires_grad


def test_responses_of_one_token_and_responses_to_the_end_of_the_context():
    for length in (1, 99):
        model, rollout = sampled(length=length, setting="gpt2")
        assert length == 1 or int(rollout.mask.sum(dim=1).max()) == CONTEXT
        assert_recorded(model, rollout)


def test_the_padding_is_never_read():
    model, rollout = sampled()
    expected = recompute_logprobs(model, model.lm_head, rollout, 0.8)
    rollout.tokens[~rollout.mask] = 9
    for got, want in zip(recompute_logprobs(model, model.lm_head, rollout, 0.8), expected, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("pad", [STOP, 2, 6])
def test_a_pad_token_in_the_middle_of_a_response_counts(pad):
    """Whatever the padding is: the end token itself, or a token that responses are full of."""
    model, rollout = sampled(pad=pad, group=8)
    rows = [response for _, response in plain_rows(rollout)]
    assert pad == STOP or sum(pad in response[:-1] for response in rows) > 3
    assert rollout.response_mask.sum(dim=1).tolist() == [len(response) for response in rows]
    for response, ended in zip(rows, rollout.ended.tolist(), strict=True):
        assert response.count(STOP) == int(ended)
    assert_recorded(model, rollout)


# ---- parts and wholes ------------------------------------------------------------------------------------


def content(rollout: Rollout):
    """Everything that a rollout says of each row, whatever its padding."""
    logprobs = [values[where].tolist() for values, where in zip(rollout.logprobs, rollout.response_mask, strict=True)]
    return list(zip(plain_rows(rollout), logprobs, rollout.rewards.tolist(), rollout.lengths.tolist(),
                    rollout.ended.tolist(), rollout.parts["half"].tolist(), rollout.texts,
                    [p for p in rollout.problems for _ in range(rollout.group)], strict=True))


def check_frame(rollout: Rollout):
    B, width = rollout.tokens.shape
    assert rollout.mask.shape == (B, width)
    assert rollout.response_mask.shape == rollout.logprobs.shape == (B, width - 1)
    assert width == rollout.prompt_width + int(rollout.lengths.max())
    assert torch.equal(rollout.response_mask[:, rollout.prompt_width - 1 :], rollout.mask[:, rollout.prompt_width :])
    assert not rollout.response_mask[:, : rollout.prompt_width - 1].any()


def test_select_keeps_whole_groups_and_cuts_to_the_longest():
    model, rollout = sampled()
    whole = content(rollout)
    for chosen in ([2, 0], [1], [3, 2, 1, 0], [0, 0]):
        part = rollout.select(torch.tensor(chosen))
        assert content(part) == [row for i in chosen for row in whole[i * G : (i + 1) * G]]
        check_frame(part)
        assert_recorded(model, part)


def test_merge_aligns_the_prompts_and_loses_nothing():
    model, wide = sampled()
    _, narrow = sampled(prompts=[[4, 4], [8]], seed=1, length=20)
    _, other = sampled(prompts=[[1, 2, 3]], seed=2, length=2)
    whole = merge([narrow, wide, other], PAD)
    assert content(whole) == content(narrow) + content(wide) + content(other)
    assert (whole.prompt_width, whole.group, len(whole.problems)) == (6, G, 7)
    check_frame(whole)
    assert (whole.tokens[~whole.mask] == PAD).all()
    assert_recorded(model, whole)
    assert merge([wide], PAD) is wide


# ---- scoring ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    texts = [f"{p['question']} {p['answer']}" for p in problems(300)]
    return Tokenizer.train(texts, 320)


def test_score_reads_each_response_to_its_end_and_asks_for_its_own_gold(tokenizer):
    """Padding that decodes to text must not reach the reward: here it is the answer itself."""
    ids = [tokenizer.encode_with_marks(text) for text in ("<answer>", "<answer>4</answer>", "12", "")]
    six = tokenizer.encode("6")[0]
    width = max(map(len, ids)) + 1
    done = Completions(
        prompts=torch.tensor([[1], [2]]), prompt_mask=torch.ones(2, 1, dtype=torch.bool),
        responses=torch.tensor([row + [tokenizer.end_of_turn] + [six] * (width - len(row) - 1) for row in ids]),
        lengths=torch.tensor([len(row) + 1 for row in ids]), logprobs=torch.zeros(4, width),
        ended=torch.ones(4, dtype=torch.bool),
    )
    rollout, asked = assemble(done, group=2), []

    def reward(text, gold):
        asked.append((text, gold))
        return {"reward": len(text) / 10, "long": len(text) > 5}

    golds = [{"question": "a", "answer": "1+3=4\n#### 4"}, {"question": "b", "answer": "#### 12"}]
    score(rollout, tokenizer, golds, reward)
    assert asked == [("<answer>", "4"), ("<answer>4</answer>", "4"), ("12", "12"), ("", "12")]
    assert rollout.texts == [text for text, _ in asked] and rollout.problems == golds
    torch.testing.assert_close(rollout.rewards, torch.tensor([0.8, 1.8, 0.2, 0.0]))
    assert rollout.parts["long"].tolist() == [1, 1, 0, 0] and rollout.rewards.dtype == torch.float32


def test_prompts_that_do_not_fit_are_counted(tokenizer):
    ten = problems(10)
    lengths = sorted(len(problem_prompt(tokenizer, p)) for p in ten)
    kept, dropped = that_fit(tokenizer, ten, lengths[6])
    assert dropped == 10 - len(kept) == sum(n > lengths[6] for n in lengths) > 0
    assert kept == [p for p in ten if len(problem_prompt(tokenizer, p)) <= lengths[6]]


def test_a_prompt_ends_where_the_model_goes_on(tokenizer):
    problem = problems(1)[0]
    ids = problem_prompt(tokenizer, problem)
    assert ids[0] == tokenizer.special["<|user|>"] and ids[-1] == tokenizer.special["<|assistant|>"]
    assert problem_prompt(tokenizer, problem, think=True) == [*ids, tokenizer.special["<think>"]]
