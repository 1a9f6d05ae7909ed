"""advantages.py by hand numbers; each check takes the function it tests."""

import math

import pytest
import torch

from nanorl.objectives import advantages


def close(got, expected):
    torch.testing.assert_close(got, torch.tensor(expected), atol=1e-5, rtol=1e-5)


def check_mean_without_scale(group_advantages):
    got = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0], [3.0, 1.0, 1.0, 3.0]]), scale="none")
    close(got, [[0.75, -0.25, -0.25, -0.25], [1.0, -1.0, -1.0, 1.0]])


def check_scaled_by_its_own_group(group_advantages):
    # deviations .75, -.25, -.25, -.25: squares sum to .75, over G - 1 = 3 gives .25, so the deviation is .5
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [10.0, 0.0, 0.0, 0.0]])
    got = group_advantages(rewards)
    close(got, [[1.5, -0.5, -0.5, -0.5], [1.5, -0.5, -0.5, -0.5]])  # ten times the reward, the same advantage
    assert torch.equal(group_advantages(rewards[:1]), got[:1])  # and other groups do not matter


def check_leave_one_out(group_advantages):
    got = group_advantages(
        torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 2.0, 3.0, 6.0]]), "none", "leave_one_out")
    close(got, [[1.0, -1 / 3, -1 / 3, -1 / 3], [1 - 11 / 3, 2 - 10 / 3, 0.0, 4.0]])


def check_leave_one_out_is_unbiased(group_advantages):
    """Two responses, each with reward 1 (probability p) or 0: over all four draws A_0 * score_0 averages to
    the gradient of the expected reward, p (1 - p) for one logit."""
    p, total = 0.3, 0.0
    for first, chance in ((1.0, p), (0.0, 1 - p)):
        for second, chance_2 in ((1.0, p), (0.0, 1 - p)):
            a = group_advantages(torch.tensor([[first, second]]), "none", "leave_one_out")[0, 0].item()
            total += chance * chance_2 * a * (first - p)  # score of a Bernoulli logit
    assert math.isclose(total, p * (1 - p), rel_tol=1e-5)


def check_equal_rewards_give_exactly_zero(group_advantages):
    for size in (2, 3, 7, 8, 64):
        for reward in (0.0, 1.0, 0.1, 1.1, -0.7, 1e-8):
            for scale in ("std", "none"):
                for baseline in ("mean", "leave_one_out"):
                    got = group_advantages(torch.full((2, size), reward), scale, baseline)
                    assert not got.any(), f"{size} rewards of {reward}: {got}"


def check_whole_numbers_are_taken(group_advantages):
    close(group_advantages(torch.tensor([[1, 0]]), scale="none"), [[0.5, -0.5]])


def check_informative_groups(informative_groups):
    rewards = torch.tensor([[0.0, 0.0, 0.0], [1.1, 1.1, 1.1], [0.0, 0.0, 0.1], [1.0, 0.0, 0.0]])
    assert informative_groups(rewards).tolist() == [False, False, True, True]


def check_soft_overlong_penalty(soft_overlong_penalty):
    lengths = torch.tensor([0, 80, 81, 90, 100, 101, 10_000])
    close(soft_overlong_penalty(lengths, 100, 20), [0.0, 0.0, -0.05, -0.5, -1.0, -1.0, -1.0])


def check_gae_by_hand(gae):
    one = torch.ones(1, 2)
    got, returns = gae(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.5]]), one, gamma=1.0, lam=0.5)
    close(got, [[0.25, 0.5]])
    close(returns, [[0.75, 1.0]])
    # deltas 1 + .5 * 4 - 2 = 1 and 3 - 4 = -1; the first takes .5 * .5 of the second
    got, returns = gae(torch.tensor([[1.0, 3.0]]), torch.tensor([[2.0, 4.0]]), one, gamma=0.5, lam=0.5)
    close(got, [[0.75, -1.0]])
    close(returns, [[2.75, 3.0]])
    got, _ = gae(torch.tensor([[0.0, 1.0]]), torch.zeros(1, 2), one)
    close(got, [[0.95, 1.0]])  # gamma 1, lam 0.95 if nothing is said


def responses():
    """Rewards, values and mask of a whole row, one that ends early, one padded on the left, both, one token, none."""
    g = torch.Generator().manual_seed(0)
    runs = torch.tensor([[0, 7], [0, 4], [3, 7], [2, 5], [6, 7], [0, 0]])
    index = torch.arange(7)
    mask = (index >= runs[:, :1]) & (index < runs[:, 1:])
    return torch.randn(6, 7, generator=g), torch.randn(6, 7, generator=g), mask, runs.tolist()


def slow_gae(rewards, values, start, end, gamma, lam):
    """Equation 16 of the paper for one row: the sum over l of (gamma lam)^l delta_t+l."""
    row = [0.0] * len(rewards)
    for t in range(start, end):
        for k in range(t, end):
            following = values[k + 1] if k + 1 < end else 0.0
            row[t] += (gamma * lam) ** (k - t) * (rewards[k] + gamma * following - values[k])
    return row


