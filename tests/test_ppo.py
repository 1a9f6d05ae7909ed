"""PPO: each choice runs and does what sets it apart; what it learns from is right; a toy reward is learned."""

import math
import warnings

import pytest
import torch
from tiny_run import config_of, largest_difference, new_home, share_of_e, train

from nanorl import checkpoint
from nanorl.data.prompts import PromptStream
from nanorl.heads import ActorCritic, RewardModel
from nanorl.objectives.advantages import gae
from nanorl.rollout import recompute_with_values
from nanorl.train import ppo, rl

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setattr(ppo, "gsm8k_reward", share_of_e)
    return new_home(tmp_path, monkeypatch)


class Parts:
    """What `ppo.train` has at hand in a step, for tests that call its functions one by one."""

    def __init__(self, **changes):
        self.cfg = config_of("ppo", **changes)
        self.policy, self.tokenizer, _ = checkpoint.parent_of(self.cfg, "sft")
        self.model = ActorCritic(self.policy, self.cfg.critic == "separate").train()
        problems, _, _ = rl.choose_problems(self.cfg, self.tokenizer, 96)
        self.stream = PromptStream(problems, self.cfg.prompts)
        self.optimizers = self.cfg.build_optimizers(self.model)

    def sample(self, judge=None):
        return ppo.sample(self.cfg, self.policy, judge, self.tokenizer, self.stream, 0, rl.Clock())

    def judged(self, rollout, reference=None, kl_coef=0.0):
        return ppo.judged(self.cfg, self.model, rollout, reference, kl_coef, CPU)

    def gradients(self, rollout, experience, kl_coef=0.0):
        """Those of one update on the whole rollout, and its figures."""
        everything = torch.arange(len(rollout.problems))
        found = ppo.update(self.cfg, self.model, self.model, self.optimizers, rollout, experience, kl_coef, everything,
                           CPU)
        return {name: p.grad.clone() for name, p in self.model.named_parameters()}, found


# ---- every choice runs -----------------------------------------------------------------------------------

VARIANTS = [
    dict(), dict(group=1), dict(critic="separate"), dict(entropy_coef=0.1), dict(kl_coef=0.1),
    dict(kl_coef=0.1, kl_in="loss"), dict(kl_coef=0.1, kl_target=0.01), dict(kl_limit=1e-6), dict(value_clip=0.0),
    dict(whiten_advantages=False, whiten_rewards=True), dict(end_penalty=0.5, monitor=2), dict(gamma=0.9, lam=0.5),
    dict(optimizer="muon", muon_lr=0.01), dict(epochs=1, minibatches=1, micro_prompts=1, temperature=0.7),
]


@pytest.mark.parametrize("changes", VARIANTS, ids=lambda changes: ",".join(f"{k}={v}" for k, v in changes.items()))
def test_each_choice_runs_and_starts_where_the_sampler_was(changes):
    before = checkpoint.require("sft", "tiny", "smoke").model.state_dict()
    records, state = train("ppo", steps=2, **changes)
    assert all(r["drift"] < 1e-4 for r in records)  # recorded and recomputed log-probs, so the first ratio is 1
    assert all(math.isfinite(value) for r in records for value in r.values())
    assert records[0]["kl"] == pytest.approx(0, abs=1e-5)  # the reference is where the policy starts
    assert (records[1]["kl"] != 0) == ("kl_coef" in changes)  # and is held only where there is a KL term
    policy = checkpoint.require("ppo", "tiny", "smoke").model
    assert 0 < largest_difference(policy.state_dict(), before) < 0.1
    critic = [name for name in state["model_state_dict"] if name.startswith("critic.")]
    assert bool(critic) == (changes.get("critic") == "separate")


def test_updates_are_counted_and_end_early_at_the_kl_limit():
    free, held = (train("ppo", steps=2, lr=1e-2, **more)[0] for more in ({}, {"kl_limit": 1e-6}))
    assert [r["updates"] for r in free] == [4, 4]  # 2 epochs of 2 minibatches
    assert all(1 <= r["updates"] < 4 for r in held)
    assert all(r["moved"] > 1e-6 for r in held)


def test_nothing_is_changed_by_the_update_that_goes_too_far():
    parts = Parts(kl_limit=1e-9, lr=1e-2)
    rollout, _ = parts.sample()
    rollout.logprobs = rollout.logprobs - 0.1 * rollout.response_mask  # the policy has moved since
    before = {name: p.clone() for name, p in parts.model.named_parameters()}
    _, found = parts.gradients(rollout, parts.judged(rollout)[0])
    assert not found["stepped"] and all(torch.equal(before[name], p) for name, p in parts.model.named_parameters())


