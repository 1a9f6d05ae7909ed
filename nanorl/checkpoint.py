"""Checkpoints: plain dictionaries, written whole or not at all, found again by stage and step.

A checkpoint is one file `step_000123.pt` in the stage's folder, holding tensors and plain types only, so
that it loads with `weights_only=True` and can run no code. It is written whole or not at all (see `storage`), with a
manifest `step_000123.json` beside it that holds its checksum. Nothing here knows about ranks: the caller saves on
rank 0, from the unwrapped model.

Keys of a state: model_state_dict, optimizer_state_dict, stage, cfg, model_cfg, step, finished, loss_history,
rng, position, metrics, best, tokenizer_hash, parent, minutes.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from nanorl import config, paths, storage
from nanorl.heads import RewardModel
from nanorl.model import ModelConfig, Transformer
from nanorl.tokenizer import Tokenizer

State = dict[str, Any]
REQUIRED = {"model_state_dict": dict, "model_cfg": dict, "stage": str, "cfg": dict, "step": int}
NAME = re.compile(r"step_(\d{6,})\.pt")
WRAPPERS = ("module.", "_orig_mod.")                 # what DDP and torch.compile put before a name
PLAIN = (dict, OrderedDict, list, tuple, str, int, float, bool, type(None))


class Artifact(NamedTuple):
    """What a finished stage leaves: the model (on CPU, in eval mode), its tokenizer, the whole checkpoint."""

    model: Transformer
    tokenizer: Tokenizer
    state: State


# Files of a folder ------------------------------------------------------------------------------------------

def checkpoint_path(folder: str | Path, step: int) -> Path:
    """The file of `step`: folder/step_000123.pt."""
    return Path(folder) / f"step_{step:06d}.pt"


def list_checkpoints(folder: str | Path) -> list[Path]:
    """The checkpoints of a folder by rising step; [] if there is no such folder."""
    folder = Path(folder)
    found = [path for path in folder.iterdir() if NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, key=_step_of)


def latest(folder: str | Path) -> Path | None:
    """The checkpoint with the highest step, or None."""
    return next(reversed(list_checkpoints(folder)), None)


def prune(folder: str | Path, keep_last: int) -> None:
    """Delete all but the `keep_last` checkpoints of the highest steps, and what a killed save left behind."""
    if keep_last < 1:
        raise ValueError(f"keep_last is {keep_last}; keep at least 1 checkpoint")
    for path in list_checkpoints(folder)[:-keep_last]:
        path.unlink(missing_ok=True)
    storage.sweep(Path(folder), "step_*", ".pt")


def resolve_resume(resume: str | None, folder: str | Path) -> Path | None:
    """The checkpoint that a `resume` setting means: None, "latest" (of `folder`), "auto" (that too, or None where
    there is none yet), a file, or another folder.

    A bare name such as step_000100.pt is looked for in `folder` too. FileNotFoundError if there is none.
    """
    if not resume or resume == "auto":
        return latest(folder) if resume else None
    if resume == "latest":
        path, place = latest(folder), Path(folder)
    else:
        place = Path(os.path.expanduser(resume))
        choices = [latest(place) if os.path.isdir(place) else place, Path(folder) / resume]
        path = next((p for p in choices if p is not None and os.path.isfile(p)), None)
    if path is None:
        have = ", ".join(p.name for p in list_checkpoints(folder)) or "none"
        raise FileNotFoundError(f"no checkpoint to resume from at {place} (in {folder}: {have}); "
                                "start without resume, or give the path of a checkpoint")
    return path


def to_resume(resume: str | None, folder: str | Path) -> State | None:
    """The state that a `resume` setting means, or None.

    Where it names a folder and the newest checkpoint there is damaged, the newest that is not is taken, with a
    warning of each that is passed over. ValueError where all are damaged, or a file that is named itself is, and
    where torchrun has restarted a run that would begin anew over what it has saved.
    """
    path = resolve_resume(resume, folder)
    if path is None:
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and latest(folder):
            raise ValueError(f"restarted, this run would begin anew over what is saved in {folder}; use --resume auto")
        return None
    if resume not in ("latest", "auto") and not os.path.isdir(os.path.expanduser(resume)):
        return load(path)
    damaged: list[str] = []
    for each in reversed(list_checkpoints(path.parent)):
        try:
            state = load(each)
        except ValueError as error:
            damaged.append(str(error))
            continue
        for text in damaged:
            warnings.warn(f"{text}; using step {state['step']} instead", stacklevel=2)
        return state
    raise ValueError(f"every checkpoint in {path.parent} is damaged; move them away and start without resume")


# Saving -----------------------------------------------------------------------------------------------------

def save(folder: str | Path, state: State, keep_last: int = 2) -> Path:
    """Write `state` to folder/step_%06d.pt (its own "step"), prune to `keep_last` files, return the path.

    Checkpoints of later steps come from a run that was abandoned (started anew, or resumed from further
    back); they are deleted once this one is safely on disk, so that `latest` means this run. ValueError if a
    key is missing or a value is not a tensor or plain type (use `plain`); OSError in one line if the disk is
    full or the folder cannot be written: then no file has changed.
    """
    missing = [key for key in REQUIRED if key not in state]
    if missing:
        raise ValueError(f"a checkpoint needs the key {missing[0]!r}")
    if keep_last < 1:
        raise ValueError(f"keep_last is {keep_last}; keep at least 1 checkpoint")
    _refuse_objects(state, "state")
    if wrong := _what_is_wrong(state):
        raise ValueError(f"this is no state to save: {wrong}")
    path = checkpoint_path(folder, state["step"])
    about = {"stage": state["stage"], "step": state["step"], "finished": bool(state.get("finished")),
             "torch": torch.__version__}
    storage.write_with_manifest(path, lambda file: torch.save(state, file), about)
    for other in list_checkpoints(folder):
        if _step_of(other) > state["step"]:
            other.unlink(missing_ok=True)
    prune(folder, keep_last)
    return path


def export(state: State, path: str | Path) -> Path:
    """Write the weights alone to a .safetensors file, with stage, step, model config and tokenizer hash as
    text metadata. Names are those of the model; tied weights are written under both names."""
    path = Path(path)
    weights = {name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
               for name, value in _clean_names(state["model_state_dict"]).items()}
    metadata = {"format": "pt", "stage": str(state["stage"]), "step": str(state["step"]),
                "model_cfg": json.dumps(plain(state["model_cfg"])), "tokenizer_hash": str(state.get("tokenizer_hash"))}
    with storage.whole_file(path) as file:
        file.write(safetensors.torch.save(weights, metadata))
    return path


def plain(value: Any) -> Any:
    """`value` in plain Python types, for metadata: tensors and NumPy values become numbers or lists, paths
    become text, pydantic models become dicts; dicts, lists and tuples are followed."""
    if hasattr(value, "model_dump"):
        value = value.model_dump()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):                     # torch and NumPy, scalars and arrays
        return value.tolist()
    return str(value) if isinstance(value, Path) else value


# Loading ----------------------------------------------------------------------------------------------------

def load(path: str | Path, map_location: str | torch.device = "cpu") -> State:
    """Read a checkpoint with `weights_only=True`, its tensors on `map_location`.

    FileNotFoundError if it is not there; ValueError in one line, naming the checkpoint to fall back to, if it
    is truncated, damaged or not a checkpoint of this package.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}; see the files in {path.parent}")
    try:
        storage.check(path)
        state = torch.load(path, map_location=map_location, weights_only=True)
    except (PermissionError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:                       # a damaged file can make the reader raise anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:80]
        raise ValueError(f"checkpoint {path} is truncated or damaged ({reason}); {_fall_back(path)}") from None
    if wrong := _what_is_wrong(state):
        raise ValueError(f"{path} is not a checkpoint of nanorl ({wrong}); {_fall_back(path)}")
    return state


def load_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy `weights` into `model`, or raise ValueError naming the first missing, extra or misshapen one.

    Prefixes of DDP and torch.compile are dropped from the names. On an error the model is unchanged.
    """
    weights, own = _clean_names(weights), model.state_dict()
    for name, value in own.items():
        if name not in weights:
            raise ValueError(f"the checkpoint has no weight {name!r} that the model needs; it was saved by "
                             "another model or another version: train the stage again")
        if weights[name].shape != value.shape:
            raise ValueError(f"weight {name!r} has shape {tuple(weights[name].shape)} in the checkpoint and "
                             f"{tuple(value.shape)} in the model; use the config it was trained with")
    extra = [name for name in weights if name not in own]
    if extra:
        raise ValueError(f"the checkpoint has a weight {extra[0]!r} that the model lacks; it was saved by "
                         "another model or another version: train the stage again")
    model.load_state_dict(weights, strict=True)


def model_from(state: State) -> Transformer | RewardModel:
    """The model that a checkpoint describes, built from its own config and loaded strictly, on CPU, in eval mode.

    A reward model comes with its head; of an actor-critic comes the policy. ValueError as `load_weights`, and where
    the config is none of a model.
    """
    weights = _clean_names(state["model_state_dict"])
    try:
        model: Transformer | RewardModel = Transformer(ModelConfig(**state["model_cfg"]))
    except (TypeError, RuntimeError, ValidationError) as error:  # RuntimeError: sizes beyond any memory
        reason = config.one_line_error(error) if isinstance(error, ValidationError) else str(error).splitlines()[0][:99]
        raise ValueError(f"the {state['stage']} checkpoint describes no model ({reason}); train it again") from None
    if "head.weight" in weights:
        model = RewardModel(model)
    elif "value_head.weight" in weights:
        weights = {name.removeprefix("policy."): x for name, x in weights.items() if name.startswith("policy.")}
    load_weights(model, weights)
    return model.eval()


def check_same_shape(state: State, model_cfg: Mapping[str, Any], tokenizer_hash: str | None = None) -> None:
    """ValueError naming the first field in which a checkpoint to resume differs from this run's model config,
    or saying that it was trained with another tokenizer (not checked when `tokenizer_hash` is None)."""
    if tokenizer_hash is not None and state.get("tokenizer_hash") != tokenizer_hash:
        raise ValueError(f"the {state['stage']} checkpoint of step {state['step']} was trained with another "
                         f"tokenizer ({_short(state.get('tokenizer_hash'))}, this run has "
                         f"{_short(tokenizer_hash)}); use that tokenizer, or start without resume")
    saved, own = plain(state["model_cfg"]), plain(model_cfg)
    for name in [*own, *(name for name in saved if name not in own)]:
        if saved.get(name) != own.get(name):
            raise ValueError(f"the {state['stage']} checkpoint of step {state['step']} has {name} = "
                             f"{saved.get(name)!r}, this run {own.get(name)!r}; set {name} to "
                             f"{saved.get(name)!r}, or start without resume")


# Stages by name ---------------------------------------------------------------------------------------------

def require(stage: str, run: str, preset: str = "auto", **settings: Any) -> Artifact:
    """The finished artifact of `stage` in run `run`, or an error with the exact command that makes it.

    `settings` are the config fields of the run that matter to that command, such as data, tokenizer and seed;
    those that the preset has anyway are left out of it, and `--run` is added where the name does not follow.
    FileNotFoundError: nothing there, not finished, or no tokenizer file. ValueError: a damaged checkpoint, or
    one of another tokenizer than the run's.
    """
    folder = paths.stage_dir(run, stage)
    flags = config.flags(run, preset, settings)
    path = latest(folder)
    if path is None:
        raise FileNotFoundError(f"no {stage} model in {folder}; make it with: {config.command(stage, **flags)}")
    state = load(path)
    if not state.get("finished"):
        raise FileNotFoundError(f"stage {stage} in {folder} stopped at step {state['step']}; finish it with: "
                                f"{config.command(stage, **flags, resume='latest')}")
    if state["cfg"].get("tokenizer") == "r50k_base":
        source, tokenizer = "r50k_base", Tokenizer.r50k_base()
    else:
        source = paths.run_dir(run) / "tokenizer.json"
        if not source.is_file():
            raise FileNotFoundError(f"no tokenizer at {source}; make it with: {config.command('prepare', **flags)}")
        tokenizer = Tokenizer.load(source)
    if tokenizer.hash != state.get("tokenizer_hash"):
        raise ValueError(f"checkpoint {path} was trained with another tokenizer "
                         f"({_short(state.get('tokenizer_hash'))}) than {source} ({_short(tokenizer.hash)}); "
                         f"train it again with: {config.command(stage, **flags)}")
    return Artifact(model_from(state), tokenizer, state)


def parent_of(cfg: config.StageConfig, stage: str) -> Artifact:
    """The finished `stage` that the stage of `cfg` builds on; errors as `require`."""
    settings = {name: getattr(cfg, name) for name in ("data", "tokenizer", "seed")}
    return require(stage, cfg.run_name, cfg.preset, **settings)


# Helpers ----------------------------------------------------------------------------------------------------

def _step_of(path: Path) -> int:
    return int(NAME.fullmatch(path.name).group(1))


def _short(hash_: str | None) -> str:
    return str(hash_)[:8]


def _clean_names(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    clean = {}
    for name, value in weights.items():
        while name.startswith(WRAPPERS):
            name = name.split(".", 1)[1]
        clean[name] = value
    return clean


def _what_is_wrong(state: Any) -> str:
    """Why something that was loaded is no state; "" where it is one."""
    if not isinstance(state, dict):
        return f"it holds a {type(state).__name__}"
    for key, kind in REQUIRED.items():
        if key not in state:
            return f"no {key!r}"
        if not isinstance(state[key], kind):
            return f"its {key!r} is a {type(state[key]).__name__}, not a {kind.__name__}"
    if state["step"] < 0:
        return f"its 'step' is {state['step']}"
    odd = [name for name, x in state["model_state_dict"].items() if not isinstance(name, str) or not torch.is_tensor(x)]
    return f"its weight {odd[0]!r} is a {type(state['model_state_dict'][odd[0]]).__name__}" if odd else ""


def _refuse_objects(value: Any, where: str) -> None:
    """ValueError if anything in `value` would not load again with weights_only=True."""
    if isinstance(value, Tensor):
        return
    if type(value) not in PLAIN:
        raise ValueError(f"{where} is a {type(value).__name__}; a checkpoint holds tensors and plain types "
                         "only: pass it through checkpoint.plain")
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, item in items:
        _refuse_objects(key, f"a key of {where}")
        _refuse_objects(item, f"{where}[{key!r}]")


def _fall_back(path: Path) -> str:
    others = [p for p in list_checkpoints(path.parent) if p != path]
    if not others:
        return "move it away and run the stage again (there is no other checkpoint beside it)"
    earlier = [p for p in others if NAME.fullmatch(path.name) and _step_of(p) < _step_of(path)]
    return f"move it away and resume from the previous one, {(earlier or others)[-1]}"
