"""Where files live. Every path of the project comes from here, never from the working directory."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path

LONGEST_NAME = 255  # bytes in the name of a file, on the usual file systems


def home() -> Path:
    """The folder that artifacts land in.

    `NANORL_HOME` if set, else `runs/` beside the package's `pyproject.toml` (a clone or an editable install),
    else `~/nanorl`. A relative `NANORL_HOME` is a ValueError: it would name another folder in JupyterLab than
    in the shell.
    """
    chosen = os.environ.get("NANORL_HOME")
    if chosen:
        folder = Path(os.path.expanduser(chosen))
        if not folder.is_absolute():
            raise ValueError(f"NANORL_HOME is a relative path, '{chosen}'; set it to '{folder.absolute()}'")
        return folder
    project = Path(__file__).resolve().parent.parent
    if (project / "pyproject.toml").is_file():
        return project / "runs"
    return Path.home() / "nanorl"


def run_dir(run: str) -> Path:
    """The folder of one run: a tokenizer, its data and the stages trained on them."""
    parts = Path(run).parts
    usable = run.isprintable() and all(part != ".." and len(part.encode()) <= LONGEST_NAME for part in parts)
    if not parts or Path(run).is_absolute() or not usable:
        raise ValueError(f"run {run!r:.80} is not a folder under {home()}; give a plain name such as 'cpu-seed1'")
    return home() / run


def stage_dir(run: str, stage: str) -> Path:
    """The folder of one stage of a run: its checkpoints and metrics."""
    return run_dir(run) / stage


def data_dir(run: str) -> Path:
    """The folder of a run's tokenized data."""
    return run_dir(run) / "data"


def presets() -> list[str]:
    """The names of the folders of `configs/`."""
    return sorted(path.parent.name for path in config_file("*", "base").parents[1].glob("*/base.json"))


def config_file(preset: str, name: str) -> Path:
    """`configs/<preset>/<name>.json` inside the package; `name` is "base" or a stage. It need not exist."""
    return Path(str(resources.files("nanorl"))) / "configs" / preset / f"{name}.json"
