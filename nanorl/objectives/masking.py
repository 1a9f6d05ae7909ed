"""Sums and means over the positions that count.

A masked position is replaced, never multiplied by 0: 0 x NaN is NaN, and a NaN or inf in a slot that does not
count must change neither a loss nor its gradient. Masks are bool or 0/1 numbers, with the shape of the values
they belong to.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of the counted values, over everything or over `dim`. Nothing counted gives 0."""
    kept = x.masked_fill(~mask.bool(), 0.0)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of the counted values, over everything or over `dim`. Nothing counted gives 0.

    For numbers that are logged. A training loss is summed and divided by a count over all ranks and
    micro-batches (see `policy.reduce`): a mean of such means is a different number.
    """
    mask = mask.bool()
    count = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(x, mask, dim) / count.clamp(min=1)


def masked_whiten(
    x: Tensor,
    mask: Tensor,
    mean: Tensor | float | None = None,
    variance: Tensor | float | None = None,
    shift_mean: bool = True,
) -> Tensor:
    """Counted values scaled to mean 0 and variance 1 (population variance); 0 where masked.

    `mean` and `variance` may be given from outside, where they are taken over several ranks. With
    `shift_mean` False the mean is put back afterwards, so that only the scale changes. Equal values become 0
    (or stay equal), not NaN.
    """
    mask = mask.bool()
    mean = masked_mean(x, mask) if mean is None else mean
    centred = (x - mean).masked_fill(~mask, 0.0)
    variance = masked_mean(centred.square(), mask) if variance is None else variance
    whitened = centred * torch.rsqrt(torch.as_tensor(variance, dtype=x.dtype, device=x.device) + 1e-8)
    return whitened if shift_mean else (whitened + mean).masked_fill(~mask, 0.0)


def response_mask(prompt_width: int | Tensor, lengths: Tensor, width: int) -> Tensor:
    """Which entries of a (B, T-1) tensor score a token of the response.

    prompt_width  tokens before the response: one number (prompts padded on the left) or (B,)
    lengths       (B,) tokens in each response, its end token included
    width         T

    Entry t scores token t+1, so the first is prompt_width - 1 and there are `lengths` of them. The mask comes
    from lengths, never from comparing ids with the end token, because padding may be that same token.
    prompt_width 2, lengths [2, 0], width 5: tokens p p r r . -> [[0, 1, 1, 0], [0, 0, 0, 0]].
    Raises ValueError if a prompt is empty or a response does not fit in the width.
    """
    start = torch.as_tensor(prompt_width, device=lengths.device).expand_as(lengths)
    if lengths.numel() and int(start.min()) < 1:
        raise ValueError("an empty prompt: nothing predicts its first response token; start it with a token")
    end = start + lengths
    if lengths.numel() and int(end.max()) > width:
        raise ValueError(f"prompt and response take {int(end.max())} tokens, the row has {width}; widen it")
    scored = torch.arange(1, width, device=lengths.device)  # entry t scores token t+1
    return (scored >= start[:, None]) & (scored < end[:, None])


def packed_targets(documents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens of the replies in packed rows, and where each is predicted.

    documents  (P, S)  0 on the prompt at the row's start, 1 and up on the replies behind it, -1 on padding
    returns    where (P, S) bool, true on the N tokens of replies, and for these, in order, their row (N,) and the
               column before (N,) whose hidden state predicts them: the one to their left, but for the first token of a
               reply the prompt's last. As (rows, before, where).

    [[0, 0, 1, 1, 2, -1]] -> rows [0, 0, 0], before [1, 2, 1], where [[0, 0, 1, 1, 1, 0]].
    """
    index = torch.arange(documents.size(1), device=documents.device)
    first = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0))
    before = torch.where(first, (documents == 0).sum(dim=1, keepdim=True), index) - 1  # (P, S)
    where = documents > 0
    return where.nonzero()[:, 0], before[where], where


def overlong_mask(mask: Tensor, ended: Tensor) -> Tensor:
    """Drop truncated responses from the loss: mask (B, T-1) and ended (B,) bool -> (B, T-1).

    Overlong filtering of DAPO (arXiv 2503.14476, section 3.4): a response cut off at the length limit may
    have been on its way to a right answer, so its reward says nothing about its reasoning.
    """
    return mask.bool() & ended.bool()[:, None]
