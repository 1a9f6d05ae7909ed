"""Bad input for what takes settings, words, texts and numbers; for what reads files see bad_files.py.

A row names the function of the package that is called, says what is wrong with the input, and holds the call, which
gets an empty folder, and the words that the error must hold; or the right result, where the input is no mistake.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from nanorl import chat, config, distributed, evaluate, launch, notebook, paths, runtime
from nanorl.__main__ import checked, commands, main, parse
from nanorl.data import corpus, prompts
from nanorl.data.preference import as_pair, encode_pairs, split_transcript
from nanorl.data.prepare import PrepareConfig
from nanorl.rewards import parsing, verifiers
from nanorl.talk import ChatConfig
from nanorl.tokenizer import Tokenizer, train_bpe

NAN, INF, HUGE = float("nan"), float("inf"), 10**30
LONG = "x" * 256  # one byte more than the name of a file may have
CONFIGS = {name: cls for name, (_, cls) in launch.STAGES.items()} | {
    "prepare": PrepareConfig, "eval": evaluate.EvalConfig, "chat": ChatConfig}


class Row(NamedTuple):
    """One bad input."""

    entry: str  # module.function
    wrong: str  # what is wrong
    call: Callable[[Path], Any]
    words: tuple[str, ...] = ()  # that the error must hold
    error: type[Exception] | None = ValueError
    result: Any = None  # where there is no error


def bad(entry: str, wrong: str, call: Callable, *words: str, error: type[Exception] = ValueError) -> Row:
    return Row(entry, wrong, call, words, error)


def absent(entry: str, wrong: str, call: Callable, *words: str) -> Row:
    return Row(entry, wrong, call, words, FileNotFoundError)


def right(entry: str, wrong: str, call: Callable, result: Any) -> Row:
    return Row(entry, wrong, call, (), None, result)


def env(call: Callable, **variables: str) -> Callable:
    """The call, with environment variables."""
    return lambda folder: mock.patch.dict(os.environ, variables)(call)(folder)


def resolving(cls: type, preset: Any = "smoke", **given: Any) -> Callable:
    return lambda _: config.resolve(cls, preset, **given)


def words_of(line: str) -> Callable:
    """The command line, read and not run."""
    command, *rest = line.split(" ")
    return lambda _: parse(command, commands()[command], rest)


def running(line: str) -> Callable:
    """The command line, run, its error raised."""
    return env(lambda _: main(line.split(" ")), NANORL_DEBUG="1", WORLD_SIZE="1")


# ---- settings ------------------------------------------------------------------------------------------

VALUES = [  # for fields that every stage has
    ("seed", -1, "greater than or equal to 0"), ("seed", HUGE, "less than"), ("seed", 1.5, "valid integer"),
    ("seed", NAN, "nan"), ("keep_last", 0, "greater than or equal to 1"), ("vocab_size", 264, "to 265"),
    ("context_length", INF, "inf"), ("context_length", HUGE, "less than"), ("context_length", "long", "valid integer"),
    ("label", "..", "pattern"), ("label", "a/b", "pattern"), ("data", "", "at least 1 character"),
    ("data", 7, "valid string"), ("tokenizer", "word", "'bpe' or 'r50k_base'"), ("precision", "fp16", "'bf16'"),
    ("tracker", "mlflow", "'wandb'"), ("resume", "", "at least 1 character"), ("max_steps", [1], "valid integer"),
    ("run", {"a": 1}, "valid string"), ("device", None, "valid string"), ("seed", "x" * 9_000, "xxx..."),
]
OWN = {  # for fields of some stages
    "prepare": [("documents", 99, "to 100"), ("problem_share", 1.01, "to 1"), ("talk_share", 1, "less than 1"),
                ("skip_reasoning", NAN, "finite"), ("corpus", "", "at least 1 character")],
    "pretrain": [("n_embed", 0, "to 8"), ("n_blocks", HUGE, "less than"), ("n_head", 5, "multiple of n_head 5"),
                 ("rope_theta", 1, "greater than 1"), ("norm_eps", -INF, "-inf"), ("position", "alibi", "'rope'")],
    "sft": [("lr", 0, "greater than 0"), ("lr", NAN, "finite"), ("steps", 0, "to 1"), ("steps", HUGE, "less than"),
            ("batch_size", -8, "to 1"), ("max_grad_norm", INF, "finite"), ("compile", "perhaps", "valid boolean")],
    "reward": [("margin", -1, "to 0"), ("noise", 0.5, "less than 0.5"), ("pairs", 0, "to 1")],
    "dpo": [("beta", 0, "greater than 0"), ("loss", "hinge", "'ipo'"), ("label_smoothing", 0.5, "less than 0.5")],
    "orpo": [("weight", -0.1, "to 0"), ("preferences", "", "at least 1 character")],
    "kto": [("desirable_weight", NAN, "finite"), ("undesirable_weight", -1, "to 0")],
    "ppo": [("gamma", 1.1, "to 1"), ("lam", -0.1, "to 0"), ("kl_target", 0.1, "set kl_coef"),
            ("critic", "", "'shared'")],
    "grpo": [("group", 1, "to 2"), ("temperature", 0, "greater than 0"), ("format_bonus", 1, "less than 1"),
             ("clip_low", 1, "less than 1"), ("overlong_buffer", 0, "to 1")],
    "eval": [("eval_group", 0, "to 1"), ("temperature", -1, "greater than 0")],
    "chat": [("top_p", 0, "greater than 0"), ("top_p", 1.5, "to 1"), ("top_k", -1, "to 0"), ("of", "base", "'sft'")],
}
SETTINGS = [
    *(bad("config.resolve", f"{stage}: stpes", resolving(cls, stpes=3), "unknown config field 'stpes'", "known names")
      for stage, cls in CONFIGS.items() if "steps" not in cls.model_fields),
    *(bad("config.resolve", f"{stage}: stpes", resolving(cls, stpes=3), "'stpes'; did you mean 'steps'?")
      for stage, cls in CONFIGS.items() if "steps" in cls.model_fields),
    *(bad("config.resolve", f"{field} {value!r:.20}", resolving(CONFIGS["sft"], **{field: value}), field, words)
      for field, value, words in VALUES),
    *(bad("config.resolve", f"{stage}: {field} {value!r}", resolving(CONFIGS[stage], **{field: value}), field, words)
      for stage, rows in OWN.items() for field, value, words in rows),
    bad("config.resolve", "a name of two lines", resolving(CONFIGS["sft"], **{"a\nb": 1}), r"'a\nb'"),
    *(bad("config.resolve", f"preset {preset!r:.20}", resolving(CONFIGS["sft"], preset), "unknown preset", words)
      for preset, words in (("cqu", "did you mean 'cpu'?"), ("", "auto, cpu"), ("../configs/cpu", "cpu"), (7, "auto"),
                            ("a\0b", "auto"), ("x" * 5_000, "auto"), (["cpu"], "'cpu'?"))),
    bad("config.resolve", "preset in the environment", env(resolving(CONFIGS["sft"], "auto"), NANORL_PRESET="laptop"),
        "unknown preset 'laptop'"),
    right("config.resolve", "no preset", lambda _: config.resolve(CONFIGS["sft"], None).preset, "smoke"),
    bad("config.check_names", "unknown", lambda _: config.check_names(["sedd"], ["seed"], "setting"), "'seed'?"),
    bad("notebook.check_parameters", "STPES", lambda _: notebook.check_parameters(
        {"In": ["# Parameters\nSTPES = 3"]}, "STEPS", "SEED"), "unknown papermill parameter 'STPES'", "'STEPS'?"),
    bad("notebook.check_parameters", "lower case", lambda _: notebook.check_parameters(
        {"In": ["# Parameters\nsteps = 3"]}, "STEPS"), "'STEPS'?"),
    right("notebook.check_parameters", "a cell that is no Python", lambda _: notebook.check_parameters(
        {"In": ["# Parameters\n%%bash", "STEPS ="]}, "STEPS"), None),
    right("notebook.given", "None", lambda _: notebook.given(STEPS=None, SEED=0), {"seed": 0}),
    bad("notebook.Form.config", "a box of letters", lambda _: filled(seed="many"), "'seed' is 'many'"),
    bad("notebook.Form.config", "a number out of bounds", lambda _: filled(steps="0"), "'steps' is '0'"),
    right("notebook.Form.config", "empty boxes", lambda _: filled(steps="", run=" ").run, None),
    bad("runtime.require_gpu", "no GPU", mock.patch("torch.cuda.is_available", lambda: False)(
        lambda _: config.resolve(CONFIGS["sft"], "gpu")), "needs a CUDA GPU", "use preset 'cpu'"),
    *(bad("runtime.pick_device", repr(name), lambda _, name=name: runtime.pick_device(name), "device", words)
      for name, words in (("tpu", "choose auto, cpu"), ("", "choose auto"), ("cuda:x", "choose auto"), (None, "auto"),
                          ("cuda:9999", "'cpu'"), ("meta", "choose auto"), ("cuda:99999999999", "cpu"), (7, "auto"),
                          ("cpu:-1", "choose auto"), ("cpu:3", "'cpu'"))),
    bad("runtime.resolve_precision", "fp16", lambda _: runtime.resolve_precision(torch.device("cpu"), "fp16"),
        "'fp16'"),
    bad("paths.home", "relative", env(lambda _: paths.home(), NANORL_HOME="runs"), "'runs'", "set it to"),
    *(bad("paths.run_dir", repr(run)[:30], lambda _, run=run: paths.run_dir(run), "plain name")
      for run in ("", ".", "..", "../up", "a/../../b", "/etc", "a\0b", "x" * 300)),
    *(bad("launch.ensure", wrong, lambda _, a=a, k=k: launch.ensure(*a, "smoke", **k), words)
      for wrong, a, k, words in (
          ("unknown stage", ["rlhf"], {}, "known names"), ("nearly a stage", ["gpro"], {}, "'grpo'?"),
          ("unknown setting", ["sft"], {"sede": 1}, "'seed'?"), ("resume", ["sft"], {"resume": "latest"}, "'resume'"),
          ("out of bounds", ["sft"], {"vocab_size": 1}, "'vocab_size' is 1"),
          ("up", ["sft"], {"run": "../up"}, "../up"))),
    *(bad("launch.launch", f"nproc {n}", lambda _, n=n: list(launch.launch(nothing, None, n)), f"nproc is {n}")
      for n in (0, -2)),
    bad("launch.launch", "a function of a notebook", lambda _: list(launch.launch(lambda cfg: [], None, 2)),
        "in a module"),
    *(bad("distributed.started_by_torchrun", repr(x), env(lambda _: distributed.started_by_torchrun(), WORLD_SIZE=x),
          "WORLD_SIZE is", "unset it") for x in ("", "x", "0", "-1", "1.5")),
    bad("launch.launch", "nproc under torchrun", env(lambda _: list(launch.launch(nothing, None, 2)), WORLD_SIZE="2"),
        "leave nproc 2 out"),
]


def filled(**boxes: str) -> config.StageConfig:
    """The config of a form whose boxes hold this."""
    form = notebook.form(CONFIGS["sft"], "smoke")
    for name, text in boxes.items():
        form.fields[name].value = text
    return form.config()


def nothing(cfg: Any) -> list:
    """A train function that trains nothing."""
    return []


# ---- words of the command line -------------------------------------------------------------------------

WORDS = [
    *(bad("__main__.parse", f"{name} --zzz", words_of(f"{name} --zzz 1"), "unknown flag '--zzz'", "known names")
      for name in commands()),
    *(bad("__main__.parse", f"{name} --sed 1", words_of(f"{name} --sed 1"), "unknown flag '--sed'", "'--seed'?")
      for name in commands()),
    *(bad("__main__.parse", line, words_of(line), *words) for line, *words in (
        ("sft --seed", "--seed needs a value"), ("sft --seed=", "'seed' is ''"),
        ("sft --steps 1e3", "'steps' is '1e3'"),
        ("sft --lr nan", "'lr'"), ("sft --lr inf", "'lr'"), ("sft --steps \u0663\u0663x", "'steps'"),
        ("prepare --device cpu", "unknown flag '--device'"), ("prepare --nproc 2", "'--nproc'"),
        ("eval --of reward", "'reward'"), ("eval --resume", "'--resume'"), ("table --json=yes", "takes no value"),
        ("sft --preset=", "unknown preset ''"), ("sft --preset nope --help", "unknown preset 'nope'"),
        ("sft -", "unexpected '-'"), ("sft --", "unknown flag '--'"),
        ("sft --=1", "unknown flag '--'"), ("sft --run --seed 1", "--run needs a value"))),
    right("__main__.parse", "the last of two wins", lambda _: words_of("sft --seed 1 --seed 2")(_)[0].seed, 2),
    right("__main__.parse", "None", lambda _: words_of("sft --run None")(_)[0].run, None),
    bad("__main__.checked", "a bare word", lambda _: checked("sft", ["grpo"], {"seed": (int, 0, "")}),
        "unexpected 'grpo'"),
    *(bad("__main__.main", line, running(line), *words) for line, *words in (
        ("grop", "unknown command 'grop'", "'grpo'?"), ("", "unknown command ''"), ("--steps 3", "unknown command"),
        ("grpo --nproc 0", "nproc is 0"), ("grpo --nproc -1", "nproc is -1"), ("sft --run ../up", "../up"),
        ("sft --run /tmp/up", "/tmp/up"), ("prepare --run a/../../b", "plain name"), ("sft --device tpu", "'tpu'"),
        ("prepare --max-number 3 --run few", "max_number 3"), ("pretrain --device cuda:77", "cuda:77"))),
    *(absent("__main__.main", line, running(line), *words) for line, *words in (
        *((f"{stage} --run none", "make it with", "--run none") for stage in launch.STAGES),
        ("eval --run none --of dpo", "no dpo model", "nanorl dpo"), ("table --run none", "no pretrain model"),
        ("chat --run none --prompt hi", "no sft model"), ("chat --run none --prompt hi --raw", "no pretrain model"),
        ("prepare --run none --data nowhere", "nowhere is no folder"), ("sft --run none --resume x.pt", "make it with"),
        ("prepare --run none --corpus nowhere.txt", "nowhere.txt does not exist"))),
]


# ---- texts and conversations ---------------------------------------------------------------------------

def tokenizer() -> Tokenizer:
    """The 256 bytes and the specials."""
    return Tokenizer.train([], 265)


def user(content: Any) -> dict:
    return {"role": "user", "content": content}


CONVERSATIONS = [
    ("no messages", [], "at least one message"), ("None", None, "at least one message"),
    ("a text", "hi", "list of messages"),
    ("7", 7, "list of messages"), ("one message alone", user("hi"), "list of messages"),
    ("an unknown role", [{"role": "robot", "content": "x"}], "'robot'; use one of system"),
    ("a role of 10 kB", [{"role": "r" * 10_000, "content": "x"}], "use one of system"),
    ("no content", [{"role": "user"}], "message 0"), ("content None", [user(None)], "NoneType"),
    ("content in parts", [user([{"type": "text", "text": "hi"}])], "must be a str"),
    ("a number", [user(4)], "must be a str"),
    ("half a character", [user("\ud83d")], "lone surrogate"), ("a list in the list", [[user("hi")]], "message 0"),
]
PROBLEM = {"question": "1+1?", "answer": "1+1=2\n#### 2"}
PAIR = {"prompt": [user("hi")], "chosen": "a", "rejected": "b"}
TEXTS = [
    *(bad(f"chat.{call.__name__}", wrong, lambda _, call=call, m=m: call(tokenizer(), m), words)
      for call in (chat.encode_conversation, chat.encode_prompt) for wrong, m, words in CONVERSATIONS),
    *(bad("chat.check_messages", wrong, lambda _, m=m: chat.check_messages(m), words)
      for wrong, m, words in CONVERSATIONS if words != "lone surrogate"),
    bad("chat.encode_prompt", "the answer at its end", lambda _: chat.encode_prompt(
        tokenizer(), [{"role": "assistant", "content": "hi"}]), "leave the last message out"),
    right("chat.encode_conversation", "assistant first, empty", lambda _: chat.encode_conversation(
        tokenizer(), [{"role": "assistant", "content": ""}]), ([259, 260], [0, 1])),
    *(bad(f"tokenizer.Tokenizer.{name}", f"{value!r:.20}", lambda _, name=name, value=value: getattr(
        tokenizer(), name)(value), words)
      for name, value, words in (
          ("encode", 7, "int"), ("encode", None, "NoneType"), ("encode", b"hi", "bytes"),
          ("encode", "a\ud800", "surrogate"),
          ("encode_with_marks", 7, "int"), ("encode_with_marks", "\udfff", "surrogate"),
          ("encode_batch", ["a", 7], "int"),
          ("encode_batch", ["\ud800"], "surrogate"), ("encode_batch", "hi", "list"))),
    right("tokenizer.Tokenizer.encode", "empty", lambda _: tokenizer().encode(""), []),
    right("tokenizer.Tokenizer.decode", "ids of nothing", lambda _: tokenizer().decode([-1, 10**12, 256, 65]),
          tokenizer().decode([65])),
    *(bad(f"tokenizer.{entry}", wrong, lambda _, a=a, call=call: call(*a), words)
      for entry, call in (("train_bpe", train_bpe), ("Tokenizer.train", Tokenizer.train)) for wrong, a, words in (
          ("too few ids", (["abc"], 100), "vocab_size 100"), ("too many ids", (["abc"], 5_000), "too small"),
          ("one text", ("abc", 300), "wrap it in a list"), ("bytes", ([b"abc"], 300), "bytes"),
          ("a number", ([7], 300), "int"), ("half a character", (["ab\ud800"], 300), "surrogate"),
          ("none", ([], 300), "small"))),
    *(bad("data.preference.as_pair", wrong, lambda _, record=record: as_pair(record, "file:3"), "file:3", words)
      for wrong, record, words in (
          ("empty", {}, "'chosen'"), ("no rejected", {"chosen": "a", "prompt": "b"}, "'rejected'"),
          ("a number", PAIR | {"chosen": 7}, "'chosen'"), ("prompt a number", PAIR | {"prompt": 7}, "'prompt'"),
          ("both empty", PAIR | {"chosen": "", "rejected": " "}, "both replies are empty"),
          ("no common prompt", {"chosen": "Human: a", "rejected": "Human: b"}, "in common"),
          ("assistant first", {"chosen": "Assistant: a", "rejected": "Assistant: b"}, "in common"),
          ("no transcript", {"chosen": "hi", "rejected": "ho"}, "must begin with"),
          ("half a character", PAIR | {"chosen": "\ud800"}, "surrogate"),
          ("unknown role", PAIR | {"prompt": [{"role": "bot", "content": "x"}]}, "'bot'"),
          ("prompt ends with the assistant", PAIR | {"prompt": [{"role": "assistant", "content": "x"}]}, "in common"))),
    bad("data.preference.split_transcript", "no turn", lambda _: split_transcript("once upon"), "must begin with"),
    bad("data.preference.split_transcript", "empty", lambda _: split_transcript(""), "must begin with"),
    bad("data.preference.encode_pairs", "no room", lambda _: encode_pairs(tokenizer(), [PAIR], 8), "8 tokens"),
    right("data.preference.encode_pairs", "no pairs", lambda _: encode_pairs(tokenizer(), [], 9)[0], []),
    *(bad("data.prompts.split_solution", repr(text), lambda _, text=text: prompts.split_solution(text), '"#### 42"')
      for text in ("", "42", "####", "42 #### \n")),
    bad("data.prompts.check_disjoint", "shared", lambda _: prompts.check_disjoint([PROBLEM], [PROBLEM]), "1+1?",
        "remove"),
    bad("data.corpus.text_field", "absent", lambda _: corpus.text_field({}, "text", "f:1"),
        'f:1: no text in field "text"'),
    *(right(f"rewards.{call.__module__.rpartition('.')[2]}.{call.__name__}", repr(text)[:20],
            lambda _, call=call, text=text: call(text), None)
      for call in (parsing.final_answer, parsing.gold_answer, parsing.stated_number)
      for text in ("", "\0", "\ud800", "#### 1e999999999", "#### " + "9" * 100_000, "#### 1/0", "<answer></answer>",
                   "<answer>1</answer><answer>1</answer>", "#### nan", "#### inf", "#### --5", "#### \u0664\u0662")),
    right("rewards.verifiers.correct", "no gold", lambda _: verifiers.correct("#### 5", ""), False),
    *(bad("rewards.verifiers.gsm8k_reward", f"bonus {b}", lambda _, b=b: verifiers.gsm8k_reward("", "1", b),
        "0 <= bonus")
      for b in (1, -0.1, NAN, INF)),
]
