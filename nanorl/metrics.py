"""What a training run reports: `metrics.jsonl`, a progress bar, a line now and then, an optional tracker.

A record is a flat dict of one step, `{"step": 12, "loss": 1.7, "time/update": 0.3}`. Fields that depend on
the clock start with "time/", so that two runs can be compared without them. Only rank 0 reports.
"""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nanorl import distributed

FILE = "metrics.jsonl"
SAMPLES = "samples.jsonl"
SECONDS_BETWEEN_LINES = 10.0


class Metrics:
    """The reporter of one stage, used as a context: `with Metrics(...) as metrics: metrics.log(record)`.

    folder       where `metrics.jsonl` is written
    stage        the label of the bar and of the printed lines
    total        the step at which the stage ends
    resume_step  the step that training goes on from: records after it are dropped from the file, those up to
                 it are kept. 0 starts a new file and puts an old one aside.
    tracker      "none", "wandb" or "tensorboard"; the last two are optional packages
    config       the stage's settings, passed to the tracker
    """

    def __init__(self, folder: str | Path, stage: str, total: int, resume_step: int = 0,
                 tracker: str = "none", config: dict | None = None) -> None:
        self.stage = stage
        self.main = distributed.is_main()
        if not self.main:
            return
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name in (FILE, SAMPLES):
            _truncate(folder / name, resume_step)
        self.folder = folder
        self.tracker = _open_tracker(tracker, folder, stage, config or {})
        self.file = open(folder / FILE, "a", encoding="utf-8")
        self.bar = tqdm(total=total, initial=resume_step, desc=stage, unit="step", mininterval=1.0)
        self.printed = time.monotonic()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def log(self, record: dict) -> None:
        """Report one record. It must hold "step"; NaN and infinity are written as null."""
        if "step" not in record:
            raise ValueError(f"a metrics record of '{self.stage}' has no 'step'; it holds {sorted(record)}")
        if not self.main:
            return
        record = plain(record)
        self.file.write(json.dumps(record, allow_nan=False) + "\n")
        self.file.flush()
        self.bar.update(record["step"] - self.bar.n)
        if self.tracker:
            self.tracker.log({k: v for k, v in record.items() if isinstance(v, (int, float))}, record["step"])
        now = time.monotonic()
        if now - self.printed >= SECONDS_BETWEEN_LINES or record["step"] == self.bar.total:
            self.printed = now
            self.say(f"{self.stage} {one_line(record)}")

    def say(self, text: str) -> None:
        """Print a line without breaking the bar."""
        if self.main:
            tqdm.write(text)

    def keep_samples(self, samples: list[dict]) -> None:
        """Append texts for reading to `samples.jsonl`, one JSON line each; each must hold "step"."""
        if self.main and samples:
            with open(self.folder / SAMPLES, "a", encoding="utf-8") as file:
                file.writelines(json.dumps(plain(sample)) + "\n" for sample in samples)

    def close(self) -> None:
        """Close the file, the bar and the tracker. May be called again."""
        if not self.main:
            return
        self.file.close()
        self.bar.close()
        if self.tracker:
            self.tracker.close()
            self.tracker = None


def read_metrics(folder: str | Path, name: str = FILE) -> list[dict]:
    """The records of `folder/metrics.jsonl` (or `name`), in order. A last line cut short by a kill is skipped."""
    path = Path(folder) / name
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; train this stage first")
    lines = path.read_bytes().splitlines()
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # bad JSON, bad UTF-8, absurd nesting
            record = None
        if isinstance(record, dict):
            records.append(record)
        elif number < len(lines):
            raise ValueError(f"{path}:{number} is not JSON of an object; delete that line")
    return records


def plain(x: Any) -> Any:
    """`x` in JSON's own types: tensors and NumPy scalars become numbers, NaN and infinity become None."""
    if isinstance(x, dict):
        return {str(key): plain(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [plain(value) for value in x]
    if hasattr(x, "tolist"):
        return plain(x.tolist())
    if isinstance(x, float) and not math.isfinite(x):
        return None
    return x


def one_line(record: dict) -> str:
    """The numbers of a record for reading, e.g. "step 12  loss 1.7", timings left out."""
    shown = [(key, value) for key, value in record.items()
             if isinstance(value, (int, float)) and not key.startswith("time/")]
    return "  ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
                     for key, value in shown)


def _truncate(path: Path, step: int) -> None:
    """Drop the records after `step` from the file; where `step` is 0 it is put aside as `previous-...`. Atomic."""
    if step == 0 and path.is_file():
        os.replace(path, path.with_name(f"previous-{path.name}"))
    elif path.is_file():
        kept = [record for record in read_metrics(path.parent, path.name) if record["step"] <= step]
        draft = path.with_suffix(".tmp")
        draft.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
        os.replace(draft, path)


class _Wandb:
    def __init__(self, folder: Path, stage: str, config: dict) -> None:
        import wandb
        name = f"{folder.parent.name}/{stage}"
        self.run = wandb.init(project="nanorl", name=name, dir=str(folder), config=config)

    def log(self, numbers: dict, step: int) -> None:
        self.run.log(numbers, step=step)

    def close(self) -> None:
        self.run.finish()


class _TensorBoard:
    def __init__(self, folder: Path, stage: str, config: dict) -> None:
        from torch.utils.tensorboard import SummaryWriter
        self.writer = SummaryWriter(str(folder / "tensorboard"))
        self.writer.add_text("config", json.dumps(plain(config)))

    def log(self, numbers: dict, step: int) -> None:
        for key, value in numbers.items():
            self.writer.add_scalar(key, value, step)

    def close(self) -> None:
        self.writer.close()


def _open_tracker(name: str, folder: Path, stage: str, config: dict) -> _Wandb | _TensorBoard | None:
    """The tracker called `name`, None for "none"; ValueError where its package is not installed."""
    kinds = {"wandb": _Wandb, "tensorboard": _TensorBoard}
    if name == "none":
        return None
    if name not in kinds:
        raise ValueError(f"unknown tracker '{name}'; choose none, {' or '.join(kinds)}")
    try:
        return kinds[name](folder, stage, config)
    except ImportError:
        raise ValueError(f"tracker '{name}' needs a package: pip install {name}") from None
