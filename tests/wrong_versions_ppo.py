"""Wrong versions of what PPO and packed replies need, in the manner of wrong_versions.py."""

import math

import torch
import torch.nn.functional as F
from wrong_versions import negated
from wrong_versions_preference import rows_mixed, with_half_the_gradient

from nanorl.objectives import advantages as A
from nanorl.objectives import masking as M
from nanorl.objectives import policy as P

# GAE

def _gae(following=lambda values, mask: F.pad((values * mask)[:, 1:], (0, 1)), discount=lambda gamma, lam: gamma * lam,
         delta=lambda r, v, following, gamma, lam: r + gamma * following - v,
         returns=lambda out, rewards, values: out + values):
    """The recursion with one of its parts replaced."""
    def wrong(rewards, values, mask, gamma=1.0, lam=0.95):
        mask = mask.bool()
        rewards, critic = rewards.detach().float().masked_fill(~mask, 0.0), values.detach().float()
        values = critic.masked_fill(~mask, 0.0)
        deltas = delta(rewards, values, following(critic.nan_to_num(), mask), gamma, lam)
        out, after = torch.zeros_like(values), torch.zeros_like(values[:, 0])
        for t in reversed(range(values.shape[1])):
            out[:, t] = after = (deltas[:, t] + discount(gamma, lam) * after).masked_fill(~mask[:, t], 0.0)
        return out, returns(out, rewards, values).masked_fill(~mask, 0.0)
    return wrong


def gae_beyond_the_mask(values, mask):
    return F.pad(values[:, 1:], (0, 1))


def gae_ends_on_its_own_value(values, mask):
    return torch.where(F.pad(mask[:, 1:], (0, 1)), F.pad(values[:, 1:], (0, 1)), values * mask)


def gae_masked_by_multiplying(rewards, values, mask, *args, **kwargs):
    return tuple(x * mask for x in A.gae(rewards * mask, values * mask, torch.ones_like(mask), *args, **kwargs))


def gae_mask_of_the_result_ignored(rewards, values, mask, gamma=1.0, lam=0.95):
    clean = (x.masked_fill(~mask.bool(), 0.0) for x in (rewards, values))
    return A.gae(*clean, torch.ones_like(mask), gamma, lam)  # a padded prompt gets the advantages of what follows it


def gae_with_gradient(rewards, values, mask, *args, **kwargs):
    out, returns = A.gae(rewards, values, mask, *args, **kwargs)
    return out, returns + (values - values.detach()).masked_fill(~mask.bool(), 0.0)


# the critic's loss

def value_clip_optimistic(values, old_values, returns, mask, clip=0.2):
    loss, diagnostics = P.clipped_value_loss(values, old_values, returns, mask, clip)
    if clip is None:
        return loss, diagnostics
    mask = mask.bool()
    v, old, r = (x.masked_fill(~mask, 0.0) for x in (values, old_values.detach(), returns.detach()))
    held = (old + (v - old).clamp(-clip, clip) - r).square()
    return 0.5 * torch.minimum((v - r).square(), held), diagnostics


def value_clip_around_returns(values, old_values, returns, mask, clip=0.2):
    return P.clipped_value_loss(values, returns, returns, mask, clip)


def value_never_clipped(values, old_values, returns, mask, clip=0.2):
    return P.clipped_value_loss(values, old_values, returns, mask, None)


def value_always_clipped(values, old_values, returns, mask, clip=0.2):
    return P.clipped_value_loss(values, old_values, returns, mask, 0.2 if clip is None else clip)


def value_without_half(*args, **kwargs):
    loss, diagnostics = P.clipped_value_loss(*args, **kwargs)
    return 2 * loss, diagnostics


def value_old_learns(values, old_values, returns, mask, clip=0.2):
    moved, target = values - old_values, returns.detach() - old_values.detach()
    return P.clipped_value_loss(moved, torch.zeros_like(moved), target, mask, clip)


def value_returns_learn(values, old_values, returns, mask, clip=0.2):
    return P.clipped_value_loss(values - returns, (old_values - returns), torch.zeros_like(returns), mask, clip)


def value_mask_ignored(values, old_values, returns, mask, clip=0.2):
    return P.clipped_value_loss(values, old_values, returns, torch.ones_like(mask), clip)


def value_masked_by_multiplying(values, old_values, returns, mask, clip=0.2):
    loss, diagnostics = P.clipped_value_loss(values, old_values, returns, torch.ones_like(mask), clip)
    return loss * mask, {"clipped": diagnostics["clipped"] & mask.bool()}


def value_clipped_wherever_outside(values, old_values, returns, mask, clip=0.2):
    loss, _ = P.clipped_value_loss(values, old_values, returns, mask, clip)
    return loss, {"clipped": ((values - old_values).abs() > (clip or math.inf)) & mask.bool()}


# packed replies

def packed_one_off(documents):
    rows, before, where = M.packed_targets(documents)
    return rows, before + 1, where  # each token is predicted by itself


def packed_predicted_by_their_left(documents):
    rows, column = (documents > 0).nonzero(as_tuple=True)
    return rows, column - 1, documents > 0  # the second reply's first token by the last of the first


def packed_all_by_the_prompt(documents):
    rows, before, where = M.packed_targets(documents)
    return rows, ((documents == 0).sum(1) - 1)[rows], where


def packed_with_padding(documents):
    rows, before, _ = M.packed_targets(documents.masked_fill(documents < 0, int(documents.max()) + 1))
    return rows, before, documents != 0


def packed_first_reply_only(documents):
    return M.packed_targets(documents.masked_fill(documents > 1, -1))


def packed_where_it_is_predicted(documents):
    rows, before, where = M.packed_targets(documents)
    return rows, before, where.roll(-1, dims=1)


WRONG = {
    "gae": [
        negated(A.gae), _gae(following=gae_beyond_the_mask), _gae(following=gae_ends_on_its_own_value),
        _gae(following=lambda values, mask: values * mask),  # no look ahead at all
        _gae(discount=lambda gamma, lam: lam), _gae(discount=lambda gamma, lam: gamma),
        lambda rewards, values, mask, gamma=1.0, lam=0.95: A.gae(rewards, values, mask, lam, gamma),  # swapped
        _gae(delta=lambda r, v, following, gamma, lam: r + following - v),
        _gae(delta=lambda r, v, following, gamma, lam: r + gamma * lam * following - v),
        _gae(delta=lambda r, v, following, gamma, lam: r + gamma * following),
        _gae(returns=lambda out, rewards, values: out), _gae(returns=lambda out, rewards, values: out + rewards),
        gae_masked_by_multiplying, gae_mask_of_the_result_ignored, gae_with_gradient],
    "clipped_value_loss": [
        negated(P.clipped_value_loss), rows_mixed(P.clipped_value_loss), value_clip_optimistic,
        value_clip_around_returns, value_never_clipped, value_always_clipped, value_without_half, value_old_learns,
        value_returns_learn, value_mask_ignored, value_masked_by_multiplying, value_clipped_wherever_outside,
        with_half_the_gradient(P.clipped_value_loss)],
    "packed_targets": [
        packed_one_off, packed_predicted_by_their_left, packed_all_by_the_prompt, packed_with_padding,
        packed_first_reply_only, packed_where_it_is_predicted],
}
