"""Settings: one flat, validated model per stage, filled in layers.

Low to high: field defaults, `configs/<preset>/base.json`, `configs/<preset>/<stage>.json`, and what the
command line or papermill gives. `null` in JSON is None. A name that no field has is an error, with the
nearest name.
"""

import difflib
import json
import os
import re
import shlex
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from nanorl import paths, runtime


class StageConfig(BaseModel):
    """The settings that every stage shares; a stage adds its own fields and names itself in `stage`."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, allow_inf_nan=False,
                              protected_namespaces=())
    stage: ClassVar[str] = ""

    preset: str = Field("cpu", description="folder of configs/ that the settings start from")
    run: str | None = Field(None, description="folder under the home folder; None derives its name")
    label: str | None = Field(None, pattern=r"^[\w-][\w.-]*$", description="name of the stage's folder in the run, to "
                              "keep trials of a stage apart; None: the stage's own")
    data: str = Field("tinyworld", min_length=1, description="word problems: tinyworld (built in), a folder "
                      "with GSM8K-style train.jsonl and test.jsonl, or a hub name such as openai/gsm8k")
    tokenizer: Literal["bpe", "r50k_base"] = Field("bpe", description="bpe (own) or r50k_base (GPT-2's)")
    vocab_size: int = Field(512, ge=265, le=65_536, description="size of the bpe vocabulary, all told")
    context_length: int = Field(256, ge=8, description="longest sequence that the model can read, in tokens")
    max_number: int = Field(40, ge=2, description="largest number in a tinyworld problem")
    max_steps: int = Field(3, ge=1, description="most steps of reasoning in a tinyworld problem")
    seed: int = Field(0, ge=0, lt=2**31, description="seed of data, initial weights and sampling")
    device: str = Field("auto", description="auto, cpu, cuda, cuda:<index> or mps")
    precision: Literal["auto", "fp32", "bf16"] = Field("auto", description="auto: bf16 where it is native")
    resume: str | None = Field(None, min_length=1, description="the checkpoint to go on from: latest, auto (latest, "
                               "where there is one) or a path")
    keep_last: int = Field(2, ge=1, description="checkpoints of this stage to keep")
    tracker: Literal["none", "wandb", "tensorboard"] = Field("none", description="where metrics also go")

    @field_validator("*")
    @classmethod
    def _check_size(cls, value: Any) -> Any:
        if isinstance(value, int) and value >= 2**31:
            raise ValueError(f"input should be less than {2**31}")
        return value

    @property
    def run_name(self) -> str:
        """`run`, or a name made of the settings that tell runs apart, e.g. "cpu-gsm8k-r50k_base-seed1"."""
        if self.run is not None:
            return self.run
        name = self.preset
        if self.data != "tinyworld":
            name += "-" + re.sub(r"[^a-z0-9]+", "-", Path(self.data).resolve().name.lower()).strip("-")
        if self.tokenizer != "bpe":
            name += "-" + self.tokenizer
        if self.seed:
            name += f"-seed{self.seed}"
        return name

    @property
    def folder(self) -> Path:
        """Where this stage keeps its checkpoints and metrics."""
        return paths.stage_dir(self.run_name, self.label or self.stage)


Config = TypeVar("Config", bound=StageConfig)


def resolve(cls: type[Config], preset: str | None = "auto", **overrides: Any) -> Config:
    """The settings of a stage: defaults, then the preset's files, then `overrides`.

    An override that is `...` counts as not given; None is a value like any other. ValueError, in one line,
    for an unknown preset or field, a value out of bounds, and preset "gpu" without a GPU.
    """
    preset = resolve_preset(preset)
    given = {name: value for name, value in overrides.items() if value is not ...}
    check_names(given, cls.model_fields, "config field")
    values = preset_values(cls, preset) | given
    runtime.require_gpu(preset)
    try:
        return cls(preset=preset, **values)
    except ValidationError as error:
        raise ValueError(one_line_error(error)) from None


def resolve_preset(preset: str | None = "auto") -> str:
    """The preset by name; "auto" or None is NANORL_PRESET if set, else "gpu" where CUDA is, else "cpu"."""
    if preset in (None, "auto"):
        preset = os.environ.get("NANORL_PRESET", "auto")
    if preset == "auto":
        preset = "gpu" if torch.cuda.is_available() else "cpu"
    known = paths.presets()
    if preset not in known:
        hint = _suggestion(str(preset), known) or f"; choose one of {', '.join(['auto', *known])}"
        raise ValueError(f"unknown preset {shown(preset)}{hint}")
    return preset


def preset_values(cls: type[StageConfig], preset: str) -> dict[str, Any]:
    """What the preset's two files say for a stage. `base.json` may only hold what all stages share."""
    values = {}
    for name, owner in (("base", StageConfig), (cls.stage, cls)):
        path = paths.config_file(preset, name)
        if path.is_file():
            layer = _read_object(path)
            check_names(layer, set(owner.model_fields) - {"preset"}, f"config field in {preset}/{name}.json")
            values |= layer
    return values


