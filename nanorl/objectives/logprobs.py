"""Log-probabilities of chosen tokens, and entropies, always in fp32 and at the temperature of the sampler.

    B batch   T time   C channels   V vocabulary   N response positions gathered from a batch

`token_logprobs` is the short version, which needs all logits (B, T, V) at once. `selected_logprobs` is the
one that training uses: it starts from the hidden states of the N positions that matter and projects them onto
the vocabulary a chunk at a time, so that no more than the logits of one chunk exist, forward or backward.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nanorl.objectives.masking import masked_sum

CHUNK_LOGITS = 2**25  # logits that exist at once: 128 MiB in fp32


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability of each token given the ones before it.

    logits (B, T, V) and tokens (B, T) -> (B, T-1) in fp32: index t is log p(tokens[t+1] | tokens[..t]).
    Raises ValueError if the temperature is not above 0.
    """
    logp = _log_softmax(logits[:, :-1], temperature)  # (B, T-1, V)
    return logp.gather(-1, tokens[:, 1:, None]).squeeze(-1)


def token_entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Exact entropy, in nats, of the distribution that each position predicts: (..., V) -> (...) in fp32."""
    return _entropy(_log_softmax(logits, temperature))


def selected_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    chunk: int | None = None,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of chosen tokens and exact entropies, never holding the logits of all positions.

    hidden   (N, C)  what the model's `lm_head` consumes, at the positions that predict a chosen token
    weight   (V, C)  the matrix of `lm_head`
    targets  (N,)    the chosen tokens
    chunk            positions projected at once; None: as many as make 2^25 logits
    returns  (logprobs (N,), entropy (N,)), both fp32

    Where gradients are recorded and N exceeds `chunk`, the logits of each chunk are thrown away after the
    forward pass and computed again in backward: one more matrix product buys memory of chunk x V instead of
    N x V. The entropy is detached unless `entropy_gradient` (an entropy bonus needs it). N = 0 gives empty
    tensors that still have a gradient (of zeros). Raises ValueError if the temperature is not above 0.
    """
    _check_temperature(temperature)
    n = hidden.shape[0]
    chunk = chunk or max(1, CHUNK_LOGITS // weight.shape[0])
    recompute = torch.is_grad_enabled() and n > chunk
    options = {"use_reentrant": False, "preserve_rng_state": False}
    parts = []
    for start in range(0, max(n, 1), chunk):
        rows = slice(start, start + chunk)
        inputs = (hidden[rows], weight, targets[rows], temperature, entropy_gradient)
        if recompute:
            parts.append(checkpoint(_project_and_pick, *inputs, **options))
        else:
            parts.append(_project_and_pick(*inputs))
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def sequence_logprobs(logprobs: Tensor, mask: Tensor, average: bool = False) -> Tensor:
    """Log-probability of each sequence: the sum (or mean, if `average`) of the counted (B, T-1) -> (B,).

    A row with nothing counted gives 0.
    """
    total = masked_sum(logprobs, mask, dim=-1)
    return total / mask.sum(-1).clamp(min=1) if average else total


def _project_and_pick(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    logits = F.linear(hidden.to(weight.dtype), weight)  # (n, V)
    logp = _log_softmax(logits, temperature)
    chosen = logp.gather(-1, targets[:, None]).squeeze(-1)
    # Last, so that the recomputation in backward stops before it where it needs no gradient.
    entropy = _entropy(logp if entropy_gradient else logp.detach())
    return chosen, entropy


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    _check_temperature(temperature)
    logits = logits.float()
    return F.log_softmax(logits if temperature == 1.0 else logits / temperature, dim=-1)


def _entropy(logp: Tensor) -> Tensor:
    probs = logp.exp()
    return -(probs * logp.masked_fill(probs == 0, 0.0)).sum(-1)  # 0 * log 0 is 0, not NaN


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature {temperature} has no log-probabilities; use one above 0")
