"""Device, precision, random numbers, memory."""

import random

import numpy as np
import pytest
import torch

from nanorl import runtime

CPU = torch.device("cpu")


def draw():
    """One draw from each global generator."""
    return random.random(), np.random.rand(), torch.rand(()).item()


def machine(monkeypatch, cuda: int = 0, mps: bool = False) -> None:
    """Pretend that the machine has this many GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)


@pytest.mark.parametrize("cuda, mps, expected", [(2, True, "cuda"), (0, True, "mps"), (0, False, "cpu")])
def test_auto_takes_the_best_device(monkeypatch, cuda, mps, expected):
    machine(monkeypatch, cuda, mps)
    assert runtime.pick_device().type == expected
    assert runtime.pick_device("cpu") == CPU


def test_absent_devices_are_refused(monkeypatch):
    machine(monkeypatch, cuda=1)
    assert runtime.pick_device("cuda:0") == torch.device("cuda", 0)
    with pytest.raises(ValueError, match="'cuda:1' was asked for, but torch finds 1 cuda"):
        runtime.pick_device("cuda:1")
    machine(monkeypatch)
    for name in ("cuda", "mps"):
        with pytest.raises(ValueError, match=f"'{name}' was asked for, .* finds 0 .*use device 'auto'"):
            runtime.pick_device(name)


@pytest.mark.parametrize("name", ["gpu", "", "meta"])
def test_unknown_devices_are_refused(name):
    with pytest.raises(ValueError, match=f"unknown device '{name}'; choose auto"):
        runtime.pick_device(name)


def test_the_gpu_preset_needs_a_gpu(monkeypatch):
    machine(monkeypatch)
    runtime.require_gpu("cpu")
    with pytest.raises(ValueError, match="preset 'gpu' needs a CUDA GPU .* use preset 'cpu'"):
        runtime.require_gpu("gpu")
    machine(monkeypatch, cuda=1)
    runtime.require_gpu("gpu")


@pytest.mark.parametrize("flags, expected", [
    ({"avx512_bf16": True}, "bf16"), ({"amx_bf16": True}, "bf16"),
    ({"avx512_bf16": False, "avx2": True}, "fp32"), ({}, "fp32"),
])
def test_auto_precision_follows_the_cpu(monkeypatch, flags, expected):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: flags, raising=False)
    assert runtime.resolve_precision(CPU, "auto") == expected
    assert runtime.resolve_precision(CPU, "fp32") == "fp32"
    assert runtime.resolve_precision(CPU, "bf16") == "bf16"


def test_bf16_on_an_old_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old One")
    device = torch.device("cuda", 0)
    assert runtime.resolve_precision(device, "auto") == "fp32"
    with pytest.raises(ValueError, match="Old One.*use precision 'fp32'"):
        runtime.resolve_precision(device, "bf16")


def test_unknown_precision_is_refused():
    with pytest.raises(ValueError, match="unknown precision 'fp16'; choose auto, fp32 or bf16"):
        runtime.autocast(CPU, "fp16")


@pytest.mark.parametrize("precision, dtype", [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_autocast_sets_the_type_of_products(precision, dtype):
    x = torch.ones(2, 2)
    with runtime.autocast(CPU, precision):
        assert (x @ x).dtype == dtype


def test_one_seed_repeats_every_generator():
    runtime.seed_everything(3)
    first = draw()
    runtime.seed_everything(3)
    assert draw() == first
    runtime.seed_everything(4)
    assert all(a != b for a, b in zip(first, draw(), strict=True))


def test_rng_state_survives_a_safe_file(tmp_path):
    runtime.seed_everything(3)
    random.gauss(0, 1), np.random.randn()  # both keep half of a pair for the next call
    torch.save(runtime.rng_state(), tmp_path / "rng.pt")
    expected = draw(), random.gauss(0, 1), np.random.randn()
    runtime.seed_everything(99)
    runtime.set_rng_state(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert (draw(), random.gauss(0, 1), np.random.randn()) == expected


def test_generators_are_stable_and_apart():
    assert runtime.mix_seed(1, 2) == 4269312763976219659  # the same on every machine and version
    seeds = {runtime.mix_seed(*numbers) for numbers in [(0,), (0, 0), (1,), (0, 1), (1, 0), (12, 3), (1, 23)]}
    assert len(seeds) == 7 and all(0 <= seed < 2**63 for seed in seeds)
    one, two = (torch.rand(4, generator=runtime.generator(5, 6)) for _ in range(2))
    assert torch.equal(one, two)


def test_memory_as_text(monkeypatch):
    assert runtime.gib(3 * 2**29) == "1.50 GiB"
    runtime.reset_peak_memory(CPU)
    assert runtime.peak_memory(CPU).startswith("n/a, ") and runtime.peak_memory(CPU).endswith("GiB resident")
    assert runtime.peak_memory(torch.device("mps")) == "n/a"
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 2**30)
    assert runtime.peak_memory(torch.device("cuda", 0)) == "1.00 GiB"
