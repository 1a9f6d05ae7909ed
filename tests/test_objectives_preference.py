"""preference.py by hand numbers, invariants, closed gradients, slow twins; each check takes the function it tests."""

import itertools
import math
from functools import partial

import pytest
import torch

from nanorl.objectives import preference

LOG2 = math.log(2)


def close(got, expected):
    torch.testing.assert_close(got, torch.as_tensor(expected, dtype=got.dtype), atol=1e-5, rtol=1e-5)


def random_rows(count, scale=30.0, size=32, seed=0):
    """So many tensors (32,) of log-probs from -scale to just below 0."""
    g = torch.Generator().manual_seed(seed)
    return [-scale * torch.rand(size, generator=g) - 0.01 for _ in range(count)]


def learning(*rows):
    return [row.clone().requires_grad_() for row in rows]


def gradients(loss, *inputs):
    """The gradient of the sum of the rows in each input: None for one that the loss does not teach."""
    return torch.autograd.grad(loss.sum(), inputs, allow_unused=True)


def stays_finite(function, numbers, count):
    """Loss, gradients and figures are finite whichever of the numbers each of the `count` inputs takes."""
    inputs = learning(*torch.tensor(list(itertools.product(numbers, repeat=count))).unbind(1))
    loss, figures = function(*inputs)
    for x in (loss, *gradients(loss, *inputs), *figures.values()):
        assert torch.isfinite(x).all(), x


def rows_do_not_mix(function, *inputs):
    """Rows in another order, and a few of them alone, give what they gave before."""
    loss, figures = function(*inputs)
    assert loss.shape == inputs[0].shape
    shuffled = torch.randperm(len(loss), generator=torch.Generator().manual_seed(1))
    for rows in (shuffled, shuffled[:5], shuffled[:1]):
        other_loss, other_figures = function(*(x[rows] for x in inputs))
        close(other_loss, loss[rows])
        for name, figure in figures.items():
            close(other_figures[name], figure[rows])


def differentiable(function, *inputs):
    """Autograd agrees with finite differences, in float64."""
    inputs = learning(*(x.double() for x in inputs))
    assert torch.autograd.gradcheck(lambda *x: function(*x)[0], inputs, raise_exception=False)


# The same formulas once more in plain floats, as TRL's trainers of rewards, DPO, ORPO and KTO have them.

def sigmoid(x):
    return 1 / (1 + math.exp(-x)) if x > 0 else math.exp(x) / (1 + math.exp(x))


def log_sigmoid(x):
    return min(x, 0.0) - math.log1p(math.exp(-abs(x)))


def slow_reward(chosen, rejected, margin, centre):
    return -log_sigmoid(chosen - rejected - margin) + centre * (rejected + chosen) ** 2


def slow_dpo(chosen, rejected, ref_chosen, ref_rejected, beta, label_smoothing, kind):
    logratios, ref_logratios = chosen - rejected, ref_chosen - ref_rejected
    logits = logratios - ref_logratios
    if kind == "ipo":
        return (logits - 1 / (2 * beta)) ** 2
    return -log_sigmoid(beta * logits) * (1 - label_smoothing) - log_sigmoid(-beta * logits) * label_smoothing


def slow_orpo(chosen, rejected, weight):
    log_odds = (chosen - rejected) - (math.log1p(-math.exp(chosen)) - math.log1p(-math.exp(rejected)))
    return -chosen - weight * log_sigmoid(log_odds)


def slow_kto(logp, ref_logp, desirable, kl, beta, desirable_weight, undesirable_weight):
    if desirable:
        return desirable_weight * (1 - sigmoid(beta * (logp - ref_logp - kl)))
    return undesirable_weight * (1 - sigmoid(beta * (kl - (logp - ref_logp))))


def by_rows(slow, *inputs, **options):
    return [slow(*row, **options) for row in zip(*(x.tolist() for x in inputs), strict=True)]


# Bradley-Terry

