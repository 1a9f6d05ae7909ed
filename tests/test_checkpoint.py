"""Checkpoint files are whole or absent, plain, and found again; damaged ones are named."""

import errno
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from nanorl import checkpoint
from nanorl.model import ModelConfig, Transformer

SHAPE = dict(vocab_size=300, context_length=16, n_embed=16, n_head=2, n_kv_head=2, n_blocks=2)


def tiny_state(step=1, seed=0, **changes):
    torch.manual_seed(seed)
    model = Transformer(ModelConfig(**SHAPE))
    state = {
        "model_state_dict": model.state_dict(), "model_cfg": model.cfg.model_dump(), "stage": "sft",
        "cfg": {"tokenizer": "bpe", "preset": "cpu"}, "step": step, "finished": False,
        "optimizer_state_dict": None, "loss_history": [2.5, 1.25], "position": 7,
        "rng": {"torch": torch.get_rng_state()}, "metrics": {"loss": 1.25}, "tokenizer_hash": "0" * 64,
        "parent": "pretrain", "minutes": 0.5,
    }
    return {**state, **changes}


def names(folder):
    """What is in a folder, manifests left out; there is one for each checkpoint and no other."""
    found = sorted(path.name for path in Path(folder).iterdir())
    manifests = {name for name in found if name.endswith(".json")}
    assert manifests == {p.with_suffix(".json").name for p in checkpoint.list_checkpoints(folder)}
    return [name for name in found if name not in manifests]


def one_line(error):
    message = str(error.value)
    assert message and "\n" not in message
    return message


# Save and load ----------------------------------------------------------------------------------------------

def test_what_is_saved_is_loaded(tmp_path):
    state = tiny_state(123)
    path = checkpoint.save(tmp_path / "new" / "sft", state, keep_last=2)
    assert path == tmp_path / "new" / "sft" / "step_000123.pt" == checkpoint.checkpoint_path(path.parent, 123)
    assert names(path.parent) == ["step_000123.pt"]
    again = checkpoint.load(path)
    assert again.keys() == state.keys()
    for key in state.keys() - {"model_state_dict", "rng"}:
        assert again[key] == state[key], key
    assert torch.equal(again["rng"]["torch"], state["rng"]["torch"])
    assert all(torch.equal(v, again["model_state_dict"][k]) for k, v in state["model_state_dict"].items())


