"""Bad runs: tokenizers, checkpoints and manifests that are missing, damaged or another's, and stages that cannot start.

Rows as in bad_inputs.py. Files are made in the folder that a call gets, or in the home folder.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from bad_files import damaged, written
from bad_inputs import LONG, absent, bad, right, tokenizer
from test_checkpoint import tiny_state

from nanorl import checkpoint, config, evaluate, launch, metrics, notebook, paths, storage, talk
from nanorl.data.prepare import PrepareConfig, prepare
from nanorl.model import ModelConfig, Transformer
from nanorl.tokenizer import Tokenizer

# ---- tokenizers, checkpoints and runs ------------------------------------------------------------------

def stored(folder: Path, **changes: Any) -> Path:
    """A finished SFT model of run "r", and its tokenizer."""
    own = tokenizer()
    own.save(paths.run_dir("r") / "tokenizer.json")
    with torch.random.fork_rng():
        model = Transformer(ModelConfig(
            vocab_size=265, context_length=24, n_embed=8, n_head=1, n_kv_head=1, n_blocks=1))
    state = tiny_state(model_state_dict=model.state_dict(), model_cfg=model.cfg.model_dump(), finished=True,
                       tokenizer_hash=own.hash, cfg={"tokenizer": "bpe", "preset": "smoke", "seed": 0})
    return checkpoint.save(paths.stage_dir("r", "sft"), state | changes)


def requiring(damage: Callable[[Path], Any] = lambda path: None, **changes: Any) -> Callable[[Path], Any]:
    def call(folder: Path) -> Any:
        damage(stored(folder, **changes))
        return checkpoint.require("sft", "r", "smoke").state["step"]

    return call


def edited(name: str, change: Callable[[dict], Any]) -> Callable[[Path], None]:
    """Damage to a JSON file of the run: its tokenizer, or the manifest of the checkpoint."""
    def damage(path: Path) -> None:
        path = storage.manifest_of(path) if name == "manifest" else paths.run_dir("r") / name
        saved = json.loads(path.read_text())
        change(saved)
        path.write_text(json.dumps(saved))

    return damage


def with_tokenizer(content: bytes) -> Callable[[Path], Any]:
    return lambda folder: Tokenizer.load(written(folder / "tokenizer.json", content))


def edited_tokenizer(**changes: Any) -> Callable[[Path], Any]:
    def call(folder: Path) -> Any:
        tokenizer().save(folder / "good.json")
        saved = json.loads((folder / "good.json").read_text()) | changes
        return with_tokenizer(json.dumps({k: v for k, v in saved.items() if v is not ...}).encode())(folder)

    return call


def chatting(text: str, **settings: Any) -> Callable[[Path], Any]:
    def call(folder: Path) -> Any:
        stored(folder)
        cfg = config.resolve(talk.ChatConfig, "smoke", run="r", of="sft", max_new_tokens=2, device="cpu", **settings)
        return isinstance(talk.Talk(cfg).say(text, lambda piece: None), str)

    return call


def weights(folder: Path) -> dict:
    return checkpoint.load(stored(folder))


TOKENIZERS = [
    *(bad("tokenizer.Tokenizer.load", wrong, with_tokenizer(content), "tokenizer.json", "make it again")
      for wrong, content in (("empty", b""), ("no JSON", b"hi"), ("a list", b"[]"), ("a number", b"7"),
                             ("null", b"null"), ("no UTF-8", b"\xff\xfe\x00"), ("zero bytes", bytes(99)),
                             ("a million brackets", b"[" * 10**6))),
    *(bad("tokenizer.Tokenizer.load", f"{k} {str(v)[:20]}", edited_tokenizer(**{k: v}), "tokenizer.json",
        "make it again")
      for k, values in {
          "version": (2, "1", ...), "pattern": (..., 7, "(", "x", ""),
          "ranks": (..., [], "abc", 7, ["?"], [7], {"a": 1}),
          "vocab_size": (..., 5, "300", None, 300.5, -1), "sha256": (..., "0" * 64, 7), "name": (..., 7, None),
      }.items() for v in values),
    absent("tokenizer.Tokenizer.load", "a folder", lambda folder: Tokenizer.load(folder), "no tokenizer at"),
    absent("tokenizer.Tokenizer.r50k_base", "no ranks",
        mock.patch("tiktoken.get_encoding", mock.Mock(side_effect=OSError))(
        lambda _: Tokenizer.r50k_base()), "connect to the network", "TIKTOKEN_CACHE_DIR"),
]
CHECKPOINTS = [
    right("checkpoint.require", "nothing wrong", requiring(), 1),
    right("checkpoint.require", "no manifest", requiring(lambda path: storage.manifest_of(path).unlink()), 1),
    *(bad("checkpoint.require", f"manifest: {wrong}", requiring(edited("manifest", change)), "step_000001.pt",
        "move it away")
      for wrong, change in (("another checksum", lambda m: m.update(sha256="0" * 64)),
                            ("an empty checksum", lambda m: m.update(sha256="")))),
    *(right("checkpoint.require", f"manifest: {wrong}", requiring(
        lambda path, text=text: storage.manifest_of(path).write_text(text)), 1)
      for wrong, text in (("empty", ""), ("a list", "[]"), ("no JSON", "{"), ("checksum 7", '{"sha256": 7}'))),
    *(bad("checkpoint.require", wrong, requiring(damage), "step_000001.pt", "move it away") for wrong, damage in (
        ("cut short", lambda path: path.write_bytes(path.read_bytes()[:-9])),
        ("empty", lambda path: path.write_bytes(b"")),
        ("a byte flipped", lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\xff")))),
    absent("checkpoint.require", "not finished", requiring(finished=False), "stopped at step 1", "--resume latest"),
    absent("checkpoint.require", "no tokenizer", requiring(
        lambda path: (paths.run_dir("r") / "tokenizer.json").unlink()), "nanorl prepare"),
    bad("checkpoint.require", "a damaged tokenizer", requiring(edited("tokenizer.json", lambda t: t["ranks"].pop())),
        "make it again"),
    bad("checkpoint.require", "another tokenizer", requiring(tokenizer_hash="0" * 64), "another tokenizer", "00000000"),
    *(bad("checkpoint.require", f"model_cfg: {k} {v!r}", requiring(
        model_cfg=tiny_state()["model_cfg"] | {"vocab_size": 265, k: v}), words, "train") for k, v, words in (
          ("n_blocks", 0, "n_blocks"), ("n_embed", "x" * 999, "n_embed"), ("depth", 3, "depth"),
          ("n_embed", 32, "shape"),
          ("n_embed", 2**45, "no model"), ("vocab_size", 2**62, "no model"), ("context_length", 2**50, "no model"))),
    absent("checkpoint.require", "no such stage", lambda _: checkpoint.require("sft", "r", "smoke"), "nanorl sft"),
    *(bad("checkpoint.require", f"run {run}", lambda _, run=run: checkpoint.require("sft", run, "smoke"), "plain name")
      for run in ("../up", "/tmp/up", "")),
    absent("checkpoint.load", "missing", lambda folder: checkpoint.load(folder / "step_000001.pt"), "no checkpoint at"),
    *(absent(f"checkpoint.{call.__name__}", f"{resume!r:.20}",
             lambda folder, call=call, resume=resume: call(resume, folder),
             "no checkpoint to resume from", "start without resume")
      for call in (checkpoint.resolve_resume, checkpoint.to_resume)
      for resume in ("latest", "step_000009.pt", "/nowhere/x.pt", "..", LONG, "a\0b", "~nobody9/x")),
    *(bad("checkpoint.save", wrong, lambda folder, changes=changes: checkpoint.save(folder, tiny_state() | changes),
        words)
      for wrong, changes, words in (("an object", {"metrics": {"a": object()}}, "plain types"),
                                    ("step 1.5", {"step": 1.5}, "step"),
                                    ("step -1", {"step": -1}, "step"), ("step None", {"step": None}, "step"),
                                    ("weights None", {"model_state_dict": None}, "model_state_dict"),
                                    ("NumPy", {"loss_history": np.zeros(2)}, "ndarray"),
                                    ("an odd key", {"metrics": {np.int64(1): 2}}, "int64"))),
    bad("checkpoint.save", "keep none", lambda folder: checkpoint.save(folder, tiny_state(), 0), "keep at least 1"),
    bad("checkpoint.prune", "keep none", lambda folder: checkpoint.prune(folder, 0), "keep at least 1"),
    bad("checkpoint.load_weights", "none", lambda _: checkpoint.load_weights(torch.nn.Linear(1, 1), {}), "'weight'"),
    bad("checkpoint.model_from", "no weights", lambda folder: checkpoint.model_from(
        weights(folder) | {"model_state_dict": {}}), "no weight"),
    *(bad("checkpoint.check_same_shape", wrong, lambda folder, a=a: checkpoint.check_same_shape(tiny_state(), *a),
        words)
      for wrong, a, words in (("another tokenizer", ({}, "1" * 64), "another tokenizer"),
                              ("another width", (tiny_state()["model_cfg"] | {"n_embed": 32},), "set n_embed to 16"))),
    bad("storage.check", "another checksum", lambda folder: damaged(
        stored(folder), lambda path: path.write_bytes(b"x"), storage.check), "manifest says"),
    bad("storage.whole_file", "a folder that is a file", lambda folder: whole(Path(written(folder / "a", b"")) / "b"),
        "could not write", "NANORL_HOME", error=storage.CannotWrite),
    absent("talk.Talk", "no model", lambda _: talk.Talk(config.resolve(talk.ChatConfig, "smoke", run="r")),
        "nanorl sft"),
    bad("talk.Talk", "too long", chatting("x" * 99), "shorten the prompt"),
    bad("talk.Talk", "too long, raw", chatting("x" * 99, raw=True), "shorten the prompt"),
    bad("talk.Talk", "a system message that leaves no room", chatting("hi", system="x" * 99), "shorten the prompt"),
    bad("talk.Talk", "half a character", chatting("\ud800"), "surrogate"),
    *(right("talk.Talk", f"empty, raw {raw}", chatting("", raw=raw), True) for raw in (True, False)),
    absent("evaluate.judge", "no model", lambda _: evaluate.judge(
        config.resolve(evaluate.EvalConfig, "smoke", run="r"), "sft"), "nanorl sft"),
    absent("evaluate.stage_table", "no stages", lambda _: evaluate.stage_table(
        config.resolve(evaluate.EvalConfig, "smoke", run="r")), "nanorl pretrain"),
    absent("notebook.read_samples", "none", lambda folder: notebook.read_samples(folder), "train this stage first"),
    *(bad("metrics.read_metrics", wrong, lambda folder, text=text: metrics.read_metrics(
        Path(written(folder / "metrics.jsonl", text)).parent), "metrics.jsonl:1", "delete that line")
      for wrong, text in (("no JSON", b"hi\n{}\n"), ("a list", b"[]\n{}\n"), ("no UTF-8", b"\xff\n{}\n"),
                          ("brackets", b"[" * 10**6 + b"\n{}\n"), ("digits", b"9" * 5_000 + b"\n{}\n"))),
    right("metrics.read_metrics", "a last line cut short", lambda folder: metrics.read_metrics(
        Path(written(folder / "metrics.jsonl", b'{"step": 1}\n{"st\xc3')).parent), [{"step": 1}]),
]


def whole(path: Path) -> None:
    with storage.whole_file(path):
        pass


# ---- stages --------------------------------------------------------------------------------------------

def training(stage: str, **settings: Any) -> Callable[[Path], Any]:
    def call(folder: Path) -> Any:
        stored(folder)
        train, cls = launch.STAGES[stage]
        return next(iter(train(config.resolve(cls, "smoke", **({"run": "r", "device": "cpu"} | settings)))))

    return call


def preparing(**settings: Any) -> Callable[[Path], Any]:
    return lambda folder: list(prepare(config.resolve(PrepareConfig, "smoke", run="p", vocab_size=265, **{
        name: value(folder) if callable(value) else value for name, value in settings.items()})))


STAGES = [
    *(bad(f"train.{launch.STAGES[stage][0].__module__.rpartition('.')[2]}.train", f"{stage}: device tpu",
          training(stage, device="tpu"), "choose auto, cpu") for stage in launch.STAGES),
    bad("train.pretrain.train", "a window beyond the context", training("pretrain", window=200, context_length=64),
        "lower window"),
    absent("train.pretrain.train", "no corpus", training("pretrain"), "nanorl prepare"),
    absent("train.sft.train", "no base model", training("sft"), "nanorl pretrain"),
    absent("train.ppo.train", "no reward model", training("ppo", reward="model"), "nanorl reward"),
    *(bad(f"train.{stage}.train", "no prompt fits", training(stage), "none of", "larger context_length")
      for stage in ("ppo", "grpo")),
    *(absent(f"train.{stage}.train", "no problems", training(stage, data="nowhere"), "nowhere is no folder")
      for stage in ("ppo", "grpo")),
    *(absent(f"train.{module}.train", f"{stage}: no pairs", training(stage, preferences="nowhere"),
        "nowhere is not here")
      for stage, module in (("dpo", "preference"), ("reward", "reward"))),
    absent("data.prepare.prepare", "no problems", preparing(data="nowhere"), "nowhere is no folder"),
    absent("data.prepare.prepare", "no corpus", preparing(corpus="nowhere.txt"), "nowhere.txt does not exist"),
    bad("data.prepare.prepare", "no corpus on the hub", preparing(corpus="nobody/nothing"), "nobody/nothing",
        "the hub gave"),
    bad("data.prepare.prepare", "an empty corpus", preparing(corpus=lambda folder: written(folder / "a.txt", b"")),
        "no text"),
    bad("data.prepare.prepare", "no room for a problem", preparing(max_number=3), "max_number 3"),
    bad("data.prepare.prepare", "nothing fits a row", preparing(context_length=8), "no conversation fits a row of 8"),
]
RUNS = [*TOKENIZERS, *CHECKPOINTS, *STAGES]
