"""The policy loss of PPO and of the GRPO family, one value a token, and the one function that reduces it.

    B batch   T time; every tensor is (B, T-1), index t scoring token t+1

The variants are differences of a line: the interval that clips (DAPO's clip_high above clip_low), the level
of the ratio (token, or sequence for GSPO), what the sum is divided by (`reduce`), with or without a KL term.
Masked positions are replaced before any exp, so that NaN or inf in them changes neither loss nor gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanorl.objectives.masking import masked_mean, masked_sum

MAX_LOG_RATIO = 20.0  # exp(20) is 5e8: far beyond any clip, and still a number


def clipped_surrogate(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    level: str = "token",
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped policy loss: minus min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A).

    logp        (B, T-1)  log-probabilities under the policy that is trained
    old_logp    (B, T-1)  under the policy that sampled; never receives a gradient
    advantages  (B, T-1)  or (B, 1), one for the whole response
    mask        (B, T-1)  1 on tokens of the response
    returns     loss (B, T-1), 0 where masked, and diagnostics without gradient, (B, T-1) each: "ratio" (1
                where masked) and "clipped" (bool: the clip is what cut the gradient here)

    level "token" is the ratio of each token (PPO, arXiv 1707.06347; GRPO, arXiv 2402.03300). level "sequence"
    is GSPO (arXiv 2507.18071): the ratio of the whole response to the power 1 / length, the same number at
    each of its tokens. It is written as in the paper's GSPO-token, value stopped and gradient through each
    token, so that with reduction by "sequence" and one advantage a response the gradient is GSPO's.

    The minimum is pessimistic: with A < 0 a ratio of 2 gives the objective -2 and a gradient that pushes it
    back, a ratio of 0.5 gives -0.8 and none. Log-ratios are cut at +-20 to keep exp finite.
    Raises ValueError for an unknown level or a negative clip.
    """
    if not (clip_low >= 0 and clip_high >= 0):
        raise ValueError(f"clip_low {clip_low}, clip_high {clip_high}: distances from 1, at least 0 each")
    mask = mask.bool()
    advantages = advantages.expand_as(logp).masked_fill(~mask, 0.0)
    log_ratio = _log_ratio(logp, old_logp.detach(), mask)
    if level == "sequence":
        whole = masked_mean(log_ratio.detach(), mask, dim=-1)[:, None]
        log_ratio = (whole + (log_ratio - log_ratio.detach())).masked_fill(~mask, 0.0)
    elif level != "token":
        raise ValueError(f"unknown level {level!r} of the ratio; use 'token' or 'sequence'")
    ratio = log_ratio.exp()
    free = ratio * advantages
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    loss = -torch.minimum(free, bounded)
    return loss, {"ratio": ratio.detach(), "clipped": (bounded < free).detach()}


def kl_estimate(logp: Tensor, ref_logp: Tensor, kind: str = "k3", mask: Tensor | None = None) -> Tensor:
    """Estimate of KL(policy || reference) at each token that the policy sampled: (B, T-1) -> (B, T-1).

    With d = logp - ref_logp, and each statement for tokens sampled from the policy as it is now:

    kind  "k1"  d             value unbiased, can be negative; its gradient averages to 0, so as a loss it
                              teaches nothing
          "k2"  d^2 / 2       value biased, never negative; its gradient averages to that of
                              KL(policy || reference)
          "k3"  e^-d - 1 + d  value unbiased, never negative; its gradient averages to that of
                              KL(reference || policy), the other direction; GRPO's choice (arXiv 2402.03300)

    (J. Schulman, Approximating KL Divergence, 2020.) `ref_logp` never receives a gradient. Positions outside
    `mask`, if one is given, are replaced before exp and give 0. d is cut at +-20 to keep exp finite.
    Raises ValueError for an unknown kind.
    """
    mask = torch.ones_like(logp, dtype=torch.bool) if mask is None else mask.bool()
    d = _log_ratio(logp, ref_logp.detach(), mask)
    if kind == "k1":
        return d
    if kind == "k2":
        return 0.5 * d.square()
    if kind == "k3":
        return torch.expm1(-d) + d
    raise ValueError(f"unknown KL estimate {kind!r}; use 'k1', 'k2' or 'k3'")


