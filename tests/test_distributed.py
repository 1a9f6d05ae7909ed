"""The same functions on one process, and on two real gloo processes."""

import pytest
import torch
import workers
from torch import nn
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from nanorl import distributed
from nanorl.metrics import read_metrics

CPU = torch.device("cpu")


def run_two(function, *args) -> list:
    """Run a function of `workers` in two processes as torchrun would; the results in rank order."""
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, run_id="test", rdzv_backend="c10d",
                          rdzv_endpoint="localhost:0", max_restarts=0, monitor_interval=0.1,
                          start_method="spawn")
    results = elastic_launch(config, function)(*args)
    return [results[rank] for rank in range(2)]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    return *run_two(workers.group_report, str(folder)), folder


def test_two_processes_know_their_places(two):
    assert [(r["device"], r["rank"], r["world"], r["main"]) for r in two[:2]] == [("cpu", 0, 2, True),
                                                                                ("cpu", 1, 2, False)]


def test_two_processes_exchange(two):
    for report in two[:2]:
        assert report["int"] == 2**54 + 1
        assert report["float"] == pytest.approx(1.2, abs=1e-12)
        assert report["mean"] == 1.5
        assert report["named"] == {"both": 2.0, "one": 3.0}  # one of them rank 1's alone
        assert report["tensor"] == [[3.0, 9.0], [6.0, 12.0]] and report["detached"]
        assert report["gathered"] == [{"rank": 0}, {"rank": 1}, {"rank": 1}]
        assert report["broadcast"] == "from 0"
    assert [report["shard"] for report in two[:2]] == [[0, 2, 4], [1, 3]]


def test_two_processes_train_one_model(two):
    for rank, report in enumerate(two[:2]):
        assert report["weight"] == 5.0  # rank 0's
        assert report["alone"] == 1.0 + rank  # d(w x)/dw = x, this rank's own
        assert report["together"] == 1.5  # the average of 1 and 2
        assert report["unwrapped"]


def test_only_rank_0_writes_metrics(two):
    assert read_metrics(two[2]) == [{"step": 1, "rank": 0}]


def test_one_process_is_a_no_op(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert distributed.setup(CPU) == CPU
    assert (distributed.rank(), distributed.world_size(), distributed.is_main()) == (0, 1, True)
    distributed.barrier()
    assert distributed.sum_over_ranks(3) == 3 and isinstance(distributed.sum_over_ranks(3), int)
    assert distributed.mean_over_ranks(0.5) == 0.5
    x = torch.ones(2, requires_grad=True)
    assert torch.equal(distributed.sum_over_ranks(x), x) and not distributed.sum_over_ranks(x).requires_grad
    assert distributed.gather_objects(["a"]) == ["a"]
    assert distributed.broadcast_object("a") == "a"
    assert distributed.shard("abc") == "abc"
    distributed.close()


def test_a_world_of_one_needs_no_group(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert distributed.setup(CPU) == CPU
    assert distributed.world_size() == 1


def test_impossible_groups_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="'mps' runs one process only; use --nproc 1"):
        distributed.setup(torch.device("mps"))
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="process 2 of this machine has no GPU of its own.*use --nproc 1"):
        distributed.setup(torch.device("cuda"))


def test_one_process_wraps_nothing():
    model = nn.Linear(2, 2)
    assert distributed.wrap(model, CPU) is model and distributed.unwrap(model) is model
    with distributed.no_sync(model):
        model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None


def test_unwrap_strips_compile():
    model = nn.Linear(2, 2)
    assert distributed.unwrap(torch.compile(model)) is model
