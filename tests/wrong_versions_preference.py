"""Wrong versions of preference.py, in the manner of wrong_versions.py."""

import math

import torch
import torch.nn.functional as F
from wrong_versions import negated

from nanorl.objectives import preference as L


def rows_mixed(function):
    """The mean of the batch in every row."""
    def wrong(*args, **kwargs):
        loss, figures = function(*args, **kwargs)
        return loss.mean().expand_as(loss), figures
    return wrong


def _figures(function, **changes):
    """The loss is right, a figure is not: each change makes it from the figures and the inputs."""
    def wrong(*args, **kwargs):
        loss, figures = function(*args, **kwargs)
        return loss, figures | {name: change(figures, *args) for name, change in changes.items()}
    return wrong


def with_half_the_gradient(function):
    """The right numbers with half of the gradient."""
    def wrong(*args, **kwargs):
        loss, figures = function(*args, **kwargs)
        return (loss + loss.detach()) / 2, figures
    return wrong


# Bradley-Terry

def reward_margin_added(chosen, rejected, margin=None, centre=0.0):
    return L.bradley_terry_loss(chosen, rejected, None if margin is None else -margin, centre)


def reward_margin_ignored(chosen, rejected, margin=None, centre=0.0):
    return L.bradley_terry_loss(chosen, rejected, None, centre)


def reward_centre_of_the_difference(chosen, rejected, margin=None, centre=0.0):
    loss, figures = L.bradley_terry_loss(chosen, rejected, margin)
    return loss + centre * (chosen - rejected).square(), figures


def reward_log_of_sigmoid(chosen, rejected, margin=None, centre=0.0):
    loss, figures = L.bradley_terry_loss(chosen, rejected, margin, centre)
    difference = chosen - rejected if margin is None else chosen - rejected - margin
    return loss - torch.log(torch.sigmoid(difference)) + F.logsigmoid(difference), figures


# DPO and IPO

def dpo_sign_flipped(chosen, rejected, ref_chosen, ref_rejected, *args, **kwargs):
    return L.dpo_loss(rejected, chosen, ref_rejected, ref_chosen, *args, **kwargs)


def dpo_reference_ignored(chosen, rejected, ref_chosen, ref_rejected, *args, **kwargs):
    return L.dpo_loss(chosen, rejected, torch.zeros_like(chosen), torch.zeros_like(chosen), *args, **kwargs)


def dpo_references_swapped(chosen, rejected, ref_chosen, ref_rejected, *args, **kwargs):
    return L.dpo_loss(chosen, rejected, ref_rejected, ref_chosen, *args, **kwargs)


def dpo_reference_learns(chosen, rejected, ref_chosen, ref_rejected, *args, **kwargs):
    zero = torch.zeros_like(chosen)
    return L.dpo_loss(chosen - ref_chosen, rejected - ref_rejected, zero, zero, *args, **kwargs)


def dpo_without_beta(*rows, beta=0.1, label_smoothing=0.0, kind="sigmoid"):
    return L.dpo_loss(*rows, beta=beta if kind == "ipo" else 1.0, label_smoothing=label_smoothing, kind=kind)


def dpo_smoothed_on_the_wrong_side(*rows, beta=0.1, label_smoothing=0.0, kind="sigmoid"):
    loss, figures = L.dpo_loss(*rows, beta=beta, label_smoothing=label_smoothing, kind=kind)
    if kind == "ipo" or not label_smoothing:
        return loss, figures
    return dpo_sign_flipped(*rows, beta=beta, label_smoothing=label_smoothing)[0], figures


def dpo_not_smoothed(*rows, beta=0.1, label_smoothing=0.0, kind="sigmoid"):
    return L.dpo_loss(*rows, beta=beta, kind=kind)


def dpo_log_of_sigmoid(*rows, beta=0.1, label_smoothing=0.0, kind="sigmoid"):
    loss, figures = L.dpo_loss(*rows, beta=beta, label_smoothing=label_smoothing, kind=kind)
    if kind == "ipo":
        return loss, figures
    h = beta * (rows[0] - rows[1] - (rows[2] - rows[3]).detach())
    return -(1 - label_smoothing) * h.sigmoid().log() - label_smoothing * (-h).sigmoid().log(), figures


