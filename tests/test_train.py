"""Every trainer at the smallest size: what they leave, that they repeat, resume and split alike."""

import json
import math

import pytest
import torch
from tiny_run import (
    PAIRS,
    REINFORCED,
    STAGES,
    config_of,
    largest_difference,
    left_behind,
    new_home,
    same,
    share_of_e,
    train,
    without_times,
)

from nanorl import checkpoint
from nanorl.metrics import read_metrics
from nanorl.optim import Optimizers
from nanorl.rewards.verifiers import gsm8k_reward
from nanorl.train import grpo, ppo, progress, supervised

each_stage = pytest.mark.parametrize("stage", STAGES)
SUPERVISED = {"step", "loss", "lr", "grad_norm", "skipped", "tokens", "time/step", "time/tokens_per_second"}
RL = SUPERVISED | {
    "reward", "correct", "format", "length", "ended", "entropy", "kl", "clip_fraction", "drift",
    "prompts_too_long", "time/rollout", "time/score", "time/update",
}
FIELDS = {
    "pretrain": SUPERVISED, "sft": SUPERVISED,
    "reward": SUPERVISED | {"accuracy", "margin", "reward"},
    "dpo": SUPERVISED | {"accuracy", "margin", "chosen_reward", "rejected_reward"},
    "orpo": SUPERVISED | {"accuracy", "margin", "nll"},
    "kto": SUPERVISED | {"accuracy", "reward"},
    "ppo": RL | {"value", "return", "explained_variance", "value_loss", "value_clip_fraction", "moved", "updates",
                 "kl_coef"},
    "grpo": RL | {"informative"},
}
DEV = {"pretrain": {"dev_loss", "bits_per_byte"}, "sft": {"dev_loss"},
       **dict.fromkeys(REINFORCED, {"dev_accuracy", "dev_length"})}
