"""What the checks of preference losses share: rows of log-probs, gradients, and what holds for every such loss."""

import itertools
import math

import torch


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


def sigmoid(x):
    return 1 / (1 + math.exp(-x)) if x > 0 else math.exp(x) / (1 + math.exp(x))


def log_sigmoid(x):
    return min(x, 0.0) - math.log1p(math.exp(-abs(x)))


def by_rows(slow, *inputs, **options):
    return [slow(*row, **options) for row in zip(*(x.tolist() for x in inputs), strict=True)]
