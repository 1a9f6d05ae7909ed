"""A whole run at the smallest size: text, a pretrained and a fine-tuned model, made once for all the tests.

Each test works on a copy of its own, so that nothing that one leaves behind is seen by another.
"""

import functools
import shutil
import tempfile
from pathlib import Path

import pytest
import torch

from nanorl import checkpoint, launch
from nanorl.config import resolve
from nanorl.data.prepare import PrepareConfig, prepare
from nanorl.metrics import read_metrics

STAGES = launch.STAGES
PAIRS, REINFORCED = ("reward", "dpo", "orpo", "kto"), ("ppo", "grpo")
COMMON = dict(run="tiny", vocab_size=300, context_length=96, max_number=10, max_steps=1, precision="fp32", device="cpu")
SIZES = {
    "pretrain": dict(n_embed=32, n_head=2, n_kv_head=1, n_blocks=1, steps=6, batch_size=4, micro_batch_size=4,
                     window=48, eval_every=3, eval_batches=1, warmup=1),
    "sft": dict(steps=6, batch_size=4, micro_batch_size=4, eval_every=3, eval_batches=1, warmup=1),
    **dict.fromkeys(PAIRS, dict(steps=6, pairs=40, dev_pairs=10, batch_size=4, micro_batch_size=2, eval_every=3,
                                eval_batches=2, warmup=1, optimizer="adamw", lr=1e-3)),
    "ppo": dict(steps=4, problems=60, prompts=8, group=2, max_new_tokens=10, micro_prompts=4, epochs=2, minibatches=2,
                eval_every=2, eval_problems=10, dev_problems=6, lr=1e-3, warmup=1),
    "grpo": dict(steps=4, problems=60, prompts=4, group=4, max_new_tokens=10, micro_prompts=4, eval_every=2,
                 eval_problems=10, dev_problems=6, lr=1e-3, warmup=1),
}


def config_of(stage, **changes):
    return resolve(STAGES[stage][1], "smoke", **(COMMON | SIZES[stage] | changes))


def train(stage, **changes):
    """Run a stage to its end: its records, and the checkpoint that it leaves."""
    cfg = config_of(stage, **changes)
    records = list(STAGES[stage][0](cfg))
    return records, checkpoint.load(checkpoint.latest(cfg.folder))


@functools.cache
def _prepared() -> tempfile.TemporaryDirectory:
    """A home folder with the data and the models of run "tiny"; it goes when the tests end."""
    folder = tempfile.TemporaryDirectory(prefix="nanorl-tiny-")
    prepare_home(Path(folder.name))
    return folder


def prepare_home(folder: Path) -> None:
    """Make the data and the models of run "tiny" in a home folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANORL_HOME", str(folder))
        list(prepare(resolve(PrepareConfig, "smoke", documents=400, conversations=120, **COMMON)))
        train("pretrain", steps=80, batch_size=16, micro_batch_size=16, eval_every=80)
        train("sft", steps=60, batch_size=16, micro_batch_size=16, eval_every=60)


def new_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the prepared home, in force until the end of the test."""
    home = Path(tempfile.mkdtemp(prefix="home-", dir=tmp_path))
    shutil.copytree(_prepared().name, home, dirs_exist_ok=True)
    monkeypatch.setenv("NANORL_HOME", str(home))
    return home


def share_of_e(text, gold, format_bonus):
    """A reward in the form of `gsm8k_reward` that differs in nearly every group: the share of the letter e."""
    share = text.count("e") / max(len(text), 1)
    return {"reward": share, "correct": share, "format": 0.0}


def without_times(records):
    """Records without what the clock says."""
    return [{name: value for name, value in record.items() if not name.startswith("time/")} for record in records]


def left_behind(stage):
    """What a run left in its files, as far as two runs can have it in common."""
    folder = config_of(stage).folder
    state = checkpoint.load(checkpoint.latest(folder))
    state = {name: value for name, value in state.items() if name not in ("minutes", "cfg")}
    state["metrics"] = without_times([state["metrics"]])
    samples = read_metrics(folder, "samples.jsonl") if stage in REINFORCED else []
    return {"state": state, "metrics": without_times(read_metrics(folder)), "samples": samples}


def same(a, b) -> bool:
    """Whether two nested structures are equal, their tensors bit for bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def largest_difference(a: dict, b: dict) -> float:
    """Between two state dicts."""
    return max(float((a[name] - b[name]).abs().max()) for name in a)
