"""Files that are whole or not there, their checksums, and one run a folder."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import threading
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


def test_truncated_at_any_length_the_one_before_is_used(tmp_path):
    checkpoint.save(tmp_path, small_state(1))
    path = checkpoint.save(tmp_path, small_state(2))
    whole, rng = path.read_bytes(), random.Random(0)
    for length in [0, 1, len(whole) - 1, *(rng.randrange(len(whole)) for _ in range(30))]:
        path.write_bytes(whole[:length])
        with pytest.warns(UserWarning, match="step_000002.pt is truncated or damaged .*using step 1 instead"):
            assert checkpoint.to_resume("latest", tmp_path)["step"] == 1
        assert path.stat().st_size == length  # it is left where it is


def test_each_that_is_passed_over_is_told_of_and_the_run_replaces_them(tmp_path):
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, small_state(step), keep_last=5)
    for step in (2, 3):
        checkpoint.checkpoint_path(tmp_path, step).write_bytes(b"no checkpoint")
    with pytest.warns(UserWarning) as told:
        state = checkpoint.to_resume(str(tmp_path), "elsewhere")
    assert [str(each.message).partition(" is truncated")[0][-14:] for each in told] == ["step_000003.pt",
                                                                                      "step_000002.pt"]
    assert all("\n" not in str(each.message) for each in told)
    checkpoint.save(tmp_path, state | {"step": 2}, keep_last=5)
    assert sorted(p.name for p in tmp_path.glob("*.pt")) == ["step_000001.pt", "step_000002.pt"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
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

class FullDisk:
    """A file open for writing on a disk that has `left` bytes free, for all files together."""

    def __init__(self, file, left):
        self.file, self.left = file, left

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def __getattr__(self, name):
        return getattr(self.file, name)

    def write(self, data):
        fits = data[: self.left[0]]
        self.left[0] -= len(fits)
        self.file.write(fits)
        if len(fits) < len(data):
            raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_that_is_full_after_k_bytes(tmp_path, monkeypatch):
    path = checkpoint.save(tmp_path, small_state(1))
    before, beside = path.read_bytes(), storage.manifest_of(path).read_bytes()
    whole, rng = len(before) + len(beside), random.Random(0)
    edges = [0, 1, len(before) - 1, len(before), len(before) + 1, whole - 1]  # the manifest is written last
    for k in edges + [rng.randrange(whole) for _ in range(20)]:
        with monkeypatch.context() as patch:
            left = [k]
            patch.setattr(storage, "open", lambda name, mode, left=left: FullDisk(open(name, mode), left) if
                          mode == "wb" else open(name, mode), raising=False)
            with pytest.raises(OSError, match=r"could not write .*step_000002\.\w+: No space left on device") as error:
                checkpoint.save(tmp_path, small_state(2), keep_last=1)
        assert "\n" not in str(error.value) and str(error.value).count("could not write") == 1
        assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000001.json", "step_000001.pt"]
        assert (path.read_bytes(), storage.manifest_of(path).read_bytes()) == (before, beside)
    checkpoint.save(tmp_path, small_state(2), keep_last=1)
    assert checkpoint.latest(tmp_path).name == "step_000002.pt"


def test_the_end_between_manifest_and_checkpoint_leaves_the_replaced_one_whole(tmp_path, monkeypatch):
    path = checkpoint.save(tmp_path, small_state(5))
    first, replace = path.read_bytes(), os.replace
    other = small_state(5) | {"loss_history": [9.0]}
    for _ in range(3):  # each time, for the manifest on the disk is then that of a file which never came
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            calls = []

            def second_fails(*names, calls=calls):
                calls.append(names)
                if len(calls) == 2:
                    raise KeyboardInterrupt
                replace(*names)

            patch.setattr(os, "replace", second_fails)
            checkpoint.save(tmp_path, other)
        assert path.read_bytes() == first and checkpoint.load(path)["loss_history"] == [2.5, 1.25]
    checkpoint.save(tmp_path, other)
    assert checkpoint.load(path)["loss_history"] == [9.0]


def test_a_manifest_does_not_vouch_for_a_damaged_file_that_is_replaced(tmp_path):
    path = checkpoint.save(tmp_path, small_state(5))
    path.write_bytes(path.read_bytes() + b"x")
    checkpoint.save(tmp_path, small_state(5))
    assert "replaces" not in storage.read_manifest(path) and checkpoint.load(path)["step"] == 5


def test_all_bytes_are_flushed_to_the_disk_before_the_name_is_there(tmp_path, monkeypatch):
    path, flushed, fsync = checkpoint.checkpoint_path(tmp_path, 4), [], os.fsync

    def noted(handle):
        flushed.append((os.fstat(handle).st_size, path.exists()))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    checkpoint.save(tmp_path, small_state(4))
    assert (path.stat().st_size, False) in flushed
    assert (storage.manifest_of(path).stat().st_size, False) in flushed


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
    for _ in range(8):
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


def test_the_lock_is_let_go_from_any_thread_and_where_it_cannot_be_signed(tmp_path, monkeypatch):
    held = storage.lock(tmp_path)
    held.__enter__()
    thread = threading.Thread(target=held.__exit__, args=(None, None, None))
    thread.start()
    thread.join()
    assert taken_elsewhere(tmp_path)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(OSError, match="could not write .*: No space left on device; free space") as _error:
            with storage.lock(tmp_path):
                pass
        assert taken_elsewhere(tmp_path)  # while the error, which knows the lock, is still at hand


def taken_elsewhere(folder) -> bool:
    """Whether another process can take the lock."""
    words = [sys.executable, "-c", HOLD.replace("60", "0"), str(folder)]
    return subprocess.run(words, env=ENV, capture_output=True, text=True).stdout == "held\n"


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
