"""Layers of settings, and one-line errors for what a user can get wrong."""

import json
import pickle
from typing import ClassVar

import pytest
import torch
from pydantic import Field, ValidationError

from nanorl import config, paths
from nanorl.config import StageConfig, resolve


class ToyConfig(StageConfig):
    stage: ClassVar[str] = "toy"
    steps: int = Field(10, ge=1, description="training steps")
    lr: float = Field(0.1, gt=0, description="learning rate")
    note: str | None = Field("default", description="a field that may be None")


@pytest.fixture(autouse=True)
def presets(monkeypatch, tmp_path):
    """A folder of presets of the test's own; `write(preset, name, text or dict)` adds a file."""
    def write(preset, name, content):
        path = tmp_path / preset / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))

    monkeypatch.delenv("NANORL_PRESET", raising=False)
    monkeypatch.setattr(paths, "config_file", lambda preset, name: tmp_path / preset / f"{name}.json")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for preset in ("smoke", "cpu", "gpu"):
        write(preset, "base", {})
    return write


def error_of(*args, **kwargs) -> str:
    """The message of the ValueError that `resolve` raises, which must be one line."""
    with pytest.raises(ValueError) as caught:
        resolve(*args, **kwargs)
    assert not isinstance(caught.value, ValidationError) and "\n" not in str(caught.value)
    return str(caught.value)


def test_each_layer_wins_over_the_one_below(presets):
    presets("cpu", "base", {"seed": 1, "max_number": 7, "keep_last": 3})
    presets("cpu", "toy", {"max_number": 8, "keep_last": 4, "steps": 20, "note": None})
    cfg = resolve(ToyConfig, "cpu", keep_last=5, lr=0.5)
    assert (cfg.preset, cfg.max_steps) == ("cpu", 3)  # a default
    assert (cfg.seed, cfg.max_number, cfg.keep_last) == (1, 8, 5)  # base.json, toy.json, override
    assert (cfg.steps, cfg.lr, cfg.note) == (20, 0.5, None)  # null is None


def test_ellipsis_is_not_given_and_none_is(presets):
    presets("cpu", "toy", {"note": "from the file", "steps": 20})
    assert resolve(ToyConfig, "cpu", note=..., steps=...).note == "from the file"
    assert resolve(ToyConfig, "cpu", note=None).note is None
    assert error_of(ToyConfig, "cpu", steps=None).startswith("config field 'steps' is None: input should be")


def test_auto_preset(monkeypatch):
    assert resolve(ToyConfig).preset == "cpu"
    assert resolve(ToyConfig, None).preset == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve(ToyConfig).preset == "gpu"
    monkeypatch.setenv("NANORL_PRESET", "smoke")
    assert resolve(ToyConfig, "auto").preset == "smoke"
    assert resolve(ToyConfig, "cpu").preset == "cpu"


def test_presets_that_cannot_be_used(monkeypatch):
    assert error_of(ToyConfig, "gpu").startswith("preset 'gpu' needs a CUDA GPU")
    assert error_of(ToyConfig, "cqu").startswith("unknown preset 'cqu'; did you mean 'cpu'?")
    monkeypatch.setenv("NANORL_PRESET", "laptop")
    assert error_of(ToyConfig) == "unknown preset 'laptop'; choose one of auto, cpu, gpu, smoke"


def test_unknown_names_suggest_the_nearest(presets):
    assert error_of(ToyConfig, "cpu", stpes=3) == "unknown config field 'stpes'; did you mean 'steps'?"
    assert "known names: context_length, data," in error_of(ToyConfig, "cpu", zzz=3)
    presets("cpu", "toy", {"stpes": 3})
    assert error_of(ToyConfig, "cpu") == "unknown config field in cpu/toy.json 'stpes'; did you mean 'steps'?"


def test_base_json_holds_common_fields_only(presets):
    presets("cpu", "base", {"steps": 3})
    assert error_of(ToyConfig, "cpu").startswith("unknown config field in cpu/base.json 'steps'")
    presets("cpu", "base", {"preset": "gpu"})
    assert error_of(ToyConfig, "cpu").startswith("unknown config field in cpu/base.json 'preset'")


@pytest.mark.parametrize("content, message", [('{"steps": 3,\n oops}', "toy.json:2 is not JSON"),
                                              ("[1]", "toy.json holds a list; write one JSON object")])
def test_files_that_are_not_settings(presets, content, message):
    presets("cpu", "toy", content)
    assert message in error_of(ToyConfig, "cpu")


@pytest.mark.parametrize("override, message", [
    ({"steps": 0}, "config field 'steps' is 0: input should be greater than or equal to 1"),
    ({"steps": "many"}, "config field 'steps' is 'many': input should be a valid integer, unable to parse"),
    ({"lr": float("nan")}, "config field 'lr' is nan: input should be a finite number"),
    ({"precision": "fp16"}, "config field 'precision' is 'fp16': input should be 'auto', 'fp32' or 'bf16'"),
    ({"seed": -1}, "config field 'seed' is -1: input should be greater than or equal to 0"),
])
def test_values_out_of_bounds(override, message):
    assert error_of(ToyConfig, "cpu", **override).startswith(message)


def test_assignment_is_validated():
    cfg = resolve(ToyConfig, "cpu")
    cfg.steps = 4
    assert cfg.steps == 4
    with pytest.raises(ValidationError):
        cfg.steps = 0


@pytest.mark.parametrize("settings, expected", [
    ({}, "cpu"),
    ({"seed": 2}, "cpu-seed2"),
    ({"data": "openai/gsm8k"}, "cpu-gsm8k"),
    ({"data": "/data/My GSM8K.v2/", "tokenizer": "r50k_base", "seed": 1}, "cpu-my-gsm8k-v2-r50k_base-seed1"),
    ({"run": "mine", "seed": 2}, "mine"),
])
def test_run_name_and_folder(monkeypatch, tmp_path, settings, expected):
    monkeypatch.setenv("NANORL_HOME", str(tmp_path))
    cfg = resolve(ToyConfig, "cpu", **settings)
    assert cfg.run_name == expected
    assert cfg.folder == tmp_path / expected / "toy"


def test_every_field_explains_itself():
    for name, field in ToyConfig.model_fields.items():
        assert field.description, name


def test_papermill_parameters():
    allowed = ["PRESET", "NPROC", "DATA"]
    config.check_parameters({"PRESET": "cpu"}, allowed)
    for name, near in [("PERSET", "PRESET"), ("nproc", "NPROC")]:
        with pytest.raises(ValueError, match=f"^unknown papermill parameter '{name}'; did you mean '{near}'"):
            config.check_parameters([name], allowed)
    with pytest.raises(ValueError, match="'XYZ'; known names: DATA, NPROC, PRESET$"):
        config.check_parameters(["XYZ"], allowed)


def test_fields_are_read_from_objects_and_dicts():
    cfg = resolve(ToyConfig, "cpu", steps=4)
    assert config.field_of(cfg, "steps") == config.field_of(cfg.model_dump(), "steps") == 4


def test_settings_travel_to_other_processes():
    cfg = resolve(ToyConfig, "cpu", steps=4)
    assert pickle.loads(pickle.dumps(cfg)) == cfg
    assert ToyConfig(**json.loads(cfg.model_dump_json())) == cfg
