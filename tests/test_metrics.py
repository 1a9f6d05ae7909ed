"""The metrics file: what is written, what a resumed run keeps, who else is told."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nanorl import metrics as metrics_module
from nanorl.metrics import Metrics, one_line, plain, read_metrics


def log_steps(folder, steps, **kwargs):
    with Metrics(folder, "toy", total=5, **kwargs) as metrics:
        for step in steps:
            metrics.log({"step": step, "loss": 1 / 3})


def test_records_come_back_as_they_went_in(tmp_path):
    record = {"step": 1, "loss": 1 / 3, "share": 0.1 + 0.2, "text": "a\nb é", "time/x": 0.5, "none": None}
    with Metrics(tmp_path / "new" / "folder", "toy", total=2) as metrics:
        metrics.log(record)
        assert read_metrics(tmp_path / "new" / "folder") == [record]  # on disk at once, every digit kept


def test_values_become_plain_json(tmp_path):
    assert plain({"a": torch.tensor(2.0), "b": np.float32(0.5), "c": (torch.tensor([1, 2]), float("inf")),
                  "d": torch.tensor(float("nan")), "e": np.int64(3), "f": True}) == {
        "a": 2.0, "b": 0.5, "c": [[1, 2], None], "d": None, "e": 3, "f": True}
    with Metrics(tmp_path, "toy", total=1) as metrics:
        metrics.log({"step": torch.tensor(1), "loss": float("nan")})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": null}\n'


def test_a_fresh_run_starts_a_new_file(tmp_path):
    log_steps(tmp_path, [0, 1, 2])
    log_steps(tmp_path, [0, 1])
    assert [record["step"] for record in read_metrics(tmp_path)] == [0, 1]


def test_a_resumed_run_leaves_the_file_of_an_unbroken_one(tmp_path):
    log_steps(tmp_path / "whole", [1, 2, 3, 4, 5])
    log_steps(tmp_path / "broken", [1, 2, 3, 4])  # stopped after 4, the checkpoint is of step 2
    with open(tmp_path / "broken" / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "lo')  # cut short
    log_steps(tmp_path / "broken", [3, 4, 5], resume_step=2)
    files = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "broken")]
    assert files[0] == files[1]
    assert sorted(path.name for path in (tmp_path / "broken").iterdir()) == ["metrics.jsonl"]


def test_damaged_and_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="metrics.jsonl is missing; train this stage first"):
        read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnot json\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl:2 is not JSON"):
        read_metrics(tmp_path)


def test_a_record_needs_a_step(tmp_path):
    with Metrics(tmp_path, "toy", total=1) as metrics, pytest.raises(ValueError, match="has no 'step'"):
        metrics.log({"loss": 1.0})


def test_lines_are_for_reading(tmp_path, capsys, monkeypatch):
    assert one_line({"step": 3, "loss": 1.23456, "time/update": 0.5, "sample": "hi"}) == "step 3  loss 1.235"
    log_steps(tmp_path, [1, 2, 3, 4, 5])
    assert capsys.readouterr().out == "toy step 5  loss 0.3333\n"  # quick steps: only the last one is printed
    monkeypatch.setattr(metrics_module, "SECONDS_BETWEEN_LINES", 0.0)
    log_steps(tmp_path, [1, 2])
    assert capsys.readouterr().out.count("\n") == 2


def test_the_bar_shows_the_step(tmp_path):
    with Metrics(tmp_path, "toy", total=5, resume_step=2) as metrics:
        assert metrics.bar.n == 2
        metrics.log({"step": 3})
        metrics.log({"step": 3})
        assert (metrics.bar.n, metrics.bar.total) == (3, 5)
    metrics.close()


def test_wandb_gets_the_numbers(tmp_path, monkeypatch):
    calls = []
    run = SimpleNamespace(log=lambda numbers, step: calls.append((numbers, step)),
                          finish=lambda: calls.append("end"))
    module = SimpleNamespace(init=lambda **kwargs: calls.append((kwargs["name"], kwargs["config"])) or run)
    monkeypatch.setitem(sys.modules, "wandb", module)
    with Metrics(tmp_path / "cpu" / "toy", "toy", total=1, tracker="wandb", config={"lr": 0.1}) as metrics:
        metrics.log({"step": 1, "loss": 0.5, "sample": "hi", "kl": float("nan")})
    assert calls == [("cpu/toy", {"lr": 0.1}), ({"step": 1, "loss": 0.5}, 1), "end"]


def test_tensorboard_gets_the_numbers(tmp_path, monkeypatch):
    calls = []

    class SummaryWriter:
        def __init__(self, folder):
            calls.append(folder)

        def add_text(self, name, text):
            calls.append((name, text))

        def add_scalar(self, name, value, step):
            calls.append((name, value, step))

        def close(self):
            calls.append("end")

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=SummaryWriter))
    with Metrics(tmp_path, "toy", total=1, tracker="tensorboard", config={"lr": 0.1}) as metrics:
        metrics.log({"step": 1, "loss": 0.5})
    assert calls == [str(tmp_path / "tensorboard"), ("config", '{"lr": 0.1}'), ("step", 1, 1),
                     ("loss", 0.5, 1), "end"]


@pytest.mark.parametrize("tracker, message", [("wandb", "tracker 'wandb' needs a package: pip install wandb"),
                                              ("mlflow", "unknown tracker 'mlflow'; choose none, wandb")])
def test_trackers_that_are_not_there(tmp_path, monkeypatch, tracker, message):
    monkeypatch.setitem(sys.modules, "wandb", None)  # makes the import fail
    with pytest.raises(ValueError, match=message):
        Metrics(tmp_path, "toy", total=1, tracker=tracker)
