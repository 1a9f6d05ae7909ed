"""Starting things: a train function on one process or many, and whatever stages are missing.

Within one machine, `launch` starts the processes itself, through torch's elastic launcher, so that it works from a
notebook. Over several machines, `torchrun -m nanorl <stage>` starts them, and `launch` finds itself in one of them.
"""

import contextlib
import json
import logging
import os
import pkgutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.multiprocessing import active_children

from nanorl import checkpoint, config, distributed, evaluate, metrics, paths, stopping
from nanorl.config import StageConfig
from nanorl.data.prepare import PrepareConfig, prepare
from nanorl.train import grpo, ppo, preference, pretrain, reward, sft

STAGES = {
    "pretrain": (pretrain.train, pretrain.PretrainConfig),
    "sft": (sft.train, sft.SFTConfig),
    "reward": (reward.train, reward.RewardConfig),
    "dpo": (preference.train, preference.DPOConfig),
    "orpo": (preference.train, preference.ORPOConfig),
    "kto": (preference.train, preference.KTOConfig),
    "ppo": (ppo.train, ppo.PPOConfig),
    "grpo": (grpo.train, grpo.GRPOConfig),
}
NEEDS = {  # what each stage starts from
    "prepare": None, "pretrain": "prepare", "sft": "pretrain",
    "reward": "sft", "dpo": "sft", "orpo": "sft", "kto": "sft", "ppo": "sft", "grpo": "sft",
}
POLL = 0.1  # seconds between looks at what the processes have written
RECORDS, STOPPED, NOTICE = "records.jsonl", "stopped.json", "notice.json"  # how they and the launcher speak
FIXED_BY_TRAINING = ("vocab_size", "context_length", "max_number", "max_steps", "seed")

Train = Callable[[Any], Iterable[dict]]


class WorkerError(RuntimeError):
    """A process of `launch` failed; the message says which, where and why, the note holds its traceback."""


# ---- one function on N processes -----------------------------------------------------------------------

def launch(train: Train, cfg: StageConfig, nproc: int = 1) -> Iterator[dict]:
    """Yield the records of `train(cfg)`, run on `nproc` processes of this machine.

    One process is this one. With more, each imports `train` by its name, so it must live in a module and not in a
    notebook; records come from rank 0. SIGTERM and Ctrl-C are passed on to them: they save, leave, and this raises
    their `Stopped`. Closing the generator early asks the same of them, a second Ctrl-C ends them at once. A process
    that `torchrun` started runs `train` itself, as one of torchrun's. Raises what `train` raises, or, with several
    processes, one WorkerError for the first of them that failed.
    """
    world = distributed.started_by_torchrun()
    if nproc < 1:
        raise ValueError(f"nproc is {nproc}; it must be at least 1")
    if nproc > 1 and world > 1:
        raise ValueError(f"torchrun has started {world} processes already; leave nproc {nproc} out")
    if nproc == 1:
        yield from train(cfg)
        return
    names = (_name_of(train), _name_of(type(cfg)), cfg.model_dump())
    with tempfile.TemporaryDirectory(prefix="nanorl-") as name, _quiet_launcher(), stopping.listening() as stop:
        folder = Path(name)
        (folder / RECORDS).touch()
        others, failures, ended = set(active_children()), [], threading.Event()
        threading.Thread(target=_run_agent, args=(nproc, name, names, failures, ended), daemon=True).start()
        try:
            yield from _follow(folder, ended, stop)
        except KeyboardInterrupt:
            _end(ended, others, at_once=True)
            raise
        finally:
            _end(ended, others)
        if (folder / STOPPED).is_file():  # also where a process was asked, and not this one
            raise stopping.Stopped(*json.loads((folder / STOPPED).read_text(encoding="utf-8")))
        if failures and stop.asked:
            stop.leave(f"{cfg.stage} stopped before its first step, there is nothing to save; start it again")
        if failures:
            raise _worker_error(folder, nproc, failures[0])


