"""logprobs.py by hand numbers and against the slow way; each check takes the function it tests."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanorl.objectives import logprobs

PROBABILITIES = torch.tensor([[[0.2, 0.3, 0.5], [0.7, 0.2, 0.1], [0.25, 0.25, 0.5]]])
TOKENS = torch.tensor([[0, 2, 1]])  # predicted with 0.5 and 0.2


def rows(n=11, C=4, V=7, seed=0):
    """Hidden states (n, C), head (V, C) and targets (n,)."""
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, C, generator=g).requires_grad_()
    weight = torch.randn(V, C, generator=g).requires_grad_()
    return hidden, weight, torch.randint(0, V, (n,), generator=g)


def check_token_logprobs_by_hand(token_logprobs):
    got = token_logprobs(PROBABILITIES.log(), TOKENS)
    torch.testing.assert_close(got, torch.tensor([[0.5, 0.2]]).log())


def check_token_logprobs_at_a_temperature(token_logprobs):
    # temperature 0.5 squares the probabilities: .25 of .04 + .09 + .25, and .04 of .49 + .04 + .01
    got = token_logprobs(PROBABILITIES.log(), TOKENS, temperature=0.5)
    torch.testing.assert_close(got, torch.tensor([[0.25 / 0.38, 0.04 / 0.54]]).log())


def check_token_logprobs_are_fp32(token_logprobs):
    logits = (10 * torch.randn(2, 4, 50, generator=torch.Generator().manual_seed(0))).bfloat16()
    tokens = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]])
    got = token_logprobs(logits, tokens)
    assert got.dtype == torch.float32
    expected = logits.double()[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


def check_entropy_by_hand(token_entropy):
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, -math.inf, -math.inf], [500.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(token_entropy(logits), torch.tensor([math.log(4), math.log(2), 0.0]))
    # temperature 2 on logits (log 4, 0): probabilities 2/3 and 1/3
    hot = token_entropy(torch.tensor([math.log(4), 0.0]), temperature=2.0)
    torch.testing.assert_close(hot, torch.tensor(math.log(3) - 2 / 3 * math.log(2)))


def check_selected_equals_the_slow_way(selected_logprobs):
    for chunk in (1, 3, 4, 11, 100, None):
        hidden, weight, targets = rows()
        got, entropy = selected_logprobs(hidden, weight, targets, temperature=0.7, chunk=chunk)
        logp = (hidden @ weight.T / 0.7).log_softmax(-1)
        slow = logp[torch.arange(11), targets]
        torch.testing.assert_close(got, slow)
        torch.testing.assert_close(entropy, -(logp.exp() * logp).sum(-1).detach())
        assert got.dtype == entropy.dtype == torch.float32
        fast_grad, slow_grad = (
            torch.autograd.grad((x * torch.arange(11)).sum(), (hidden, weight), materialize_grads=True)
            for x in (got, slow))
        torch.testing.assert_close(fast_grad, slow_grad, atol=1e-4, rtol=1e-5)


def check_selected_holds_a_chunk_at_most(selected_logprobs):
    hidden, weight, targets = rows(n=12, V=9)
    widest, kept = [], []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dim() == 2 and out.shape[-1] == 9:
                widest.append(out.shape[0])
            return out

    def pack(tensor):
        kept.append(tensor.dim() == 2 and tensor.shape[-1] == 9)
        return tensor

    with Watch():
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            total = selected_logprobs(hidden, weight, targets, chunk=4)[0].sum()
        total.backward()
    assert widest and max(widest) <= 4
    assert not any(kept), "logits wait for backward: they should be recomputed"


def check_selected_of_nothing(selected_logprobs):
    hidden, weight, targets = rows()
    got, entropy = selected_logprobs(hidden[:0], weight, targets[:0], chunk=4)
    assert got.shape == entropy.shape == (0,)
    got.sum().backward()
    assert weight.grad is not None and not weight.grad.any()


def check_selected_entropy_gradient(selected_logprobs):
    hidden, weight, targets = rows()
    assert not selected_logprobs(hidden, weight, targets, chunk=4)[1].requires_grad
    for chunk in (4, 100):
        entropy = selected_logprobs(hidden, weight, targets, chunk=chunk, entropy_gradient=True)[1]
        assert entropy.requires_grad
        logp = (hidden @ weight.T).log_softmax(-1)
        slow = -(logp.exp() * logp).sum(-1)
        torch.testing.assert_close(torch.autograd.grad(entropy.sum(), hidden),
                                   torch.autograd.grad(slow.sum(), hidden), atol=1e-5, rtol=1e-4)


def check_sequence_logprobs(sequence_logprobs):
    logp = torch.tensor([[-1.0, -2.0, math.nan], [-3.0, -4.0, -5.0], [math.inf, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 0], [0, 1, 1], [0, 0, 0]])
    assert sequence_logprobs(logp, mask).tolist() == [-3, -9, 0]
    assert sequence_logprobs(logp, mask, average=True).tolist() == [-1.5, -4.5, 0]


CHECKS = {
    "token_logprobs": [
        check_token_logprobs_by_hand, check_token_logprobs_at_a_temperature, check_token_logprobs_are_fp32],
    "token_entropy": [check_entropy_by_hand],
    "selected_logprobs": [
        check_selected_equals_the_slow_way, check_selected_holds_a_chunk_at_most, check_selected_of_nothing,
        check_selected_entropy_gradient],
    "sequence_logprobs": [check_sequence_logprobs],
}


@pytest.mark.parametrize("name, check", [(name, check) for name in CHECKS for check in CHECKS[name]])
def test_function(name, check):
    check(getattr(logprobs, name))


def test_selected_equals_token_logprobs_in_one_batch():
    hidden, weight, _ = rows(n=2 * 5)
    tokens = torch.tensor([[0, 1, 2, 3, 4], [6, 5, 4, 3, 2]])
    full = logprobs.token_logprobs(hidden.view(2, 5, 4) @ weight.T, tokens, temperature=1.3)  # (B, T-1)
    mask = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1]]).bool()
    got, entropy = logprobs.selected_logprobs(
        hidden.view(2, 5, 4)[:, :-1][mask], weight, tokens[:, 1:][mask], temperature=1.3, chunk=4)
    torch.testing.assert_close(got, full[mask])
    slow = logprobs.token_entropy(hidden.view(2, 5, 4) @ weight.T, temperature=1.3)
    torch.testing.assert_close(entropy, slow[:, :-1][mask].detach())


def test_selected_under_autocast_and_without_gradient():
    hidden, weight, targets = rows()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, _ = logprobs.selected_logprobs(hidden, weight, targets, chunk=4)
        got.sum().backward()  # the recomputation sees the same autocast
        with torch.no_grad():
            again, _ = logprobs.selected_logprobs(hidden, weight, targets, chunk=4)
    assert got.dtype == torch.float32 and torch.equal(got.detach(), again)
    assert torch.isfinite(hidden.grad).all() and hidden.grad.dtype == torch.float32


@pytest.mark.parametrize("temperature", [0, -1.0, math.nan])
def test_temperature_has_to_be_positive(temperature):
    with pytest.raises(ValueError, match="use one above 0"):
        logprobs.token_logprobs(PROBABILITIES.log(), TOKENS, temperature)
    with pytest.raises(ValueError, match="use one above 0"):
        logprobs.selected_logprobs(*rows(), temperature=temperature)
