"""Cross-entropy of the next token, for pretraining and for supervised fine-tuning.

    B batch   T time   V vocabulary

Both losses return one value a token, index t for token t+1; the loop divides their sum by a count over all
ranks and micro-batches.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Negative log-likelihood of each next token: logits (B, T, V), tokens (B, T) -> (B, T-1) fp32."""
    predictions = logits[:, :-1].float()  # (B, T-1, V)
    losses = F.cross_entropy(predictions.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return losses.view(tokens.shape[0], tokens.shape[1] - 1)


def target_mask(loss_mask: Tensor, documents: Tensor | None = None) -> Tensor:
    """Which predictions count: loss_mask and documents (B, T) -> (B, T-1) bool.

    Prediction t counts if its target t+1 has loss_mask set and, in a packed row, belongs to the same document
    as token t: the last token of one document does not predict the first of the next.
    """
    mask = loss_mask[:, 1:].bool()
    return mask if documents is None else mask & (documents[:, 1:] == documents[:, :-1])


def masked_cross_entropy(
    logits: Tensor, tokens: Tensor, loss_mask: Tensor, documents: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Negative log-likelihood of the next tokens that count.

    logits (B, T, V), tokens, loss_mask and documents (B, T) -> (losses (B, T-1) in fp32, mask (B, T-1) bool).
    The mask is `target_mask(loss_mask, documents)` and losses are 0 outside it. Only counted rows of the
    logits are read, so that whatever stands in the others changes neither loss nor gradient.
    """
    mask = target_mask(loss_mask, documents)
    counted = F.cross_entropy(logits[:, :-1][mask].float(), tokens[:, 1:][mask], reduction="none")
    losses = torch.zeros(mask.shape, dtype=counted.dtype, device=counted.device)
    return losses.masked_scatter(mask, counted), mask