def _name_of(thing: Callable) -> str:
    """"module:name", by which another process can import it."""
    name = f"{thing.__module__}:{thing.__qualname__}"
    if thing.__module__ == "__main__" or "<" in thing.__qualname__:
        raise ValueError(f"{name} cannot be imported by other processes; put it in a module, or use nproc 1")
    return name


def _run_agent(nproc: int, folder: str, names: tuple, failures: list[Exception], ended: threading.Event) -> None:
    """Start the processes and wait for them, then set `ended`; what goes wrong is added to `failures`."""
    launch_config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=nproc, run_id=f"nanorl-{os.getpid()}", max_restarts=0,
        rdzv_backend="c10d", rdzv_endpoint="localhost:0", local_addr="127.0.0.1", start_method="spawn",
        monitor_interval=POLL, logs_specs=DefaultLogsSpecs(log_dir=folder),
    )
    try:
        elastic_launch(launch_config, _worker)(folder, *names)
    except Exception as error:
        failures.append(error)
    finally:
        ended.set()


def _worker(folder: str, train_name: str, config_name: str, values: dict) -> None:
    """What each process runs. Rank 0 appends its records to a file, and writes down what it says as it leaves; a
    failure is written down before it spreads. At the end torch waits for its launcher to see a process out, for ever
    if a signal ended it there: so signals are ignored by then."""
    rank = int(os.environ["RANK"])
    stopping.heed(Path(folder) / NOTICE)
    try:
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, torch.get_num_threads() // int(os.environ["LOCAL_WORLD_SIZE"])))
        train, config_class = pkgutil.resolve_name(train_name), pkgutil.resolve_name(config_name)
        with open(Path(folder) / RECORDS, "a", encoding="utf-8") as file:
            for record in train(config_class(**values)):
                if rank == 0:
                    file.write(json.dumps(metrics.plain(record)) + "\n")
                    file.flush()
        stopping.ignore()
        distributed.close()
    except stopping.Stopped as stopped:
        stopping.ignore()
        if rank == 0:
            _write(Path(folder) / STOPPED, [str(stopped), stopped.status])
        distributed.close()
    except KeyboardInterrupt:
        sys.exit(130)  # torch would take it for a success
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        reason = " ".join(traceback.format_exception_only(error)[-1].split())
        failure = {"time": time.time(), "traceback": traceback.format_exc(),
                   "what": f"process {rank} failed in {Path(last.filename).name}:{last.lineno} ({last.name}): {reason}"}
        _write(Path(folder) / f"failure-{rank}.json", failure)
        raise


def _write(path: Path, what: Any) -> None:
    """A JSON file, whole or not at all."""
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(what), encoding="utf-8")
    draft.replace(path)


def _follow(folder: Path, ended: threading.Event, stop: stopping.Stop) -> Iterator[dict]:
    """The records of a growing file as they come, until the processes have `ended` and everything is read. A wish to
    stop is passed on to them."""
    with open(folder / RECORDS, encoding="utf-8") as file:
        line, told = "", False
        while True:
            if stop.asked and not told:
                _write(folder / NOTICE, int(stop.asked))
                told = True
            running = not ended.is_set()  # asked before reading, so that the last lines are not missed
            line += file.readline()
            if line.endswith("\n"):
                yield json.loads(line)
                line = ""
            elif not running:
                return
            else:
                ended.wait(POLL)


def _end(ended: threading.Event, others: set, at_once: bool = False) -> None:
    """Ask the processes that are still there, which are not `others`, to leave, or end them, and wait until they have
    `ended`."""
    told = set(others)
    while not ended.is_set():
        for process in set(active_children()) - told:
            process.kill() if at_once else process.terminate()
            told.add(process)
        ended.wait(POLL)


