"""Losses of preference learning: the reward model's, and those that do without one.

    B pairs, or for KTO single replies; every input is (B,) in fp32

A log-prob is that of a whole reply given its prompt, a sum over its tokens, for ORPO a mean. Each loss returns one
value a row, (B,), to be summed and divided by a count over all ranks, and figures (B,) without a gradient. What comes
from a reference never receives one.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

Result = tuple[Tensor, dict[str, Tensor]]
SMALLEST = 1e-7  # log1mexp's distance from 0: a probability of 1 has odds of 1e7, not infinity


def bradley_terry_loss(chosen: Tensor, rejected: Tensor, margin: Tensor | None = None, centre: float = 0.0) -> Result:
    """Reward model's loss: -log sigmoid(chosen - rejected - margin) + centre * (chosen + rejected)^2, of rewards (B,).

    The probability that the chosen reply is preferred is the sigmoid of the difference of rewards (Bradley and Terry
    1952; InstructGPT, arXiv:2203.02155). `margin` (B,) asks for a difference (Llama 2, arXiv:2307.09288); `centre`
    fixes the zero, which differences leave open (Eisenstein et al. 2023, arXiv:2312.09244).
    Rewards 2 and 2: log 2. Figures: accuracy (a tie is half right) and margin, the difference of rewards.
    Raises ValueError for a negative centre.
    """
    if not centre >= 0:
        raise ValueError(f"centre is {centre}; it must be at least 0")
    difference = chosen - rejected
    loss = -F.logsigmoid(difference if margin is None else difference - margin)
    return loss + centre * (chosen + rejected).square(), {"accuracy": _right(difference), "margin": difference.detach()}


def dpo_loss(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor,
    beta: float = 0.1, label_smoothing: float = 0.0, kind: str = "sigmoid",
) -> Result:
    """DPO (Rafailov et al. 2023, arXiv:2305.18290), of log-probs (B,) under the policy and a reference.

    With h = (chosen - ref_chosen) - (rejected - ref_rejected):

    kind "sigmoid"  -log sigmoid(beta h): Bradley-Terry on the implicit rewards beta (logp - ref_logp). With
                    `label_smoothing` e, where a share e of the labels is taken to be wrong (conservative DPO):
                    -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)
    kind "ipo"      (h - 1 / (2 beta))^2, which wants that margin and no more (Azar et al. 2023, arXiv:2310.12036).
                    Where its h is to be that of a mean token, the caller passes means.

    At the reference h is 0: log 2, and 1 / (4 beta^2). Figures: accuracy of the implicit rewards, margin beta h,
    chosen_reward, rejected_reward. Raises ValueError for beta at or below 0, label_smoothing outside 0 <= e < 0.5 or
    above 0 with "ipo", an unknown kind.
    """
    _check_beta(beta)
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing is {label_smoothing}; use 0 <= label_smoothing < 0.5")
    chosen_ratio, rejected_ratio = chosen - ref_chosen.detach(), rejected - ref_rejected.detach()
    h = chosen_ratio - rejected_ratio
    if kind == "sigmoid":
        loss = -(1 - label_smoothing) * F.logsigmoid(beta * h) - label_smoothing * F.logsigmoid(-beta * h)
    elif kind == "ipo":
        if label_smoothing:
            raise ValueError(f"label_smoothing {label_smoothing} has no meaning for kind 'ipo'; set it to 0")
        loss = (h - 1 / (2 * beta)).square()
    else:
        raise ValueError(f"unknown kind {kind!r} of DPO; use 'sigmoid' or 'ipo'")
    return loss, {"accuracy": _right(h), "margin": beta * h.detach(),
                  "chosen_reward": beta * chosen_ratio.detach(), "rejected_reward": beta * rejected_ratio.detach()}


def implicit_rewards(logp: Tensor, ref_logp: Tensor, beta: float) -> Tensor:
    """The rewards (B,) that a policy trained by DPO stands for, up to a number that depends on the prompt alone."""
    return beta * (logp - ref_logp)


def orpo_loss(chosen: Tensor, rejected: Tensor, weight: float = 0.1) -> Result:
    """ORPO (Hong et al. 2024, arXiv:2403.07691), of mean log-probs a token (B,); no reference.

    -chosen, the likelihood of the chosen reply, plus weight * -log sigmoid(log odds(chosen) - log odds(rejected)),
    where odds(p) = p / (1 - p). Mean log-probs log(1/2) and log(1/4): odds 1 and 1/3, so log 2 + weight * log(4/3).
    Figures: accuracy, margin (the log of the odds ratio), nll. Raises ValueError for a negative weight.
    """
    if not weight >= 0:
        raise ValueError(f"weight is {weight}; it must be at least 0")
    margin = log_odds(chosen) - log_odds(rejected)
    return -chosen - weight * F.logsigmoid(margin), {
        "accuracy": _right(chosen - rejected), "margin": margin.detach(), "nll": -chosen.detach()}


def log_odds(logp: Tensor) -> Tensor:
    """log(p / (1 - p)) of log p, at most 0."""
    return logp - log1mexp(logp)


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x at most 0, exact at both ends: expm1 near 0, log1p far from it.

    x is held at least 1e-7 below 0, so that a probability of 1 gives -16, not -inf; there the gradient is 0.
    """
    x = x.clamp(max=-SMALLEST)
    return torch.where(x > -math.log(2), torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))