def _read_object(path: Path) -> dict[str, Any]:
    try:
        layer = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno} is not JSON ({error.msg}); correct the file") from None
    if not isinstance(layer, dict):
        raise ValueError(f"{path} holds a {type(layer).__name__}; write one JSON object of fields and values")
    return layer


def check_names(given: Iterable[str], allowed: Iterable[str], what: str) -> None:
    """Raise a ValueError naming the first of `given` that is not in `allowed`, and the nearest that is."""
    allowed = list(allowed)
    for name in given:
        if name not in allowed:
            names = textwrap.shorten(", ".join(sorted(allowed)), 150, placeholder=" ...")
            raise ValueError(f"unknown {what} {shown(name)}{_suggestion(name, allowed) or f'; known names: {names}'}")


def check_parameters(given: Iterable[str], allowed: Iterable[str]) -> None:
    """The same for the parameters of a notebook, which papermill itself accepts under any name."""
    check_names(given, allowed, "papermill parameter")


def _suggestion(name: str, known: Iterable[str]) -> str:
    """"; did you mean 'steps'?" for the nearest known name, whatever its case, or nothing."""
    by_lower = {other.lower(): other for other in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return f"; did you mean '{by_lower[near[0]]}'?" if near else ""


def one_line_error(error: ValidationError) -> str:
    """pydantic's report as one line: the first field at fault, its value and what was wanted."""
    first = error.errors()[0]
    message = first["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if not first["loc"]:  # several fields together
        return message
    field = ".".join(str(part) for part in first["loc"])
    return f"config field '{field}' is {shown(first['input'])}: {message}"


def shown(value: Any) -> str:
    """A value as Python writes it, for a message: in one line, cut at 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def field_of(config: Any, name: str) -> Any:
    """Read a field from a config object or from a dict of one, such as a checkpoint's `cfg`."""
    return config[name] if isinstance(config, dict) else getattr(config, name)


# ---- the command line that means the same ---------------------------------------------------------------

def command_for(stage: str, cfg: StageConfig) -> str:
    """The command line that makes `stage` in the run of `cfg`."""
    settings = {name: getattr(cfg, name) for name in ("data", "tokenizer", "seed")}
    return command(stage, **flags(cfg.run_name, cfg.preset, settings))


def command(stage: str, **flags: Any) -> str:
    """The command line that runs a stage: command("sft", preset="cpu", seed=1) is
    `python -m nanorl sft --preset cpu --seed 1`."""
    words = ["python", "-m", "nanorl", stage]
    for name, value in flags.items():
        words += ["--" + name.replace("_", "-"), str(value)]
    return shlex.join(words)


def flags(run: str, preset: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The fewest flags that mean `run`: preset, what differs from it, and the name where not implied."""
    preset = resolve_preset(preset)
    usual = StageConfig(preset=preset, **preset_values(StageConfig, preset))
    differing = {name: value for name, value in settings.items()
                 if value is not None and value != getattr(usual, name, None)}
    known = {name: value for name, value in differing.items() if hasattr(usual, name)}
    implied = usual.model_copy(update=known).run_name == run
    return {"preset": preset, **differing} | ({} if implied else {"run": run})
