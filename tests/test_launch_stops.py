"""A launch of several processes that is asked to stop, in whichever way, saves, leaves and says how to go on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import stress
from tiny_run import new_home

from nanorl import checkpoint, paths


def workers_of(pid: int) -> list[int]:
    """The two processes that `launch` started from process `pid`; where there is no /proc the test is skipped."""
    if not Path("/proc/self/stat").is_file():
        pytest.skip("finds the children of a process in /proc")
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent, words = (path / "stat").read_text().rpartition(")")[2].split()[1], (path / "cmdline").read_bytes()
        except OSError:  # it has ended
            continue
        if int(parent) == pid and b"spawn_main" in words:
            found.append(int(path.name))
    assert len(found) == 2
    return found


@pytest.mark.parametrize(("whom", "number"), [
    ("launcher", signal.SIGTERM), ("launcher", signal.SIGINT),  # kill; an interrupted kernel
    ("group", signal.SIGINT), ("group", signal.SIGTERM),  # Ctrl-C in a terminal; timeout, and many a batch system
    ("worker", signal.SIGTERM),
])
def test_a_launcher_passes_on_what_it_is_asked(tmp_path, monkeypatch, whom, number):
    new_home(tmp_path, monkeypatch)
    words = [word for word in stress.command("sft", resume=False) if not word.startswith(("--steps", "--save-every"))]
    environment = os.environ | {"PYTHONPATH": str(Path(stress.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    metrics = paths.stage_dir("tiny", "sft") / "metrics.jsonl"
    before = metrics.stat().st_mtime_ns
    child = subprocess.Popen([*words, "--steps=100000", "--nproc=2"], stderr=subprocess.PIPE, text=True,
                             stdout=subprocess.DEVNULL, env=environment, start_new_session=True)
    try:
        while metrics.stat().st_mtime_ns == before or not metrics.stat().st_size:
            time.sleep(0.05)
            assert child.poll() is None
        if whom == "group":
            os.killpg(child.pid, number)
        else:
            os.kill(child.pid if whom == "launcher" else workers_of(child.pid)[1], number)
        errors = child.communicate(timeout=60)[1]
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
    assert child.returncode == 128 + number
    state = checkpoint.load(checkpoint.latest(metrics.parent))
    assert not state["finished"]
    assert f"sft stopped after step {state['step']} of 100000" in errors and "Traceback" not in errors


FOREVER = """
import sys
sys.path.insert(0, sys.argv[1])
import workers
from nanorl.launch import launch
for record in launch(workers.deaf, workers.CourseConfig(), nproc=2):
    print(record["step"], flush=True)
"""


def test_asked_twice_it_ends_processes_that_do_not_listen():
    here = str(Path(__file__).parent)
    child = subprocess.Popen([sys.executable, "-c", FOREVER, here], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True)
    try:
        assert child.stdout.readline() == "1\n"
        workers_before = workers_of(child.pid)
        child.send_signal(signal.SIGINT)
        time.sleep(1.5)
        assert child.poll() is None  # the processes have not stopped
        child.send_signal(signal.SIGINT)
        errors = child.communicate(timeout=20)[1]
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers_before)
