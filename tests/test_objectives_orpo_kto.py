"""preference.py, ORPO and KTO: by hand numbers, invariants, closed gradients, slow twins."""

import math
from functools import partial

import pytest
import torch
from loss_checks import (
    by_rows,
    close,
    differentiable,
    gradients,
    learning,
    log_sigmoid,
    random_rows,
    rows_do_not_mix,
    sigmoid,
    stays_finite,
)

from nanorl.objectives import preference

LOG2 = math.log(2)


# The same formulas once more in plain floats, as TRL's trainers have them.

def slow_orpo(chosen, rejected, weight):
    log_odds = (chosen - rejected) - (math.log1p(-math.exp(chosen)) - math.log1p(-math.exp(rejected)))
    return -chosen - weight * log_sigmoid(log_odds)


def slow_kto(logp, ref_logp, desirable, kl, beta, desirable_weight, undesirable_weight):
    if desirable:
        return desirable_weight * (1 - sigmoid(beta * (logp - ref_logp - kl)))
    return undesirable_weight * (1 - sigmoid(beta * (kl - (logp - ref_logp))))


# ORPO

def check_orpo_by_hand(orpo_loss):
    chosen, rejected = torch.tensor([0.5, 0.25, 0.5]).log(), torch.tensor([0.25, 0.5, 0.5]).log()
    for weight in (0.1, 2.0):  # odds 1 and 1/3: the sigmoid of the log of their ratio 3 is 3/4
        close(orpo_loss(chosen, rejected, weight)[0], [
            LOG2 + weight * math.log(4 / 3), 2 * LOG2 + weight * math.log(4), LOG2 + weight * LOG2])
    close(orpo_loss(chosen, rejected, 0.0)[0], -chosen)
    close(orpo_loss(chosen, rejected)[0], orpo_loss(chosen, rejected, 0.1)[0])


def check_orpo_figures(orpo_loss):
    chosen, rejected = learning(torch.tensor([0.5, 0.25, 0.5]).log(), torch.tensor([0.25, 0.5, 0.5]).log())
    _, figures = orpo_loss(chosen, rejected)
    assert not any(figure.requires_grad for figure in figures.values())
    assert figures["accuracy"].tolist() == [1.0, 0.0, 0.5]
    close(figures["margin"], [math.log(3), -math.log(3), 0.0])
    close(figures["nll"], [LOG2, 2 * LOG2, LOG2])


def check_orpo_swap(orpo_loss):
    chosen, rejected = random_rows(2, scale=4.0)
    loss, figures = orpo_loss(chosen, rejected, 0.4)
    close(orpo_loss(rejected, chosen, 0.4)[0] - loss, chosen - rejected + 0.4 * figures["margin"])


def check_orpo_rows_do_not_mix(orpo_loss):
    rows_do_not_mix(orpo_loss, *random_rows(2, scale=4.0))


def check_orpo_twin(orpo_loss):
    for weight in (0.05, 0.1, 1.5):
        rows = random_rows(2, scale=5.0)
        close(orpo_loss(*rows, weight)[0], by_rows(slow_orpo, *rows, weight=weight))


def check_orpo_gradient(orpo_loss):
    """The log of the odds has the slope 1 / (1 - p)."""
    chosen, rejected = learning(*random_rows(2, scale=4.0))
    loss, figures = orpo_loss(chosen, rejected, 0.3)
    got = gradients(loss, chosen, rejected)
    pull = 0.3 * torch.sigmoid(-figures["margin"])
    close(got[0], -1 - pull / (1 - chosen.detach().exp()))
    close(got[1], pull / (1 - rejected.detach().exp()))
    differentiable(partial(orpo_loss, weight=0.3), chosen[:4], rejected[:4])


def check_orpo_stays_finite(orpo_loss):
    stays_finite(orpo_loss, (-1e4, -1.0, -1e-7, 0.0), 2)


def check_log_odds(log_odds):
    close(log_odds(torch.tensor([0.5, 0.25, 0.9]).log()), [0.0, -math.log(3), math.log(9)])
    close(log_odds(torch.tensor([-30.0])), [-30.0])  # of a rare reply, the log-prob itself
    logp = torch.tensor([0.0, -1e4], requires_grad=True)
    odds = log_odds(logp)
    assert torch.isfinite(odds).all() and torch.isfinite(gradients(odds, logp)[0]).all()


