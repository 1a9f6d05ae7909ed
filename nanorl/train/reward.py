"""The reward model: which of two replies a person, or a program, would prefer, as one number a reply.

The SFT model's Transformer with a head in place of its `lm_head`, trained with the Bradley-Terry loss: the chosen
reply's reward should be above the rejected one's. Only differences are learned, so rewards have no zero of their own;
`centre` pulls the two of a pair to a sum of 0. Follows Stiennon et al. 2020 (arXiv:2009.01325) and InstructGPT
(arXiv:2203.02155). Simplified: one pair a prompt.
"""

import itertools
from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field
from torch import Tensor, nn

from nanorl import checkpoint, distributed, runtime
from nanorl.heads import RewardModel, reply_rewards
from nanorl.objectives.preference import bradley_terry_loss
from nanorl.train import supervised
from nanorl.train.preference import PairConfig, count, interval, pair_batches, pairs_of


class RewardConfig(PairConfig):
    """The reward model's settings."""

    stage: ClassVar[str] = "reward"

    margin: float = Field(0.0, ge=0, description="by how much the chosen reply's reward should be above the other's")
    centre: float = Field(0.01, ge=0, description="weight of the square of the sum of a pair's rewards")


def train(cfg: RewardConfig) -> Iterator[dict]:
    """Train a reward model from the run's `sft` model; yields one record a step, leaves stage `reward`.

    Raises FileNotFoundError, with the command that helps, where there is no SFT model; ValueError where no pair fits.
    """
    device = distributed.setup(runtime.pick_device(cfg.device))
    runtime.seed_everything(cfg.seed)
    policy, tokenizer, parent = checkpoint.parent_of(cfg, "sft")
    train_pairs, dev_pairs = pairs_of(cfg, tokenizer, "train"), pairs_of(cfg, tokenizer, "heldout")

    def losses(model: nn.Module, batch: dict) -> tuple[Tensor, dict]:
        """Losses (B,) and figures of a micro-batch."""
        chosen, rejected = reply_rewards(model, batch["tokens"], batch["documents"], 2).unbind(dim=1)
        margin = chosen.new_full(chosen.shape, cfg.margin)
        loss, figures = bradley_terry_loss(chosen, rejected, margin, cfg.centre)
        return loss, figures | {"reward": (chosen + rejected) / 2}

    job = supervised.Job(
        RewardModel(policy), tokenizer, pair_batches(cfg, train_pairs, tokenizer.pad, None),
        dev_batches=lambda: itertools.islice(pair_batches(cfg, dev_pairs, tokenizer.pad, 1), cfg.eval_batches),
        losses=losses, count=count, parent=f"sft step {parent['step']}", report=interval,
    )
    yield from supervised.train(cfg, job, device)
