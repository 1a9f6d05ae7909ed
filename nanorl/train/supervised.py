"""The one supervised loop: pretraining, SFT and whatever else learns from given targets.

A step, in order:

 1. take this rank's rows of the global batch;
 2. count the targets of the whole batch, over all micro-batches and ranks, before any backward;
 3. for each micro-batch: losses of its tokens, their sum over that count, backward;
 4. set the learning rate, clip the gradient, step;
 5. now and then the loss on held-out data and a checkpoint, and always one metrics record.

`batch_size` is the number of rows of the global batch, whatever the number of processes and micro-batches: 4
micro-batches on one rank, 2 on each of two and 1 on each of four give the same step.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from nanorl import distributed, runtime
from nanorl.metrics import Metrics
from nanorl.model import Transformer
from nanorl.optim import clip_and_step
from nanorl.tokenizer import Tokenizer
from nanorl.train.progress import OptimConfig, restore, save, training_forward


class SupervisedConfig(OptimConfig):
    """What pretraining and SFT share."""

    batch_size: int = Field(32, ge=1, description="rows a step, over all processes and micro-batches")
    micro_batch_size: int = Field(32, ge=1, description="rows a forward pass on one process")
    eval_every: int = Field(100, ge=1, description="steps between losses on held-out data")
    eval_batches: int = Field(10, ge=1, description="held-out batches for that loss")


@dataclass
class Job:
    """What a stage hands to the loop."""

    model: Transformer
    tokenizer: Tokenizer
    batches: Any  # endless iterator of dicts of (B_local, ...) tensors, with an integer `position`
    dev_batches: Callable[[], Iterable[dict]]  # a fresh pass over held-out batches
    losses: Callable[[nn.Module, dict], Tensor]  # (model, micro-batch) -> losses of targets, 0 where not counted
    count: Callable[[dict], int]  # batch -> how many targets count
    parent: str | None = None  # the checkpoint that the model came from
    report: Callable[[float], dict] = lambda dev_loss: {}  # more figures from a held-out loss


def train(cfg: SupervisedConfig, job: Job, device: torch.device) -> Iterator[dict]:
    """Train `job.model`; yields one record a step and leaves checkpoints in `cfg.folder`.

    Raises ValueError where the checkpoint to resume from has another shape or tokenizer.
    """
    model, world = job.model.to(device).train(), distributed.world_size()
    optimizers = cfg.build_optimizers(model)
    progress = restore(cfg, model, job.tokenizer, optimizers, job.batches)
    forward = training_forward(cfg, model, device)
    with Metrics(cfg.folder, cfg.stage, cfg.steps, progress.step, cfg.tracker, cfg.model_dump()) as metrics:
        while progress.step < cfg.steps:
            started = time.perf_counter()
            # 1. this rank's rows
            batch = to_device(next(job.batches), device)
            # 2. the count of the whole batch
            count = distributed.sum_over_ranks(job.count(batch))
            # 3. losses, micro-batch by micro-batch; ranks meet in the last backward
            optimizers.zero_grad()
            loss = 0.0
            micros = list(split(batch, cfg.micro_batch_size))
            for i, micro in enumerate(micros):
                with sync_last(forward, i, len(micros)):
                    with runtime.autocast(device, cfg.precision):
                        share = job.losses(forward, micro).sum() / max(count, 1)
                    (share * world).backward()  # DDP averages over ranks, and the count is global already
                loss += share.detach()
            # 4. step
            lr = cfg.set_lr(optimizers, progress.step)
            grad_norm = clip_and_step(model, optimizers, cfg.max_grad_norm)
            # 5. figures, held-out loss, checkpoint
            loss = float(distributed.sum_over_ranks(loss))
            tokens = distributed.sum_over_ranks(batch["tokens"].numel())
            seconds = time.perf_counter() - started
            progress.step += 1
            progress.tokens += tokens
            progress.minutes += seconds / 60
            progress.loss_history.append(loss)
            record = {"step": progress.step, "loss": loss, "lr": lr, "grad_norm": grad_norm,
                      "skipped": optimizers.skipped, "tokens": progress.tokens,
                      "time/step": seconds, "time/tokens_per_second": tokens / seconds}
            if progress.step % cfg.eval_every == 0 or progress.step == cfg.steps:
                record["dev_loss"] = held_out_loss(cfg, job, device)
                record |= job.report(record["dev_loss"])
            if cfg.save_due(progress.step):
                save(cfg, model, job.tokenizer, optimizers, job.batches, progress, record, job.parent)
            metrics.log(record)
            yield record


@torch.no_grad()
def held_out_loss(cfg: SupervisedConfig, job: Job, device: torch.device) -> float:
    """Mean loss of the targets in the held-out batches, over all ranks."""
    total, count = 0.0, 0
    job.model.eval()
    for batch in job.dev_batches():
        batch = to_device(batch, device)
        with runtime.autocast(device, cfg.precision):
            total += float(job.losses(job.model, batch).sum())
        count += job.count(batch)
    job.model.train()
    return distributed.sum_over_ranks(total) / max(distributed.sum_over_ranks(count), 1)


def to_device(batch: dict, device: torch.device) -> dict:
    """The tensors of a batch, on `device`."""
    return {name: x.to(device) for name, x in batch.items() if isinstance(x, Tensor)}


def split(batch: dict, size: int) -> Iterator[dict]:
    """A batch in pieces of `size` rows."""
    for start in range(0, len(batch["tokens"]), size):
        yield {name: x[start : start + size] for name, x in batch.items()}


def sync_last(forward: nn.Module, i: int, n: int) -> AbstractContextManager:
    """Gradients are averaged over ranks in the last of `n` backwards only."""
    return distributed.no_sync(forward) if i + 1 < n else nullcontext()