@pytest.mark.parametrize(("kl", "after"), [(0.1, 1.0), (0.2, 1.02), (0.05, 0.98), (0.11, 1.01), (0.0, 0.98)])
def test_the_adapted_kl_weight_by_hand(kl, after):
    assert ppo.adapted(config_of("ppo", kl_coef=1.0, kl_target=0.1), 1.0, kl) == pytest.approx(after)
    assert ppo.adapted(config_of("ppo", kl_coef=1.0), 1.0, kl) == 1.0


def test_an_adapted_kl_weight_is_taken_along_when_resumed():
    records, state = train("ppo", steps=2, kl_coef=0.1, kl_target=0.5, save_every=1)
    assert records[1]["kl_coef"] == pytest.approx(0.1 * 0.98)
    assert state["history"]["kl_coef"] == [pytest.approx(0.1 * 0.98**2)]
    more, _ = train("ppo", steps=3, kl_coef=0.1, kl_target=0.5, resume="latest")
    assert more[0]["kl_coef"] == state["history"]["kl_coef"][0]


def test_a_target_needs_a_weight_to_start_from():
    with pytest.raises(ValueError, match="set kl_coef to start from"):
        config_of("ppo", kl_target=0.1)


# ---- what it learns from ---------------------------------------------------------------------------------

def test_the_reward_stands_at_the_last_token_and_nowhere_else():
    parts = Parts()
    rollout, _ = parts.sample()
    rewards = ppo.token_rewards(parts.cfg, rollout)
    for row, mask, total in zip(rewards, rollout.response_mask, rollout.rewards, strict=True):
        last = int(mask.nonzero().max())
        assert row[last] == total and float(row.abs().sum()) == pytest.approx(abs(float(total)))


def test_whitened_rewards_have_a_deviation_of_1_and_keep_their_sign():
    parts = Parts(whiten_rewards=True)
    rollout, _ = parts.sample()
    rollout.rewards = torch.tensor([1.0, 3.0] * 8)
    found = ppo.token_rewards(parts.cfg, rollout).sum(dim=1)
    torch.testing.assert_close(found, torch.tensor([1.0, 3.0] * 8), atol=1e-5, rtol=0)  # mean 2, deviation 1 already
    rollout.rewards = torch.tensor([0.0, 4.0] * 8)
    torch.testing.assert_close(ppo.token_rewards(parts.cfg, rollout).sum(dim=1), torch.tensor([1.0, 3.0] * 8))


def test_advantages_are_those_of_gae_over_reward_minus_kl():
    parts = Parts(whiten_advantages=False, kl_coef=0.5, lam=0.8)
    torch.nn.init.normal_(parts.model.value_head.weight)
    rollout, _ = parts.sample()
    reference = rollout.logprobs - 0.2 * rollout.response_mask  # a KL of 0.2 at each token
    experience, figures = parts.judged(rollout, reference, kl_coef=0.5)
    expected = ppo.token_rewards(parts.cfg, rollout) - 0.5 * 0.2 * rollout.response_mask
    advantages, returns = gae(expected, experience.values, rollout.response_mask, 1.0, 0.8)
    torch.testing.assert_close(experience.advantages, advantages)
    torch.testing.assert_close(experience.returns, returns)
    assert figures["kl"] == pytest.approx(0.2, abs=1e-5)
    left = (returns - experience.values)[rollout.response_mask]
    share = 1 - float(left.var(unbiased=False) / returns[rollout.response_mask].var(unbiased=False))
    assert figures["explained_variance"] == pytest.approx(share, abs=1e-4)


def test_whitened_advantages_have_mean_0_and_deviation_1():
    parts = Parts()
    rollout, _ = parts.sample()
    found = parts.judged(rollout)[0].advantages[rollout.response_mask]
    assert float(found.mean()) == pytest.approx(0, abs=1e-5)
    assert float(found.std(unbiased=False)) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("separate", [False, True])
def test_values_are_those_before_each_token(separate):
    parts = Parts(critic="separate" if separate else "shared")
    torch.nn.init.normal_(parts.model.value_head.weight)
    rollout, _ = parts.sample()
    values = recompute_with_values(parts.model, parts.policy.lm_head, rollout, 1.0)[2]
    critic = parts.model.critic if separate else parts.policy
    for i in range(0, len(values), 5):
        row = rollout.tokens[i][rollout.mask[i]]  # prompt and response without padding
        alone = parts.model.value_head(critic.forward_hidden(row[None]))[0]
        n = int(rollout.lengths[i])
        torch.testing.assert_close(values[i][rollout.response_mask[i]], alone[-n - 1 : -1], atol=1e-4, rtol=0)


