"""Wrong versions of advantages.py and policy.py, in the manner of wrong_versions.py."""

import torch
from wrong_versions import negated

from nanorl.objectives import advantages as A
from nanorl.objectives import masking as M
from nanorl.objectives import policy as P

# advantages

def deviation_of_the_batch(rewards, scale="std", baseline="mean"):
    out = A.group_advantages(rewards, "none", baseline)
    return out / (rewards.float().std() + 1e-6) if scale == "std" else out


def mean_of_the_batch(rewards, scale="std", baseline="mean"):
    if baseline != "mean":
        return A.group_advantages(rewards, scale, baseline)
    out = rewards.float() - rewards.float().mean()
    return out / (rewards.float().std(-1, keepdim=True) + 1e-6) if scale == "std" else out


def population_deviation(rewards, scale="std", baseline="mean"):
    out = A.group_advantages(rewards, "none", baseline)
    return out / (rewards.float().std(-1, correction=0, keepdim=True) + 1e-6) if scale == "std" else out


def variance_for_deviation(rewards, scale="std", baseline="mean"):
    out = A.group_advantages(rewards, "none", baseline)
    return out / (rewards.float().var(-1, keepdim=True) + 1e-6) if scale == "std" else out


def leave_one_out_with_itself(rewards, scale="std", baseline="mean"):
    return A.group_advantages(rewards, scale, "mean")  # biased: the baseline knows the response


def leave_one_out_over_all(rewards, scale="std", baseline="mean"):
    if baseline == "mean":
        return A.group_advantages(rewards, scale, baseline)
    others = (rewards.sum(-1, keepdim=True) - rewards) / rewards.shape[-1]
    return (rewards - others).masked_fill(~A.informative_groups(rewards)[:, None], 0.0)


def always_scaled(rewards, scale="std", baseline="mean"):
    return A.group_advantages(rewards, "std", baseline)


def crumbs_for_equal_rewards(rewards, scale="std", baseline="mean"):
    rewards, size = rewards.float(), rewards.shape[-1]
    expected = rewards.mean(-1, keepdim=True)
    if baseline == "leave_one_out":
        expected = (rewards.sum(-1, keepdim=True) - rewards) / (size - 1)
    out = rewards - expected
    return out / (rewards.std(-1, keepdim=True) + 1e-6) if scale == "std" else out


def informative_if_any_reward(rewards):
    return (rewards > 0).any(-1)


def penalty_not_bounded(lengths, max_length, buffer):
    return ((max_length - buffer - lengths.float()) / buffer).clamp(max=0.0)


def penalty_after_the_limit(lengths, max_length, buffer):
    return A.soft_overlong_penalty(lengths, max_length + buffer, buffer)


# policy

def clip_reversed(logp, old_logp, advantages, mask, clip_low=0.2, clip_high=0.2, level="token"):
    loss, diagnostics = P.clipped_surrogate(logp, old_logp, -advantages, mask, clip_low, clip_high, level)
    return -loss, diagnostics  # -min(-x, -y) is max(x, y)


def never_clipped(logp, old_logp, advantages, mask, clip_low=0.2, clip_high=0.2, level="token"):
    return P.clipped_surrogate(logp, old_logp, advantages, mask, 1.0, 1e9, level)


def always_clipped(logp, old_logp, advantages, mask, clip_low=0.2, clip_high=0.2, level="token"):
    loss, diagnostics = P.clipped_surrogate(logp, old_logp, advantages, mask, clip_low, clip_high, level)
    _, free = P.clipped_surrogate(logp, old_logp, advantages, mask, 1.0, 1e9, level)
    inside = (free["ratio"] > 1 - clip_low) & (free["ratio"] < 1 + clip_high)
    bounded = -free["ratio"].clamp(1 - clip_low, 1 + clip_high) * advantages
    return torch.where(inside, loss, bounded), diagnostics


def clips_swapped(logp, old_logp, advantages, mask, clip_low=0.2, clip_high=0.2, level="token"):
    return P.clipped_surrogate(logp, old_logp, advantages, mask, clip_high, clip_low, level)


def ratio_upside_down(logp, old_logp, *args, **kwargs):
    _, diagnostics = P.clipped_surrogate(old_logp, logp, *args, **kwargs)
    loss, _ = P.clipped_surrogate(2 * logp.detach() - logp, 2 * logp.detach() - old_logp, *args, **kwargs)
    return loss, diagnostics


def surrogate_mask_ignored(logp, old_logp, advantages, mask, *args, **kwargs):
    return P.clipped_surrogate(logp, old_logp, advantages, torch.ones_like(mask), *args, **kwargs)


def surrogate_masked_by_multiplying(logp, old_logp, advantages, mask, *args, **kwargs):
    loss, diagnostics = P.clipped_surrogate(
        logp, old_logp, advantages.expand_as(logp), torch.ones_like(mask), *args, **kwargs)
    return loss * mask, {k: torch.where(mask.bool(), d, k == "ratio") for k, d in diagnostics.items()}