def test_python_and_numpy_generators_survive(tmp_path):
    kind, keys, *rest = np.random.get_state()
    rng = {"python": random.getstate(), "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), *rest]}
    again = checkpoint.load(checkpoint.save(tmp_path, tiny_state(rng=rng)))["rng"]
    assert again["python"] == rng["python"] and again["numpy"][2:] == rest


@pytest.mark.parametrize("bad, where", [
    ({"metrics": {"loss": np.float64(1.0)}}, r"state\['metrics'\]\['loss'\] is a float64"),
    ({"cfg": {"folder": Path("x")}}, r"state\['cfg'\]\['folder'\] is a \w*Path"),
    ({"loss_history": [1.0, {"a": (object(),)}]}, r"state\['loss_history'\]\[1\]\['a'\]\[0\] is a object"),
])
def test_what_could_not_be_loaded_again_is_not_saved(tmp_path, bad, where):
    with pytest.raises(ValueError, match=where + ".*checkpoint.plain"):
        checkpoint.save(tmp_path, tiny_state(**bad))
    assert names(tmp_path) == []


def test_a_state_without_a_needed_key_is_not_saved(tmp_path):
    state = tiny_state()
    del state["model_cfg"]
    with pytest.raises(ValueError, match="needs the key 'model_cfg'"):
        checkpoint.save(tmp_path, state)


def test_plain_turns_metadata_into_python_types():
    value = {"a": torch.tensor(1.5), "b": np.int64(3), "c": (np.float32(0.5), [torch.tensor([1, 2])]),
             "d": Path("runs"), "e": None, "f": True, "g": "text", "model": ModelConfig(**SHAPE)}
    got = checkpoint.plain(value)
    assert got["model"]["n_blocks"] == 2 and isinstance(got["model"], dict)
    del got["model"]
    assert got == {"a": 1.5, "b": 3, "c": [0.5, [[1, 2]]], "d": "runs", "e": None, "f": True, "g": "text"}
    assert type(got["b"]) is int and type(got["c"][0]) is float


# Files of a folder ------------------------------------------------------------------------------------------

def test_listing_latest_and_pruning(tmp_path):
    assert checkpoint.list_checkpoints(tmp_path / "absent") == [] and checkpoint.latest(tmp_path) is None
    for step in (1, 20, 300):
        checkpoint.save(tmp_path, tiny_state(step), keep_last=2)
    (tmp_path / "step_1.pt").touch()                 # not ours: neither listed nor pruned
    (tmp_path / "notes_step_000001.pt").touch()
    assert [p.name for p in checkpoint.list_checkpoints(tmp_path)] == ["step_000020.pt", "step_000300.pt"]
    assert checkpoint.latest(tmp_path).name == "step_000300.pt"
    checkpoint.prune(tmp_path, 1)
    assert names(tmp_path) == ["notes_step_000001.pt", "step_000300.pt", "step_1.pt"]
    with pytest.raises(ValueError, match="keep_last is 0"):
        checkpoint.save(tmp_path, tiny_state(301), keep_last=0)
    assert checkpoint.latest(tmp_path).name == "step_000300.pt"


def test_steps_sort_as_numbers(tmp_path):
    for step in (999_999, 1_000_000):
        checkpoint.checkpoint_path(tmp_path, step).touch()
    assert checkpoint.latest(tmp_path).name == "step_1000000.pt"


def test_a_run_resumed_from_further_back_replaces_the_abandoned_steps(tmp_path):
    for step in (10, 20, 30):
        checkpoint.save(tmp_path, tiny_state(step), keep_last=5)
    checkpoint.save(tmp_path, tiny_state(15), keep_last=5)
    assert names(tmp_path) == ["step_000010.pt", "step_000015.pt"]
    assert checkpoint.latest(tmp_path).name == "step_000015.pt"


def test_resolving_a_resume_argument(tmp_path):
    assert checkpoint.resolve_resume(None, tmp_path) is None
    with pytest.raises(FileNotFoundError, match="start without resume") as error:
        checkpoint.resolve_resume("latest", tmp_path)
    one_line(error)
    first, second = (checkpoint.save(tmp_path, tiny_state(step)) for step in (1, 2))
    assert checkpoint.resolve_resume("latest", tmp_path) == second
    assert checkpoint.resolve_resume(str(first), tmp_path / "other") == first
    assert checkpoint.resolve_resume(str(tmp_path), tmp_path / "other") == second
    assert checkpoint.resolve_resume("step_000001.pt", tmp_path) == first
    with pytest.raises(FileNotFoundError, match=r"step_000009.pt .*step_000001.pt, step_000002.pt") as error:
        checkpoint.resolve_resume("step_000009.pt", tmp_path)
    one_line(error)


# Nothing is lost --------------------------------------------------------------------------------------------

SAVE_IN_A_CHILD = """
import os, resource, sys, torch
from nanorl import checkpoint
folder, how = sys.argv[1:]
state = checkpoint.load(checkpoint.latest(folder))
state["step"] = 2
if how == "full":
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
else:
    os.fsync = lambda handle: os._exit(9)            # a kill when all bytes are written and none is safe
try:
    checkpoint.save(folder, state, keep_last=1)
except OSError as error:
    print(error)
"""


def save_in_a_child(folder, how):
    done = subprocess.run([sys.executable, "-c", SAVE_IN_A_CHILD, str(folder), how],
                          capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(Path(checkpoint.__file__).parents[1])})
    return done.returncode, done.stdout, done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="limits the size of a file by setrlimit")