def check_reward_by_hand(bradley_terry_loss):
    chosen, rejected = torch.tensor([2.0, 1.0, 0.0]), torch.tensor([2.0, 0.0, 1.0])
    lose = math.log(1 + math.e)  # -log sigmoid(-1)
    close(bradley_terry_loss(chosen, rejected)[0], [LOG2, lose - 1, lose])
    close(bradley_terry_loss(chosen, rejected, torch.tensor([0.0, 1.0, -1.0]))[0], [LOG2, LOG2, LOG2])
    close(bradley_terry_loss(chosen, rejected, torch.tensor([1.0, 0.0, 0.0]))[0], [lose, lose - 1, lose])
    close(bradley_terry_loss(chosen, rejected, centre=0.5)[0], [LOG2 + 8, lose - 0.5, lose + 0.5])


def check_reward_figures(bradley_terry_loss):
    chosen, rejected = learning(torch.tensor([2.0, 1.0, 0.0]), torch.tensor([2.0, -0.5, 1.0]))
    _, figures = bradley_terry_loss(chosen, rejected, torch.full((3,), 5.0), centre=1.0)
    assert figures["accuracy"].tolist() == [0.5, 1.0, 0.0]  # a tie is half right; the margin asked for changes nothing
    assert figures["margin"].tolist() == [0.0, 1.5, -1.0]
    assert not any(figure.requires_grad for figure in figures.values())


def check_reward_swap_and_shift(bradley_terry_loss):
    """log sigmoid(x) - log sigmoid(-x) is x; and rewards count by their difference alone, but for `centre`."""
    chosen, rejected, margin = random_rows(3, scale=6.0)
    loss = bradley_terry_loss(chosen, rejected, margin)[0]
    close(bradley_terry_loss(rejected, chosen, -margin)[0] - loss, chosen - rejected - margin)
    close(bradley_terry_loss(chosen + 3, rejected + 3, margin)[0], loss)
    centred = bradley_terry_loss(chosen, rejected, margin, 0.1)[0]
    close(bradley_terry_loss(-rejected, -chosen, margin, 0.1)[0], centred)
    assert (bradley_terry_loss(chosen - 9, rejected - 9, margin, 0.1)[0] > centred + 1).all()


def check_reward_rows_do_not_mix(bradley_terry_loss):
    rows_do_not_mix(bradley_terry_loss, *random_rows(3, scale=6.0))


def check_reward_twin(bradley_terry_loss):
    for centre in (0.0, 0.01, 0.7):
        rows = random_rows(3, scale=8.0)
        close(bradley_terry_loss(*rows, centre)[0], by_rows(slow_reward, *rows, centre=centre))


def check_reward_gradient(bradley_terry_loss):
    chosen, rejected = learning(*random_rows(2, scale=8.0))
    margin, centre = random_rows(1, scale=2.0, seed=3)[0], 0.02
    got = gradients(bradley_terry_loss(chosen, rejected, margin, centre)[0], chosen, rejected)
    pull = torch.sigmoid(-(chosen - rejected - margin)).detach()
    push = (2 * centre * (chosen + rejected)).detach()
    close(got[0], push - pull)
    close(got[1], push + pull)
    differentiable(partial(bradley_terry_loss, centre=centre), chosen[:4], rejected[:4], margin[:4])


def check_reward_stays_finite(bradley_terry_loss):
    stays_finite(bradley_terry_loss, (-1e4, 0.0, 1e4), 2)
    stays_finite(partial(bradley_terry_loss, centre=0.01), (-1e4, 0.0, 1e4), 2)


# DPO and IPO

