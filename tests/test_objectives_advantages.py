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


CHECKS = {
    "group_advantages": [
        check_mean_without_scale, check_scaled_by_its_own_group, check_leave_one_out,
        check_leave_one_out_is_unbiased, check_equal_rewards_give_exactly_zero,
        check_whole_numbers_are_taken],
    "informative_groups": [check_informative_groups],
    "soft_overlong_penalty": [check_soft_overlong_penalty],
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