def test_a_full_disk_leaves_the_previous_checkpoint_whole(tmp_path):
    before = checkpoint.save(tmp_path, tiny_state(1)).read_bytes()
    assert len(before) > 20_000
    code, out, errors = save_in_a_child(tmp_path, "full")
    assert (code, errors) == (0, "")
    assert out.count("\n") == 1
    assert all(part in out for part in ("could not write", "File too large", "free space"))
    assert names(tmp_path) == ["step_000001.pt"]     # no temporary file either: the space is free again
    assert (tmp_path / "step_000001.pt").read_bytes() == before


def test_a_kill_during_a_save_leaves_the_previous_checkpoint_whole(tmp_path):
    before = checkpoint.save(tmp_path, tiny_state(1)).read_bytes()
    code, _, _ = save_in_a_child(tmp_path, "kill")
    assert code == 9
    assert names(tmp_path) == [".step_000002.json.tmp", ".step_000002.pt.tmp", "step_000001.pt"]
    assert checkpoint.latest(tmp_path).read_bytes() == before
    checkpoint.save(tmp_path, tiny_state(3))
    assert names(tmp_path) == ["step_000001.pt", "step_000003.pt"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_no_space_at_the_last_moment(tmp_path, monkeypatch, call):
    checkpoint.save(tmp_path, tiny_state(1))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match=r"step_000002\.\w+: No space left on device; free space") as error:
        checkpoint.save(tmp_path, tiny_state(2), keep_last=1)
    one_line(error)
    assert names(tmp_path) == ["step_000001.pt"]


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "sft").write_text("a file in the way")
    with pytest.raises(OSError, match="could not write .*NANORL_HOME") as error:
        checkpoint.save(tmp_path / "sft", tiny_state())
    one_line(error)


def test_an_interrupt_during_a_save_leaves_no_temporary_file(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, tiny_state())
    assert names(tmp_path) == []


# Damaged and foreign files ----------------------------------------------------------------------------------

def test_truncated_at_any_length_is_one_line_naming_file_remedy_and_previous(tmp_path):
    good = checkpoint.save(tmp_path, tiny_state(1))
    bad = checkpoint.save(tmp_path, tiny_state(2))
    whole = bad.read_bytes()
    for length in (0, 1, 3, 4, 30, 1000, len(whole) // 2, len(whole) - 30, len(whole) - 1):
        bad.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="step_000002.pt is truncated .* resume from") as error:
            checkpoint.load(bad)
        assert str(good) in one_line(error)


def test_random_bytes_never_escape_as_another_error(tmp_path):
    path = tmp_path / "step_000001.pt"
    rng = random.Random(0)
    for start in (b"", b"PK\x03\x04", b"\x80\x02", b"\x80\x02}q\x00", b"\x80\x02c", b"("):
        for _ in range(20):
            path.write_bytes(start + rng.randbytes(rng.randint(0, 60)))
            with pytest.raises(ValueError, match="truncated or damaged|is not a checkpoint") as error:
                checkpoint.load(path)
            assert "no other checkpoint" in one_line(error)


def test_a_file_of_something_else_is_refused(tmp_path):
    for content in ({"weights": torch.zeros(2)}, torch.zeros(2), [1, 2]):
        torch.save(content, tmp_path / "other.pt")
        with pytest.raises(ValueError, match="is not a checkpoint of nanorl") as error:
            checkpoint.load(tmp_path / "other.pt")
        one_line(error)


class Trap:
    """Code that a pickle would run on loading."""

    def __reduce__(self):
        return (os.mkdir, (os.environ["NANORL_TRAP"],))


def test_a_checkpoint_cannot_run_code(tmp_path, monkeypatch):
    monkeypatch.setenv("NANORL_TRAP", str(tmp_path / "sprung"))
    torch.save({**tiny_state(), "metrics": Trap()}, tmp_path / "step_000001.pt")
    with pytest.raises(ValueError, match="damaged"):
        checkpoint.load(tmp_path / "step_000001.pt")
    assert not (tmp_path / "sprung").exists()


def test_an_absent_file_is_one_line(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint at .*step_000001.pt") as error:
        checkpoint.load(tmp_path / "step_000001.pt")
    one_line(error)