def test_an_entropy_bonus_makes_the_policy_less_sure():
    entropies = [train("ppo", steps=3, lr=3e-3, entropy_coef=c)[0][-1]["entropy"] for c in (0.0, 1.0)]
    assert entropies[1] > entropies[0] + 0.05


def test_the_kl_in_the_loss_pulls_at_the_weights_and_that_in_the_reward_does_not():
    def with_kl(where):
        parts = Parts(kl_coef=1.0, kl_in=where)
        rollout, _ = parts.sample()
        reference = rollout.logprobs - 0.5 * rollout.response_mask
        experience, _ = parts.judged(rollout, reference, kl_coef=1.0)
        experience.advantages = torch.zeros_like(experience.advantages)
        experience.returns = experience.values
        gradients, _ = parts.gradients(rollout, experience, kl_coef=1.0)
        return max(float(g.abs().max()) for g in gradients.values())

    assert with_kl("loss") > 1e-3 and with_kl("reward") == 0


# ---- the learned reward ----------------------------------------------------------------------------------

def test_without_a_reward_model_it_says_how_to_get_one():
    with pytest.raises(FileNotFoundError, match="no reward model in .*python -m nanorl reward --preset smoke"):
        train("ppo", reward="model")


def test_learned_rewards_are_those_of_each_response_alone():
    train("reward")
    parts = Parts(reward="model", micro_prompts=3)
    judge = checkpoint.require("reward", "tiny", "smoke").model
    assert isinstance(judge, RewardModel) and not judge.training
    rollout, figures = parts.sample(judge)
    for i in range(0, len(rollout.rewards), 3):
        row = rollout.tokens[i][rollout.mask[i]]
        torch.testing.assert_close(rollout.rewards[i], judge(row[None])[0, -1].detach(), atol=1e-4, rtol=0)
    assert figures["reward"] == pytest.approx(float(rollout.rewards.mean()), abs=1e-5)
    assert figures["correct"] == pytest.approx(float(rollout.parts["correct"].mean()))  # the truth is watched


def test_it_is_trained_by_the_learned_reward_and_unended_responses_pay_for_it():
    train("reward")
    records, _ = train("ppo", reward="model", end_penalty=2.0, monitor=1, kl_coef=0.05)
    assert {"parted", "repetition", "hollow"} <= set(records[0])
    parts, judge = Parts(reward="model", end_penalty=2.0), checkpoint.require("reward", "tiny", "smoke").model
    rollout, _ = parts.sample(judge)
    plain = ppo.learned_rewards(parts.cfg, judge, rollout)
    torch.testing.assert_close(rollout.rewards, plain - 2.0 * (~rollout.ended))
    assert not rollout.ended.all()


def test_the_monitor_warns_once_when_reward_and_truth_part():
    cfg, history = config_of("ppo", monitor=1), {}
    truths = [0.5, 0.4, 0.3, 0.6, 0.4]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = [rl.watch(cfg, history, {"step": i, "reward": float(i), "correct": c}) for i, c in enumerate(truths)]
    assert [f["parted"] for f in found] == [0, 1, 1, 0, 1]
    assert len(told) == 2 and "ppo step 1: reward and truth have parted" in str(told[0].message)
    assert rl.watch(config_of("ppo"), {}, {"step": 1}) == {}


# ---- it learns -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_a_toy_reward_is_learned(critic):
    records, _ = train("ppo", steps=25, prompts=16, lr=3e-3, warmup=2, critic=critic, eval_every=99)
    rewards = [r["reward"] for r in records]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_the_critic_learns_what_to_expect(critic):
    """On one rollout, again and again: what a response was worth is explained better and better."""
    parts = Parts(critic=critic, prompts=12, group=1, lr=5e-3, value_clip=0.0, lam=1.0)
    rollout, _ = parts.sample()
    rollout.rewards = torch.tensor([0.0, 1.0, 2.0] * 4)
    explained = []
    for _ in range(40):
        experience, figures = parts.judged(rollout)
        experience.advantages = torch.zeros_like(experience.advantages)
        parts.gradients(rollout, experience)
        explained.append(figures["explained_variance"])
    assert explained[0] == pytest.approx(0, abs=1e-3) and explained[-1] > 0.6
