"""Wrong versions of masking.py, logprobs.py and language_model.py: mistakes that the tests have to see.

Each is wrong in one way and works otherwise; where it can, it is the real function with one thing changed.
`WRONG` lists them under the function they stand for. The losses of RL are in wrong_versions_rl.py.
"""

import torch
import torch.nn.functional as F

from nanorl.objectives import language_model as LM
from nanorl.objectives import logprobs as LP
from nanorl.objectives import masking as M


def negated(function):
    """The sign flipped: of the result, or of the first of several."""
    def wrong(*args, **kwargs):
        out = function(*args, **kwargs)
        return (-out[0], *out[1:]) if isinstance(out, tuple) else -out
    return wrong


# masking

def masked_by_multiplying(x, mask, dim=None):
    kept = x * mask
    return kept.sum() if dim is None else kept.sum(dim)


def mean_over_all(x, mask, dim=None):
    return M.masked_sum(x, mask, dim) / (x.numel() if dim is None else x.shape[dim])


def mean_of_row_means(x, mask, dim=None):
    return M.masked_mean(x, mask, -1).mean() if dim is None else M.masked_mean(x, mask, dim)


def mean_without_guard(x, mask, dim=None):
    return M.masked_sum(x, mask, dim) / (mask.sum() if dim is None else mask.sum(dim))


def whiten_over_padding(x, mask, **kwargs):
    return M.masked_whiten(x.nan_to_num(), torch.ones_like(mask), **kwargs).masked_fill(~mask.bool(), 0.0)


def whiten_by_variance(x, mask, mean=None, variance=None, shift_mean=True):
    mask = mask.bool()
    mean = M.masked_mean(x, mask) if mean is None else mean
    variance = M.masked_mean((x - mean) ** 2, mask) if variance is None else variance
    out = (x - mean) / (variance + 1e-8)
    return (out if shift_mean else out + mean).masked_fill(~mask, 0.0)


def whiten_without_guard(x, mask, mean=None, variance=None, shift_mean=True):
    mask = mask.bool()
    mean = M.masked_mean(x, mask) if mean is None else mean
    variance = M.masked_mean((x - mean) ** 2, mask) if variance is None else variance
    out = (x - mean) / variance ** 0.5
    return (out if shift_mean else out + mean).masked_fill(~mask, 0.0)


def whiten_ignoring_given(x, mask, mean=None, variance=None, shift_mean=True):
    return M.masked_whiten(x, mask, shift_mean=shift_mean)


def response_mask_one_late(prompt_width, lengths, width):
    return M.response_mask(prompt_width, lengths, width).roll(1, dims=-1)


def response_mask_without_end_token(prompt_width, lengths, width):
    return M.response_mask(prompt_width, (lengths - 1).clamp(min=0), width)


def response_mask_with_padding(prompt_width, lengths, width):
    start = torch.as_tensor(prompt_width).expand_as(lengths)
    return torch.arange(1, width).expand(len(lengths), -1) >= start[:, None]


# logprobs

def logprobs_of_the_token_itself(logits, tokens, temperature=1.0):
    logp = (logits.float() / temperature).log_softmax(-1)
    return logp.gather(-1, tokens[..., None])[:, :-1, 0]


def logprobs_shifted_twice(logits, tokens, temperature=1.0):
    logp = (logits.float() / temperature).log_softmax(-1)
    return logp[:, 1:].gather(-1, tokens[:, 1:, None])[..., 0]


def logprobs_not_normalised(logits, tokens, temperature=1.0):
    return (logits[:, :-1].float() / temperature).gather(-1, tokens[:, 1:, None])[..., 0]


def logprobs_in_half_precision(logits, tokens, temperature=1.0):
    logp = (logits[:, :-1] / temperature).log_softmax(-1)
    return logp.gather(-1, tokens[:, 1:, None])[..., 0].float()


def selected_all_at_once(hidden, weight, targets, temperature=1.0, chunk=None, entropy_gradient=False):
    return LP.selected_logprobs(hidden, weight, targets, temperature, 10**9, entropy_gradient)


def selected_without_recomputation(
        hidden, weight, targets, temperature=1.0, chunk=None, entropy_gradient=False):
    chunk = chunk or len(targets)
    parts = [LP.selected_logprobs(h, weight, t, temperature, chunk, entropy_gradient)
             for h, t in zip(hidden.split(chunk), targets.split(chunk), strict=True)]
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))