def ipo_with_target(target):
    """IPO that wants another margin than 1 / (2 beta)."""
    def wrong(*rows, beta=0.1, label_smoothing=0.0, kind="sigmoid"):
        if kind != "ipo":
            return L.dpo_loss(*rows, beta=beta, label_smoothing=label_smoothing)
        return L.dpo_loss(*rows, beta=1 / (2 * target(beta)), kind="ipo")
    return wrong


def ipo_of_scaled_margin(*rows, beta=0.1, label_smoothing=0.0, kind="sigmoid"):
    loss, figures = L.dpo_loss(*rows, beta=beta, label_smoothing=label_smoothing, kind=kind)
    return (figures["margin"] - 1 / (2 * beta)).square() + 0 * loss if kind == "ipo" else loss, figures


# ORPO

def orpo_ratio_of_probabilities(chosen, rejected, weight=0.1):
    _, figures = L.orpo_loss(chosen, rejected, weight)
    margin = chosen - rejected
    return -chosen - weight * F.logsigmoid(margin), figures | {"margin": margin.detach()}


def orpo_likelihood_of_both(chosen, rejected, weight=0.1):
    loss, figures = L.orpo_loss(chosen, rejected, weight)
    return loss - rejected, figures


def orpo_odds_do_not_learn(chosen, rejected, weight=0.1):
    loss, figures = L.orpo_loss(chosen, rejected, weight)
    return (loss + chosen).detach() - chosen + 0 * rejected, figures


def orpo_with_infinite_odds(chosen, rejected, weight=0.1):
    _, figures = L.orpo_loss(chosen, rejected, weight)
    margin = chosen - rejected - torch.log1p(-chosen.exp()) + torch.log1p(-rejected.exp())
    return -chosen - weight * F.logsigmoid(margin), figures


def odds_unbounded(logp):
    return logp - torch.log1p(-logp.exp())


def log1mexp_without_its_near_branch(x):
    return torch.log1p(-torch.exp(x.clamp(max=-L.SMALLEST)))


def log1mexp_without_its_far_branch(x):
    return torch.log(-torch.expm1(x.clamp(max=-L.SMALLEST)))


def log1mexp_unbounded(x):
    return torch.where(x > -math.log(2), torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))


def log1mexp_branches_swapped(x):
    x = x.clamp(max=-L.SMALLEST)
    return torch.where(x > -math.log(2), torch.log1p(-torch.exp(x)), torch.log(-torch.expm1(x)))


# KTO

def kto_good_and_bad_swapped(logp, ref_logp, desirable, *args, **kwargs):
    return L.kto_loss(logp, ref_logp, ~desirable, *args, **kwargs)


def kto_weights_swapped(logp, ref_logp, desirable, baseline, beta=0.1, desirable_weight=1.0, undesirable_weight=1.0):
    return L.kto_loss(logp, ref_logp, desirable, baseline, beta, undesirable_weight, desirable_weight)


def kto_weights_ignored(logp, ref_logp, desirable, baseline, beta=0.1, desirable_weight=1.0, undesirable_weight=1.0):
    return L.kto_loss(logp, ref_logp, desirable, baseline, beta)


def kto_baseline_ignored(logp, ref_logp, desirable, baseline, *args, **kwargs):
    return L.kto_loss(logp, ref_logp, desirable, torch.zeros_like(baseline), *args, **kwargs)


def kto_baseline_learns(logp, ref_logp, desirable, baseline, *args, **kwargs):
    _, figures = L.kto_loss(logp, ref_logp, desirable, baseline, *args, **kwargs)
    return L.kto_loss(logp - baseline, ref_logp, desirable, torch.tensor(0.0), *args, **kwargs)[0], figures


def kto_reference_learns(logp, ref_logp, *args, **kwargs):
    return L.kto_loss(logp - ref_logp, torch.zeros_like(logp), *args, **kwargs)


def kto_without_beta(logp, ref_logp, desirable, baseline, beta=0.1, *args, **kwargs):
    return L.kto_loss(logp, ref_logp, desirable, baseline, 1.0, *args, **kwargs)


def kto_that_does_not_saturate(logp, ref_logp, desirable, baseline, beta=0.1, *args, **kwargs):
    loss, figures = L.kto_loss(logp, ref_logp, desirable, baseline, beta, *args, **kwargs)
    return -torch.log1p(-loss), figures  # DPO's -log sigmoid, which at the far end is infinite


def baseline_not_clamped(total, count):
    return torch.as_tensor(total, dtype=torch.float32).detach() / max(count, 1)


