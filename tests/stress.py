"""Kill runs, stop them, resume them, and see that nothing is different in the end.

    python tests/stress.py --kills 50 --terms 20 [--stages sft grpo]

Each trainer runs once undisturbed, at the smallest size. Then it runs again and is ended so many times in all, at
random moments, by SIGKILL or SIGTERM, and resumed each time; whenever it comes to its end, it starts anew.
What it leaves at each end must be the same to the last bit: weights, optimizers, generators, metrics and samples,
timings aside. A line a trainer; exit status 1 where anything differs, or a SIGTERM was not obeyed with status 143
within 10 seconds. A signal that comes after the last save does not count, another is sent for it.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tiny_run import COMMON, SIZES, STAGES, left_behind, prepare_home, same

from nanorl import checkpoint, paths
from nanorl.metrics import read_metrics

LONG = {"steps": 40, "save_every": 2, "keep_last": 2}
LIMIT = 10.0  # seconds from SIGTERM to the end
NOTICE = 0.05  # seconds between looks at whether a run has begun
SHARE = 0.5  # of the time that all steps take: the longest that a run is left alone


def command(stage: str, resume: bool) -> list[str]:
    """The command line of a stage at the smallest size."""
    settings = COMMON | SIZES[stage] | LONG | {"preset": "smoke"}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    return [sys.executable, "-m", "nanorl", stage, *flags, *(["--resume"] if resume else [])]


def run(stage: str, resume: bool, end: int | None = None, delay: float = 0.0) -> tuple[int, float]:
    """Run a stage, ended by signal `end` so long after it began to write. Its exit status, and the seconds from the
    signal to its end, or, where none was sent, from its first record."""
    metrics, before = paths.stage_dir("tiny", stage) / "metrics.jsonl", time.time()
    child = subprocess.Popen(command(stage, resume), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while child.poll() is None and not (metrics.exists() and metrics.stat().st_mtime >= before):
        time.sleep(NOTICE)
    since = time.monotonic()
    try:
        child.wait(None if end is None else delay)
    except subprocess.TimeoutExpired:
        child.send_signal(end)
        since = time.monotonic()
    return child.wait(), time.monotonic() - since


def disturbed(
    stage: str, signals: list[int], rng: random.Random, span: float, expected: dict
) -> tuple[int, float, list[str]]:
    """Runs that get all these signals, resumed each time, and the last of them left to its end.

    How many came to their end, the most seconds from a SIGTERM to the exit, what went wrong. Each that came to its end
    is compared with `expected`, and the next starts anew.
    """
    folder, signals = paths.stage_dir("tiny", stage), list(signals)
    ends, slowest, wrong = 0, 0.0, []
    for _ in range(6 * len(signals) + 6):
        end = signals[-1] if signals else None
        status, seconds = run(stage, checkpoint.latest(folder) is not None, end, rng.random() * span)
        if not finished(folder):
            if end is None or status == 0:
                return ends, slowest, [*wrong, f"ended with status {status} and is not finished"]
            signals.pop()
            if end == signal.SIGTERM:
                slowest = max(slowest, seconds)
                if status != 143 or seconds > LIMIT:
                    wrong.append(f"SIGTERM: status {status} after {seconds:.1f} s")
            if end == signal.SIGKILL and status != -signal.SIGKILL:
                wrong.append(f"ended with status {status} before it was killed")
            continue
        found = left_behind(stage)  # the signal came after the last save, or not at all
        wrong += [f"{name} differs" for name in expected if not same(found[name], expected[name])]
        ends += 1
        if end is None:
            return ends, slowest, wrong
        shutil.rmtree(folder)
    return ends, slowest, [*wrong, f"{len(signals)} signals came too late each time"]


def finished(folder: Path) -> bool:
    """Whether the newest checkpoint of a folder is that of a run that is done."""
    newest = checkpoint.latest(folder)
    return newest is not None and bool(checkpoint.load(newest)["finished"])


def tried(stage: str, kills: int, terms: int, seed: int) -> bool:
    """Whether disturbed runs of a stage end like an undisturbed one; prints a line."""
    rng, folder = random.Random(f"{stage} {seed}"), paths.stage_dir("tiny", stage)
    shutil.rmtree(folder, ignore_errors=True)
    status, _ = run(stage, resume=False)
    if status:
        print(f"{stage:9} the undisturbed run ended with status {status}")
        return False
    expected = left_behind(stage)
    span = sum(record["time/step"] for record in read_metrics(folder)) * SHARE
    shutil.rmtree(folder)
    signals = [signal.SIGKILL] * kills + [signal.SIGTERM] * terms
    rng.shuffle(signals)
    ends, slowest, wrong = disturbed(stage, signals, rng, span, expected)
    print(f"{stage:9} {kills} kills and {terms} stops (the slowest {slowest:.1f} s), {ends} ends: "
          f"{'; '.join(wrong) or 'the same to the last bit'}", flush=True)
    return not wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--terms", type=int, default=3)
    parser.add_argument("--stages", nargs="+", choices=list(STAGES), default=list(STAGES))
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="nanorl-stress-") as folder:
        os.environ["NANORL_HOME"] = folder
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        prepare_home(Path(folder))
        return 0 if all([tried(stage, given.kills, given.terms, given.seed) for stage in given.stages]) else 1


if __name__ == "__main__":
    sys.exit(main())
