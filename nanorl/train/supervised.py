"""The one supervised loop: pretraining, SFT, the reward model and learning from preferences.

A step, in order:

 1. take this rank's rows of the global batch;
 2. count the targets of the whole batch, over all micro-batches and ranks, before any backward;
 3. for each micro-batch: losses of its targets, their sum over that count, backward;
 4. set the learning rate, clip the gradient, step;
 5. now and then the loss on held-out data and a checkpoint, and always one metrics record.

`batch_size` is the number of rows of the global batch, whatever the number of processes and micro-batches: 4
micro-batches on one rank, 2 on each of two and 1 on each of four give the same step.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from nanorl import distributed, runtime
from nanorl.optim import clip_and_step
from nanorl.stopping import together
from nanorl.tokenizer import Tokenizer
from nanorl.train.progress import OptimConfig, accumulate, guard, restore, session, training_forward


class SupervisedConfig(OptimConfig):
    """What the stages of this loop share."""

    batch_size: int = Field(32, ge=1, description="rows a step, over all processes and micro-batches")
    micro_batch_size: int = Field(32, ge=1, description="rows a forward pass on one process")
    eval_batches: int = Field(10, ge=1, description="held-out batches for that loss")


@dataclass
class Job:
    """What a stage hands to the loop."""

    model: nn.Module
    tokenizer: Tokenizer
    batches: Any  # endless iterator of dicts of (B_local, ...) tensors, with an integer `position`
    dev_batches: Callable[[], Iterable[dict]]  # a fresh pass over held-out batches
    # (model, micro-batch) -> losses of targets, 0 where not counted, and further figures in the same form
    losses: Callable[[nn.Module, dict], tuple[Tensor, dict[str, Tensor]]]
    count: Callable[[dict], int]  # batch -> how many targets count
    parent: str | None = None  # the checkpoint that the model came from
    ready: Callable[[dict], dict] = lambda batch: batch  # what a batch needs before it is split, from all ranks
    report: Callable[[dict], dict] = lambda held_out: {}  # more figures from the held-out ones and their count


def train(cfg: SupervisedConfig, job: Job, device: torch.device) -> Iterator[dict]:
    """Train `job.model`; yields one record a step and leaves checkpoints in `cfg.folder`.

    Raises ValueError where the checkpoint to resume from has another shape or tokenizer.
    """
    model, world = job.model.to(device).train(), distributed.world_size()
    optimizers = cfg.build_optimizers(model)
    progress = restore(cfg, model, job.tokenizer, optimizers, job.batches)
    forward = training_forward(cfg, model, device)
    with session(cfg, model, job.tokenizer, optimizers, job.batches, progress, job.parent,
                 partial(held_out, cfg, job, device)) as run:
        yield from run.close_open_step()
        while progress.step < cfg.steps:
            started = time.perf_counter()
            # 1. this rank's rows
            batch = job.ready(to_device(next(job.batches), device))
            # 2. the count of the whole batch
            count = distributed.sum_over_ranks(job.count(batch))
            # 3. losses, micro-batch by micro-batch; ranks meet in the last backward
            optimizers.zero_grad()
            sums: dict[str, Tensor] = {}
            for micro in accumulate(forward, split(batch, cfg.micro_batch_size)):
                with runtime.autocast(device, cfg.precision):
                    losses, figures = job.losses(forward, micro)
                share = losses.sum() / max(count, 1)
                (share * world).backward()  # DDP averages over ranks, and the count is global already
                add_sums(sums, {"loss": losses, **figures})
            # 4. step
            lr = cfg.set_lr(optimizers, progress.step)
            grad_norm = clip_and_step(model, optimizers, cfg.max_grad_norm)
            # 5. figures, held-out figures, checkpoint
            means = over_ranks(sums, count)
            tokens = distributed.sum_over_ranks(read(batch))
            seconds = time.perf_counter() - started
            progress.add(tokens, seconds, means["loss"])
            record = {"step": progress.step, **means, "lr": lr, "grad_norm": grad_norm,
                      "skipped": optimizers.skipped, "tokens": progress.tokens,
                      "time/step": seconds, "time/tokens_per_second": tokens / seconds}
            guard(cfg, record, job.batches)
            yield from run.close_step(record)


@torch.no_grad()
def held_out(cfg: SupervisedConfig, job: Job, device: torch.device) -> dict:
    """Mean loss and figures of the targets in the held-out batches, over all ranks, as `dev_loss` and so on."""
    sums: dict[str, Tensor] = {}
    count = 0
    with runtime.evaluating(job.model):
        for batch in job.dev_batches():
            batch = job.ready(to_device(batch, device))
            with together(), runtime.autocast(device, cfg.precision):
                losses, figures = job.losses(job.model, batch)
            add_sums(sums, {"loss": losses, **figures})
            count += job.count(batch)
    count = distributed.sum_over_ranks(count)
    means = {f"dev_{name}": value for name, value in over_ranks(sums, count).items()}
    return means | job.report(means | {"count": count})


def add_sums(sums: dict[str, Tensor], figures: dict[str, Tensor]) -> None:
    """Add the sum of each figure to `sums`."""
    for name, x in figures.items():
        sums[name] = sums.get(name, 0.0) + x.detach().float().sum()


def over_ranks(sums: dict[str, Tensor], count: int) -> dict[str, float]:
    """The sums of all ranks over a global count. A rank may have none, where a pass left nothing for it."""
    totals = distributed.sum_named({name: float(total) for name, total in sums.items()})
    return {name: total / max(count, 1) for name, total in totals.items()}


def read(batch: dict) -> int:
    """The tokens of a batch, padding left out."""
    return int((batch["documents"] >= 0).sum()) if "documents" in batch else batch["tokens"].numel()


def to_device(batch: dict, device: torch.device) -> dict:
    """The tensors of a batch, on `device`."""
    return {name: x.to(device) for name, x in batch.items() if isinstance(x, Tensor)}


def split(batch: dict, size: int) -> Iterator[dict]:
    """A batch in pieces of `size` rows."""
    for start in range(0, len(batch["tokens"]), size):
        yield {name: x[start : start + size] for name, x in batch.items()}