def kto_loss(
    logp: Tensor, ref_logp: Tensor, desirable: Tensor, baseline: Tensor, beta: float = 0.1,
    desirable_weight: float = 1.0, undesirable_weight: float = 1.0,
) -> Result:
    """KTO (Ethayarajh et al. 2024, arXiv:2402.01306), of single replies that are good or bad.

    logp, ref_logp  (B,)  of each reply
    desirable       (B,)  bool
    baseline        ()    or (B,), z0 of the paper: how far the policy has moved anyway, see `kto_baseline`

    With r = logp - ref_logp: weight * (1 - sigmoid(beta (r - z0))) for a good reply, weight * (1 - sigmoid(beta (z0 -
    r))) for a bad one. The sigmoid saturates both ways: a reply that is far above or below z0 pulls no more. At the
    reference 1/2 each. Figures: accuracy (r above z0 where good, not above where bad), reward (beta r).
    Raises ValueError for beta at or below 0, negative weights.
    """
    _check_beta(beta)
    if not (desirable_weight >= 0 and undesirable_weight >= 0):
        raise ValueError(f"weights {desirable_weight} and {undesirable_weight} must be at least 0")
    ratio, good = logp - ref_logp.detach(), desirable.bool()
    above = ratio - baseline.detach()
    value = torch.sigmoid(beta * torch.where(good, above, -above))
    weight = torch.where(good, desirable_weight, undesirable_weight)
    return weight * (1 - value), {"accuracy": ((above > 0) == good).float(), "reward": beta * ratio.detach()}


def kto_baseline(total: Tensor | float, count: int) -> Tensor:
    """KTO's z0: the mean of `count` log-ratios that sum to `total`, over all ranks and micro-batches; at least 0.

    The log-ratios are those of mismatched pairs, a prompt with another prompt's reply: the KL between policy and
    reference is wanted on replies that the prompt does not favour, and sampling them would be dear. A KL is never
    negative, an estimate may be: it is cut off at 0. A count of 0 gives 0.
    """
    mean = torch.as_tensor(total, dtype=torch.float32).detach() / max(count, 1)
    return mean.clamp(min=0.0)


def _right(difference: Tensor) -> Tensor:
    """1 where the difference has the right sign, half where it is 0."""
    return (torch.sign(difference.detach()) + 1) / 2


def _check_beta(beta: float) -> None:
    if not beta > 0:
        raise ValueError(f"beta is {beta}; it must be above 0")
