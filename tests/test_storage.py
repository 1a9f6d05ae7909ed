"""Files that are whole or not there, their checksums, and one run a folder."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from test_checkpoint import tiny_state

from nanorl import checkpoint, storage

ENV = {**os.environ, "PYTHONPATH": str(Path(storage.__file__).parents[1])}


def small_state(step):
    return tiny_state(step)


# ---- checksums -----------------------------------------------------------------------------------------

def test_a_manifest_says_what_its_checkpoint_is(tmp_path):
    path = checkpoint.save(tmp_path, small_state(7))
    found = json.loads((tmp_path / "step_000007.json").read_text())
    assert found["step"] == 7 and found["bytes"] == path.stat().st_size and len(found["sha256"]) == 64
    assert {"stage", "finished", "torch"} <= set(found)


def test_a_byte_changed_anywhere_is_noticed_and_the_one_before_is_used(tmp_path):
    checkpoint.save(tmp_path, small_state(1))
    path = checkpoint.save(tmp_path, small_state(2))
    whole, rng = path.read_bytes(), random.Random(0)
    for _ in range(60):
        at = rng.randrange(len(whole))
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << rng.randrange(8))]) + whole[at + 1 :])
        with pytest.raises(ValueError, match="truncated or damaged .*its SHA-256 is"):
            checkpoint.load(path)
        with pytest.warns(UserWarning, match="using step 1 instead"):
            assert checkpoint.to_resume("latest", tmp_path)["step"] == 1
    with pytest.raises(ValueError, match="truncated or damaged"):  # asked for by name: no other will do
        checkpoint.to_resume(str(path), tmp_path)
    path.write_bytes(whole)
    assert checkpoint.to_resume("latest", tmp_path)["step"] == 2


def test_where_all_are_damaged_it_says_so(tmp_path):
    for step in (1, 2):
        checkpoint.save(tmp_path, small_state(step)).write_bytes(b"no checkpoint")
    with pytest.raises(ValueError, match="every checkpoint in .* is damaged"):
        checkpoint.to_resume("latest", tmp_path)


@pytest.mark.parametrize("manifest", [None, "", "{", "[]", "{}", '{"sha256": 7}'])
def test_a_checkpoint_without_a_manifest_of_ours_loads(tmp_path, manifest):
    path = checkpoint.save(tmp_path, small_state(3))
    beside = storage.manifest_of(path)
    beside.unlink() if manifest is None else beside.write_text(manifest)
    assert checkpoint.load(path)["step"] == 3


# ---- a save that does not come to its end ----------------------------------------------------------------

@pytest.mark.parametrize("k", [0, 1, 100, 5_000, 20_000, 40_000])
def test_a_disk_that_is_full_after_k_bytes(tmp_path, monkeypatch, k):
    before = checkpoint.save(tmp_path, small_state(1)).read_bytes()
    assert len(before) > 40_000
    written = [0]

    def write(self, data):
        written[0] += len(data)
        if written[0] > k:
            raise OSError(errno.ENOSPC, "No space left on device")
        return len(data)

    monkeypatch.setattr(storage.Hashing, "write", write)
    with pytest.raises(OSError, match="could not write .*step_000002.pt: No space left on device; free space"):
        checkpoint.save(tmp_path, small_state(2), keep_last=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000001.json", "step_000001.pt"]
    assert (tmp_path / "step_000001.pt").read_bytes() == before


def test_the_end_between_manifest_and_checkpoint_leaves_the_replaced_one_whole(tmp_path, monkeypatch):
    path = checkpoint.save(tmp_path, small_state(5))
    replace, calls = os.replace, []

    def second_fails(*names):
        calls.append(names)
        if len(calls) == 2:
            raise KeyboardInterrupt
        replace(*names)

    monkeypatch.setattr(os, "replace", second_fails)
    other = small_state(5)
    other["loss_history"] = [9.0]
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, other)
    monkeypatch.undo()
    assert checkpoint.load(path)["loss_history"] != [9.0]
    checkpoint.save(tmp_path, other)
    assert checkpoint.load(path)["loss_history"] == [9.0]


SAVE_FOR_EVER = """
import sys, torch
from nanorl import checkpoint
folder = sys.argv[1]
state = checkpoint.load(checkpoint.latest(folder))
state["model_state_dict"]["more"] = torch.randn(250_000)
while True:
    state["step"] += 1
    checkpoint.save(folder, state, keep_last=3)
    print(state["step"], flush=True)
"""


def test_a_kill_at_any_moment_leaves_every_checkpoint_whole(tmp_path):
    checkpoint.save(tmp_path, small_state(1))
    rng = random.Random(0)
    for _ in range(6):
        child = subprocess.Popen([sys.executable, "-c", SAVE_FOR_EVER, str(tmp_path)], env=ENV, stdout=subprocess.PIPE)
        child.stdout.readline()  # it saves now
        time.sleep(rng.random() * 0.3)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            steps = [checkpoint.load(path)["step"] for path in checkpoint.list_checkpoints(tmp_path)]
        assert steps and steps == sorted(steps)
    state = checkpoint.load(checkpoint.latest(tmp_path))
    checkpoint.save(tmp_path, state | {"step": state["step"] + 1}, keep_last=1)
    assert len(list(tmp_path.iterdir())) == 2  # what the kills left is gone


# ---- one run a folder ------------------------------------------------------------------------------------

HOLD = """
import sys, time
from pathlib import Path
from nanorl import storage
with storage.lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_process_is_refused_and_a_dead_one_holds_nothing(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], env=ENV, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "held\n"
    with pytest.raises(ValueError, match=f"another run, process {child.pid}, is using") as error:
        with storage.lock(tmp_path):
            pass
    assert "\n" not in str(error.value)
    child.kill()
    child.wait()
    child.stdout.close()
    with storage.lock(tmp_path):
        pass


def test_a_newer_run_of_the_same_process_takes_over(tmp_path):
    older = storage.lock(tmp_path)
    older.__enter__()
    with storage.lock(tmp_path):
        pass
    older.__exit__(None, None, None)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="could not write"):
        with storage.lock(tmp_path / "file" / "run"):
            pass


def test_what_goes_through_is_hashed(tmp_path):
    with open(tmp_path / "x", "wb") as file:
        hashing = storage.Hashing(file)
        torch.save({"a": torch.arange(5)}, hashing)
    assert hashing.size == (tmp_path / "x").stat().st_size
    assert hashing.hash.hexdigest() == storage._sha256(tmp_path / "x")
