"""policy.py by hand numbers; each check takes the function it tests."""

import math

import pytest
import torch

from nanorl.objectives import policy

ONE = torch.ones(1, 1)


def one_token(surrogate, ratio, advantage, **options):
    """Of one token at this ratio: its loss, the gradient of that in logp, and whether it was clipped."""
    logp = torch.tensor([[math.log(ratio) - 2.0]], requires_grad=True)
    old_logp, advantages = torch.tensor([[-2.0]]), torch.tensor([[advantage]])
    loss, diagnostics = surrogate(logp, old_logp, advantages, ONE, **options)
    loss.sum().backward()
    assert math.isclose(diagnostics["ratio"].item(), ratio, rel_tol=1e-5)
    return loss.item(), logp.grad.item(), diagnostics["clipped"].item()


def near(got, expected):
    for a, b in zip(got, expected, strict=True):
        assert math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-6), f"{got} instead of {expected}"


def check_clip_by_hand(surrogate):
    for level in ("token", "sequence"):
        near(one_token(surrogate, 1.1, 1.0, level=level), (-1.1, -1.1, False))
        near(one_token(surrogate, 0.9, -1.0, level=level), (0.9, 0.9, False))
        near(one_token(surrogate, 2.0, 1.0, level=level), (-1.2, 0.0, True))  # good enough: no gradient
        near(one_token(surrogate, 0.5, 1.0, level=level), (-0.5, -0.5, False))  # good but rarer: pull it back
        near(one_token(surrogate, 2.0, -1.0, level=level), (2.0, 2.0, False))  # objective -2, with gradient
        near(one_token(surrogate, 0.5, -1.0, level=level), (0.8, 0.0, True))  # objective -0.8, without


def check_low_and_high_clip(surrogate):
    near(one_token(surrogate, 1.25, 1.0, clip_low=0.1, clip_high=0.3), (-1.25, -1.25, False))
    near(one_token(surrogate, 1.5, 1.0, clip_low=0.1, clip_high=0.3), (-1.3, 0.0, True))
    near(one_token(surrogate, 0.8, -1.0, clip_low=0.1, clip_high=0.3), (0.9, 0.0, True))
    near(one_token(surrogate, 0.8, -2.0, clip_low=0.3, clip_high=0.1), (1.6, 1.6, False))


def check_first_update(surrogate):
    """Equal policies: every ratio is exactly 1 and the gradient is that of plain policy gradient."""
    for level in ("token", "sequence"):
        logp = torch.tensor([[-0.3, -1.7, -2.9], [-5.1, -0.01, -8.0]], requires_grad=True)
        mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
        loss, diagnostics = surrogate(logp, logp, torch.tensor([[2.0], [-0.5]]), mask, level=level)
        loss.sum().backward()
        assert torch.equal(diagnostics["ratio"], torch.ones(2, 3)) and not diagnostics["clipped"].any()
        assert logp.grad.tolist() == [[-2.0, -2.0, -2.0], [0.5, 0.5, 0.0]]
        assert loss.tolist() == logp.grad.tolist()


def check_advantage_a_token(surrogate):
    advantages = torch.tensor([[1.0, -1.0, math.nan]])
    loss, _ = surrogate(torch.zeros(1, 3), torch.zeros(1, 3), advantages, torch.tensor([[1, 1, 0]]))
    assert loss.tolist() == [[-1.0, 1.0, 0.0]]


def check_sequence_ratio_by_hand(surrogate):
    # mean log-ratio (0.3 - 0.1 + 0.1) / 3 = 0.1, and of the second row 0.6
    log_ratio = torch.tensor([[0.3, -0.1, 0.1], [0.6, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    old = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]])
    loss, diagnostics = surrogate(old + log_ratio, old, torch.tensor([[2.0], [1.0]]), mask, level="sequence")
    s = math.exp(0.1)
    expected = torch.tensor([[s, s, s], [math.exp(0.6), 1.0, 1.0]])
    torch.testing.assert_close(diagnostics["ratio"], expected)
    torch.testing.assert_close(loss, torch.tensor([[-2 * s] * 3, [-1.2, 0.0, 0.0]]))
    assert diagnostics["clipped"].tolist() == [[False] * 3, [True, False, False]]


