"""Paths come from NANORL_HOME or the project, never from the working directory."""

from pathlib import Path

import pytest

from nanorl import paths


def test_home_follows_the_variable(monkeypatch, tmp_path):
    monkeypatch.setenv("NANORL_HOME", str(tmp_path))
    assert paths.home() == tmp_path
    assert paths.run_dir("cpu") == tmp_path / "cpu"
    assert paths.stage_dir("cpu", "sft") == tmp_path / "cpu" / "sft"
    assert paths.data_dir("cpu") == tmp_path / "cpu" / "data"


def test_home_expands_the_tilde(monkeypatch):
    monkeypatch.setenv("NANORL_HOME", "~/models")
    assert paths.home() == Path.home() / "models"


def test_relative_home_is_refused(monkeypatch):
    monkeypatch.setenv("NANORL_HOME", "models")
    with pytest.raises(ValueError, match="NANORL_HOME is a relative path, 'models'"):
        paths.home()


@pytest.mark.parametrize("cloned", [True, False])
def test_home_without_the_variable(monkeypatch, tmp_path, cloned):
    monkeypatch.delenv("NANORL_HOME", raising=False)
    monkeypatch.setattr(paths, "__file__", str(tmp_path / "nanorl" / "paths.py"))
    if cloned:
        (tmp_path / "pyproject.toml").touch()
    assert paths.home() == (tmp_path / "runs" if cloned else Path.home() / "nanorl")


def test_home_ignores_the_working_directory(monkeypatch, tmp_path):
    monkeypatch.delenv("NANORL_HOME", raising=False)
    before = paths.home()
    monkeypatch.chdir(tmp_path)
    assert paths.home() == before


@pytest.mark.parametrize("run", ["", "..", "../other", "a/../../b", "/elsewhere/x"])
def test_runs_stay_under_home(monkeypatch, tmp_path, run):
    monkeypatch.setenv("NANORL_HOME", str(tmp_path))
    with pytest.raises(ValueError, match="is not a folder under"):
        paths.run_dir(run)


def test_config_file_is_inside_the_package():
    package = Path(paths.__file__).parent
    assert paths.config_file("cpu", "base") == package / "configs" / "cpu" / "base.json"
