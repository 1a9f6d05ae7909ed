"""The machine underneath: device, precision, random numbers, memory."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch
from torch import nn


def pick_device(name: str = "auto") -> torch.device:
    """The device called `name`; "auto" is the first of cuda, mps, cpu that this machine has.

    A device that is asked for by name and absent is a ValueError, never a silent fallback.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = None
    if not isinstance(name, str) or device is None or device.type not in ("cpu", "cuda", "mps"):
        raise ValueError(f"unknown device '{name}'; choose auto, cpu, cuda, cuda:<index> or mps")
    found = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if (device.index or 0) >= found[device.type]:
        raise ValueError(f"device '{name}' was asked for, but torch finds {found[device.type]} {device.type} "
                         "device(s) here; use device 'auto' or 'cpu'")
    return device


def require_gpu(preset: str) -> None:
    """Raise a ValueError where `preset` is "gpu" and this machine has no CUDA GPU."""
    if preset == "gpu" and not torch.cuda.is_available():
        raise ValueError("preset 'gpu' needs a CUDA GPU and torch finds none; use preset 'cpu', or install a "
                         "CUDA build of torch")


def resolve_precision(device: torch.device, precision: str = "auto") -> str:
    """"fp32" or "bf16": what `precision` ("auto", "fp32" or "bf16") means on `device`.

    "auto" is bf16 where the hardware computes in it: CUDA GPUs since Ampere, CPUs with bf16 instructions.
    "bf16" on a CPU without them works but is emulated and slow; on an older GPU it is a ValueError.
    """
    if precision not in ("auto", "fp32", "bf16"):
        raise ValueError(f"unknown precision '{precision}'; choose auto, fp32 or bf16")
    if precision == "fp32":
        return "fp32"
    native = _has_bf16(device)
    if precision == "bf16" and device.type == "cuda" and not native:
        gpu = torch.cuda.get_device_name(device)
        raise ValueError(f"precision 'bf16' is not supported by this GPU ({gpu}); use precision 'fp32'")
    return "bf16" if precision == "bf16" or native else "fp32"


def _has_bf16(device: torch.device) -> bool:
    """Whether `device` has bf16 arithmetic in hardware. False where torch cannot tell."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        capabilities = getattr(torch.cpu, "get_capabilities", dict)()
        return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16"))
    return False


def autocast(device: torch.device, precision: str = "auto") -> AbstractContextManager:
    """A context in which matrix products run in bf16, or one that does nothing, see `resolve_precision`."""
    if resolve_precision(device, precision) == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """`model` in eval mode; in the end it is in the mode that it was in."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def mix_seed(*numbers: int) -> int:
    """One seed in [0, 2^63) from several integers: the same in every process and version, order matters."""
    text = ",".join(str(int(n)) for n in numbers)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def generator(seed: int, *more: int, device: str | torch.device = "cpu") -> torch.Generator:
    """A torch generator seeded by all of the integers, e.g. `generator(seed, epoch, rank)`."""
    return torch.Generator(device).manual_seed(mix_seed(seed, *more))


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python, NumPy, torch and CUDA."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # CUDA's generators too, on every device


def rng_state() -> dict:
    """The state of the global generators, in types that `torch.load(weights_only=True)` accepts."""
    name, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(keys.astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_rng_state(state: dict) -> None:
    """Put the global generators back to what `rng_state` returned. CUDA's state is skipped without a GPU."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.cpu().numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())


def gib(n_bytes: int) -> str:
    """Bytes as text, e.g. "1.50 GiB"."""
    return f"{n_bytes / 2**30:.2f} GiB"


def peak_memory(device: torch.device) -> str:
    """Peak memory as text: on CUDA what torch allocated since `reset_peak_memory`, on a CPU the process's
    resident set since it started ("n/a, 0.52 GiB resident": no GPU memory to report), else "n/a"."""
    if device.type == "cuda":
        return gib(torch.cuda.max_memory_allocated(device))
    if device.type != "cpu" or sys.platform == "win32":
        return "n/a"
    import resource  # not on Windows
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return f"n/a, {gib(peak * (1 if sys.platform == 'darwin' else 1024))} resident"


def reset_peak_memory(device: torch.device) -> None:
    """Start a new measurement for `peak_memory`; nothing to do off CUDA."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
