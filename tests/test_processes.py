"""A run spread over processes in every way: moved from one number of ranks to another and back, ended by the death of a
rank and restarted by torchrun, on two machines; what ranks share, and what each has of its own."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import workers
from test_checkpoint import one_line
from test_distributed import run_two
from tiny_run import COMMON, REINFORCED, SIZES, STAGES, config_of, new_home, same, without_times
from torch.distributed import TCPStore

from nanorl import checkpoint
from nanorl.metrics import read_metrics

HERE = Path(__file__).parent
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="loopback interface and addresses as Linux has them")
SUPERVISED = [stage for stage in STAGES if stage not in REINFORCED]
FIRST = {stage: 1 if stage in REINFORCED else 2 for stage in STAGES}  # the step up to which one rank goes,
SECOND = {stage: 3 if stage in REINFORCED else 4 for stage in STAGES}  # and then two; one goes on to the end


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WORLD_SIZE", raising=False)
        patch.setenv("OMP_NUM_THREADS", "1")  # as torchrun has it for several processes
        yield new_home(tmp_path_factory.mktemp("processes"), patch)


@pytest.fixture(scope="module")
def first_legs(home):
    return {stage: workers.leg(stage, step, label=f"{stage}-moved") for stage, step in FIRST.items()}


@pytest.fixture(scope="module")
def two_ranks(first_legs):
    """What each of two ranks says: the second legs of all stages, and more."""
    return run_two(workers.on_two_ranks, SECOND)


@pytest.fixture(scope="module")
def alone_and_moved(first_legs, two_ranks):
    """Each stage on one rank, never stopped; and its legs on one rank, on two, and on one again."""
    alone = {stage: workers.leg(stage, label=f"{stage}-alone") for stage in STAGES}
    last = {stage: workers.leg(stage, resume="latest", label=f"{stage}-moved") for stage in STAGES}
    return alone, {stage: [first_legs[stage], two_ranks[0]["legs"][stage], last[stage]] for stage in STAGES}


# Another number of ranks ------------------------------------------------------------------------------------

@pytest.mark.parametrize("stage", STAGES)
def test_moved_from_one_rank_to_two_and_back_it_reads_the_same_data_in_the_same_order(alone_and_moved, stage):
    """The samples of PPO and GRPO are others, since each rank has a generator of its own; the prompts are the same."""
    alone, legs = (part[stage] for part in alone_and_moved)
    assert [len(leg["rows"]) for leg in legs] == [FIRST[stage], SECOND[stage] - FIRST[stage], 2 - (stage in REINFORCED)]
    assert [rows for leg in legs for rows in leg["rows"]] == alone["rows"]
    assert len({str(rows) for rows in alone["rows"]}) == len(alone["rows"])  # no batch is another again
    assert legs[-1]["position"] == alone["position"] and [leg["finished"] for leg in legs] == [False, False, True]
    steps = [record["step"] for leg in legs for record in leg["records"]]
    assert steps == [record["step"] for record in read_metrics(config_of(stage, label=f"{stage}-moved").folder)]
    assert steps == list(range(1, config_of(stage).steps + 1))


@pytest.mark.parametrize("stage", SUPERVISED)
def test_moved_from_one_rank_to_two_and_back_it_loses_the_same(alone_and_moved, stage):
    alone, legs = (part[stage] for part in alone_and_moved)
    moved = [record for leg in legs for record in leg["records"]]
    for one, other in zip(alone["records"], moved, strict=True):
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
        assert other["grad_norm"] > workers.SMALL["max_grad_norm"]  # so that it is clipped
        for name in ("loss", "dev_loss", "lr"):
            assert other.get(name) == pytest.approx(one.get(name), abs=1e-5), f"{name} of step {one['step']}"


# Restarts ---------------------------------------------------------------------------------------------------

def torchrun(*words: str) -> subprocess.Popen:
    """torchrun, whose words these are, in the home of the test."""
    env = {**os.environ, "PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE}", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--monitor-interval=0.1", *words], env=env,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end_of(*jobs: subprocess.Popen) -> list[tuple[int, str, str]]:
    """Exit status, output and errors of each; what takes longer than two minutes is ended."""
    try:
        said = [job.communicate(timeout=120) for job in jobs]
        return [(job.returncode, *both) for job, both in zip(jobs, said, strict=True)]
    finally:
        for job in jobs:
            job.terminate()


def sft(label: str) -> list[str]:
    """The command line that trains what `workers.leg` does."""
    settings = COMMON | SIZES["sft"] | workers.SMALL | {"preset": "smoke", "save_every": 1, "label": label}
    return ["--", "sft", *(f"--{name.replace('_', '-')}={value}" for name, value in settings.items())]


def left_in(label: str) -> list:
    """What an SFT run of that name left, as far as two runs can have it in common."""
    folder = config_of("sft", label=label).folder
    state = checkpoint.load(checkpoint.latest(folder))
    kept = {name: value for name, value in state.items() if name not in ("cfg", "minutes", "metrics")}
    return [kept, without_times([state["metrics"]]), without_times(read_metrics(folder))]


@LINUX
def test_a_rank_that_is_killed_is_started_again_and_goes_on(two_ranks):
    """The one that holds the folder's lock is killed; the run goes on from its last checkpoint, to the same end."""
    job = torchrun("--standalone", "--nproc-per-node=2", "--max-restarts=1", str(HERE / "dying_run.py"), "kill",
                   "0:4", *sft("sft-killed"), "--resume=auto")
    ((status, said, errors),) = end_of(job)
    assert status == 0, errors
    assert errors.count("rank 0 is killed in step 4") == 1 and said.count("sft: step 6, see") == 1
    assert same(left_in("sft-killed"), left_in("sft-two"))