def check_log1mexp(log1mexp):
    for x in (-1e-6, -1e-4, -0.01, -0.5, -0.69, -0.70, -1.0, -5.0, -12.0, -20.0, -60.0):
        x = torch.tensor(x).item()  # as fp32 has it
        exact = math.log(-math.expm1(x)) if x > -0.5 else math.log1p(-math.exp(x))
        assert math.isclose(log1mexp(torch.tensor([x])).item(), exact, rel_tol=1e-5), x


def check_log1mexp_at_its_ends(log1mexp):
    x = torch.tensor([0.0, -1e4, -1e-8], requires_grad=True)
    out = log1mexp(x)
    close(out, [math.log(1e-7), 0.0, math.log(1e-7)])
    assert gradients(out, x)[0].tolist() == [0.0, 0.0, 0.0]


def check_log1mexp_gradient(log1mexp):
    x = torch.tensor([-0.001, -0.3, -0.69, -0.70, -4.0], dtype=torch.float64, requires_grad=True)
    close(gradients(log1mexp(x), x)[0], -x.detach().exp() / (1 - x.detach().exp()))


# KTO

GOOD = torch.arange(32) % 3 > 0


def check_kto_by_hand(kto_loss):
    ref, good = torch.full((4,), -2.0), torch.tensor([True, False, True, False])
    logp = torch.tensor([-2.0, -2.0, 0.0, 0.0])  # log-ratios 0, 0, 2, 2
    high, low = 1 / (1 + math.exp(-0.5)), 1 / (1 + math.exp(0.5))
    close(kto_loss(logp, ref, good, torch.tensor(0.0), beta=0.25)[0], [0.5, 0.5, low, high])
    close(kto_loss(logp, ref, good, torch.tensor(2.0), beta=0.25)[0], [high, low, 0.5, 0.5])
    close(kto_loss(logp, ref, good.long(), torch.tensor(2.0), beta=0.25)[0], [high, low, 0.5, 0.5])  # 1 and 0 will do
    close(kto_loss(logp, ref, good, torch.tensor([0.0, 2.0, 2.0, 0.0]), beta=0.25)[0], [0.5, low, 0.5, high])
    close(kto_loss(logp, ref, good, torch.tensor(0.0), 0.25, 3.0, 2.0)[0], [1.5, 1.0, 3 * low, 2 * high])
    close(kto_loss(logp, ref, good, torch.tensor(0.0))[0][:3], [0.5, 0.5, 1 / (1 + math.exp(0.2))])


def check_kto_figures(kto_loss):
    logp, ref = learning(torch.tensor([-1.0, -1.0, -4.0, -4.0, -2.0, -2.0]), torch.full((6,), -3.0))
    good = torch.tensor([True, False] * 3)  # log-ratios 2, 2, -1, -1, 1, 1 around a baseline of 1
    _, figures = kto_loss(logp, ref, good, torch.tensor(1.0), beta=0.5, desirable_weight=7.0)
    assert figures["accuracy"].tolist() == [1, 0, 0, 1, 0, 1] and not figures["accuracy"].requires_grad
    assert figures["reward"].tolist() == [1, 1, -0.5, -0.5, 0.5, 0.5] and not figures["reward"].requires_grad


def check_kto_swap_and_shift(kto_loss):
    """A good reply's loss and a bad one's add up to 1; log-ratios count by their distance from the baseline."""
    logp, ref = random_rows(2)
    loss = kto_loss(logp, ref, GOOD, torch.tensor(1.0))[0]
    close(loss + kto_loss(logp, ref, ~GOOD, torch.tensor(1.0))[0], torch.ones(32))
    close(kto_loss(logp - 2, ref - 2, GOOD, torch.tensor(1.0))[0], loss)
    close(kto_loss(logp + 3, ref, GOOD, torch.tensor(4.0))[0], loss)


def check_kto_rows_do_not_mix(kto_loss):
    rows_do_not_mix(kto_loss, *random_rows(2), GOOD, random_rows(1, seed=2)[0].neg())


def check_kto_twin(kto_loss):
    for options in ((0.1, 1.0, 1.0), (0.5, 1.33, 1.0), (0.02, 0.4, 2.5)):
        options = dict(zip(("beta", "desirable_weight", "undesirable_weight"), options, strict=True))
        inputs = *random_rows(2), GOOD, torch.full((32,), 0.7)
        close(kto_loss(*inputs, **options)[0], by_rows(slow_kto, *inputs, **options))
        close(kto_loss(*inputs[:3], torch.tensor(0.7), **options)[0], kto_loss(*inputs, **options)[0])