def check_sequence_gradient_is_gspo(surrogate):
    """Against equation 5 of arXiv 2507.18071 as it stands, on rows of which some are clipped."""
    g = torch.Generator().manual_seed(0)
    logp = (torch.randn(6, 5, generator=g) - 3).requires_grad_()
    old = logp.detach() + 0.4 * torch.randn(6, 5, generator=g)
    mask = torch.arange(5) < torch.tensor([5, 4, 3, 2, 1, 5])[:, None]
    advantages = torch.tensor([[1.0], [-1.0], [0.5], [2.0], [-2.0], [-0.3]])
    s = (((logp - old) * mask).sum(-1) / mask.sum(-1)).exp()
    paper = -torch.minimum(s * advantages[:, 0], s.clamp(0.95, 1.05) * advantages[:, 0]).mean()
    loss, diagnostics = surrogate(logp, old, advantages, mask, 0.05, 0.05, level="sequence")
    ours = ((loss * mask).sum(-1) / mask.sum(-1)).mean()
    assert 0 < diagnostics["clipped"].any(-1).sum() < 6
    torch.testing.assert_close(ours, paper)
    torch.testing.assert_close(*(torch.autograd.grad(x, logp)[0] for x in (ours, paper)))


def check_masked_slots_do_not_matter(surrogate):
    for level in ("token", "sequence"):
        results = []
        for bad in (0.0, -50.0, math.nan, math.inf, -math.inf):
            logp = torch.tensor([[-1.0, bad, -1.5], [bad, bad, bad]], requires_grad=True)
            old = torch.tensor([[-1.1, -bad, -1.2], [0.0, bad, -1.0]])
            advantages = torch.tensor([[1.0, bad, -1.0], [bad, 1.0, bad]])
            mask = torch.tensor([[1, 0, 1], [0, 0, 0]])  # the second row has no response
            loss, diagnostics = surrogate(logp, old, advantages, mask, level=level)
            loss.sum().backward()
            results.append([loss.tolist(), logp.grad.tolist(), *(d.tolist() for d in diagnostics.values())])
        assert all(result == results[0] for result in results)
        loss, gradient, ratio, clipped = results[0]
        assert loss[1] == gradient[1] == [0, 0, 0] and ratio[1] == [1, 1, 1] and not any(clipped[1])
        assert loss[0][1] == gradient[0][1] == 0 and loss[0][0] < 0 < loss[0][2]


def check_only_the_trained_policy_learns(surrogate):
    tensors = [torch.full((1, 2), value, requires_grad=True) for value in (-1.0, -1.1)]
    for level in ("token", "sequence"):
        loss, diagnostics = surrogate(*tensors, torch.ones(1, 1), torch.ones(1, 2), level=level)
        assert not any(d.requires_grad for d in diagnostics.values())
        gradients = torch.autograd.grad(loss.sum(), tensors, allow_unused=True)
        assert gradients[0].all() and gradients[1] is None


def check_wild_ratios_stay_finite(surrogate):
    for advantage in (0.0, 1.0, -1.0):
        logp = torch.tensor([[-1.0, -2000.0]], requires_grad=True)
        old = torch.tensor([[-2000.0, -1.0]])
        loss, _ = surrogate(logp, old, torch.tensor([[advantage]]), torch.ones(1, 2))
        loss.sum().backward()
        assert torch.isfinite(loss).all() and torch.isfinite(logp.grad).all()


# Two distributions over four tokens, for expectations that are sums.
P = torch.tensor([0.5, 0.2, 0.2, 0.1], dtype=torch.float64)
Q = torch.tensor([0.1, 0.3, 0.2, 0.4], dtype=torch.float64)
KL = (P * (P / Q).log()).sum()


def expected_gradient(kl_estimate, kind):
    """Mean gradient of the estimate in the logits of P, over tokens sampled from P."""
    logits = P.log().requires_grad_()
    values = kl_estimate(logits.log_softmax(-1)[None], Q.log()[None], kind)
    return torch.autograd.grad((P * values[0]).sum(), logits)[0]  # the chances are those of sampling: fixed


def check_k1_and_k3_average_to_the_kl(kl_estimate):
    for kind in ("k1", "k3"):
        torch.testing.assert_close((P * kl_estimate(P.log()[None], Q.log()[None], kind)[0]).sum(), KL)