def _worker_error(folder: Path, nproc: int, error: Exception) -> Exception:
    """The first failure that a process wrote down; where none did, what the launcher saw."""
    written = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("failure-*.json")]
    if written:
        first = min(written, key=lambda failure: failure["time"])
        result = WorkerError(first["what"])
        result.add_note(f"In that process, one of {nproc}:\n{first['traceback']}")
        return result
    if isinstance(error, ChildFailedError):
        rank, failure = error.get_first_failure()
        return WorkerError(f"process {rank} of {nproc} ended with exit code {failure.exitcode} and said nothing"
                           + ("; was memory short?" if failure.exitcode == -9 else ""))
    return error


@contextlib.contextmanager
def _quiet_launcher() -> Iterator[None]:
    """Keep torch's launcher from logging what our own error says in a line."""
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict
               if name.startswith(("torch.distributed.elastic", "torch.multiprocessing"))]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


# ---- the stages up to one of them ----------------------------------------------------------------------

def ensure(stage: str, preset: str = "auto", nproc: int = 1, **settings: Any) -> StageConfig:
    """Run what is missing up to `stage`: prepare, pretrain, sft and the stage itself; prints a line about each.

    `settings` may be any that all stages share (see `StageConfig`), and `steps`, which holds for each stage that
    trains; `...` counts as not given. A stage that was cut short goes on from its last checkpoint. Returns the
    settings of `stage`. ValueError for a setting that no stage has, or one that a finished stage was not trained with.
    """
    config.check_names([stage], NEEDS, "stage")
    chain = [stage]
    while NEEDS[chain[0]]:
        chain.insert(0, NEEDS[chain[0]])
    settings = {name: value for name, value in settings.items() if value is not ...}
    shared = config.StageConfig.model_fields
    others = ("preset", "resume", "label")
    config.check_names(settings, [name for name in shared if name not in others] + ["steps"], "setting")
    for name in chain:
        _, cls = STAGES.get(name, (None, PrepareConfig))
        cfg = config.resolve(cls, preset, **{k: v for k, v in settings.items() if k in cls.model_fields})
        done = _ensure_prepared(cfg) if name == "prepare" else _ensure_trained(cfg, nproc, settings)
        print(f"{name}: {done}", flush=True)
    return cfg


def _ensure_prepared(cfg: PrepareConfig) -> str:
    """Prepare what is missing; says what was made."""
    def products() -> set[str]:
        return {path.name for folder in (paths.run_dir(cfg.run_name), paths.data_dir(cfg.run_name))
                for path in folder.glob("*") if path.suffix in (".json", ".h5")}

    before, started = products(), time.perf_counter()
    for _ in prepare(cfg):
        pass
    made = sorted(products() - before)
    return f"made {', '.join(made)} in {_time_since(started)}" if made else "there already"


def _ensure_trained(cfg: StageConfig, nproc: int, settings: dict[str, Any]) -> str:
    """Train a stage, or go on with it, unless it is finished; says what was done."""
    if evaluate.is_finished(cfg, cfg.stage):
        _check_same(cfg, settings)
        return "there already"
    found, started, steps = checkpoint.latest(cfg.folder), time.perf_counter(), 0
    if found is not None:
        cfg = cfg.model_copy(update={"resume": "latest"})
    for _ in launch(STAGES[cfg.stage][0], cfg, nproc):
        steps += 1
    return f"trained {steps} {'more ' if found else ''}steps in {_time_since(started)}"


def _check_same(cfg: StageConfig, settings: dict[str, Any]) -> None:
    """ValueError where a finished stage was trained with another value of what is asked for now."""
    saved = checkpoint.load(checkpoint.latest(cfg.folder))["cfg"]
    for name in FIXED_BY_TRAINING:
        if name in settings and saved.get(name) != settings[name]:
            raise ValueError(f"{cfg.stage} of run '{cfg.run_name}' was trained with {name} {saved.get(name)}, not "
                             f"{settings[name]}; choose another run, or delete {cfg.folder}")


def _time_since(started: float) -> str:
    seconds = time.perf_counter() - started
    return f"{seconds:.0f} s" if seconds < 60 else f"{seconds / 60:.1f} min"