def check_gae_is_the_double_sum(gae):
    rewards, values, mask, runs = responses()
    for gamma, lam in ((1.0, 0.95), (0.9, 0.8), (0.5, 1.0), (0.7, 0.0), (0.0, 0.9), (1.0, 1.0)):
        slow = [slow_gae(r, v, *run, gamma, lam)
                for r, v, run in zip(rewards.tolist(), values.tolist(), runs, strict=True)]
        got, returns = gae(rewards, values, mask, gamma, lam)
        close(got, slow)
        close(returns, (torch.tensor(slow) + values * mask).tolist())


def check_gae_at_its_ends(gae):
    """lam 1: the rewards to come minus the value. lam 0: one step. The return of the first does not know the critic."""
    rewards, values, mask, _ = responses()
    to_come = (rewards * mask).flip(1).cumsum(1).flip(1) * mask
    got, returns = gae(rewards, values, mask, 1.0, 1.0)
    torch.testing.assert_close(got, to_come - values * mask)
    torch.testing.assert_close(returns, to_come)
    following = torch.nn.functional.pad((values * mask)[:, 1:], (0, 1))
    got, returns = gae(rewards, values, mask, 0.9, 0.0)
    torch.testing.assert_close(got, (rewards + 0.9 * following - values) * mask)
    torch.testing.assert_close(returns, (rewards + 0.9 * following) * mask)


def check_gae_of_a_critic_that_is_right(gae):
    """Each value is the discounted rewards to come: no advantage, whatever lam."""
    rewards, _, mask, _ = responses()
    values = torch.tensor([slow_gae(r, [0.0] * 7, *run, 0.9, 1.0)
                           for r, run in zip(rewards.tolist(), responses()[3], strict=True)])
    for lam in (0.0, 0.5, 1.0):
        got, returns = gae(rewards, values, mask, 0.9, lam)
        torch.testing.assert_close(got, torch.zeros(6, 7), atol=1e-5, rtol=0)
        torch.testing.assert_close(returns, values)


def check_gae_reads_nothing_that_is_masked(gae):
    """Least of all the value after the last token, where the critic looks at padding."""
    rewards, values, mask, runs = responses()
    expected = gae(rewards.masked_fill(~mask, 0.0), values.masked_fill(~mask, 0.0), mask, 0.9, 0.8)
    for bad in (math.nan, math.inf, -math.inf, 100.0):
        for got, right in zip(gae(rewards.masked_fill(~mask, bad), values.masked_fill(~mask, bad), mask, 0.9, 0.8),
                              expected, strict=True):
            assert torch.equal(got, right) and not got[~mask].any()
    for r, v, (start, end), row in zip(rewards, values, runs, expected[0], strict=True):
        if start < end:  # cut out of its row, a response has the same advantages
            alone = gae(r[None, start:end], v[None, start:end], torch.ones(1, end - start), 0.9, 0.8)[0]
            torch.testing.assert_close(alone[0], row[start:end])


def check_gae_is_a_constant(gae):
    rewards, values, mask, _ = responses()
    for x in gae(rewards.double().requires_grad_(), values.double().requires_grad_(), mask.long()):
        assert not x.requires_grad and x.dtype == torch.float32


CHECKS = {
    "group_advantages": [
        check_mean_without_scale, check_scaled_by_its_own_group, check_leave_one_out,
        check_leave_one_out_is_unbiased, check_equal_rewards_give_exactly_zero,
        check_whole_numbers_are_taken],
    "informative_groups": [check_informative_groups],
    "soft_overlong_penalty": [check_soft_overlong_penalty],
    "gae": [
        check_gae_by_hand, check_gae_is_the_double_sum, check_gae_at_its_ends, check_gae_of_a_critic_that_is_right,
        check_gae_reads_nothing_that_is_masked, check_gae_is_a_constant],
}


@pytest.mark.parametrize("name, check", [(name, check) for name in CHECKS for check in CHECKS[name]])
def test_function(name, check):
    check(getattr(advantages, name))


@pytest.mark.parametrize("rewards, words", [
    ([[1.0], [0.0]], "G at least 2"),
    ([1.0, 0.0], "G at least 2"),
    ([[1.0, math.nan]], "NaN or inf"),
    ([[1.0, math.inf]], "NaN or inf"),
])
def test_bad_rewards_are_refused(rewards, words):
    with pytest.raises(ValueError, match=words):
        advantages.group_advantages(torch.tensor(rewards))


def test_bad_choices_are_refused():
    rewards = torch.tensor([[1.0, 0.0]])
    with pytest.raises(ValueError, match="unknown scale 'variance'"):
        advantages.group_advantages(rewards, scale="variance")
    with pytest.raises(ValueError, match="unknown baseline 'median'"):
        advantages.group_advantages(rewards, baseline="median")
    for buffer in (0, 101):
        with pytest.raises(ValueError, match="overlong buffer"):
            advantages.soft_overlong_penalty(torch.tensor([1]), 100, buffer)
    x = torch.zeros(1, 2)
    for gamma, lam in ((-0.1, 1.0), (1.1, 1.0), (1.0, -0.1), (1.0, 1.1), (math.nan, 1.0)):
        with pytest.raises(ValueError, match=f"gamma {gamma} and lam {lam} must be from 0 to 1"):
            advantages.gae(x, x, x, gamma, lam)
    for shapes in ((x[:, :1], x, x), (x, x[:, :1], x), (x, x, x[:, :1])):
        with pytest.raises(ValueError, match="must have one shape"):
            advantages.gae(*shapes)