def check_kl_by_hand(kl_estimate):
    logp, ref = torch.tensor([[-1.0, -2.0, -3.0]]), torch.tensor([[-1.5, -2.0, -2.0]])  # d = .5, 0, -1
    for kind, expected in (("k1", [0.5, 0.0, -1.0]), ("k2", [0.125, 0.0, 0.5]),
                           ("k3", [math.exp(-0.5) - 0.5, 0.0, math.e - 2])):
        torch.testing.assert_close(kl_estimate(logp, ref, kind), torch.tensor([expected]))


def check_kl_gradients(kl_estimate):
    logits = P.log().requires_grad_()
    p = logits.softmax(-1)
    forward = torch.autograd.grad((p * (p / Q).log()).sum(), logits, retain_graph=True)[0]
    reverse = torch.autograd.grad((Q * (Q / p).log()).sum(), logits)[0]
    torch.testing.assert_close(expected_gradient(kl_estimate, "k1"), torch.zeros(4, dtype=torch.float64))
    torch.testing.assert_close(expected_gradient(kl_estimate, "k2"), forward)
    torch.testing.assert_close(expected_gradient(kl_estimate, "k3"), reverse)


def check_kl_masked_slots_do_not_matter(kl_estimate):
    for kind in ("k1", "k2", "k3"):
        for bad in (math.nan, math.inf, -math.inf, -1e4):
            logp = torch.tensor([[-1.0, bad, -3.0]], requires_grad=True)
            ref = torch.tensor([[-1.5, -2.0, bad]])
            kl = kl_estimate(logp, ref, kind, torch.tensor([[1, 0, 0]]))
            kl.sum().backward()
            assert kl[0, 0] > 0 and kl[0, 1:].tolist() == logp.grad[0, 1:].tolist() == [0, 0]
            assert math.isfinite(logp.grad[0, 0])


def check_kl_reference_does_not_learn(kl_estimate):
    logp, ref = torch.zeros(1, 2, requires_grad=True), torch.ones(1, 2, requires_grad=True)
    for kind in ("k1", "k2", "k3"):
        assert torch.autograd.grad(kl_estimate(logp, ref, kind).sum(), ref, allow_unused=True) == (None,)


def check_kl_stays_finite(kl_estimate):
    logp = torch.tensor([[-1.0, -1e4]], requires_grad=True)
    kl = kl_estimate(logp, torch.tensor([[-1e4, -1.0]]), "k3")
    kl.sum().backward()
    assert torch.isfinite(kl).all() and torch.isfinite(logp.grad).all()


VALUES = torch.tensor(
    [[1.0, 2.0, 3.0, 6.0], [10.0, math.nan, 20.0, math.inf], [math.nan] * 4, [5.0, 0.0, 0.0, 0.0]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0]])


def check_reduce_by_hand(reduce):
    assert reduce(VALUES, MASK, "token", 7).item() == pytest.approx(47 / 7)
    assert reduce(VALUES, MASK, "sequence", 3).item() == pytest.approx((3 + 15 + 5) / 3)
    assert reduce(VALUES, MASK, "constant", 3 * 10).item() == pytest.approx(47 / 30)
    # Another micro-batch has 7 more tokens:
    assert reduce(VALUES, MASK, "token", torch.tensor(14.0)).item() == pytest.approx(47 / 14)


def check_reduce_gradient(reduce):
    equal, by_row = [1 / 7] * 3, [1 / 12, 1 / 6, 1 / 3]
    for how, (a, b, c) in (("token", equal), ("sequence", by_row), ("constant", equal)):
        values = VALUES.clone().requires_grad_()
        reduce(values, MASK, how, 3 if how == "sequence" else 7).backward()
        expected = torch.tensor([[a, a, a, a], [b, 0, b, 0], [0, 0, 0, 0], [c, 0, 0, 0]])
        torch.testing.assert_close(values.grad, expected)


def check_reduce_of_nothing(reduce):
    for how in ("token", "sequence", "constant"):
        values = torch.full((2, 3), math.nan, requires_grad=True)
        loss = reduce(values, torch.zeros(2, 3), how, 0)
        loss.backward()
        assert loss.item() == 0 and not values.grad.any()


