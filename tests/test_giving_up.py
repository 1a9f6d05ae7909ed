"""A stop in the middle of a rollout, between micro-batches or in a look at held-out data: the work is given up at once,
on every rank, and the run that goes on from there is the run that was never stopped."""

import os
import signal
import time

import pytest
import torch
from test_distributed import run_two
from tiny_run import STAGES, config_of, left_behind, new_home, same, without_times

from nanorl import checkpoint, distributed, generate, stopping
from nanorl.metrics import read_metrics
from nanorl.train import ppo, progress, rl, supervised

PLACES = [  # who asks whether to go on: for a token, a part to score, a micro-batch; for a group of those, or a look
    ("ppo", "check", (generate, rl, ppo)), ("ppo", "check", (progress,)), ("grpo", "check", (generate, rl)),
    ("grpo", "check", (progress,)), ("sft", "together", (progress, supervised)),
    ("kto", "together", (progress, supervised)),
]
CHANGES = {"ppo": dict(micro_prompts=2), "grpo": dict(micro_prompts=2, epochs=2, kl_coef=0.1), "sft": {}, "kto": {}}


class Asking:
    """Stands in for a function that looks whether the run has been asked to stop: at call `at`, it has been."""

    def __init__(self, function, at: int | None = None):
        self.function, self.at, self.calls = function, at, 0

    def __call__(self):
        self.calls += 1
        if self.calls == self.at:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
        return self.function()


def run_through(cfg) -> None:
    """A whole run; where it is stopped, what is left of it too. A stop before the first step leaves nothing."""
    try:
        list(STAGES[cfg.stage][0](cfg))
    except stopping.Stopped as stopped:
        assert stopped.status == 143
        resume = "latest" if "go on with --resume" in str(stopped) else None
        assert resume or str(stopped).endswith("there is nothing to save; start it again")
        list(STAGES[cfg.stage][0](cfg.model_copy(update={"resume": resume})))


@pytest.mark.parametrize(("stage", "name", "modules"), PLACES)
def test_given_up_anywhere_and_resumed_it_is_the_same(tmp_path, monkeypatch, stage, name, modules):
    def left_by_one_asked_at(at: int | None) -> tuple[dict, int]:
        new_home(tmp_path, monkeypatch)
        asking = Asking(getattr(stopping, name), at)
        for module in modules:
            monkeypatch.setattr(module, name, asking)
        run_through(config_of(stage, **CHANGES[stage]))
        return left_behind(stage), asking.calls

    expected, calls = left_by_one_asked_at(None)
    for at in sorted({1, calls - 1, calls, *range(2, calls, calls // 8 + 1)}):
        assert same(left_by_one_asked_at(at)[0], expected), f"stopped at {at} of {calls}"


def cut_short(cfg, step: int, monkeypatch) -> dict:
    """What is saved of an SFT run that is interrupted in its look after `step` steps."""
    held_out = supervised.held_out

    def asked(*args):
        if len(read_metrics(cfg.folder)) == step - 1:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        return held_out(*args)

    with monkeypatch.context() as patch, pytest.raises(stopping.Stopped, match=f"after step {step} of 6") as stopped:
        patch.setattr(supervised, "held_out", asked)
        list(STAGES["sft"][0](cfg))
    assert stopped.value.status == 130
    return checkpoint.load(checkpoint.latest(cfg.folder))


def test_a_step_whose_look_was_cut_short_is_open_and_not_finished(tmp_path, monkeypatch):
    new_home(tmp_path, monkeypatch)
    cfg = config_of("sft")
    state = cut_short(cfg, 6, monkeypatch)
    assert state["step"] == 6 and state["open"] and not state["finished"] and "dev_loss" not in state["metrics"]
    (record,) = STAGES["sft"][0](cfg.model_copy(update={"resume": "latest"}))
    assert record["step"] == 6 and "dev_loss" in record
    assert checkpoint.load(checkpoint.latest(cfg.folder))["finished"]


def test_an_open_step_that_is_closed_twice_is_logged_once(tmp_path, monkeypatch):
    new_home(tmp_path, monkeypatch)
    cfg = config_of("sft")
    cut_short(cfg, 3, monkeypatch)
    again = cfg.model_copy(update={"resume": "latest"})
    records = STAGES["sft"][0](again)
    assert next(records)["step"] == 3
    records.close()  # killed before it saves again
    assert [record["step"] for record in STAGES["sft"][0](again)] == [3, 4, 5, 6]
    assert [record["step"] for record in read_metrics(cfg.folder)] == [1, 2, 3, 4, 5, 6]


def test_nothing_is_cut_short_where_nobody_listens():
    with stopping.together():
        stopping.check()


# ---- two ranks, one of which is asked --------------------------------------------------------------------------

def one_is_asked() -> list[str]:
    """On each of two ranks: a run left alone, and one in which rank 1 is asked while it samples, and then resumed.
    What differs."""
    distributed.setup(torch.device("cpu"))
    try:
        alone, cfg = config_of("grpo", label="alone"), config_of("grpo")
        list(STAGES["grpo"][0](alone))
        if distributed.rank() == 1:
            generate.check = Asking(generate.check, at=25)
        with pytest.raises(stopping.Stopped, match="grpo stopped after step 2 of 4") as stopped:
            list(STAGES["grpo"][0](cfg))
        assert stopped.value.status == 143
        list(STAGES["grpo"][0](cfg.model_copy(update={"resume": "latest"})))
        one, other = (checkpoint.load(checkpoint.latest(each.folder)) for each in (alone, cfg))
        records = [without_times(read_metrics(each.folder)) for each in (alone, cfg)]
        differing = [name for name in one if not same(one[name], other[name])]
        return sorted(set(differing) - {"cfg", "minutes", "metrics"}) + ["records"] * (records[0] != records[1])
    finally:
        distributed.close()


def test_two_ranks_give_up_together(tmp_path, monkeypatch):
    new_home(tmp_path, monkeypatch)
    assert run_two(one_is_asked) == [[], []]