def check_dpo_by_hand(dpo_loss):
    # h of the rows: 0 at the reference; (-1 + 2) - (-4 + 1) = 4; the same replies the other way round: -4
    rows = torch.tensor([[-3.0, -5.0, -3.0, -5.0], [-1.0, -4.0, -2.0, -1.0], [-4.0, -1.0, -1.0, -2.0]]).unbind(1)
    win = math.log(1 + math.exp(-2))  # -log sigmoid(0.5 * 4)
    close(dpo_loss(*rows, beta=0.5)[0], [LOG2, win, win + 2])
    close(dpo_loss(*rows, beta=0.5, label_smoothing=0.25)[0], [LOG2, win + 0.5, win + 1.5])
    close(dpo_loss(*rows)[0][:2], [LOG2, math.log(1 + math.exp(-0.4))])  # beta is 0.1 if nothing is said
    close(dpo_loss(*rows, beta=0.5, kind="ipo")[0], [1.0, 9.0, 25.0])  # wants h = 1
    close(dpo_loss(*rows, beta=0.125, kind="ipo")[0], [16.0, 0.0, 64.0])  # wants h = 4


def check_dpo_figures(dpo_loss):
    for options in ({}, {"label_smoothing": 0.3}, {"kind": "ipo"}):
        rows = learning(*torch.tensor([[-1.0, -4.0, -2.0, -1.0], [-4.0, -1.0, -1.0, -2.0], [-3.0] * 4]).unbind(1))
        loss, figures = dpo_loss(*rows, beta=0.5, **options)
        assert loss.requires_grad and not any(figure.requires_grad for figure in figures.values())
        assert {name: figure.tolist() for name, figure in figures.items()} == {
            "accuracy": [1.0, 0.0, 0.5], "margin": [2.0, -2.0, 0.0],
            "chosen_reward": [0.5, -1.5, 0.0], "rejected_reward": [-1.5, 0.5, 0.0]}


def check_dpo_swap_and_shift(dpo_loss):
    """The other label costs more by what the margin is worth; log-probs that both replies share cost nothing."""
    chosen, rejected, ref_chosen, ref_rejected = random_rows(4)
    h = chosen - ref_chosen - rejected + ref_rejected
    for options, worth in (({}, 0.1 * h), ({"label_smoothing": 0.2}, 0.6 * 0.1 * h), ({"kind": "ipo"}, 20 * h)):
        loss = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, **options)[0]
        swapped = dpo_loss(rejected, chosen, ref_rejected, ref_chosen, **options)[0]
        torch.testing.assert_close(swapped - loss, worth, atol=1e-4, rtol=1e-4)  # a difference of squares near 1000
        shifted = dpo_loss(chosen + 2, rejected + 2, ref_chosen - 3, ref_rejected - 3, **options)[0]
        torch.testing.assert_close(shifted, loss, atol=1e-4, rtol=1e-4)


def check_dpo_rows_do_not_mix(dpo_loss):
    for kind in ("sigmoid", "ipo"):
        rows_do_not_mix(partial(dpo_loss, kind=kind), *random_rows(4))


def check_dpo_twin(dpo_loss):
    for beta, label_smoothing, kind in ((0.1, 0.0, "sigmoid"), (0.5, 0.0, "sigmoid"), (0.2, 0.1, "sigmoid"),
                                        (1.0, 0.4, "sigmoid"), (0.1, 0.0, "ipo"), (0.7, 0.0, "ipo")):
        rows = random_rows(4)
        options = {"beta": beta, "label_smoothing": label_smoothing, "kind": kind}
        close(dpo_loss(*rows, **options)[0], by_rows(slow_dpo, *rows, **options))


def check_dpo_gradient(dpo_loss):
    """-beta sigmoid(-beta h) on the chosen reply: the wronger the implicit rewards, the harder it pulls."""
    beta = 0.2
    for e, kind in ((0.0, "sigmoid"), (0.1, "sigmoid"), (0.0, "ipo")):
        rows = learning(*random_rows(4))
        options = {"beta": beta, "label_smoothing": e, "kind": kind}
        got = gradients(dpo_loss(*rows, **options)[0], *rows[:2])
        h = (rows[0] - rows[2] - rows[1] + rows[3]).detach()
        pull = -beta * ((1 - e) * torch.sigmoid(-beta * h) - e * torch.sigmoid(beta * h))
        expected = 2 * (h - 1 / (2 * beta)) if kind == "ipo" else pull
        close(got[0], expected)
        close(got[1], -expected)
        references = [x[:4].detach().double() for x in rows[2:]]
        differentiable(lambda *x, options=options, references=references: dpo_loss(*x, *references, **options),
                       *(x[:4] for x in rows[:2]))