def check_reduce_is_the_same_however_split(reduce):
    """4 rows at once, 2 x 2 and 4 x 1: the shares add up, because the count is that of the whole."""
    for how in ("token", "sequence", "constant"):
        count = policy.count_for(MASK, how, constant_length=8)
        whole = reduce(VALUES, MASK, how, count)
        for size in (1, 2):
            shares = [reduce(VALUES[i:i + size], MASK[i:i + size], how, count) for i in range(0, 4, size)]
            torch.testing.assert_close(torch.stack(shares).sum(), whole)


def check_count_by_hand(count_for):
    assert count_for(MASK, "token").item() == 7
    assert count_for(MASK, "sequence").item() == 3  # the row without a response does not count
    assert count_for(MASK, "constant", constant_length=10).item() == 30
    assert count_for(MASK[2:3], "token").item() == count_for(MASK[2:3], "sequence").item() == 0


def check_grpo_adds_kl(grpo_loss):
    logp = torch.tensor([[-1.0, -2.0, math.nan]])
    old, ref = torch.tensor([[-1.0, -2.0, 0.0]]), torch.tensor([[-1.5, -2.0, math.inf]])
    mask, advantages = torch.tensor([[1, 1, 0]]), torch.tensor([[2.0]])
    loss, diagnostics = grpo_loss(logp, old, advantages, mask)
    assert loss.tolist() == [[-2.0, -2.0, 0.0]] and "kl" not in diagnostics
    loss, diagnostics = grpo_loss(logp, old, advantages, mask, ref, kl_coef=0.1, kl_kind="k2")
    torch.testing.assert_close(diagnostics["kl"], torch.tensor([[0.125, 0.0, 0.0]]))
    torch.testing.assert_close(loss, torch.tensor([[-1.9875, -2.0, 0.0]]))


CHECKS = {
    "clipped_surrogate": [
        check_clip_by_hand, check_low_and_high_clip, check_first_update, check_advantage_a_token,
        check_sequence_ratio_by_hand, check_sequence_gradient_is_gspo, check_masked_slots_do_not_matter,
        check_only_the_trained_policy_learns, check_wild_ratios_stay_finite],
    "kl_estimate": [
        check_k1_and_k3_average_to_the_kl, check_kl_by_hand, check_kl_gradients,
        check_kl_masked_slots_do_not_matter, check_kl_reference_does_not_learn, check_kl_stays_finite],
    "reduce": [
        check_reduce_by_hand, check_reduce_gradient, check_reduce_of_nothing,
        check_reduce_is_the_same_however_split],
    "count_for": [check_count_by_hand],
    "grpo_loss": [check_grpo_adds_kl],
}


@pytest.mark.parametrize("name, check", [(name, check) for name in CHECKS for check in CHECKS[name]])
def test_function(name, check):
    check(getattr(policy, name))


def test_bad_choices_are_refused():
    x = torch.zeros(1, 2)
    for words, call in [
        ("unknown level 'word'", lambda: policy.clipped_surrogate(x, x, x, x, level="word")),
        ("clip_low -0.2", lambda: policy.clipped_surrogate(x, x, x, x, clip_low=-0.2)),
        ("unknown KL estimate 'k4'", lambda: policy.kl_estimate(x, x, "k4")),
        ("needs a reference", lambda: policy.grpo_loss(x, x, x, x, kl_coef=0.1)),
        ("unknown reduction 'mean'", lambda: policy.reduce(x, x, "mean", 1)),
        ("unknown reduction 'mean'", lambda: policy.count_for(x, "mean")),
        ("constant_length is None", lambda: policy.count_for(x, "constant")),
    ]:
        with pytest.raises(ValueError, match=words):
            call()


def test_a_few_steps_move_probability_to_the_better_token():
    """The sign of everything at once: descent on the loss raises the chance of the rewarded token."""
    logits = torch.zeros(3, requires_grad=True)
    advantages, mask = torch.tensor([[1.0], [-0.5], [-0.5]]), torch.ones(3, 1)
    for _ in range(20):
        old = logits.detach().log_softmax(-1)[:, None]
        loss, _ = policy.clipped_surrogate(logits.log_softmax(-1)[:, None], old, advantages, mask)
        gradient = torch.autograd.grad(policy.reduce(loss, mask, "token", 3), logits)[0]
        with torch.no_grad():
            logits -= gradient
    assert logits.softmax(-1)[0] > 0.9
