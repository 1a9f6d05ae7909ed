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


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2015, arXiv 1506.02438) over the tokens of responses.

    rewards  (B, T-1)  of writing token t+1
    values   (B, T-1)  what the critic expected before token t+1 was written
    mask     (B, T-1)  1 on the response, one run of tokens a row
    returns  advantages and returns, (B, T-1) each, 0 where masked, without a gradient; return = advantage + value

    A_t = d_t + gamma lam A_t+1 with d_t = r_t + gamma V_t+1 - V_t. After the last token of a response there is
    nothing: V and A are 0 there, whatever the critic says of the padding. lam 1 is the sum of rewards to come minus
    V_t, right on average and noisy; lam 0 is d_t alone, quiet and as wrong as the critic.
    rewards [0, 1], values [0.5, 0.5], gamma 1, lam 0.5 -> advantages [0.25, 0.5], returns [0.75, 1].
    Raises ValueError for gamma or lam outside 0 to 1, or shapes that differ.
    """
    if not (0 <= gamma <= 1 and 0 <= lam <= 1):
        raise ValueError(f"gamma {gamma} and lam {lam} must be from 0 to 1")
    if not rewards.shape == values.shape == mask.shape:
        raise ValueError(f"rewards {tuple(rewards.shape)}, values {tuple(values.shape)} and mask {tuple(mask.shape)} "
                         "must have one shape")
    mask = mask.bool()
    rewards = rewards.detach().float()
    values = values.detach().float().masked_fill(~mask, 0.0)  # so that the value after the last token is 0
    advantages = torch.zeros_like(values)
    after, next_value = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        after = (delta + gamma * lam * after).masked_fill(~mask[:, t], 0.0)
        next_value, advantages[:, t] = values[:, t], after
    return advantages, advantages + values