def check_dpo_is_content_where_it_should_be(dpo_loss):
    """No gradient at the margin that the loss wants: IPO's, and that of labels of which one in four is wrong."""
    zero = torch.zeros(1)
    for h, options in ((2.5, {"kind": "ipo"}), (math.log(3) / 0.2, {"label_smoothing": 0.25})):
        chosen = torch.tensor([h], requires_grad=True)
        close(gradients(dpo_loss(chosen, zero, zero, zero, beta=0.2, **options)[0], chosen)[0], [0.0])


def check_dpo_reference_does_not_learn(dpo_loss):
    for kind in ("sigmoid", "ipo"):
        rows = learning(*random_rows(4))
        got = gradients(dpo_loss(*rows, kind=kind)[0], *rows)
        assert got[0].any() and got[1].any() and got[2] is got[3] is None


def check_dpo_stays_finite(dpo_loss):
    def of_the_policy(chosen, rejected, **options):
        references = torch.full_like(chosen, -5e3), torch.zeros_like(chosen)
        return dpo_loss(chosen, rejected, *references, **options)
    for options in ({}, {"beta": 1.0, "label_smoothing": 0.1}, {"kind": "ipo"}):
        stays_finite(partial(of_the_policy, **options), (-1e4, 0.0), 2)


def check_implicit_rewards(implicit_rewards):
    close(implicit_rewards(torch.tensor([-1.0, -4.0, -2.0]), torch.tensor([-2.0, -1.0, -2.0]), 0.5), [0.5, -1.5, 0.0])


def check_implicit_rewards_are_those_of_dpo(implicit_rewards):
    """-log sigmoid of their difference is the loss: the policy is a reward model of Bradley and Terry."""
    chosen, rejected, ref_chosen, ref_rejected = random_rows(4)
    rewards = implicit_rewards(chosen, ref_chosen, 0.3), implicit_rewards(rejected, ref_rejected, 0.3)
    close(preference.bradley_terry_loss(*rewards)[0],
          preference.dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta=0.3)[0])


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
    "bradley_terry_loss": [
        check_reward_by_hand, check_reward_figures, check_reward_swap_and_shift, check_reward_rows_do_not_mix,
        check_reward_twin, check_reward_gradient, check_reward_stays_finite],
    "dpo_loss": [
        check_dpo_by_hand, check_dpo_figures, check_dpo_swap_and_shift, check_dpo_rows_do_not_mix, check_dpo_twin,
        check_dpo_gradient, check_dpo_is_content_where_it_should_be, check_dpo_reference_does_not_learn,
        check_dpo_stays_finite],
    "implicit_rewards": [check_implicit_rewards, check_implicit_rewards_are_those_of_dpo],
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
PAIR, FOUR = (ROW - 1, ROW - 2), (ROW,) * 4
SINGLE = ROW, ROW, ROW.bool(), torch.tensor(0.0)


@pytest.mark.parametrize("words, call", [
    ("centre is -0.1", lambda: preference.bradley_terry_loss(*PAIR, centre=-0.1)),
    ("beta is 0", lambda: preference.dpo_loss(*FOUR, beta=0)),
    ("beta is -0.1", lambda: preference.dpo_loss(*FOUR, beta=-0.1, kind="ipo")),
    ("label_smoothing is 0.5", lambda: preference.dpo_loss(*FOUR, label_smoothing=0.5)),
    ("label_smoothing is -0.1", lambda: preference.dpo_loss(*FOUR, label_smoothing=-0.1)),
    ("no meaning for kind 'ipo'", lambda: preference.dpo_loss(*FOUR, label_smoothing=0.1, kind="ipo")),
    ("unknown kind 'hinge'", lambda: preference.dpo_loss(*FOUR, kind="hinge")),
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
