"""Starting: one function on two real gloo processes, the same training on one and on two, whatever is missing."""

import os
import shutil

import pytest
import torch
import workers
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.multiprocessing import active_children
from workers import TINY, CourseConfig, course

from nanorl import checkpoint, config, launch, paths
from nanorl.data.prepare import PrepareConfig, prepare
from nanorl.metrics import read_metrics
from nanorl.train import pretrain

STEPS = 5


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANORL_HOME", str(tmp_path_factory.mktemp("home")))
        patch.delenv("WORLD_SIZE", raising=False)
        yield


@pytest.fixture(scope="module")
def one_and_two(home):
    """The records of the whole course on one process, and on two with the same data and the same global batch."""
    for _ in prepare(PrepareConfig(run="one", preset="smoke", documents=200, conversations=60, **TINY)):
        pass
    shutil.copytree(paths.run_dir("one"), paths.run_dir("two"))
    one = list(launch.launch(course, CourseConfig(run="one", preset="smoke")))
    two = list(launch.launch(course, CourseConfig(run="two", preset="smoke"), nproc=2))
    return one, two


# Two processes are one --------------------------------------------------------------------------------------

@pytest.mark.parametrize("stage", launch.STAGES)
def test_two_processes_train_what_one_does(one_and_two, stage):
    one, two = (checkpoint.load(checkpoint.latest(paths.stage_dir(run, stage))) for run in ("one", "two"))
    assert one["step"] == two["step"] == STEPS and one["finished"] and two["finished"]
    assert one["position"] == two["position"] and one["tokens"] == two["tokens"]
    for name, weight in one["model_state_dict"].items():
        torch.testing.assert_close(two["model_state_dict"][name], weight, atol=1e-5, rtol=0, msg=name)
    if stage != "pretrain":  # and something was trained
        before = checkpoint.load(checkpoint.latest(paths.stage_dir("one", launch.NEEDS[stage])))["model_state_dict"]
        before |= {f"{where}.{name}": weight for name, weight in before.items() for where in ("backbone", "policy")}
        after = one["model_state_dict"]
        moved = [(weight - before[name]).abs().max() for name, weight in after.items() if name in before]
        assert len(moved) > 5 and max(moved) > 1e-3


@pytest.mark.parametrize("stage", launch.STAGES)
def test_two_processes_report_what_one_does(one_and_two, stage):
    one, two = ([r for r in records if r["stage"] == stage] for records in one_and_two)
    assert [r["step"] for r in one] == [r["step"] for r in two] == list(range(1, STEPS + 1))
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        at_the_reference = {"accuracy"} if a["step"] == 1 else set()  # a log-ratio of 0 has either sign
        for name in a.keys() - {"stage", "weights"} - at_the_reference:
            if not name.startswith("time/"):
                assert b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-5), name  # figures may be quotients
    assert ("dev_loss" in two[-1]) or ("dev_accuracy" in two[-1])  # the look at held-out data is included


@pytest.mark.parametrize("stage", launch.STAGES)
def test_ranks_end_with_the_same_parameters(one_and_two, stage):
    (last,) = [r for r in one_and_two[1] if r["stage"] == stage and r["step"] == STEPS]
    assert len(last["weights"]) == 2 and len(set(last["weights"])) == 1


def test_the_clip_and_the_kl_had_something_to_do(one_and_two):
    last = one_and_two[0][-1]
    assert last["clip_fraction"] > 0 and last["kl"] > 0 and last["grad_norm"] > 0


def test_records_are_those_of_the_metrics_file(one_and_two):
    mine = [r for r in one_and_two[1] if r["stage"] == "grpo"]
    written = read_metrics(paths.stage_dir("two", "grpo"))
    assert [r | {"stage": "grpo"} for r in written] == [{k: v for k, v in r.items() if k != "weights"} for r in mine]


# Failures, endings ------------------------------------------------------------------------------------------

def test_a_failure_names_the_process_and_the_reason(home, capfd):
    records = launch.launch(workers.rank_1_fails, CourseConfig(), nproc=2)
    assert next(records) == {"step": 1}
    with pytest.raises(RuntimeError) as error:
        list(records)
    message = str(error.value)
    assert message.startswith("process 1 failed in workers.py:") and "\n" not in message
    assert message.endswith("(rank_1_fails): KeyError: 'apples'")
    assert 'raise KeyError("apples")' in error.value.__notes__[0]
    assert "Traceback" not in capfd.readouterr().err


