"""What every training run has: an optimizer's settings, a count of what it has done, a state to save and restore."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from pydantic import Field
from torch import nn

from nanorl import checkpoint, distributed, runtime, storage
from nanorl.config import StageConfig
from nanorl.metrics import Metrics, one_line
from nanorl.optim import Optimizers, build_optimizers, schedule
from nanorl.stopping import GivenUp, Stop, check, listening, together
from nanorl.tokenizer import Tokenizer


class OptimConfig(StageConfig):
    """What every trainer says about its optimizer."""

    steps: int = Field(100, ge=1, description="training steps")
    optimizer: Literal["adamw", "muon"] = Field("muon", description="adamw for everything, or muon for the blocks' "
                                                "matrices and adamw for the rest")
    lr: float = Field(3e-3, gt=0, le=1, description="peak learning rate of adamw")
    muon_lr: float = Field(0.02, gt=0, le=1, description="peak learning rate of muon")
    weight_decay: float = Field(0.0, ge=0, le=1, description="decoupled weight decay, matrices only")
    eval_every: int = Field(100, ge=1, description="steps between looks at held-out data")
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

    def look_due(self, step: int) -> bool:
        """Whether held-out data is to be looked at after `step` steps."""
        return step == self.steps or step % self.eval_every == 0

    def how_to_resume(self, step: int) -> str:
        """What a run that was asked to stop says as it leaves."""
        if not step:
            return f"{self.stage} stopped in its first step, there is nothing to save; start it again"
        return (f"{self.stage} stopped after step {step} of {self.steps}, saved in {self.folder}; go on with --resume, "
                "in a notebook with resume='latest' in the config")


@dataclass
class Progress:
    """How far a run is; saved with it."""

    step: int = 0  # steps done
    tokens: int = 0  # tokens read or written so far
    minutes: float = 0.0  # time spent in steps, evaluation left out
    loss_history: list[float] = field(default_factory=list)
    history: dict[str, list[float]] = field(default_factory=dict)  # what controllers and monitors go by
    best: dict[str, float] = field(default_factory=dict)  # step and figure of the best look at held-out data
    metrics: dict[str, float] = field(default_factory=dict)  # the record of the last step
    samples: list[dict] = field(default_factory=list)  # and its samples, where the step is open:
    open: bool = False  # a stop cut its look at held-out data short

    def add(self, tokens: int, seconds: float, loss: float) -> None:
        """Count a step that is done."""
        self.step += 1
        self.tokens += tokens
        self.minutes += seconds / 60
        self.loss_history.append(loss)

    def compare(self, record: dict) -> None:
        """Keep step and figure of a look at held-out data that is better than all before it: by its loss, in RL by
        its accuracy."""
        name, sign = ("dev_loss", -1) if "dev_loss" in record else ("dev_accuracy", 1)
        if sign * record[name] > sign * self.best.get(name, -sign * math.inf):
            self.best = {"step": record["step"], name: record[name]}


def restore(
    cfg: OptimConfig, model: nn.Module, tokenizer: Tokenizer, optimizers: Optimizers, source: Any
) -> Progress:
    """Put a run back to the checkpoint that `cfg.resume` means; a new run where it means none.

    `source` is where batches come from; its `position` is set. Raises ValueError where the checkpoint has another
    shape, stage or tokenizer, or only weights, FileNotFoundError where there is none.
    """
    state = checkpoint.to_resume(cfg.resume, cfg.folder)
    if state is None:
        return Progress()
    if state["stage"] != cfg.stage:
        raise ValueError(f"{cfg.resume} is a checkpoint of stage {state['stage']}, this is {cfg.stage}; resume from "
                         f"one of {cfg.stage}'s own")
    if missing := [name for name in ("optimizer_state_dict", "rng", "position") if name not in state]:
        raise ValueError(f"{cfg.resume} cannot be resumed from, it has no {missing[0]!r}; start without resume")
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
    look: Callable[[], dict]  # figures of held-out data
    before: tuple[dict, int] = field(init=False)  # the generators and the position of `source` as the last step left
    weights: list[dict] = field(default_factory=list)  # copies of model and optimizers as the last step left them
    changed: bool = False  # whether a step that has begun may have changed them since

    def __post_init__(self):
        self.remember()

    def remember(self) -> None:
        """Note where the next step begins, for `give_up`."""
        self.before, self.changed = (runtime.rng_state(), self.source.position), False

    def remember_weights(self) -> None:
        """Copy model and optimizers to main memory, so that a step of several updates can be given up after the first
        of them."""
        self.weights = copied([self.model.state_dict(), self.optimizers.state_dict()], self.weights)
        self.changed = True

    def close_step(self, record: dict, samples: Sequence[dict] = ()) -> Iterator[dict]:
        """Look at held-out data where that is due, log the step, save where that is due or the run has been asked to
        stop, yield the record, leave if asked. A look that a stop cuts short is made when the run is resumed."""
        progress = self.progress
        self.remember()
        if self.cfg.look_due(progress.step):
            progress.metrics, progress.samples, progress.open = checkpoint.plain(record), list(samples), True
            record = record | self.look()
            progress.compare(record)
        leaving = self.stop.due()
        self.metrics.log(record)
        self.metrics.keep_samples(samples)
        progress.metrics, progress.samples, progress.open = checkpoint.plain(record), [], False
        if self.cfg.save_due(progress.step) or leaving:
            self.save()
        if progress.step == self.cfg.steps > progress.best.get("step", progress.step):
            self.metrics.say(f"{self.cfg.stage} was better before: {one_line(progress.best)}")
        yield record
        if leaving:
            self.stop.leave(self.cfg.how_to_resume(progress.step))

    def close_open_step(self) -> Iterator[dict]:
        """What is left to do of a step in whose look at held-out data the run was stopped."""
        if self.progress.open:
            yield from self.close_step(self.progress.metrics, self.progress.samples)

    def give_up(self) -> None:
        """Leave in the middle of a step, as if it had not begun, or of a look, which is then still to be made."""
        state, self.source.position = self.before
        runtime.set_rng_state(state)
        if self.changed:
            self.model.load_state_dict(self.weights[0])
            self.optimizers.load_state_dict(self.weights[1])
        if self.progress.step:
            self.save()
        self.stop.leave(self.cfg.how_to_resume(self.progress.step))

    def save(self) -> None:
        """Rank 0 writes the whole state of the run to its folder; the others wait for it."""
        progress = self.progress
        if distributed.is_main():
            state = {
                "stage": self.cfg.stage, "finished": progress.step >= self.cfg.steps and not progress.open,
                "parent": self.parent, "cfg": self.cfg.model_dump(), "model_cfg": self.model.cfg.model_dump(),
                "tokenizer_hash": self.tokenizer.hash, "model_state_dict": self.model.state_dict(),
                "optimizer_state_dict": self.optimizers.state_dict(), "rng": runtime.rng_state(),
                "position": self.source.position,
            }
            checkpoint.save(self.cfg.folder, state | asdict(progress), self.cfg.keep_last)
        distributed.barrier()


@contextmanager
def session(
    cfg: OptimConfig, model: nn.Module, tokenizer: Tokenizer, optimizers: Optimizers, source: Any, progress: Progress,
    parent: str | None, look: Callable[[], dict],
) -> Iterator[Run]:
    """Hold the run's folder against a second run, listen for signals, and keep metrics, as long as the run lasts.

    Raises ValueError where another run is using the folder, or ranks would go on from different steps.
    """
    if len(steps := set(distributed.gather_objects([progress.step]))) > 1:
        raise ValueError(f"ranks would go on from steps {', '.join(map(str, sorted(steps)))}; NANORL_HOME must be one "
                         "folder that all machines see")
    logged = progress.step - progress.open
    with (storage.lock(cfg.folder) if distributed.is_main() else nullcontext(), listening() as stop,
          Metrics(cfg.folder, cfg.stage, cfg.steps, logged, cfg.tracker, cfg.model_dump()) as metrics):
        run = Run(cfg, model, tokenizer, optimizers, source, progress, parent, metrics, stop, look)
        try:
            yield run
        except GivenUp:
            run.give_up()


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


def accumulate(forward: nn.Module, parts: Iterable[Any]) -> Iterator[Any]:
    """The parts of one optimizer step, one after the other, for a forward and a backward each: ranks meet in the last
    backward, and before it they can give the step up together."""
    *others, last = parts
    with together():
        for part in others:
            check()
            with distributed.no_sync(forward):
                yield part
    yield last


def copied(state: Any, old: Any = None) -> Any:
    """A copy of nested dicts and lists whose tensors are in main memory: those of an `old` copy, if it fits."""
    if isinstance(state, torch.Tensor):
        fits = isinstance(old, torch.Tensor) and (old.shape, old.dtype) == (state.shape, state.dtype)
        return old.copy_(state) if fits else state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {name: copied(value, old.get(name) if isinstance(old, dict) else None) for name, value in state.items()}
    if isinstance(state, list):
        old = old if isinstance(old, list) and len(old) == len(state) else [None] * len(state)
        return [copied(value, before) for value, before in zip(state, old, strict=True)]
    return state


def training_forward(cfg: OptimConfig, model: nn.Module, device: torch.device) -> nn.Module:
    """The module to compute losses through: compiled and wrapped in DDP where that applies."""
    return distributed.wrap(torch.compile(model) if cfg.compile else model, device)
