"""Optimizers, the learning-rate schedule, and the one place where a step is taken.

Two choices: AdamW for everything (Loshchilov & Hutter, 2019), or Muon for the matrices inside the blocks
and AdamW for the rest (Jordan et al., 2024, "Muon: an optimizer for hidden layers"). Muon replaces the
momentum of a matrix by (nearly) the closest orthogonal matrix, found by five Newton-Schulz iterations in
bfloat16, so that every direction of the matrix moves by the same amount. Embeddings and `lm_head` are
matrices too, but their rows are looked up one by one, so they stay with AdamW, as the authors advise.
Weight decay is decoupled and goes to matrices only: norms and biases are few, and pulling them to zero
changes the scale of a layer instead of regularising it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


class Optimizers:
    """One or two torch optimizers that step together: iterate, index and `len` as with a list.

    Each parameter group remembers the learning rate it was built with as `group["base_lr"]`; `set_lr(scale)`
    sets every group to `base_lr * scale`, so that one schedule serves groups with different rates.
    `skipped` counts the steps that `clip_and_step` refused to take.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = list(optimizers)
        self.scale = 1.0
        self.skipped = 0
        for group in self.param_groups:
            group["base_lr"] = group["lr"]

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(self.optimizers)

    def __len__(self) -> int:
        return len(self.optimizers)

    def __getitem__(self, index: int) -> torch.optim.Optimizer:
        return self.optimizers[index]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers, in order."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def set_lr(self, scale: float) -> None:
        """Set the rate of every group to its own base rate times `scale`."""
        self.scale = float(scale)
        for group in self.param_groups:
            group["lr"] = group["base_lr"] * self.scale

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain types only, fit for a checkpoint loaded with `weights_only=True`."""
        return {"kinds": self._kinds(), "scale": self.scale, "skipped": self.skipped,
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over moments and counters. Base rates, decay and betas stay those of this run.

        So a run resumed with the same config continues exactly, and one resumed with another learning rate
        gets the rate it asked for. ValueError if the saved optimizers are of another kind.
        """
        if state["kinds"] != self._kinds():
            raise ValueError(f"the checkpoint was trained with {'+'.join(state['kinds'])}, this run uses "
                             f"{'+'.join(self._kinds())}; resume with the same 'optimizer' setting")
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            optimizer.load_state_dict(saved)
            for group, own in zip(optimizer.param_groups, options, strict=True):
                group.update(own)
        self.skipped = state["skipped"]
        self.set_lr(state["scale"])

    def _kinds(self) -> list[str]:
        return [type(optimizer).__name__.lower() for optimizer in self.optimizers]


def build_optimizers(
    model: nn.Module,
    optimizer: str = "adamw",
    *,
    lr: float = 3e-4,
    muon_lr: float = 0.02,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
) -> Optimizers:
    """Sort the trainable parameters of `model` into groups and build "adamw" or "muon" over them.

    "adamw": AdamW at `lr` for all, `weight_decay` on parameters of two or more dimensions, 0 on the others.
    "muon": `torch.optim.Muon` at `muon_lr` for the 2-D weights under a module called `blocks`, AdamW at `lr`
    for the rest, the same `weight_decay` on the matrices of both. Muon runs with momentum 0.95, Nesterov, and
    the update scaling `adjust_lr_fn="original"`: a matrix of shape (rows, cols) moves by
    `muon_lr * max(1, rows / cols) ** 0.5` times an orthogonal matrix. (Moonshot's alternative, 0.2 *
    max(rows, cols) ** 0.5, lets Muon reuse AdamW's rates: not used here, so `muon_lr` is about 0.02 and not
    3e-4.) AdamW uses the fused kernel on CPU and CUDA.

    ValueError: an unknown optimizer, or "muon" for a model without matrices under `blocks`.
    """
    if optimizer not in ("adamw", "muon"):
        raise ValueError(f"unknown optimizer {optimizer!r}; choose 'adamw' or 'muon'")
    hidden, matrices, vectors = [], [], []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if optimizer == "muon" and parameter.ndim == 2 and "blocks" in name.split("."):
            hidden.append(parameter)
        elif parameter.ndim >= 2:
            matrices.append(parameter)
        else:
            vectors.append(parameter)
    if optimizer == "muon" and not hidden:
        raise ValueError("optimizer 'muon' found no matrices under 'blocks' in this model; use 'adamw'")

    built: list[torch.optim.Optimizer] = []
    if hidden:
        built.append(torch.optim.Muon(hidden, lr=muon_lr, weight_decay=weight_decay, momentum=0.95,
                                      nesterov=True, adjust_lr_fn="original"))
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    if groups:
        fused = all(p.device.type in ("cpu", "cuda") for p in matrices + vectors)
        built.append(torch.optim.AdamW(groups, lr=lr, betas=tuple(betas), eps=1e-8, fused=fused))
    return Optimizers(built)


def schedule(step: int, total: int, warmup: int, floor: float = 0.1) -> float:
    """The multiplier of the learning rate at `step` (0-based) of `total`: linear warm-up, cosine to `floor`.

    Steps 0 .. warmup-1 give (step+1) / (warmup+1), step `warmup` gives 1, and from there half a cosine falls
    to `floor` at the last step, total-1, and stays there. Worked example, total 7, warmup 2, floor 0.1:
    1/3, 2/3, 1, 0.868, 0.55, 0.232, 0.1.
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    span = total - 1 - warmup                        # steps from the peak to the floor
    if span <= 0:
        return 1.0
    progress = min(1.0, (step - warmup) / span)
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def clip_and_step(model: nn.Module, optimizers: Optimizers, max_norm: float) -> float:
    """Scale the gradient of `model` to at most `max_norm`, take the step, return the norm before clipping.

    The norm is over all parameters together (Pascanu et al., 2013); `max_norm` of 0 measures without
    clipping. If the norm is not finite nothing is changed: no parameter, no moment. The returned nan or inf
    and `optimizers.skipped`, one higher, report it. Under DDP every rank holds the same averaged gradient,
    so all ranks decide alike. Gradients are left in place: call `optimizers.zero_grad()` before the next
    backward.
    """
    parameters = [p for p in model.parameters() if p.grad is not None]
    norm = get_total_norm([p.grad for p in parameters])
    value = float(norm)
    if not math.isfinite(value):
        optimizers.skipped += 1
        return value
    if max_norm > 0:
        clip_grads_with_norm_(parameters, max_norm, norm)
    optimizers.step()
    return value