def surrogate_masked_after(logp, old_logp, advantages, mask, clip_low=0.2, clip_high=0.2, level="token"):
    if level == "sequence":
        return P.clipped_surrogate(logp, old_logp, advantages, mask, clip_low, clip_high, level)
    mask = mask.bool()  # the loss is clean, its gradient is not
    ratio = (logp - old_logp.detach()).exp()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    loss = -torch.minimum(ratio * advantages, bounded).masked_fill(~mask, 0.0)
    clipped = (bounded < ratio * advantages) & mask
    return loss, {"ratio": ratio.detach().masked_fill(~mask, 1.0), "clipped": clipped.detach()}


def old_policy_learns(logp, old_logp, *args, **kwargs):
    loss, diagnostics = P.clipped_surrogate(logp - old_logp, torch.zeros_like(old_logp), *args, **kwargs)
    return loss, diagnostics


def policy_does_not_learn(logp, old_logp, *args, **kwargs):
    loss, diagnostics = P.clipped_surrogate(logp.detach(), old_logp, *args, **kwargs)
    return loss + 0 * logp.nan_to_num(0, 0, 0), diagnostics


def log_ratio_unbounded(logp, old_logp, advantages, mask, clip_low=0.2, clip_high=0.2, level="token"):
    if level == "sequence":
        return P.clipped_surrogate(logp, old_logp, advantages, mask, clip_low, clip_high, level)
    mask = mask.bool()
    ratio = (logp.masked_fill(~mask, 0.0) - old_logp.detach().masked_fill(~mask, 0.0)).exp()
    advantages = advantages.expand_as(logp).masked_fill(~mask, 0.0)
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    clipped = bounded < ratio * advantages
    return -torch.minimum(ratio * advantages, bounded), {"ratio": ratio.detach(), "clipped": clipped.detach()}


def clipped_wherever_outside(logp, old_logp, advantages, mask, clip_low=0.2, clip_high=0.2, level="token"):
    loss, diagnostics = P.clipped_surrogate(logp, old_logp, advantages, mask, clip_low, clip_high, level)
    outside = (diagnostics["ratio"] < 1 - clip_low) | (diagnostics["ratio"] > 1 + clip_high)
    return loss, {**diagnostics, "clipped": outside}


def _sequence_level(whole_of, through_token=True):
    """The surrogate with another idea of the log-ratio of a sequence."""
    def wrong(logp, old_logp, advantages, mask, clip_low=0.2, clip_high=0.2, level="token"):
        if level == "sequence":
            log_ratio = (logp - old_logp.detach()).masked_fill(~mask.bool(), 0.0)
            whole = whole_of(log_ratio, mask).detach()[:, None]
            here = log_ratio - log_ratio.detach() if through_token else 0 * log_ratio
            logp, old_logp = whole + here, torch.zeros_like(logp)
        return P.clipped_surrogate(logp, old_logp, advantages, mask, clip_low, clip_high)
    return wrong


def k3_direction_swapped(logp, ref_logp, kind="k3", mask=None):
    if kind != "k3":
        return P.kl_estimate(logp, ref_logp, kind, mask)
    return P.kl_estimate(2 * ref_logp - logp, ref_logp, kind, mask)  # e^d - 1 - d


def k2_without_half(logp, ref_logp, kind="k3", mask=None):
    return P.kl_estimate(logp, ref_logp, kind, mask) * (2 if kind == "k2" else 1)


def k1_of_the_other_side(logp, ref_logp, kind="k3", mask=None):
    return P.kl_estimate(logp, ref_logp, kind, mask) * (-1 if kind == "k1" else 1)


def k3_without_its_linear_part(logp, ref_logp, kind="k3", mask=None):
    out = P.kl_estimate(logp, ref_logp, kind, mask)
    return out - P.kl_estimate(logp, ref_logp, "k1", mask) if kind == "k3" else out


def kl_mask_ignored(logp, ref_logp, kind="k3", mask=None):
    return P.kl_estimate(logp, ref_logp, kind)


def kl_masked_by_multiplying(logp, ref_logp, kind="k3", mask=None):
    out = P.kl_estimate(logp, ref_logp, kind)
    return out if mask is None else out * mask


def kl_teaches_the_reference(logp, ref_logp, kind="k3", mask=None):
    return P.kl_estimate(logp - ref_logp, torch.zeros_like(ref_logp), kind, mask)


def kl_unbounded(logp, ref_logp, kind="k3", mask=None):
    if mask is not None or kind != "k3":
        return P.kl_estimate(logp, ref_logp, kind, mask)
    return torch.expm1(ref_logp.detach() - logp) + logp - ref_logp.detach()


def mean_of_means(values, mask, how, count):
    return P.reduce(values, mask, "sequence", P.count_for(mask, "sequence"))


def mean_of_the_micro_batch(values, mask, how, count):
    return P.reduce(values, mask, how, P.count_for(mask, how, constant_length=10))


