"""GRPO's variants: each runs, each does what sets it apart, and a toy reward is learned."""

import math
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
import torch
from tiny_run import config_of, largest_difference, new_home, share_of_e, train

from nanorl import checkpoint
from nanorl.data.prompts import PromptStream
from nanorl.objectives.advantages import group_advantages, soft_overlong_penalty
from nanorl.train import grpo

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    return new_home(tmp_path, monkeypatch)


def constant(value):
    """A reward that never differs, so that no group teaches anything."""
    return lambda text, gold, format_bonus: {"reward": value, "correct": 0.0, "format": 1.0}


@pytest.fixture
def slope(monkeypatch):
    """Every group teaches something."""
    monkeypatch.setattr(grpo, "gsm8k_reward", share_of_e)


class Parts:
    """What `grpo.train` has at hand in a step, for tests that call its functions one by one."""

    def __init__(self, **changes):
        self.cfg = config_of("grpo", **changes)
        self.policy, self.tokenizer, _ = checkpoint.parent_of(self.cfg, "sft")
        self.policy.train()
        problems, _, _ = grpo.choose_problems(self.cfg, self.tokenizer, 96)
        self.stream = PromptStream(problems, self.cfg.prompts)
        self.optimizers = self.cfg.build_optimizers(self.policy)

    def sample(self, step=0):
        return grpo.sample(self.cfg, self.policy, self.tokenizer, self.stream, step, grpo.Clock())

    def update(self, rollout, advantages=None, reference_logprobs=None, prompts=None):
        if advantages is None:
            advantages = group_advantages(rollout.rewards.view(-1, self.cfg.group)).flatten()
        prompts = torch.arange(len(rollout.problems)) if prompts is None else prompts
        figures = grpo.update(self.cfg, self.policy, self.policy, self.optimizers, rollout, advantages,
                              reference_logprobs, prompts, CPU)
        return figures, {name: p.grad.clone() for name, p in self.policy.named_parameters()}


# ---- every variant runs ----------------------------------------------------------------------------------

VARIANTS = [
    dict(), dict(kl_coef=0.1, kl_kind="k1"), dict(kl_coef=0.1, kl_kind="k2"), dict(kl_coef=0.1, kl_kind="k3"),
    dict(reduction="sequence"), dict(reduction="constant"), dict(overlong="mask"),
    dict(overlong="penalty", overlong_buffer=4), dict(dynamic_sampling=2), dict(ratio_level="sequence"),
    dict(minibatches=3), dict(epochs=2), dict(epochs=2, minibatches=2, ratio_level="sequence", reduction="sequence"),
    dict(baseline="leave_one_out", advantage_scale="none"), dict(temperature=0.7), dict(optimizer="muon", muon_lr=0.01),
    dict(kl_coef=0.1, dynamic_sampling=1, overlong="mask", reduction="constant", epochs=2, micro_prompts=1),
]