for stage in PAIRS:  # every figure of a batch is one of held-out pairs too, and the accuracy has an interval
    DEV[stage] = {f"dev_{name}" for name in (FIELDS[stage] - SUPERVISED) | {"loss"}}
    DEV[stage] |= {"dev_accuracy_low", "dev_accuracy_high", "dev_pairs"}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A home of its own for each test, and a reward from which so small a model has something to learn."""
    for module in (grpo, ppo):
        monkeypatch.setattr(module, "gsm8k_reward", share_of_e)
    return new_home(tmp_path, monkeypatch)


def refused(error, message, stage, **changes):
    """The stage raises `error` in one line that matches `message`."""
    with pytest.raises(error, match=message) as caught:
        train(stage, **changes)
    assert "\n" not in str(caught.value)


# ---- what a run says and leaves --------------------------------------------------------------------------


@each_stage
def test_one_record_a_step_and_a_finished_checkpoint(stage, home):
    records, state = train(stage)
    steps = len(records)
    looked = [1, 2, 4] if stage in REINFORCED else [3, 6]
    for i, record in enumerate(records, start=1):
        assert record["step"] == i and set(record) == FIELDS[stage] | (DEV[stage] if i in looked else set())
        assert all(isinstance(value, int | float) for value in record.values())
    assert read_metrics(home / "tiny" / stage) == records
    assert [r["tokens"] for r in records] == sorted({r["tokens"] for r in records})
    assert state["stage"] == stage and state["step"] == steps and state["finished"] is True
    assert state["loss_history"] == [r["loss"] for r in records] and state["metrics"] == records[-1]
    name, better = ("dev_accuracy", max) if stage in REINFORCED else ("dev_loss", min)
    best = better((records[step - 1] for step in looked), key=lambda record: record[name])
    assert state["best"] == {"step": best["step"], name: best[name]}
    parents = {"pretrain": None, "sft": "pretrain step 80"}
    assert state["parent"] == parents.get(stage, "sft step 60")
    assert state["minutes"] == pytest.approx(sum(r["time/step"] for r in records) / 60)
    left = {p.name for p in (home / "tiny" / stage).iterdir()}
    written = {"metrics.jsonl", f"step_{steps:06d}.pt", f"step_{steps:06d}.json", "run.lock", "run.pid"}
    written |= {"samples.jsonl"} if stage in REINFORCED else set()
    prepared = {"previous-metrics.jsonl"} if stage in ("pretrain", "sft") else set()
    assert left == written | prepared
    checkpoint.require(stage, "tiny", "smoke")


def test_supervised_losses_fall(home):
    for stage, start in (("pretrain", 5.5), ("sft", 1.0)):
        losses = [r["loss"] for r in read_metrics(home / "tiny" / stage)]
        assert losses[0] > start and sum(losses[-5:]) / 5 < 0.6 * losses[0]


def test_the_reward_is_the_sum_of_its_parts_and_samples_show_it(home, monkeypatch):
    monkeypatch.setattr(grpo, "gsm8k_reward", gsm8k_reward)
    records, _ = train("grpo", keep_samples=5)
    for r in records:
        assert r["reward"] == pytest.approx(r["correct"] + 0.1 * r["format"])
        assert 0 <= r["informative"] <= 1 and 1 <= r["length"] <= 10 and r["entropy"] > 0
        assert r["time/step"] == pytest.approx(r["time/rollout"] + r["time/score"] + r["time/update"])
    samples = read_metrics(home / "tiny" / "grpo", "samples.jsonl")
    assert [s["step"] for s in samples] == [step for step in (1, 2, 3, 4) for _ in range(5)]
    assert len({s["question"] for s in samples[:5]}) == 2  # a group of four and one of the next
    assert set(samples[0]) == {"step", "question", "response", "answer", "reward"}


@each_stage
def test_checkpoints_now_and_then_and_the_last_ones_kept(stage, home):
    steps = len(train(stage, save_every=1, keep_last=3)[0])
    kept = [p.name for p in checkpoint.list_checkpoints(home / "tiny" / stage)]
    assert kept == [f"step_{n:06d}.pt" for n in (steps - 2, steps - 1, steps)]
    finished = [checkpoint.load(home / "tiny" / stage / name)["finished"] for name in kept]
    assert finished == [False, False, True]


# ---- the same again --------------------------------------------------------------------------------------


@each_stage
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_same_run_twice_is_the_same(stage, optimizer, tmp_path, monkeypatch):
    train(stage, optimizer=optimizer)
    first = left_behind(stage)
    new_home(tmp_path, monkeypatch)
    train(stage, optimizer=optimizer)
    assert same(left_behind(stage), first)
    train(stage, optimizer=optimizer, seed=1)
    assert not same(left_behind(stage)["state"]["model_state_dict"], first["state"]["model_state_dict"])


@each_stage
def test_looking_and_saving_change_nothing(stage, tmp_path, monkeypatch):
    _, quiet = train(stage, eval_every=99)
    new_home(tmp_path, monkeypatch)
    _, busy = train(stage, eval_every=1, save_every=1)
    assert all(same(busy[name], quiet[name]) for name in ("model_state_dict", "rng", "position"))


@each_stage
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_resumed_run_is_the_run_that_was_not_stopped(stage, optimizer, tmp_path, monkeypatch):
    """Stopped a step after its checkpoint: that step is forgotten and done again."""
    steps = len(train(stage, optimizer=optimizer)[0])
    whole = left_behind(stage)
    home, half = new_home(tmp_path, monkeypatch), steps // 2
    running = STAGES[stage][0](config_of(stage, optimizer=optimizer, save_every=half))
    for _ in range(half + 1):
        next(running)
    running.close()
    torch.manual_seed(99)  # the other process would not be here
    assert len(read_metrics(home / "tiny" / stage)) == half + 1
    rest, _ = train(stage, optimizer=optimizer, save_every=half, resume="latest")
    assert [r["step"] for r in rest] == list(range(half + 1, steps + 1))
    assert same(left_behind(stage), whole)


@pytest.mark.parametrize("stage, name, looks, best", [
    ("sft", "dev_loss", [math.nan, 2.0, 1.5, 1.75, 1.5, 1.625], 3),
    ("grpo", "dev_accuracy", [0.25, 0.5, 0.5, 0.125], 2),
])
def test_the_best_look_so_far_is_kept_and_told(stage, name, looks, best, monkeypatch, capsys):
    """A loss that is no number is never the best, of equal ones it is the first, and a resumed run remembers it."""
    found = iter(looks)
    place = (supervised, "held_out") if stage == "sft" else (grpo, "look")
    monkeypatch.setattr(*place, lambda *_: {name: next(found)})
    first = train(stage, steps=best, eval_every=1)[1]
    assert first["best"] == {"step": best, name: looks[best - 1]} and "better" not in capsys.readouterr().out
    last = train(stage, steps=len(looks), eval_every=1, resume="latest")[1]
    assert last["best"] == first["best"] and last["step"] == len(looks)
    assert f"{stage} was better before: step {best}  {name} {looks[best - 1]}" in capsys.readouterr().out


def test_a_finished_run_has_nothing_to_resume():
    _, state = train("sft")
    records, again = train("sft", resume="latest")
    assert records == [] and same(again, state)


def test_a_new_run_in_the_folder_of_an_old_one_starts_anew(home):
    first = train("grpo", steps=4)[0]
    again = train("grpo", steps=2, lr_floor=1.0, warmup=0)[0]
    assert len(first) == 4 and read_metrics(home / "tiny" / "grpo") == again
    assert [p.name for p in checkpoint.list_checkpoints(home / "tiny" / "grpo")] == ["step_000002.pt"]
    assert {s["step"] for s in read_metrics(home / "tiny" / "grpo", "samples.jsonl")} == {1, 2}


# ---- one batch, however it is split ----------------------------------------------------------------------


@pytest.mark.parametrize("stage, changes", [
    ("pretrain", {}), ("sft", {}), ("grpo", {}), ("grpo", dict(reduction="sequence", kl_coef=0.1)),
    ("grpo", dict(reduction="constant", overlong="mask", ratio_level="sequence")),
])
def test_four_micro_batches_two_and_one_are_the_same_step(stage, changes, tmp_path, monkeypatch):
    """Conversations and responses are of unequal length: a mean of means would be another step.

    By plain gradient descent: Adam would blow up a gradient of 1e-9, which is rounding, to a step of the full rate.
    """
    size = "micro_prompts" if stage == "grpo" else "micro_batch_size"
    monkeypatch.setattr(progress, "build_optimizers",
                        lambda model, *_, **__: Optimizers([torch.optim.SGD(model.parameters(), lr=0.3)]))
    runs = []
    for micro in (4, 2, 1):
        new_home(tmp_path, monkeypatch)
        runs.append(train(stage, steps=3, save_every=1, keep_last=3, **{size: micro}, **changes))
        first = checkpoint.load(checkpoint.checkpoint_path(config_of(stage).folder, 1))["model_state_dict"]
    (one, weights), *others = runs
    assert largest_difference(first, weights["model_state_dict"]) > 1e-3  # it moves
    for records, state in others:
        assert largest_difference(state["model_state_dict"], weights["model_state_dict"]) < 1e-5
        for a, b in zip(without_times(records), without_times(one), strict=True):
            assert a == pytest.approx(b, rel=1e-4, abs=1e-6)


# ---- what is refused -------------------------------------------------------------------------------------


def test_a_checkpoint_of_another_shape_tokenizer_stage_or_optimizer_is_refused(home):
    path = checkpoint.latest(home / "tiny" / "sft")
    state = checkpoint.load(path)
    other = checkpoint.save(home / "elsewhere", {**state, "tokenizer_hash": "0" * 64})
    refused(ValueError, "pretrain checkpoint of step 80 has n_embed = 32, this run 16; set n_embed to 32",
            "pretrain", n_embed=16, resume="latest")
    refused(ValueError, "has context_length = 96, this run 64", "pretrain", context_length=64, resume="latest")
    refused(ValueError, "is a checkpoint of stage pretrain, this is sft; resume from one of sft's own",
            "sft", resume=str(home / "tiny" / "pretrain"))
    refused(ValueError, "was trained with muon.adamw, this run uses adamw; resume with the same",
            "sft", resume="latest", optimizer="adamw", steps=99)
    refused(ValueError, r"sft checkpoint of step 60 was trained with another tokenizer \(00000000, this run has",
            "sft", resume=str(other), steps=99)
    refused(FileNotFoundError, "no checkpoint to resume from at .*grpo", "grpo", resume="latest")
    assert same(checkpoint.load(path), state)  # nothing was lost


@pytest.mark.parametrize("stage, gone, command", [
    ("grpo", "sft", "python -m nanorl sft --preset smoke"), ("sft", "pretrain", "python -m nanorl pretrain"),
    ("sft", "data/instruct.h5", "python -m nanorl prepare"), ("pretrain", "data/corpus.h5", "python -m nanorl prepare"),
    ("pretrain", "tokenizer.json", "python -m nanorl prepare"),
])
def test_what_is_missing_is_named_with_the_command_that_makes_it(stage, gone, command, home):
    (home / "tiny" / gone).rename(home / "gone")
    refused(FileNotFoundError, command, stage)


def test_settings_that_cannot_work():
    for stage, changes, message in [
        ("grpo", dict(group=1), "config field 'group' is 1: input should be greater than or equal to 2"),
        ("pretrain", dict(window=97), "window 97 is longer than context_length 96; lower window"),
        ("pretrain", dict(n_head=3), "n_embed 32 must be a multiple of n_head 3"),
        ("grpo", dict(overlong="penalty", overlong_buffer=11), "overlong_buffer 11 is longer than max_new_tokens 10"),
    ]:
        refused(ValueError, message, stage, **changes)


def write_problems(folder, name, questions):
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"question": q, "answer": "1+1=2\n#### 2"}) for q in questions]
    (folder / name).write_text("\n".join(lines))
    return str(folder)


def test_prompts_too_long_are_counted_and_left_out(home):
    long = [f"{i} " * 60 for i in range(3)]
    data = write_problems(home / "problems", "train.jsonl", [*long, *(f"How many is {i}?" for i in range(4))])
    write_problems(home / "problems", "test.jsonl", [f"What is {i}?" for i in range(16)])
    records, _ = train("grpo", data=data, steps=2)
    assert [r["prompts_too_long"] for r in records] == [3, 3]
    write_problems(home / "problems", "train.jsonl", long)
    refused(ValueError, "none of 3 prompts fits a context of 96 tokens; pretrain with a larger", "grpo", data=data)


def test_a_held_out_question_among_those_to_train_on_is_refused(home):
    data = write_problems(home / "problems", "train.jsonl", ["How many?", "Why?"])
    write_problems(home / "problems", "test.jsonl", [f"What is {i}?" for i in range(15)] + ["how  MANY?"])
    refused(ValueError, "1 held-out questions are also in the training set", "grpo", data=data)