def reduce_mask_ignored(values, mask, how, count):
    return P.reduce(values, torch.ones_like(mask), how, count)


def reduce_masked_by_multiplying(values, mask, how, count):
    return P.reduce(values * mask, torch.ones_like(mask), "token", count)


def reduce_sequence_over_width(values, mask, how, count):
    total = P.reduce(values, mask, "token" if how == "sequence" else how, count)
    return total / (values.shape[-1] if how == "sequence" else 1)


def reduce_sequence_as_token(values, mask, how, count):
    return P.reduce(values, mask, "token", count)


def reduce_without_guard(values, mask, how, count):
    total = M.masked_mean(values, mask, -1).sum() if how == "sequence" else M.masked_sum(values, mask)
    return total / count if isinstance(count, torch.Tensor) else total / torch.tensor(float(count))


def count_padding(mask, how, constant_length=None):
    return P.count_for(torch.ones_like(mask), how, constant_length)


def count_empty_rows(mask, how, constant_length=None):
    rows = torch.tensor(float(mask.shape[0]))
    return {"token": mask.sum().float(), "sequence": rows, "constant": rows * (constant_length or 0)}[how]


def count_constant_by_width(mask, how, constant_length=None):
    return P.count_for(mask, how, mask.shape[-1])


def grpo_kl_subtracted(logp, old_logp, advantages, mask, ref_logp=None, kl_coef=0.0, kl_kind="k3"):
    loss, diagnostics = P.clipped_surrogate(logp, old_logp, advantages, mask)
    if not kl_coef:
        return loss, diagnostics
    kl = P.kl_estimate(logp, ref_logp, kl_kind, mask)
    return loss - kl_coef * kl, {**diagnostics, "kl": kl}


def grpo_without_coefficient(logp, old_logp, advantages, mask, ref_logp=None, kl_coef=0.0, kl_kind="k3"):
    return P.grpo_loss(logp, old_logp, advantages, mask, ref_logp, float(kl_coef > 0), kl_kind)


def grpo_kl_mask_ignored(logp, old_logp, advantages, mask, ref_logp=None, kl_coef=0.0, kl_kind="k3"):
    loss, diagnostics = P.clipped_surrogate(logp, old_logp, advantages, mask)
    if not kl_coef:
        return loss, diagnostics
    kl = P.kl_estimate(logp, ref_logp, kl_kind)
    return loss + kl_coef * kl, {**diagnostics, "kl": kl}


def grpo_against_the_old_policy(logp, old_logp, advantages, mask, ref_logp=None, kl_coef=0.0, kl_kind="k3"):
    return P.grpo_loss(logp, old_logp, advantages, mask, old_logp, kl_coef, kl_kind)


WRONG = {
    "group_advantages": [
        negated(A.group_advantages), deviation_of_the_batch, mean_of_the_batch, population_deviation,
        variance_for_deviation, leave_one_out_with_itself, leave_one_out_over_all, always_scaled,
        crumbs_for_equal_rewards],
    "informative_groups": [informative_if_any_reward, lambda rewards: ~A.informative_groups(rewards)],
    "soft_overlong_penalty": [
        negated(A.soft_overlong_penalty), penalty_not_bounded, penalty_after_the_limit],
    "clipped_surrogate": [
        negated(P.clipped_surrogate), clip_reversed, never_clipped, always_clipped, clips_swapped,
        ratio_upside_down, surrogate_mask_ignored, surrogate_masked_by_multiplying, surrogate_masked_after,
        old_policy_learns, policy_does_not_learn, log_ratio_unbounded, clipped_wherever_outside,
        _sequence_level(lambda log_ratio, mask: log_ratio.sum(-1)),  # not normalised by length
        _sequence_level(lambda log_ratio, mask: log_ratio.mean(-1)),  # by the width, padding included
        _sequence_level(lambda log_ratio, mask: M.masked_mean(log_ratio.exp(), mask, -1).log()),
        _sequence_level(lambda log_ratio, mask: M.masked_mean(log_ratio, mask, -1), through_token=False),
        lambda *args, level="token", **kwargs: P.clipped_surrogate(*args, **kwargs)],
    "kl_estimate": [
        negated(P.kl_estimate), k3_direction_swapped, k2_without_half, k1_of_the_other_side,
        k3_without_its_linear_part, kl_mask_ignored, kl_masked_by_multiplying, kl_teaches_the_reference,
        kl_unbounded, lambda logp, ref_logp, *rest: P.kl_estimate(logp.detach(), ref_logp, *rest) + 0 * logp],
    "reduce": [
        negated(P.reduce), mean_of_means, mean_of_the_micro_batch, reduce_mask_ignored,
        reduce_masked_by_multiplying, reduce_sequence_over_width, reduce_sequence_as_token,
        reduce_without_guard],
    "count_for": [count_padding, count_empty_rows, count_constant_by_width],
    "grpo_loss": [
        grpo_kl_subtracted, grpo_without_coefficient, grpo_kl_mask_ignored, grpo_against_the_old_policy],
}