@pytest.mark.parametrize("changes", VARIANTS, ids=lambda changes: ",".join(f"{k}={v}" for k, v in changes.items()))
def test_each_variant_runs_and_starts_at_ratio_1(changes, slope, monkeypatch):
    calls, copies, loss = [], [], grpo.grpo_loss

    def watched_loss(logprobs, old, advantages, mask, reference, *more):
        result = loss(logprobs, old, advantages, mask, reference, *more)
        calls.append((result[1]["ratio"], reference))
        return result

    monkeypatch.setattr(grpo, "grpo_loss", watched_loss)
    frozen_copy = grpo.frozen_copy
    monkeypatch.setattr(grpo, "frozen_copy", lambda x: copies.append(type(x).__name__) or frozen_copy(x))
    before = checkpoint.require("sft", "tiny", "smoke").model.state_dict()
    records, state = train("grpo", steps=2, **changes)
    # the first ratio of the first update is 1, the drift from what was recorded is rounding
    assert float((calls[0][0] - 1).abs().max()) < 1e-4
    assert all(r["drift"] < 1e-4 for r in records)
    # a reference is held, and read, only where there is a KL term
    wanted = "kl_coef" in changes
    assert copies == (["Transformer"] if wanted else [])
    assert all((reference is not None) == wanted for _, reference in calls)
    assert all(r["kl"] == 0 for r in records) or wanted
    updates = changes.get("epochs", 1) * changes.get("minibatches", 1)
    micro = changes.get("micro_prompts", 4)
    assert len(calls) == 2 * updates * (4 // micro)
    if updates == 1:
        assert all(r["clip_fraction"] == 0 for r in records)
    assert all(math.isfinite(value) for r in records for value in r.values())
    assert 0 < largest_difference(state["model_state_dict"], before) < 0.1


def test_the_kl_starts_at_0_and_grows_as_the_policy_moves(slope):
    for kind in ("k2", "k3"):
        records, _ = train("grpo", steps=6, kl_coef=1e-6, kl_kind=kind, lr=1e-3)
        kl = [r["kl"] for r in records]
        assert abs(kl[0]) < 1e-6 < kl[1] and kl[-1] > 1.5 * kl[1]


def test_a_strong_kl_holds_the_policy_back(slope):
    before = checkpoint.require("sft", "tiny", "smoke").model.state_dict()
    free, held = (train("grpo", steps=8, kl_coef=coef, lr=3e-3)[0][-1]["kl"] for coef in (1e-6, 30.0))
    assert 0 < held < free / 3
    assert largest_difference(checkpoint.require("sft", "tiny", "smoke").model.state_dict(), before) == 0


def test_later_updates_of_a_rollout_are_clipped(slope):
    records, _ = train("grpo", steps=3, epochs=4, lr=1e-2, clip_low=0.01, clip_high=0.01, warmup=0)
    assert all(r["clip_fraction"] > 0.02 for r in records)


# ---- what sets them apart --------------------------------------------------------------------------------


@pytest.mark.parametrize("choices", [
    [dict(reduction=how) for how in ("token", "sequence", "constant")],
    [dict(kl_coef=0.5, kl_kind=kind) for kind in ("k1", "k2", "k3")], [dict(kl_coef=0.5), dict(kl_coef=0.1)],
    [dict(advantage_scale="std"), dict(advantage_scale="none")], [dict(), dict(baseline="leave_one_out")],
    [dict(), dict(ratio_level="sequence")], [dict(clip_low=0.2), dict(clip_low=0.01)],
    [dict(clip_high=0.28), dict(clip_high=0.01)],
], ids=lambda choices: str(choices[-1]))
def test_each_choice_makes_another_step(choices, slope):
    """The first rollout is the same; its second update, where ratios are no longer 1, is not."""
    norms = [train("grpo", steps=1, epochs=2, lr=1e-2, warmup=0, **choice)[0][0]["grad_norm"] for choice in choices]
    assert all(abs(a / b - 1) > 1e-3 for a, b in combinations(norms, 2))


def test_what_the_loss_is_averaged_over_by_hand(slope):
    """At ratio 1 a token's loss is minus its advantage, so the loss follows from advantages and lengths alone."""
    advantages = torch.linspace(-1, 2, 16)
    for reduction in ("token", "sequence", "constant"):
        parts = Parts(reduction=reduction)
        rollout, _ = parts.sample()
        lengths = rollout.lengths.float()
        total = float((advantages * lengths).sum())
        by_hand = {"token": -total / float(lengths.sum()), "sequence": -float(advantages.mean()),
                   "constant": -total / (16 * 10)}  # 16 responses of at most 10 tokens
        assert parts.update(rollout, advantages)[0]["loss"] == pytest.approx(by_hand[reduction], abs=1e-5)


@pytest.mark.parametrize("changes", [dict(), dict(reduction="sequence"), dict(reduction="constant"),
                                     dict(overlong="mask"), dict(ratio_level="sequence"), dict(micro_prompts=1)])
def test_leaving_out_groups_of_equal_rewards_leaves_the_gradient(changes, slope):
    """Their tokens are counted, or the others would weigh more; their forward pass is what is saved."""
    results = []
    for leave_out in (True, False):
        parts = Parts(max_grad_norm=0.0, **changes)
        rollout, _ = parts.sample()
        rollout.rewards.view(4, 4)[:] = torch.tensor([[0.5] * 4, [1.0, 0.0, 0.2, 0.0], [0.5] * 4, [0.0, 0.3, 0.0, 1.0]])
        rows = []
        parts.policy.register_forward_pre_hook(lambda module, inputs, rows=rows: rows.append(len(inputs[0])))
        # with reference log-probs nothing is left out; kl_coef is 0, so they are not used
        reference = None if leave_out else torch.zeros_like(rollout.logprobs)
        figures, gradients = parts.update(rollout, reference_logprobs=reference)
        results.append((sum(rows), figures["loss"], gradients, parts.policy.state_dict()))
    (few, loss, gradients, weights), (all_rows, all_loss, all_gradients, all_weights) = results
    assert (few, all_rows) == (2, 4) and loss == pytest.approx(all_loss, abs=1e-6)
    assert max(float(g.abs().max()) for g in gradients.values()) > 1e-3
    assert largest_difference(gradients, all_gradients) < 1e-6
    assert largest_difference(weights, all_weights) < 1e-5


def test_a_rollout_that_teaches_nothing_changes_nothing(monkeypatch):
    monkeypatch.setattr(grpo, "gsm8k_reward", constant(0.3))
    before = checkpoint.require("sft", "tiny", "smoke").model.state_dict()
    records, state = train("grpo", steps=2)
    assert [(r["informative"], r["grad_norm"], r["loss"]) for r in records] == [(0.0, 0.0, 0.0)] * 2
    assert largest_difference(state["model_state_dict"], before) == 0


def test_the_update_raises_what_was_better_than_its_group(slope):
    parts = Parts(lr=1e-3)
    rollout, _ = parts.sample()
    advantages = group_advantages(rollout.rewards.view(4, 4)).flatten()

    def logprobs():
        with torch.no_grad():
            values, _ = grpo.recompute_logprobs(parts.policy, parts.policy.lm_head, rollout, 1.0)
        return values.sum(dim=1)

    before = logprobs()
    parts.update(rollout)
    assert float(((logprobs() - before) * advantages).sum()) > 0.1


def test_only_the_prompts_of_the_minibatch_are_learned_from(slope):
    """The gradient of a minibatch is that of a rollout of those prompts alone."""
    parts, alone = Parts(), Parts()
    rollout, _ = parts.sample()
    advantages = group_advantages(rollout.rewards.view(4, 4))
    _, gradients = parts.update(rollout, advantages.flatten(), prompts=torch.tensor([3, 1]))
    _, expected = alone.update(rollout.select(torch.tensor([1, 3])), advantages[[1, 3]].flatten())
    assert largest_difference(gradients, expected) < 1e-6


def test_minibatches_hold_every_prompt_once_an_epoch(slope):
    parts = Parts(minibatches=3, epochs=2)
    rollout, _ = parts.sample()
    some = [part.tolist() for part in grpo.minibatches(parts.cfg, rollout, step=0)]
    assert [len(part) for part in some] == [2, 1, 1] * 2
    one, two = sum(some[:3], []), sum(some[3:], [])
    assert sorted(one) == sorted(two) == [0, 1, 2, 3] and one != two
    few = Parts(minibatches=3, epochs=1)
    drawn = list(grpo.minibatches(few.cfg, rollout.select(torch.tensor([0])), step=0))
    assert [part.tolist() for part in drawn] == [[0]] * 3  # fewer groups than minibatches: never an empty step


def test_overlong_responses_are_left_out_of_the_loss_and_of_its_count(slope):
    """The same gradient as with their advantages at 0, but for what it is divided by."""
    parts, plain = Parts(overlong="mask", max_grad_norm=0.0), Parts(max_grad_norm=0.0)
    rollout, _ = parts.sample()
    rollout = replace(rollout, ended=torch.arange(16) % 3 == 0)
    advantages = torch.linspace(-1, 2, 16)
    _, gradients = parts.update(rollout, advantages)
    _, expected = plain.update(rollout, advantages * rollout.ended)
    share = int(rollout.lengths[rollout.ended].sum()) / int(rollout.lengths.sum())
    assert largest_difference({name: g * share for name, g in gradients.items()}, expected) < 1e-6
    assert max(float(g.abs().max()) for g in expected.values()) > 1e-3


def test_the_soft_penalty_is_added_to_the_reward_before_the_advantages(slope):
    parts = Parts(overlong="penalty", overlong_buffer=6)
    rollout, _ = parts.sample()
    penalty = soft_overlong_penalty(rollout.lengths, 10, 6)
    assert len(penalty.unique()) > 1
    torch.testing.assert_close(rollout.rewards, rollout.parts["reward"] + penalty)


@pytest.mark.parametrize("rounds, groups", [(0, 4), (1, 3), (5, 4)])
def test_dynamic_sampling_replaces_groups_that_teach_nothing(rounds, groups, monkeypatch):
    """Problems in turn: every second one gives all its responses the same reward, and its group is thrown away."""
    asked = []

    def reward(text, gold, format_bonus):
        asked.append(text)
        number = (len(asked) - 1) // 4  # of the group
        useful = number % 2 == 1 and number != 3
        value = float(len(asked) % 4 == 0) if useful else 1.0
        return {"reward": value, "correct": value, "format": 0.0}

    monkeypatch.setattr(grpo, "gsm8k_reward", reward)
    parts = Parts(dynamic_sampling=rounds)
    rollout, figures = parts.sample()
    informative = [bool((group != group[0]).any()) for group in rollout.rewards.view(-1, 4)]
    assert len(rollout.problems) == groups
    if rounds:
        assert all(informative)
    else:
        assert informative == [False, True, False, False]
    # one useful group in the first round of four, two in each that follows; sampled until there are four, or no more
    sampled = {0: 4, 1: 8, 5: 12}[rounds]
    assert len(asked) == 4 * sampled and parts.stream.position == sampled
    useful = {0: 1, 1: 3, 5: 5}[rounds]
    assert figures["informative"] == pytest.approx(useful / sampled)  # of all that was sampled


def test_dynamic_sampling_that_finds_nothing_still_makes_a_step(monkeypatch):
    monkeypatch.setattr(grpo, "gsm8k_reward", constant(0.0))
    records, _ = train("grpo", steps=2, dynamic_sampling=1)
    assert [r["grad_norm"] for r in records] == [0.0, 0.0]


# ---- learning --------------------------------------------------------------------------------------------


def test_a_reward_for_a_letter_is_learned(slope):
    """The share of e in the response: from what the SFT model writes anyway to most of it."""
    records, _ = train("grpo", steps=30, prompts=8, group=8, micro_prompts=8, lr=3e-3, eval_every=99)
    rewards = [r["reward"] for r in records]
    first, last = sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3
    assert first < 0.2 and last > first + 0.4
    tenths = [sum(rewards[i : i + 10]) / 10 for i in (0, 10, 20)]
    assert all(a < b for a, b in pairwise(tenths))