def selected_dropping_the_last_chunk(
        hidden, weight, targets, temperature=1.0, chunk=None, entropy_gradient=False):
    chunk = chunk or len(targets)
    n = len(targets) // chunk * chunk or len(targets)
    out = LP.selected_logprobs(hidden[:n], weight, targets[:n], temperature, chunk, entropy_gradient)
    return tuple(F.pad(part, (0, len(targets) - n)) for part in out)


def selected_with_detached_head(hidden, weight, *args, **kwargs):
    return LP.selected_logprobs(hidden, weight.detach(), *args, **kwargs)


def selected_with_entropy_of_temperature_one(hidden, weight, *args, **kwargs):
    logp, _ = LP.selected_logprobs(hidden, weight, *args, **kwargs)
    return logp, LP.token_entropy(hidden @ weight.T)


def selected_with_surprise_for_entropy(*args, **kwargs):
    logp, _ = LP.selected_logprobs(*args, **kwargs)
    return logp, -logp.detach()


def sequence_average_over_width(logp, mask, average=False):
    return M.masked_sum(logp, mask, -1) / (logp.shape[-1] if average else 1)


# language_model

def next_token_is_this_token(logits, tokens):
    return F.cross_entropy(logits[:, :-1].float().transpose(1, 2), tokens[:, :-1], reduction="none")


def next_token_in_half_precision(logits, tokens):
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")


def cross_entropy_mask_one_early(logits, tokens, loss_mask, documents=None):
    mask = LM.target_mask(loss_mask, documents)
    if documents is None:
        mask = loss_mask[:, :-1].bool()
    losses = LM.next_token_loss(logits, tokens)
    return losses.masked_fill(~mask, 0.0), mask


def cross_entropy_across_documents(logits, tokens, loss_mask, documents=None):
    return LM.masked_cross_entropy(logits, tokens, loss_mask)


def cross_entropy_mask_ignored(logits, tokens, loss_mask, documents=None):
    return LM.masked_cross_entropy(logits, tokens, torch.ones_like(loss_mask), documents)


def cross_entropy_masked_by_multiplying(logits, tokens, loss_mask, documents=None):
    mask = LM.target_mask(loss_mask, documents)
    return LM.next_token_loss(logits, tokens) * mask, mask


def cross_entropy_masked_after(logits, tokens, loss_mask, documents=None):
    mask = LM.target_mask(loss_mask, documents)  # the loss is clean, its gradient is not
    return LM.next_token_loss(logits, tokens).masked_fill(~mask, 0.0), mask


WRONG = {
    "masked_sum": [masked_by_multiplying, negated(M.masked_sum)],
    "masked_mean": [mean_over_all, mean_of_row_means, mean_without_guard, negated(M.masked_mean)],
    "masked_whiten": [
        whiten_over_padding, whiten_by_variance, whiten_without_guard, whiten_ignoring_given,
        negated(M.masked_whiten)],
    "response_mask": [response_mask_one_late, response_mask_without_end_token, response_mask_with_padding],
    "overlong_mask": [lambda mask, ended: mask.bool(), lambda mask, ended: mask.bool() & ~ended[:, None]],
    "token_logprobs": [
        logprobs_of_the_token_itself, logprobs_shifted_twice, logprobs_not_normalised,
        logprobs_in_half_precision, negated(LP.token_logprobs),
        lambda logits, tokens, temperature=1.0: LP.token_logprobs(logits, tokens),
        lambda logits, tokens, temperature=1.0: LP.token_logprobs(logits, tokens, 1 / temperature),
        lambda logits, tokens, temperature=1.0: LP.token_logprobs(logits, tokens) / temperature],
    "token_entropy": [
        negated(LP.token_entropy), lambda logits, temperature=1.0: LP.token_entropy(logits),
        lambda logits, temperature=1.0: (logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).neg()],
    "selected_logprobs": [
        selected_all_at_once, selected_without_recomputation, selected_dropping_the_last_chunk,
        selected_with_detached_head, selected_with_entropy_of_temperature_one,
        selected_with_surprise_for_entropy, negated(LP.selected_logprobs)],
    "sequence_logprobs": [
        sequence_average_over_width, negated(LP.sequence_logprobs),
        lambda logp, mask, average=False: LP.sequence_logprobs(logp, torch.ones_like(mask), average),
        lambda logp, mask, average=False: LP.sequence_logprobs(logp, mask)],
    "next_token_loss": [
        next_token_is_this_token, next_token_in_half_precision, negated(LM.next_token_loss)],
    "masked_cross_entropy": [
        cross_entropy_mask_one_early, cross_entropy_across_documents, cross_entropy_mask_ignored,
        cross_entropy_masked_by_multiplying, cross_entropy_masked_after, negated(LM.masked_cross_entropy)],
}