def test_auto_is_the_latest_where_there_is_one(home, tmp_path, monkeypatch):
    folder, state = tmp_path / "sft", checkpoint.load(checkpoint.latest(config_of("sft").folder))
    assert checkpoint.to_resume("auto", folder) is None
    for step in (1, 2):
        checkpoint.save(folder, state | {"step": step})
    assert checkpoint.to_resume("auto", folder)["step"] == 2
    checkpoint.latest(folder).write_bytes(b"damaged")
    with pytest.warns(UserWarning, match="using step 1 instead"):
        assert checkpoint.to_resume("auto", folder)["step"] == 1


def test_a_restart_does_not_begin_anew_over_what_is_saved(home, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    folder = config_of("sft").folder
    with pytest.raises(ValueError) as error:
        checkpoint.to_resume(None, folder)
    message = one_line(error)
    assert message.startswith("restarted, ") and str(folder) in message and message.endswith("use --resume auto")
    assert checkpoint.to_resume(None, tmp_path) is None


@LINUX
def test_a_rank_that_fails_ends_the_job_in_its_own_words(home):
    started = time.monotonic()
    job = torchrun("--standalone", "--nproc-per-node=2", str(HERE / "dying_run.py"), "raise", "1:2", *sft("sft-failed"))
    ((status, _, errors),) = end_of(job)
    assert status == 1 and time.monotonic() - started < 30, errors
    assert "[rank1]: KeyError: 'apples'" in errors


# Two machines -----------------------------------------------------------------------------------------------

@LINUX
def test_two_machines_train_what_two_processes_of_one_do(two_ranks):
    """Two agents of torchrun, each with an address and a process of its own, and one home folder. They meet at a store
    of the test, since an agent that holds it may leave before the other is done."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agents = [torchrun("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=two",
                       f"--rdzv-endpoint=127.0.0.1:{store.port}", "--rdzv-conf=is_host=0", f"--local-addr={address}",
                       "-m", "nanorl", *sft("sft-machines")) for address in ("127.0.0.1", "127.0.0.2")]
    ends = end_of(*agents)
    assert [status for status, _, _ in ends] == [0, 0], ends
    assert sum(said.count("sft: step 6, see") for _, said, _ in ends) == 1  # rank 0 alone speaks
    assert same(left_in("sft-machines"), left_in("sft-two"))


# What ranks share, what each has of its own ---------------------------------------------------------------------

def test_ranks_write_different_responses_to_the_same_prompts(two_ranks):
    mine, other = (rank["written"] for rank in two_ranks)
    assert mine == workers.written()  # rank 0 is the one rank of a run on one
    assert len(mine) == len(other) and sum(a == b for a, b in zip(mine, other, strict=True)) < len(mine) / 2


def test_mean_and_variance_are_those_of_all_ranks(two_ranks):
    x = torch.tensor([0, 1, 4, 9, 16, 25, 36, 64, 81, 144.0])  # what counts of them
    for rank in two_ranks:
        assert rank["moments"] == pytest.approx((x.mean().item(), x.var(unbiased=False).item()), rel=1e-6)


def test_ranks_meet_once_a_step_whatever_the_number_of_micro_batches(two_ranks):
    assert [rank["reductions"] for rank in two_ranks] == [1, 1]


def test_two_ranks_judge_as_one_does(two_ranks):
    (one, other), (record, texts) = (rank["eval"] for rank in two_ranks), workers.judged()
    assert one == (record, texts) and other == (None, texts)  # rank 0 alone prints
    assert len({tuple(answers) for answers in texts[1]}) > 6  # the sampled ones, 4 to each of 12 problems
