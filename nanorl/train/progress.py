"""What every training run has: an optimizer's settings, a count of what it has done, a state to save and restore."""

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from pydantic import Field
from torch import nn

from nanorl import checkpoint, distributed, runtime, storage
from nanorl.config import StageConfig
from nanorl.metrics import Metrics
from nanorl.optim import Optimizers, build_optimizers, schedule
from nanorl.stopping import Stop, listening
from nanorl.tokenizer import Tokenizer


class OptimConfig(StageConfig):
    """What every trainer says about its optimizer."""

    steps: int = Field(100, ge=1, description="training steps")
    optimizer: Literal["adamw", "muon"] = Field("muon", description="adamw for everything, or muon for the blocks' "
                                                "matrices and adamw for the rest")
    lr: float = Field(3e-3, gt=0, le=1, description="peak learning rate of adamw")
    muon_lr: float = Field(0.02, gt=0, le=1, description="peak learning rate of muon")
    weight_decay: float = Field(0.0, ge=0, le=1, description="decoupled weight decay, matrices only")
    warmup: int = Field(10, ge=0, description="steps of linear warm-up; a cosine follows")
    lr_floor: float = Field(0.1, ge=0, le=1, description="the learning rate at the end, as a share of its peak")
    max_grad_norm: float = Field(1.0, ge=0, description="gradients are scaled down to this norm; 0 never does")
    save_every: int = Field(0, ge=0, description="steps between checkpoints; 0 saves at the end only")
    max_skipped: int = Field(20, ge=0, description="steps with a gradient that is no number, which are left out; with "
                             "more of them the run ends")
    compile: bool = Field(False, description="torch.compile the training forward")

    def build_optimizers(self, model: nn.Module) -> Optimizers:
        """The optimizers that these settings name, over the model's trainable parameters."""
        return build_optimizers(
            model, self.optimizer, lr=self.lr, muon_lr=self.muon_lr, weight_decay=self.weight_decay
        )

    def set_lr(self, optimizers: Optimizers, step: int) -> float:
        """Set the schedule's rate for `step` (0-based); returns it as a share of the peak."""
        scale = schedule(step, self.steps, self.warmup, self.lr_floor)
        optimizers.set_lr(scale)
        return scale

    def save_due(self, step: int) -> bool:
        """Whether a checkpoint is due after `step` steps."""
        return step == self.steps or bool(self.save_every and step % self.save_every == 0)

    def how_to_resume(self, step: int) -> str:
        """What a run that was asked to stop says as it leaves."""
        return f"{self.stage} stopped after step {step} of {self.steps}, saved in {self.folder}; go on with --resume"


@dataclass
class Progress:
    """How far a run is; saved with it."""

    step: int = 0  # steps done
    tokens: int = 0  # tokens read or written so far
    minutes: float = 0.0  # time spent in steps, evaluation left out
    loss_history: list[float] = field(default_factory=list)
    history: dict[str, list[float]] = field(default_factory=dict)  # what controllers and monitors go by

    def add(self, tokens: int, seconds: float, loss: float) -> None:
        """Count a step that is done."""
        self.step += 1
        self.tokens += tokens
        self.minutes += seconds / 60
        self.loss_history.append(loss)


def restore(
    cfg: OptimConfig, model: nn.Module, tokenizer: Tokenizer, optimizers: Optimizers, source: Any
) -> Progress:
    """Put a run back to the checkpoint that `cfg.resume` means; a new run where it means none.

    `source` is where batches come from; its `position` is set. Raises ValueError where the checkpoint has another
    shape or tokenizer, FileNotFoundError where there is none.
    """
    state = checkpoint.to_resume(cfg.resume, cfg.folder)
    if state is None:
        return Progress()
    if state["stage"] != cfg.stage:
        raise ValueError(f"{cfg.resume} is a checkpoint of stage {state['stage']}, this is {cfg.stage}; resume from "
                         f"one of {cfg.stage}'s own")
    checkpoint.check_same_shape(state, model.cfg.model_dump(), tokenizer.hash)
    checkpoint.load_weights(model, state["model_state_dict"])
    optimizers.load_state_dict(state["optimizer_state_dict"])
    runtime.set_rng_state(state["rng"])
    source.position = state["position"]
    return Progress(**{name: state[name] for name in asdict(Progress()) if name in state})