def test_closing_early_ends_the_processes(home, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before, threads = set(active_children()), torch.get_num_threads()
    records = launch.launch(workers.endless, CourseConfig(seed=7), nproc=2)
    record = next(records)
    assert len(set(active_children()) - before) == 2
    assert (record["seed"], record["loss"]) == (7, None)  # NaN, as in a metrics file
    if threads == (os.cpu_count() or 1):
        assert record["threads"] == max(1, threads // 2)  # the cores are shared
    assert next(records)["step"] == 2
    records.close()
    assert set(active_children()) == before


def test_a_process_that_says_nothing_is_reported_by_the_launcher(tmp_path):
    killed = ProcessFailure(local_rank=1, pid=1, exitcode=-9, error_file="none")
    error = launch._worker_error(tmp_path, 2, ChildFailedError("x", {1: killed}))
    assert str(error) == "process 1 of 2 ended with exit code -9 and said nothing; was memory short?"


def test_one_process_runs_here_and_raises_as_it_is():
    def local(cfg):
        yield {"step": 1, "pid": os.getpid()}
        raise KeyError("apples")

    records = launch.launch(local, CourseConfig())
    assert next(records) == {"step": 1, "pid": os.getpid()}
    with pytest.raises(KeyError):
        next(records)


def test_what_cannot_be_launched_is_refused(monkeypatch):
    def local(cfg):
        yield {}

    with pytest.raises(ValueError, match="local cannot be imported by other processes; put it in a module"):
        next(launch.launch(local, CourseConfig(), nproc=2))
    with pytest.raises(ValueError, match="nproc is 0; it must be at least 1"):
        next(launch.launch(course, CourseConfig(), nproc=0))
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="torchrun has started 4 processes already; leave nproc 2 out"):
        next(launch.launch(course, CourseConfig(), nproc=2))


# Whatever is missing ----------------------------------------------------------------------------------------

def small(**settings):
    return dict(run="small", device="cpu", precision="fp32", max_steps=1) | settings


def test_ensure_trains_what_is_missing_in_order(home, capsys):
    cfg = launch.ensure("sft", "smoke", steps=2, **small(seed=...))
    assert (cfg.stage, cfg.steps, cfg.run_name) == ("sft", 2, "small")
    made = "made corpus-dev.h5, corpus.h5, instruct-dev.h5, instruct.h5, tokenizer.json in"
    lines = [line for line in capsys.readouterr().out.splitlines() if line.partition(":")[1]]
    assert lines[0].startswith(f"prepare: {made}")
    assert lines[1].startswith("pretrain: trained 2 steps in") and lines[2].startswith("sft: trained 2 steps in")
    assert all(checkpoint.latest(paths.stage_dir("small", s)).name == "step_000002.pt" for s in ("pretrain", "sft"))

    launch.ensure("sft", "smoke", **small())
    assert capsys.readouterr().out.splitlines() == [f"{s}: there already" for s in ("prepare", "pretrain", "sft")]

    with pytest.raises(ValueError, match="pretrain of run 'small' was trained with max_number 20, not 30; choose"):
        launch.ensure("sft", "smoke", **small(max_number=30))


def test_ensure_goes_on_with_a_stage_that_was_cut_short(home, capsys):
    launch.ensure("prepare", "smoke", **small())
    shutil.rmtree(paths.stage_dir("small", "pretrain"), ignore_errors=True)
    cfg = config.resolve(pretrain.PretrainConfig, "smoke", steps=3, save_every=1, **small())
    records = launch.launch(pretrain.train, cfg)
    assert [next(records)["step"] for _ in range(2)] == [1, 2]
    records.close()
    capsys.readouterr()
    launch.ensure("pretrain", "smoke", steps=3, **small())
    assert "pretrain: trained 1 more steps in" in capsys.readouterr().out
    assert [r["step"] for r in read_metrics(cfg.folder)] == [1, 2, 3]


@pytest.mark.parametrize("stage, settings, message", [
    ("stf", {}, "unknown stage 'stf'; did you mean 'sft'"),
    ("sft", {"stpes": 3}, "unknown setting 'stpes'; did you mean 'steps'"),
    ("sft", {"batch_size": 3}, "unknown setting 'batch_size'"),  # prepare has none
    ("sft", {"seed": -1}, "config field 'seed' is -1"),
])
def test_ensure_refuses_what_it_does_not_know(home, stage, settings, message):
    with pytest.raises(ValueError, match=message):
        launch.ensure(stage, "smoke", **settings)


def test_every_trainer_is_a_stage():
    assert list(launch.STAGES) == ["pretrain", "sft", "reward", "dpo", "orpo", "kto", "ppo", "grpo"]
    assert set(launch.NEEDS) == {"prepare", *launch.STAGES}
    for name, (train, cls) in launch.STAGES.items():
        assert cls.stage == name and train.__name__ == "train"
