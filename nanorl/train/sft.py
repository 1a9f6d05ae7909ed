"""Supervised fine-tuning: the pretrained model learns to answer in the chat form.

Rows are packed: several conversations share a row, each sees itself only. The loss counts what the assistant
has to produce, its end token included, and nothing else.
"""

import itertools
from collections.abc import Iterator
from typing import ClassVar

from torch import Tensor, nn

from nanorl import checkpoint, distributed, paths, runtime
from nanorl.data.instruct import RowBatches
from nanorl.objectives.language_model import masked_cross_entropy, target_mask
from nanorl.train import supervised


class SFTConfig(supervised.SupervisedConfig):
    """SFT's settings: the loop's."""

    stage: ClassVar[str] = "sft"


def losses(model: nn.Module, batch: dict) -> tuple[Tensor, dict]:
    """Per-token losses (B, T-1) of packed rows (B, T), 0 on what does not count."""
    logits = model(batch["tokens"], documents=batch["documents"])
    return masked_cross_entropy(logits, batch["tokens"], batch["loss_mask"], batch["documents"])[0], {}


def count(batch: dict) -> int:
    """The assistant's tokens."""
    return int(target_mask(batch["loss_mask"], batch["documents"]).sum())


def train(cfg: SFTConfig) -> Iterator[dict]:
    """Fine-tune the run's `pretrain` model; yields one record a step, leaves stage `sft`.

    Raises FileNotFoundError, with the command that helps, where the model or the conversations are missing.
    """
    device = distributed.setup(runtime.pick_device(cfg.device))
    runtime.seed_everything(cfg.seed)
    model, tokenizer, parent = checkpoint.parent_of(cfg, "pretrain")
    data = paths.data_dir(cfg.run_name)

    def batches(name: str, epochs: int | None) -> RowBatches:
        return RowBatches(data / name, cfg.batch_size, cfg.seed, epochs, rank=distributed.rank(),
                          world=distributed.world_size(), tokenizer=tokenizer)

    job = supervised.Job(
        model, tokenizer, batches("instruct.h5", None),
        dev_batches=lambda: itertools.islice(batches("instruct-dev.h5", 1), cfg.eval_batches),
        losses=losses, count=count, parent=f"pretrain step {parent['step']}",
    )
    yield from supervised.train(cfg, job, device)
