"""preference.py, losses of pairs: by hand numbers, invariants, closed gradients, slow twins.

Each check takes the function it tests. ORPO and KTO are in test_objectives_orpo_kto.py.
"""

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
    stays_finite,
)

from nanorl.objectives import preference

LOG2 = math.log(2)


# The same formulas once more in plain floats, as TRL's trainers of rewards and of DPO have them.

def slow_reward(chosen, rejected, margin, centre):
    return -log_sigmoid(chosen - rejected - margin) + centre * (rejected + chosen) ** 2


def slow_dpo(chosen, rejected, ref_chosen, ref_rejected, beta, label_smoothing, kind):
    logratios, ref_logratios = chosen - rejected, ref_chosen - ref_rejected
    logits = logratios - ref_logratios
    if kind == "ipo":
        return (logits - 1 / (2 * beta)) ** 2
    return -log_sigmoid(beta * logits) * (1 - label_smoothing) - log_sigmoid(-beta * logits) * label_smoothing


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


CHECKS = {
    "bradley_terry_loss": [
        check_reward_by_hand, check_reward_figures, check_reward_swap_and_shift, check_reward_rows_do_not_mix,
        check_reward_twin, check_reward_gradient, check_reward_stays_finite],
    "dpo_loss": [
        check_dpo_by_hand, check_dpo_figures, check_dpo_swap_and_shift, check_dpo_rows_do_not_mix, check_dpo_twin,
        check_dpo_gradient, check_dpo_is_content_where_it_should_be, check_dpo_reference_does_not_learn,
        check_dpo_stays_finite],
    "implicit_rewards": [check_implicit_rewards, check_implicit_rewards_are_those_of_dpo],
}


@pytest.mark.parametrize("name, check", [(name, check) for name in CHECKS for check in CHECKS[name]])
def test_function(name, check):
    check(getattr(preference, name))


ROW = torch.zeros(2)
PAIR, FOUR = (ROW - 1, ROW - 2), (ROW,) * 4


@pytest.mark.parametrize("words, call", [
    ("centre is -0.1", lambda: preference.bradley_terry_loss(*PAIR, centre=-0.1)),
    ("beta is 0", lambda: preference.dpo_loss(*FOUR, beta=0)),
    ("beta is -0.1", lambda: preference.dpo_loss(*FOUR, beta=-0.1, kind="ipo")),
    ("label_smoothing is 0.5", lambda: preference.dpo_loss(*FOUR, label_smoothing=0.5)),
    ("label_smoothing is -0.1", lambda: preference.dpo_loss(*FOUR, label_smoothing=-0.1)),
    ("no meaning for kind 'ipo'", lambda: preference.dpo_loss(*FOUR, label_smoothing=0.1, kind="ipo")),
    ("unknown kind 'hinge'", lambda: preference.dpo_loss(*FOUR, kind="hinge")),
])
def test_bad_choices_are_refused(words, call):
    with pytest.raises(ValueError, match=words):
        call()
