"""From rewards to advantages: how much better than expected a response was.

    P prompts   G responses to each prompt, its group
"""

from __future__ import annotations

import torch
from torch import Tensor


def group_advantages(
    rewards: Tensor, scale: str = "std", baseline: str = "mean", eps: float = 1e-6
) -> Tensor:
    """Group-relative advantages: rewards (P, G) -> (P, G) in fp32.

    baseline  "mean"           the mean of the group (GRPO, arXiv 2402.03300)
              "leave_one_out"  the mean of the rest of the group (RLOO, arXiv 2402.14740): it does not
                               depend on the response it judges, so the gradient is unbiased; the advantage
                               is G / (G-1) times the one with "mean"
    scale     "std"            divide by the standard deviation of the group, sample form (G - 1)
              "none"           leave it (Dr. GRPO, arXiv 2503.20783): dividing favours prompts that are nearly
                               always or nearly never solved

    A group of equal rewards gets exactly 0: it says nothing about which response is better.
    [[1, 0, 0, 0]] without scale -> [[0.75, -0.25, -0.25, -0.25]]; leave-one-out -> [[1, -1/3, -1/3, -1/3]].
    Raises ValueError for a group of one, a reward that is NaN or inf, an unknown scale or baseline.
    """
    rewards = rewards.float()
    size = rewards.shape[-1]
    if rewards.dim() != 2 or size < 2:
        raise ValueError(f"rewards {tuple(rewards.shape)} are no groups; give (P, G) with G at least 2")
    if not torch.isfinite(rewards).all():
        raise ValueError("a reward is NaN or inf; the reward function must return finite numbers")
    if baseline == "mean":
        expected = rewards.mean(-1, keepdim=True)
    elif baseline == "leave_one_out":
        expected = (rewards.sum(-1, keepdim=True) - rewards) / (size - 1)
    else:
        raise ValueError(f"unknown baseline {baseline!r}; use 'mean' or 'leave_one_out'")
    advantages = rewards - expected
    if scale == "std":
        advantages = advantages / (rewards.std(-1, keepdim=True) + eps)
    elif scale != "none":
        raise ValueError(f"unknown scale {scale!r}; use 'std' or 'none'")
    # The mean of equal numbers may be off by a rounding error, which the division would blow up.
    return advantages.masked_fill(~informative_groups(rewards)[:, None], 0.0)


def informative_groups(rewards: Tensor) -> Tensor:
    """Groups whose rewards differ: (P, G) -> (P,) bool. The others have advantage 0 and teach nothing.

    Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2) keeps only these and samples more prompts to fill
    the batch.
    """
    return (rewards != rewards[:, :1]).any(-1)


def soft_overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """Reward to add for length: (B,) -> (B,), 0 up to max_length - buffer, then down in a line to -1.

    Soft overlong punishment of DAPO (arXiv 2503.14476, equation 13): -1 is reached at max_length and kept.
    max_length 100, buffer 20: lengths [80, 90, 100, 101] -> [0, -0.5, -1, -1].
    Raises ValueError unless 0 < buffer <= max_length.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"overlong buffer {buffer} is outside 1..{max_length} (the longest response)")
    return ((max_length - buffer - lengths.float()) / buffer).clamp(-1.0, 0.0)
