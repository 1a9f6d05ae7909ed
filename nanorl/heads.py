"""What stands on a Transformer beside its `lm_head`: a reward for a whole reply, a value for each position.

A head is one linear layer from the last hidden state to one number, computed in fp32 whatever autocast says: a
reward or a value in bf16 would come in steps of 1 in 256. B batch, T time, C channels.
"""

import copy

import torch
from torch import Tensor, nn

from nanorl.model import ModelConfig, Transformer


class ScalarHead(nn.Linear):
    """Hidden states (..., C) to one number each, (...), in fp32. `std` is that of its first weights; 0 starts at 0."""

    def __init__(self, channels: int, std: float):
        super().__init__(channels, 1, bias=False)
        nn.init.normal_(self.weight, std=std)

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return super().forward(hidden.float()).squeeze(-1)


class RewardModel(nn.Module):
    """A Transformer that says how good a reply is, at the reply's last token (Stiennon et al. 2020, arXiv:2009.01325).

    `backbone` is taken over and loses its `lm_head`, which would be a parameter that no loss ever reaches. The head
    starts with a standard deviation of 1 / sqrt(C + 1), as there: rewards of size 1.
    """

    def __init__(self, backbone: Transformer):
        super().__init__()
        self.backbone = without_lm_head(backbone)
        self.head = ScalarHead(self.cfg.n_embed, (self.cfg.n_embed + 1) ** -0.5)

    @property
    def cfg(self) -> ModelConfig:
        return self.backbone.cfg

    @property
    def device(self) -> torch.device:
        return self.backbone.device

    def forward(
        self, tokens: Tensor, mask: Tensor | None = None, documents: Tensor | None = None, shared: Tensor | None = None
    ) -> Tensor:
        """Rewards (B, T) of the text up to each position; what a reply is worth stands at its last token."""
        return self.head(self.backbone.forward_hidden(tokens, mask, documents, shared))


class ActorCritic(nn.Module):
    """A policy and a critic that says, before each token, how much reward is to come.

    shared     the value head reads the policy's own last hidden states: nothing is computed twice, and the two
               losses pull at the same weights
    separate   the critic is a copy of the policy's Transformer: twice the work, no pulling

    The value head starts at 0: the critic has no opinion before it has seen a reward.
    """

    def __init__(self, policy: Transformer, separate: bool = False):
        super().__init__()
        self.policy = policy
        self.critic = without_lm_head(copy.deepcopy(policy)) if separate else None
        self.value_head = ScalarHead(self.cfg.n_embed, 0.0)

    @property
    def cfg(self) -> ModelConfig:
        return self.policy.cfg

    @property
    def device(self) -> torch.device:
        return self.policy.device

    def forward(self, tokens: Tensor, documents: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
        """What the policy's `lm_head` consumes (B, T, C), and the value (B, T) of each position, in one pass."""
        hidden = self.policy.forward_hidden(tokens, documents=documents, shared=shared)
        seen = hidden if self.critic is None else self.critic.forward_hidden(tokens, documents=documents, shared=shared)
        return hidden, self.value_head(seen)


def reply_rewards(model: nn.Module, tokens: Tensor, documents: Tensor, n: int) -> Tensor:
    """Rewards (B, n) of the replies in packed rows: tokens and documents (B, T), 0 the prompt, 1 to n the replies.

    `model` is a RewardModel, or one in DDP. Each reply must have at least one token.
    """
    rewards = model(tokens, documents=documents, shared=documents == 0)  # (B, T)
    return rewards.gather(1, last_positions(documents, n))


def last_positions(documents: Tensor, n: int) -> Tensor:
    """Where each of the documents 1 to `n` of packed rows (B, T) ends: (B, n) int64."""
    index = torch.arange(documents.size(1), device=documents.device)
    return torch.stack([((documents == d) * index).amax(dim=1) for d in range(1, n + 1)], dim=1)


def without_lm_head(model: Transformer) -> Transformer:
    """The same model, which can no longer give logits."""
    model.lm_head = None
    return model


def frozen_copy(model: nn.Module) -> nn.Module:
    """A copy that stays as it is: eval mode, no gradients."""
    return copy.deepcopy(model).eval().requires_grad_(False)
