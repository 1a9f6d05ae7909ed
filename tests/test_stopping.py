"""Leaving when asked: what is heard, when it ends at once, what a stopped run leaves; killed and resumed, the same."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import stress
import torch
from test_distributed import run_two
from tiny_run import left_behind, new_home, same

from nanorl import checkpoint, distributed, paths, stopping

HERE = Path(__file__).parent
ENV = {**os.environ, "PYTHONPATH": str(HERE.parent)}


def test_the_first_signal_is_noted_and_handlers_are_put_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with stopping.listening() as stop:
        assert not stop.due()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        assert stop.due() and stop.due()
        with pytest.raises(stopping.Stopped, match="saved") as left:
            stop.leave("saved")
        assert left.value.status == 143 and isinstance(left.value, KeyboardInterrupt)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_asked_again_it_ends_at_once(monkeypatch):
    monkeypatch.setattr(stopping, "SAME_WISH", 0.0)
    with pytest.raises(KeyboardInterrupt) as left:
        with stopping.listening():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
    assert not isinstance(left.value, stopping.Stopped)


def test_what_arrives_twice_within_a_second_is_one_wish():
    with stopping.listening() as stop:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        assert stop.due()


def test_the_inner_listener_hears():
    with stopping.listening() as outer, stopping.listening() as inner:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        assert inner.due() and not outer.due()


def test_another_thread_changes_nothing():
    found = []

    def listen():
        with stopping.listening() as stop:
            found.append((signal.getsignal(signal.SIGTERM), stop.due()))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert found == [(before, False)]


def test_a_signal_while_the_ranks_confer_is_not_forgotten(monkeypatch):
    def asked_meanwhile(items):
        found = list(items)
        if not found[0]:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
        return found

    monkeypatch.setattr(distributed, "gather_objects", asked_meanwhile)
    with stopping.listening() as stop:
        assert not stop.due()  # the answer that every rank has, given before the signal
        assert stop.due()
        with pytest.raises(stopping.Stopped) as left:
            stop.leave("saved")
    assert left.value.status == 143


def rank_1_is_asked(both: bool) -> tuple:
    """In step 3 rank 1 is sent SIGTERM, and rank 0 SIGINT, or SIGTERM once it is leaving. How this rank left."""
    distributed.setup(torch.device("cpu"))
    rank = distributed.rank()
    try:
        with stopping.listening() as stop:
            for step in range(1, 6):
                if step == 3 and (rank == 1 or both):
                    os.kill(os.getpid(), signal.SIGTERM if rank == 1 else signal.SIGINT)
                if stop.due():
                    if rank == 0 and not both:
                        os.kill(os.getpid(), signal.SIGTERM)  # a launcher tells one after the other
                    distributed.barrier()
                    stop.leave(f"saved step {step}")
    except stopping.Stopped as stopped:
        return str(stopped), stopped.status
    finally:
        distributed.close()
    return "never asked", 0


@pytest.mark.parametrize("both", [False, True])
def test_two_ranks_leave_together(both):
    assert run_two(rank_1_is_asked, both) == [("saved step 3", 143)] * 2


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_asked_saves_leaves_and_says_how_to_go_on(tmp_path, monkeypatch, number, status):
    home = new_home(tmp_path, monkeypatch)
    words = [word for word in stress.command("grpo", resume=False) if not word.startswith(("--steps", "--save-every"))]
    child = subprocess.Popen([*words, "--steps=100000"], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
                             env=ENV | {"NANORL_HOME": str(home)})
    metrics = paths.stage_dir("tiny", "grpo") / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.05)
        assert child.poll() is None
    child.send_signal(number)
    asked = time.monotonic()
    errors = child.communicate(timeout=30)[1]
    assert child.returncode == status and time.monotonic() - asked < 10
    state = checkpoint.load(checkpoint.latest(metrics.parent))
    assert not state["finished"] and f"grpo stopped after step {state['step']} of 100000" in errors
    assert "go on with --resume" in errors and "Traceback" not in errors


def test_killed_stopped_and_resumed_a_run_ends_like_one_that_was_left_alone():
    """The short form of `python tests/stress.py`, which tries every trainer for longer."""
    words = [sys.executable, str(HERE / "stress.py"), "--kills", "4", "--terms", "3", "--stages", "ppo"]
    done = subprocess.run(words, capture_output=True, text=True, env=ENV | {"OMP_NUM_THREADS": "1"}, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "4 kills and 3 stops" in done.stdout and "the same to the last bit" in done.stdout


def test_a_difference_would_be_seen(tmp_path, monkeypatch):
    new_home(tmp_path, monkeypatch)
    found = left_behind("sft")
    other = left_behind("sft")
    assert same(found, other)
    other["state"]["model_state_dict"]["norm.weight"][0] += 1e-7
    assert not same(found, other)