def check_kto_gradient(kto_loss):
    """-+ weight beta s (1 - s), which is largest at the baseline."""
    logp, ref = learning(*random_rows(2))
    z0, beta = torch.tensor(1.5), 0.2
    got = gradients(kto_loss(logp, ref, GOOD, z0, beta, 2.0, 3.0)[0], logp)[0]
    s = torch.sigmoid(beta * (logp - ref - z0)).detach()
    close(got, torch.where(GOOD, -2.0, 3.0) * beta * s * (1 - s))
    differentiable(lambda x: kto_loss(x, ref[:6].detach().double(), GOOD[:6], z0.double(), beta, 2.0, 3.0), logp[:6])


def check_kto_only_the_policy_learns(kto_loss):
    logp, ref = learning(*random_rows(2))
    for baseline in learning(torch.tensor(0.5), torch.full((32,), 0.5)):
        got = gradients(kto_loss(logp, ref, GOOD, baseline)[0], logp, ref, baseline)
        assert got[0].any() and got[1] is got[2] is None


def check_kto_stays_finite(kto_loss):
    for good in (True, False):
        for baseline in (0.0, 1e4):
            stays_finite(lambda logp, good=good, z0=baseline: kto_loss(
                logp, torch.tensor([0.0, -1e4]), torch.full((2,), good), torch.tensor(z0), beta=1.0), (-1e4, 0.0), 1)


def check_baseline_by_hand(kto_baseline):
    assert kto_baseline(6.0, 3).item() == kto_baseline(torch.tensor(6.0), 3).item() == 2
    assert kto_baseline(0.5, 1).item() == 0.5
    assert kto_baseline(-6.0, 3).item() == 0  # a KL is never negative
    assert kto_baseline(0.0, 0).item() == 0
    assert kto_baseline(torch.tensor(3, dtype=torch.float64), 2).dtype == torch.float32


def check_baseline_does_not_learn(kto_baseline):
    baseline = kto_baseline(torch.tensor(6.0, requires_grad=True), 3)
    assert baseline.shape == () and not baseline.requires_grad


CHECKS = {
    "orpo_loss": [
        check_orpo_by_hand, check_orpo_figures, check_orpo_swap, check_orpo_rows_do_not_mix, check_orpo_twin,
        check_orpo_gradient, check_orpo_stays_finite],
    "log_odds": [check_log_odds],
    "log1mexp": [check_log1mexp, check_log1mexp_at_its_ends, check_log1mexp_gradient],
    "kto_loss": [
        check_kto_by_hand, check_kto_figures, check_kto_swap_and_shift, check_kto_rows_do_not_mix, check_kto_twin,
        check_kto_gradient, check_kto_only_the_policy_learns, check_kto_stays_finite],
    "kto_baseline": [check_baseline_by_hand, check_baseline_does_not_learn],
}


@pytest.mark.parametrize("name, check", [(name, check) for name in CHECKS for check in CHECKS[name]])
def test_function(name, check):
    check(getattr(preference, name))


ROW = torch.zeros(2)
PAIR, SINGLE = (ROW - 1, ROW - 2), (ROW, ROW, ROW.bool(), torch.tensor(0.0))


@pytest.mark.parametrize("words, call", [
    ("weight is -1", lambda: preference.orpo_loss(*PAIR, weight=-1)),
    ("beta is 0", lambda: preference.kto_loss(*SINGLE, beta=0)),
    ("weights -1 and 1", lambda: preference.kto_loss(*SINGLE, desirable_weight=-1, undesirable_weight=1)),
    ("weights 1 and -2", lambda: preference.kto_loss(*SINGLE, desirable_weight=1, undesirable_weight=-2)),
])
def test_bad_choices_are_refused(words, call):
    with pytest.raises(ValueError, match=words):
        call()


def test_descent_prefers_the_chosen_reply():
    """The sign of everything at once: of three replies the first is liked and the second is not."""
    for loss in (lambda p: preference.dpo_loss(p[:1], p[1:2], *torch.full((2, 1), 1 / 3).log(), beta=1.0)[0],
                 lambda p: preference.orpo_loss(p[:1], p[1:2], weight=1.0)[0],
                 lambda p: preference.kto_loss(p[:2], torch.full((2,), 1 / 3).log(), torch.tensor([True, False]),
                                               torch.tensor(0.0), beta=1.0)[0]):
        logits = torch.zeros(3, requires_grad=True)
        for _ in range(50):
            gradient = gradients(loss(logits.log_softmax(-1)), logits)[0]
            with torch.no_grad():
                logits -= gradient
        chances = logits.softmax(-1)
        assert chances[0] > 0.5 and chances[1] < 0.1, chances