def grpo_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    ref_logp: Tensor | None = None,
    kl_coef: float = 0.0,
    kl_kind: str = "k3",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    level: str = "token",
) -> tuple[Tensor, dict[str, Tensor]]:
    """`clipped_surrogate` plus kl_coef times the KL to a reference, one value a token (B, T-1).

    With kl_coef 0 no reference is needed and none is read. The diagnostics gain "kl" (B, T-1) when there is a
    reference. Raises ValueError for a kl_coef above 0 without a reference.
    """
    loss, diagnostics = clipped_surrogate(logp, old_logp, advantages, mask, clip_low, clip_high, level)
    if kl_coef == 0:
        return loss, diagnostics
    if ref_logp is None:
        raise ValueError(f"kl_coef {kl_coef} needs a reference; pass its ref_logp, or set kl_coef to 0")
    kl = kl_estimate(logp, ref_logp, kl_kind, mask)
    return loss + kl_coef * kl, {**diagnostics, "kl": kl.detach()}


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None = 0.2
) -> tuple[Tensor, dict[str, Tensor]]:
    """Critic's loss: half of max((V - R)^2, (V_clipped - R)^2), where V_clipped is V kept within `clip` of V_old.

    values, old_values, returns  (B, T-1)  the critic's now, when the rollout was sampled, and what it should have said
    returns    loss (B, T-1), 0 where masked, and the diagnostic "clipped" (bool: the clip is what cut the gradient)

    The maximum is pessimistic like the policy's minimum: a value that has moved by more than `clip` towards R gets no
    gradient, one that has moved away from it does. V_old 0, V 0.5, R 1, clip 0.2: V_clipped 0.2, loss 0.32, no
    gradient; R 0: loss 0.125. `clip` None does not clip. (Schulman's `ppo2`, 2017; not in the paper.)
    Raises ValueError for a clip at or below 0.
    """
    if clip is not None and not clip > 0:
        raise ValueError(f"clip of the values is {clip}; it must be above 0, or None")
    mask = mask.bool()
    values, old, returns = (x.masked_fill(~mask, 0.0) for x in (values, old_values.detach(), returns.detach()))
    free = (values - returns).square()
    if clip is None:
        return 0.5 * free, {"clipped": torch.zeros_like(mask)}
    moved = values - old
    bounded = torch.where(moved.abs() > clip, (old + moved.clamp(-clip, clip) - returns).square(), free)
    return 0.5 * torch.maximum(free, bounded), {"clipped": (bounded > free).detach()}


def count_for(mask: Tensor, how: str, constant_length: int | None = None) -> Tensor:
    """What `reduce` divides by, for this mask (B, T-1) alone: a scalar in fp32.

    To be summed over the ranks and micro-batches of a step before its first backward.

    how  "token"     tokens that count (DAPO)
         "sequence"  rows with at least one token that counts (GRPO)
         "constant"  the same rows times `constant_length`, for example the longest response allowed
                     (Dr. GRPO)
    Raises ValueError for an unknown `how` or a constant without its length.
    """
    mask = mask.bool()
    if how == "token":
        return mask.sum().float()
    rows = mask.any(-1).sum().float()
    if how == "sequence":
        return rows
    if how == "constant":
        if constant_length is None or constant_length < 1:
            raise ValueError(f"constant_length is {constant_length}; reduction 'constant' needs at least 1")
        return rows * constant_length
    raise ValueError(f"unknown reduction {how!r}; use 'token', 'sequence' or 'constant'")


def reduce(values: Tensor, mask: Tensor, how: str, count: Tensor | float) -> Tensor:
    """Per-token values (B, T-1) to a micro-batch's share of the loss: a sum over a count given from outside.

    how  "token"     sum over tokens: each token weighs the same, long responses more (DAPO, arXiv 2503.14476)
         "sequence"  sum of the mean of each row: each response weighs the same, tokens of long ones less
                     (GRPO, arXiv 2402.03300)
         "constant"  sum over tokens, divided by a count that does not know the lengths: no bias towards long
                     wrong responses (Dr. GRPO, arXiv 2503.20783)

    `count` is `count_for(mask, how, ...)` summed over all micro-batches and ranks of the step, so that the
    shares add up to the loss of the whole batch however it is split. (DDP averages gradients over ranks:
    multiply by the number of ranks.) Rows with nothing counted add 0, and a count of 0 gives 0. Raises
    ValueError for an unknown `how`.
    """
    if how == "sequence":
        total = masked_mean(values, mask, dim=-1).sum()
    elif how in ("token", "constant"):
        total = masked_sum(values, mask)
    else:
        raise ValueError(f"unknown reduction {how!r}; use 'token', 'sequence' or 'constant'")
    return total / torch.as_tensor(count, dtype=total.dtype, device=total.device).clamp(min=1.0)


def _log_ratio(logp: Tensor, other: Tensor, mask: Tensor) -> Tensor:
    difference = logp.masked_fill(~mask, 0.0) - other.masked_fill(~mask, 0.0)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
