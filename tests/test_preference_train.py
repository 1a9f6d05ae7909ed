"""The reward model, DPO, ORPO and KTO in training: what they start from, what they learn, what they need not know."""

import math

import pytest
import torch
from tiny_run import PAIRS, config_of, largest_difference, new_home, train

from nanorl import checkpoint
from nanorl.data.preference import collate, encode_pairs, load_pairs
from nanorl.heads import RewardModel
from nanorl.objectives.logprobs import token_logprobs
from nanorl.train import preference

each_method = pytest.mark.parametrize("stage", PAIRS)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    return new_home(tmp_path, monkeypatch)


def sft():
    return checkpoint.require("sft", "tiny", "smoke")


def some_pairs(n=6):
    tokenizer = sft().tokenizer
    return encode_pairs(tokenizer, load_pairs("tinyworld", "train", n, 0, 10, 1), 96)[0], tokenizer.pad


# ---- where they start --------------------------------------------------------------------------------------

@pytest.mark.parametrize(("stage", "changes", "loss"), [
    ("dpo", {}, math.log(2)), ("dpo", {"label_smoothing": 0.2}, math.log(2)), ("dpo", {"loss": "ipo"}, 25.0),
    ("kto", {}, 0.5), ("kto", {"desirable_weight": 2.0, "undesirable_weight": 2.0}, 1.0),
])
def test_at_the_reference_the_loss_is_known(stage, changes, loss):
    records, _ = train(stage, steps=1, **changes)
    assert records[0]["loss"] == pytest.approx(loss, rel=1e-3)


def test_log_probs_of_replies_are_those_of_each_reply_alone():
    pairs, pad = some_pairs()
    model = sft().model
    batch = collate(pairs, pad)
    found, lengths = preference.pair_logprobs(model, model.lm_head, batch["tokens"], batch["documents"])
    for i, (prompt, *replies) in enumerate(pairs):
        for j, reply in enumerate(replies):
            row = torch.tensor([prompt + reply])
            alone = token_logprobs(model(row), row)[0, len(prompt) - 1 :].sum()
            torch.testing.assert_close(found[i, j], alone, atol=1e-3, rtol=0)
            assert lengths[i, j] == len(reply)


def test_reference_log_probs_do_not_depend_on_how_they_are_batched():
    pairs, pad = some_pairs(7)
    model = sft().model
    one, three = (preference.reference_logprobs(config_of("dpo", micro_batch_size=n), model, pairs, pad, "train",
                                                torch.device("cpu")) for n in (1, 3))
    assert one.shape == (7, 2)
    torch.testing.assert_close(one, three, atol=1e-4, rtol=0)


def test_the_baseline_of_kto_is_that_of_the_whole_batch():
    pairs, pad = some_pairs(5)
    model, batch = sft().model, None
    for size in (1, 2, 5):
        rows = collate(pairs, pad) | {"reference": torch.full((5, 2), -100.0)}
        made = preference.with_baseline(config_of("kto", micro_batch_size=size), model, rows, torch.device("cpu"))
        logprobs, _ = preference.pair_logprobs(model, model.lm_head, rows["tokens"], rows["documents"])
        expected = (logprobs[:, 1] + 100).mean().clamp(min=0).detach()
        torch.testing.assert_close(made["baseline"], expected.expand(5), atol=1e-3, rtol=1e-4)
        batch = made
    assert float(batch["baseline"][0]) > 1
    rows["reference"] = torch.full((5, 2), 100.0)  # further away than the reference: cut off at 0
    cut = preference.with_baseline(config_of("kto"), model, rows, torch.device("cpu"))
    assert not cut["baseline"].any()


@pytest.mark.parametrize("batch", [1, 3])
@each_method
def test_batches_of_one_and_odd_ones(stage, batch):
    records, _ = train(stage, steps=3, batch_size=batch, micro_batch_size=2, pairs=5)
    assert all(math.isfinite(value) for r in records for value in r.values())


# ---- what they learn ---------------------------------------------------------------------------------------

@each_method
def test_held_out_pairs_are_told_apart_and_margins_grow(stage):
    changes = dict(steps=40, pairs=400, dev_pairs=100, batch_size=16, micro_batch_size=16, eval_every=20)
    records, state = train(stage, **changes, eval_batches=99, lr=3e-3)
    first, last = records[:5], records[-5:]
    assert sum(r["loss"] for r in last) < sum(r["loss"] for r in first)
    assert records[-1]["dev_accuracy"] > 0.7 and records[-1]["dev_pairs"] == (200 if stage == "kto" else 100)
    assert records[-1]["dev_accuracy_low"] < records[-1]["dev_accuracy"] < records[-1]["dev_accuracy_high"] or (
        records[-1]["dev_accuracy"] == 1)
    if stage != "kto":
        assert sum(r["margin"] for r in last) > sum(r["margin"] for r in first)
    assert state["parent"] == "sft step 60"


def test_the_reward_model_comes_back_with_its_head():
    _, state = train("reward", steps=3)
    model = checkpoint.require("reward", "tiny", "smoke").model
    assert isinstance(model, RewardModel) and largest_difference(model.state_dict(), state["model_state_dict"]) == 0


def test_centred_rewards_of_a_pair_add_up_to_less():
    spread = [abs(train("reward", steps=30, lr=3e-3, centre=c)[0][-1]["reward"]) for c in (0.0, 1.0)]
    assert spread[1] < spread[0] or spread[1] < 0.05


@pytest.mark.parametrize("stage", ["dpo", "orpo", "kto"])
def test_the_policy_comes_back_as_a_language_model(stage):
    before = sft().model.state_dict()
    train(stage, steps=3)
    assert 0 < largest_difference(checkpoint.require(stage, "tiny", "smoke").model.state_dict(), before) < 0.1


def test_noise_is_in_the_training_pairs_only():
    cfg = config_of("reward", noise=0.4, pairs=200, dev_pairs=200)
    tokenizer = sft().tokenizer
    clean = cfg.model_copy(update={"noise": 0.0})
    for split, share in (("train", 0.4), ("heldout", 0.0)):
        noisy, plain = (preference.pairs_of(c, tokenizer, split) for c in (cfg, clean))
        swapped = sum(a[1] != b[1] for a, b in zip(noisy, plain, strict=True)) / len(plain)
        assert swapped == pytest.approx(share, abs=0.12)


# ---- what goes wrong ---------------------------------------------------------------------------------------

@each_method
def test_pairs_that_are_not_there(stage, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere is not here; give tinyworld"):
        train(stage, preferences=str(tmp_path / "nowhere"))


def test_equal_pairs_are_dropped_with_a_word_and_nothing_left_is_an_error(tmp_path, capsys):
    same = '{"prompt": "Hi", "chosen": "yes", "rejected": "yes"}\n'
    good = '{"prompt": "Hi there", "chosen": "yes", "rejected": "no"}\n'
    for name, lines in (("train", same + good * 3), ("test", good * 2)):
        (tmp_path / f"{name}.jsonl").write_text(lines)
    train("reward", preferences=str(tmp_path), steps=1, batch_size=2, micro_batch_size=2)
    assert "of 4 train pairs 1 equal after truncation were dropped" in capsys.readouterr().out
    (tmp_path / "train.jsonl").write_text(same)
    with pytest.raises(ValueError, match="all 1 train pairs of .* are equal after truncation to 96 tokens"):
        train("reward", preferences=str(tmp_path), steps=1)