@dataclass
class Run:
    """A run while it lasts: what it is made of, its metrics, and its ear for SIGTERM and Ctrl-C."""

    cfg: OptimConfig
    model: nn.Module
    tokenizer: Tokenizer
    optimizers: Optimizers
    source: Any  # where batches come from, with an integer `position`
    progress: Progress
    parent: str | None  # the checkpoint that the model came from
    metrics: Metrics
    stop: Stop

    def close_step(self, record: dict, samples: Sequence[dict] = ()) -> Iterator[dict]:
        """Log a step, save where that is due or the run has been asked to stop, yield the record, leave if asked."""
        leaving = self.stop.due()
        self.metrics.log(record)
        self.metrics.keep_samples(samples)
        if self.cfg.save_due(self.progress.step) or leaving:
            save(self.cfg, self.model, self.tokenizer, self.optimizers, self.source, self.progress, record, self.parent)
        yield record
        if leaving:
            self.stop.leave(self.cfg.how_to_resume(self.progress.step))


@contextmanager
def session(
    cfg: OptimConfig, model: nn.Module, tokenizer: Tokenizer, optimizers: Optimizers, source: Any, progress: Progress,
    parent: str | None,
) -> Iterator[Run]:
    """Hold the run's folder against a second run, listen for signals, and keep metrics, as long as the run lasts.

    Raises ValueError where another run is using the folder.
    """
    with (storage.lock(cfg.folder) if distributed.is_main() else nullcontext(), listening() as stop,
          Metrics(cfg.folder, cfg.stage, cfg.steps, progress.step, cfg.tracker, cfg.model_dump()) as metrics):
        yield Run(cfg, model, tokenizer, optimizers, source, progress, parent, metrics, stop)


def guard(cfg: OptimConfig, record: dict, source: Any) -> None:
    """Warn of a step that was left out because its gradient was no number; FloatingPointError where there have been
    more than `max_skipped`."""
    if math.isfinite(record["grad_norm"]):
        return
    what = (f"{cfg.stage} step {record['step']}: the gradient was no number, on the batch that ends at position "
            f"{source.position}; left out, {record['skipped']} of at most {cfg.max_skipped}")
    if record["skipped"] > cfg.max_skipped:
        raise FloatingPointError(f"{what}; lower lr, or look at that batch")
    if distributed.is_main():
        warnings.warn(what, stacklevel=2)


def save(
    cfg: OptimConfig, model: nn.Module, tokenizer: Tokenizer, optimizers: Optimizers, source: Any,
    progress: Progress, record: dict, parent: str | None,
) -> None:
    """Rank 0 writes the whole state of the run to `cfg.folder`; the others wait for it."""
    if distributed.is_main():
        state = {
            "stage": cfg.stage, "finished": progress.step >= cfg.steps, "parent": parent,
            "cfg": cfg.model_dump(), "model_cfg": model.cfg.model_dump(), "tokenizer_hash": tokenizer.hash,
            "model_state_dict": model.state_dict(), "optimizer_state_dict": optimizers.state_dict(),
            "rng": runtime.rng_state(), "position": source.position, "metrics": checkpoint.plain(record),
        }
        checkpoint.save(cfg.folder, state | asdict(progress), cfg.keep_last)
    distributed.barrier()


def training_forward(cfg: OptimConfig, model: nn.Module, device: torch.device) -> nn.Module:
    """The module to compute losses through: compiled and wrapped in DDP where that applies."""
    return distributed.wrap(torch.compile(model) if cfg.compile else model, device)
