"""policy.py, the critic's loss, by hand numbers and a slow twin; each check takes the function it tests."""

import itertools
import math

import pytest
import torch
from test_objectives_policy import ONE, near

from nanorl.objectives import policy


def one_value(value_loss, value, old, target, **options):
    """Of one token: the critic's loss, the gradient of that in its value, and whether it was clipped."""
    values = torch.tensor([[value]], requires_grad=True)
    loss, diagnostics = value_loss(values, torch.tensor([[old]]), torch.tensor([[target]]), ONE, **options)
    loss.sum().backward()
    return loss.item(), values.grad.item(), diagnostics["clipped"].item()


def check_value_loss_by_hand(value_loss):
    near(one_value(value_loss, 0.5, 0.0, 1.0), (0.32, 0.0, True))  # has moved towards R by enough: V is held at 0.2
    near(one_value(value_loss, 0.5, 0.0, 0.0), (0.125, 0.5, False))  # has moved away from R: pull it back
    near(one_value(value_loss, 0.1, 0.0, 1.0), (0.405, -0.9, False))  # has moved by less than the clip
    near(one_value(value_loss, -0.5, 0.0, -1.0), (0.32, 0.0, True))
    near(one_value(value_loss, 3.0, 2.0, 5.0, clip=0.5), (3.125, 0.0, True))
    near(one_value(value_loss, 0.5, 0.0, 1.0, clip=1.0), (0.125, -0.5, False))
    near(one_value(value_loss, 0.5, 0.0, 1.0, clip=None), (0.125, -0.5, False))


def some_values():
    g = torch.Generator().manual_seed(0)
    values, returns = torch.randn(5, 8, generator=g), torch.randn(5, 8, generator=g)
    old = values + 0.4 * torch.randn(5, 8, generator=g)
    return values.requires_grad_(), old, returns, torch.arange(8) < torch.tensor([8, 5, 1, 0, 3])[:, None]


def check_value_loss_twin(value_loss):
    """In plain floats, as TRL's PPO has it; with the gradient that the larger of the two squares has."""
    clipped = []
    for clip in (0.1, 0.3, 1.0):
        values, old, returns, mask = some_values()
        loss, diagnostics = value_loss(values, old, returns, mask, clip)
        loss.sum().backward()
        for at in itertools.product(range(5), range(8)):
            v, o, r = (x[at].item() for x in (values, old, returns))
            free, held = (v - r) ** 2, (max(min(v, o + clip), o - clip) - r) ** 2
            expected = 0.5 * max(free, held), 0.0 if held > free else v - r, held > free
            near((loss[at].item(), values.grad[at].item(), diagnostics["clipped"][at].item()),
                 expected if mask[at] else (0.0, 0.0, False))
            clipped.append(mask[at].item() and held > free)
    assert 10 < sum(clipped) < 30


def check_value_loss_is_a_distance(value_loss):
    """Adding a number to all three, or turning all signs, changes nothing; nor do other rows."""
    values, old, returns, mask = some_values()
    loss, diagnostics = value_loss(values, old, returns, mask)
    assert not any(d.requires_grad for d in diagnostics.values())
    for other in (value_loss(values + 3, old + 3, returns + 3, mask), value_loss(-values, -old, -returns, mask)):
        torch.testing.assert_close(other[0], loss, atol=1e-5, rtol=1e-5)
    rows = torch.tensor([3, 0, 4])
    torch.testing.assert_close(value_loss(*(x[rows] for x in some_values()))[0], loss[rows])
    assert (value_loss(values, old, returns, mask, clip=None)[0] <= loss).all()  # the clip is pessimistic


def check_value_loss_gradient(value_loss):
    values, old, returns, mask = some_values()
    for clip in (0.2, None):
        inputs = values.detach().double().requires_grad_(), old.double(), returns.double(), mask
        assert torch.autograd.gradcheck(
            lambda *x, clip=clip: value_loss(*x, clip)[0], inputs, raise_exception=False)


def check_only_the_critic_learns(value_loss):
    tensors = [torch.full((1, 2), value, requires_grad=True) for value in (0.5, 0.0, 1.0)]
    for clip in (0.2, 0.9, None):
        loss, diagnostics = value_loss(*tensors, torch.ones(1, 2), clip)
        got = torch.autograd.grad(loss.sum(), tensors, allow_unused=True)
        assert bool(got[0].any()) == (clip != 0.2) and got[1] is got[2] is None


def check_masked_values_do_not_matter(value_loss):
    for clip in (0.2, None):
        results = []
        for bad in (0.0, 1e4, math.nan, math.inf, -math.inf):
            values = torch.tensor([[0.1, bad, 0.3], [bad, bad, bad]], requires_grad=True)
            old, returns = torch.tensor([[0.0, -bad, 0.9], [0.0, bad, 1.0]]), torch.tensor([[1.0, bad, 0.0], [bad] * 3])
            loss, diagnostics = value_loss(values, old, returns, torch.tensor([[1, 0, 1], [0, 0, 0]]), clip)
            loss.sum().backward()
            results.append([loss.tolist(), values.grad.tolist(), diagnostics["clipped"].tolist()])
        assert all(result == results[0] for result in results)
        loss, gradient, clipped = results[0]
        assert loss[1] == gradient[1] == [0, 0, 0] and not any(clipped[1])
        assert loss[0][1] == gradient[0][1] == 0 and loss[0][0] > 0


CHECKS = {
    "clipped_value_loss": [
        check_value_loss_by_hand, check_value_loss_twin, check_value_loss_is_a_distance, check_value_loss_gradient,
        check_only_the_critic_learns, check_masked_values_do_not_matter],
}


@pytest.mark.parametrize("name, check", [(name, check) for name in CHECKS for check in CHECKS[name]])
def test_function(name, check):
    check(getattr(policy, name))


@pytest.mark.parametrize("clip", [0, -0.2, math.nan])
def test_bad_clip_is_refused(clip):
    x = torch.zeros(1, 2)
    with pytest.raises(ValueError, match=f"clip of the values is {clip}"):
        policy.clipped_value_loss(x, x, x, x, clip=clip)
