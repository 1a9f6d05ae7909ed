"""One process or many, through the same code.

`torchrun` tells each process its place in RANK, LOCAL_RANK and WORLD_SIZE. `setup` joins the group that they
describe; without them, or with a world of one, there is no group and every function here is a no-op that
gives the answer of one process.

DDP averages gradients over ranks. A loss that is already divided by a global count must therefore be
multiplied by `world_size()` before backward.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

Number = TypeVar("Number", int, float, Tensor)
TIMEOUT = timedelta(minutes=30)


def setup(device: torch.device) -> torch.device:
    """Join torchrun's process group (NCCL on CUDA, gloo on CPU) and return this process's own device.

    May be called again. ValueError where a machine has fewer GPUs than processes, or the device is mps.
    """
    if started_by_torchrun() == 1:
        return device
    if device.type == "mps":
        raise ValueError("device 'mps' runs one process only; use --nproc 1 or --device cpu")
    if device.type == "cuda":
        local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local >= gpus:
            raise ValueError(f"process {local + 1} of this machine has no GPU of its own, there are {gpus}; "
                             f"use --nproc {gpus}")
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    if not _grouped():
        store, number, world = next(dist.rendezvous("env://", timeout=TIMEOUT))
        if os.environ.get("LOCAL_WORLD_SIZE") == str(world):  # a restart must not find the addresses of dead ranks
            store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT')}", store)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT, store=store, rank=number,
                                world_size=world, device_id=device if device.type == "cuda" else None)
    return device


def started_by_torchrun() -> int:
    """How many processes `torchrun` says there are, by WORLD_SIZE; 1 without it. ValueError where that is no number."""
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"WORLD_SIZE is '{text}' here, torchrun sets it to a number of processes; unset it")
    return int(text)


def close() -> None:
    """Leave the process group."""
    if _grouped():
        dist.destroy_process_group()


def _grouped() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """This process's number, 0 to world_size() - 1."""
    return dist.get_rank() if _grouped() else 0


def world_size() -> int:
    """How many processes train together."""
    return dist.get_world_size() if _grouped() else 1


def is_main() -> bool:
    """Whether this is rank 0: the one that prints and writes files."""
    return rank() == 0


def barrier() -> None:
    """Wait until every rank is here."""
    if _grouped():
        dist.barrier()


def wrap(model: nn.Module, device: torch.device) -> nn.Module:
    """The module whose forward to train through: DDP over `model`, or `model` itself on one process.

    DDP copies rank 0's parameters and buffers to the other ranks here; buffers are constants from then on.
    """
    if not _grouped():
        return model
    renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters  # since torch 2.13
    constant_buffers = {"forward_sync_buffers" if renamed else "broadcast_buffers": False}
    return DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None,
                                   **constant_buffers)


def unwrap(model: nn.Module) -> nn.Module:
    """The raw module under any layers of DDP and `torch.compile`."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        else:
            return model


def no_sync(model: nn.Module) -> AbstractContextManager:
    """A context in which backward adds up gradients on this rank without averaging them over ranks."""
    return model.no_sync() if hasattr(model, "no_sync") else nullcontext()


def sum_over_ranks(x: Number) -> Number:
    """The sum of every rank's `x`, on every rank. Ints stay exact, floats are added in float64; a tensor
    keeps its shape, dtype and device, is not changed in place and carries no gradient."""
    if not _grouped():
        return x.detach() if isinstance(x, Tensor) else x
    if not isinstance(x, Tensor):
        dtype = torch.int64 if isinstance(x, int) else torch.float64
        return sum_over_ranks(torch.tensor(x, dtype=dtype)).item()
    total = x.detach().to(_transport(), copy=True).contiguous()
    dist.all_reduce(total)
    return total.to(x.device)


def sum_named(numbers: Mapping[str, float]) -> dict[str, float]:
    """The sums of every rank's numbers by name, on every rank, in one exchange. A rank may lack some names."""
    parts = gather_objects([dict(numbers)])
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0.0) for part in parts) for name in names}


def _transport() -> torch.device:
    """The device whose tensors the group can send."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def mean_over_ranks(x: Number) -> float | Tensor:
    """The mean of every rank's `x`, on every rank; each rank counts the same."""
    return sum_over_ranks(x) / world_size()


def gather_objects(items: list) -> list:
    """Every rank's list, one after the other in rank order, on every rank. Items must pickle."""
    if not _grouped():
        return list(items)
    parts = [None] * world_size()
    dist.all_gather_object(parts, list(items))
    return [item for part in parts for item in part]


def broadcast_object(x: Any) -> Any:
    """Rank 0's `x`, on every rank. It must pickle."""
    if not _grouped():
        return x
    box = [x]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def shard(items: Sequence) -> Sequence:
    """This rank's share: items rank, rank + world, rank + 2 world, ... Shares differ by at most one item."""
    return items[rank()::world_size()]