def baseline_with_gradient(total, count):
    return (torch.as_tensor(total, dtype=torch.float32) / max(count, 1)).clamp(min=0.0)


def baseline_without_guard(total, count):
    return (torch.as_tensor(total, dtype=torch.float32).detach() / count).clamp(min=0.0)


def baseline_of_absolute_value(total, count):
    return torch.as_tensor(total, dtype=torch.float32).detach().abs() / max(count, 1)


def baseline_of_the_sum(total, count):
    return L.kto_baseline(total, 1)


WRONG = {
    "bradley_terry_loss": [
        negated(L.bradley_terry_loss), rows_mixed(L.bradley_terry_loss), reward_margin_added, reward_margin_ignored,
        reward_centre_of_the_difference, reward_log_of_sigmoid, with_half_the_gradient(L.bradley_terry_loss),
        lambda chosen, rejected, *args, **kwargs: L.bradley_terry_loss(rejected, chosen, *args, **kwargs),
        lambda chosen, rejected, margin=None, centre=0.0: L.bradley_terry_loss(chosen, rejected, margin),
        _figures(L.bradley_terry_loss, accuracy=lambda figures, *_: (figures["margin"] > 0).float()),
        _figures(L.bradley_terry_loss, margin=lambda figures, chosen, rejected, *_: chosen - rejected)],
    "dpo_loss": [
        negated(L.dpo_loss), rows_mixed(L.dpo_loss), dpo_sign_flipped, dpo_reference_ignored, dpo_references_swapped,
        dpo_reference_learns, dpo_without_beta, dpo_smoothed_on_the_wrong_side, dpo_not_smoothed, dpo_log_of_sigmoid,
        ipo_with_target(lambda beta: 1 / beta), ipo_with_target(lambda beta: beta / 2), ipo_of_scaled_margin,
        with_half_the_gradient(L.dpo_loss),
        _figures(L.dpo_loss, accuracy=lambda figures, *_: (figures["margin"] > 0).float()),
        _figures(L.dpo_loss, margin=lambda figures, chosen, rejected, *_: (chosen - rejected).detach()),
        _figures(L.dpo_loss, chosen_reward=lambda figures, chosen, *_: figures["chosen_reward"] + 0 * chosen),
        _figures(L.dpo_loss, rejected_reward=lambda figures, *_: -figures["rejected_reward"])],
    "implicit_rewards": [
        negated(L.implicit_rewards), lambda logp, ref_logp, beta: logp - ref_logp,
        lambda logp, ref_logp, beta: beta * logp, lambda logp, ref_logp, beta: (logp - ref_logp) / beta],
    "orpo_loss": [
        negated(L.orpo_loss), rows_mixed(L.orpo_loss), orpo_ratio_of_probabilities, orpo_likelihood_of_both,
        orpo_odds_do_not_learn, orpo_with_infinite_odds,
        lambda chosen, rejected, weight=0.1: L.orpo_loss(rejected, chosen, weight),
        lambda chosen, rejected, weight=0.1: L.orpo_loss(chosen, rejected, 1.0),
        _figures(L.orpo_loss, nll=lambda figures, chosen, *_: -chosen),
        _figures(L.orpo_loss, margin=lambda figures, chosen, rejected, *_: (chosen - rejected).detach())],
    "log_odds": [negated(L.log_odds), odds_unbounded, lambda logp: logp, lambda logp: logp + L.log1mexp(logp)],
    "log1mexp": [
        negated(L.log1mexp), log1mexp_without_its_near_branch, log1mexp_without_its_far_branch, log1mexp_unbounded,
        log1mexp_branches_swapped],
    "kto_loss": [
        negated(L.kto_loss), rows_mixed(L.kto_loss), kto_good_and_bad_swapped, kto_weights_swapped,
        kto_weights_ignored, kto_baseline_ignored, kto_baseline_learns, kto_reference_learns, kto_without_beta,
        kto_that_does_not_saturate, with_half_the_gradient(L.kto_loss),
        _figures(L.kto_loss, reward=lambda figures, logp, ref_logp, *_: (logp - ref_logp).detach()),
        _figures(L.kto_loss, accuracy=lambda figures, *_: (figures["reward"] > 0).float())],
    "kto_baseline": [
        negated(L.kto_baseline), baseline_not_clamped, baseline_with_gradient, baseline_without_guard,
        baseline_of_absolute_value, baseline_of_the_sum],
}
