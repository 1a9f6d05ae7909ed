"""What every training run has: an optimizer's settings, a count of what it has done, a state to save and restore."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from pydantic import Field
from torch import nn

from nanorl import checkpoint, distributed, runtime
from nanorl.config import StageConfig
from nanorl.model import Transformer
from nanorl.optim import Optimizers, build_optimizers, schedule
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


@dataclass
class Progress:
    """How far a run is; saved with it."""

    step: int = 0  # steps done
    tokens: int = 0  # tokens read or written so far
    minutes: float = 0.0  # time spent in steps, evaluation left out
    loss_history: list[float] = field(default_factory=list)


def restore(
    cfg: OptimConfig, model: Transformer, tokenizer: Tokenizer, optimizers: Optimizers, source: Any
) -> Progress:
    """Put a run back to the checkpoint that `cfg.resume` means; a new run where it means none.

    `source` is where batches come from; its `position` is set. Raises ValueError where the checkpoint has another
    shape or tokenizer, FileNotFoundError where there is none.
    """
    path = checkpoint.resolve_resume(cfg.resume, cfg.folder)
    if path is None:
        return Progress()
    state = checkpoint.load(path)
    if state["stage"] != cfg.stage:
        raise ValueError(f"{path} is a checkpoint of stage {state['stage']}, this is {cfg.stage}; resume from one of "
                         f"{cfg.stage}'s own")
    checkpoint.check_same_shape(state, model.cfg.model_dump(), tokenizer.hash)
    checkpoint.load_weights(model, state["model_state_dict"])
    optimizers.load_state_dict(state["optimizer_state_dict"])
    runtime.set_rng_state(state["rng"])
    source.position = state["position"]
    return Progress(**{name: state[name] for name in asdict(Progress())})


def save(
    cfg: OptimConfig, model: Transformer, tokenizer: Tokenizer, optimizers: Optimizers, source: Any,
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


def training_forward(cfg: OptimConfig, model: Transformer, device: torch.device) -> nn.Module:
    """The module to compute losses through: compiled and wrapped in DDP where that applies."""
    return distributed.wrap(torch.compile(model) if cfg.compile else model, device)
