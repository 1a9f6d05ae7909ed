"""PPO: reinforcement learning with a critic, from answers that a program can check or from a learned reward.

GRPO asks how a response did beside its group; PPO asks a critic how much reward was to be expected, at each token.
A step, in order:

 1. sample responses;
 2. score them, by the verifier or by the reward model, at their last token; the verifier's verdict is kept as truth;
 3. the critic's values; the KL to the reference, taken off the reward of each token; advantages and returns by GAE;
 4. update over epochs of minibatches: clipped policy loss, clipped value loss, entropy bonus; stop early where the
    policy has moved too far;
 5. adapt the KL's weight, measure, log, save.

Follows PPO (Schulman et al. 2017, arXiv:1707.06347) as used on language models (Ziegler et al. 2019,
arXiv:1909.08593; InstructGPT, arXiv:2203.02155). Simplified: no pretraining term, and sampling waits for the update.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from nanorl import checkpoint, distributed, runtime
from nanorl.data.prompts import PromptStream
from nanorl.heads import ActorCritic, RewardModel, frozen_copy, reply_rewards
from nanorl.model import Transformer
from nanorl.objectives.advantages import gae
from nanorl.objectives.masking import masked_whiten
from nanorl.objectives.policy import clipped_surrogate, clipped_value_loss, kl_estimate, reduce
from nanorl.optim import Optimizers, clip_and_step
from nanorl.rewards.verifiers import gsm8k_reward
from nanorl.rollout import Rollout, group_rows, pack_groups, recompute_with_values
from nanorl.stopping import check, together
from nanorl.tokenizer import Tokenizer
from nanorl.train.progress import accumulate, guard, restore, session, training_forward
from nanorl.train.rl import (
    Clock,
    RLConfig,
    act,
    choose_problems,
    for_reading,
    in_parts,
    look,
    minibatches,
    moments,
    over_all_ranks,
    precision_drift,
    reference_of,
    token_sums,
    watch,
)

KL_RATE, KL_ERROR = 0.1, 0.2  # of the adaptive KL weight: how fast, and the largest error that counts


class PPOConfig(RLConfig):
    """PPO's settings. The defaults are PPO from the verifier without a KL term."""

    stage: ClassVar[str] = "ppo"

    minibatches: int = Field(4, ge=1, description="optimizer steps over each epoch of a rollout")
    reward: Literal["verifier", "model"] = Field("verifier", description="what a response is paid by: the check of its "
                                                 "answer, or the run's reward model")
    end_penalty: float = Field(0.0, ge=0, description="taken off the reward of a response that did not end")
    whiten_rewards: bool = Field(False, description="divide rewards by the standard deviation of the step's")

    critic: Literal["shared", "separate"] = Field("shared", description="a head on the policy's own Transformer, or a "
                                                  "Transformer of its own")
    gamma: float = Field(1.0, ge=0, le=1, description="discount a token")
    lam: float = Field(0.95, ge=0, le=1, description="GAE's lambda: 0 trusts the critic, 1 the rewards")
    whiten_advantages: bool = Field(True, description="scale advantages to mean 0 and variance 1, over all processes")
    value_coef: float = Field(0.5, ge=0, description="weight of the value loss")
    value_clip: float = Field(0.2, ge=0, description="how far a value may move for its loss to count; 0 does not clip")
    entropy_coef: float = Field(0.0, ge=0, description="weight of the entropy bonus")

    kl_in: Literal["reward", "loss"] = Field("reward", description="the KL is taken off the reward of each token (k1), "
                                             "or added to the loss (k3)")
    kl_target: float = Field(0.0, ge=0, description="KL a token that kl_coef is adapted to; 0 leaves kl_coef as it is")
    kl_limit: float = Field(0.0, ge=0, description="KL a token between the policy and the one that sampled at which "
                            "the epochs of a step end; 0 has no limit")

    @model_validator(mode="after")
    def _check_kl(self) -> "PPOConfig":
        if self.kl_target and not self.kl_coef:
            raise ValueError(f"kl_target {self.kl_target} adapts kl_coef, which is 0; set kl_coef to start from")
        return self


@dataclass
class Experience:
    """What PPO learns from a rollout, (B, T-1) each."""

    values: Tensor  # the critic's, when the rollout was sampled
    advantages: Tensor
    returns: Tensor
    reference_logprobs: Tensor | None


def train(cfg: PPOConfig) -> Iterator[dict]:
    """Train the run's `sft` model, with a critic, on problems; yields one record a step, leaves `ppo`.

    Raises FileNotFoundError, with the command that helps, where there is no SFT model, or no reward model if that is
    what pays; ValueError where no prompt fits the context, or a training problem is among the held-out ones.
    """
    device = distributed.setup(runtime.pick_device(cfg.device))
    runtime.seed_everything(cfg.seed)
    policy, tokenizer, parent = checkpoint.parent_of(cfg, "sft")
    judge = checkpoint.parent_of(cfg, "reward").model.to(device) if cfg.reward == "model" else None
    model = ActorCritic(policy, separate=cfg.critic == "separate").to(device).train()
    reference = frozen_copy(policy) if cfg.kl_coef > 0 else None
    problems, dev, too_long = choose_problems(cfg, tokenizer, policy.cfg.context_length)
    stream = PromptStream(problems, cfg.prompts, cfg.seed, 0, distributed.rank(), distributed.world_size())
    optimizers = cfg.build_optimizers(model)
    progress = restore(cfg, model, tokenizer, optimizers, stream)
    kl_coef = progress.history.setdefault("kl_coef", [cfg.kl_coef])
    forward = training_forward(cfg, model, device)
    came_from = f"sft step {parent['step']}"
    with session(cfg, model, tokenizer, optimizers, stream, progress, came_from,
                 partial(look, cfg, policy, tokenizer, dev)) as run:
        yield from run.close_open_step()
        while progress.step < cfg.steps:
            clock = Clock()
            # 1. sample responses; 2. score them
            rollout, sampled = sample(cfg, policy, judge, tokenizer, stream, progress.step, clock)
            # 3. values, KL, advantages and returns
            reference_logprobs = reference_of(reference, rollout, cfg, device)
            experience, expected = judged(cfg, model, rollout, reference_logprobs, kl_coef[0], device)
            if progress.step == 0:
                sampled |= precision_drift(cfg, policy, rollout, device)
            clock.lap("score")
            # 4. update on minibatches, for some epochs
            if cfg.epochs * cfg.minibatches > 1:
                run.remember_weights()
            lr, updates = cfg.set_lr(optimizers, progress.step), []
            for prompts in minibatches(cfg, rollout, progress.step):
                updates.append(update(cfg, forward, model, optimizers, rollout, experience, kl_coef[0], prompts,
                                      device))
                if not updates[-1]["stepped"]:
                    break
            clock.lap("update")
            # 5. the KL's weight; figures, held-out accuracy, samples, checkpoint
            tokens = distributed.sum_over_ranks(int(rollout.lengths.sum()))
            progress.add(tokens, sum(clock.laps.values()), updates[-1]["loss"])
            record = {"step": progress.step, **sampled, **expected, **summary(updates), "kl_coef": kl_coef[0], "lr": lr,
                      "tokens": progress.tokens, "skipped": optimizers.skipped, "prompts_too_long": too_long,
                      **clock.figures(tokens)}
            kl_coef[0] = adapted(cfg, kl_coef[0], expected["kl"])
            record |= watch(cfg, progress.history, record)
            guard(cfg, record, stream)
            yield from run.close_step(record, for_reading(rollout, progress.step, cfg.keep_samples))


def sample(
    cfg: PPOConfig, policy: Transformer, judge: RewardModel | None, tokenizer: Tokenizer, stream: PromptStream,
    step: int, clock: Clock,
) -> tuple[Rollout, dict]:
    """This rank's share of a step's rollout, scored by what pays, and figures over all ranks."""
    problems = [problem for _, problem in next(stream)]
    verifier = partial(gsm8k_reward, format_bonus=cfg.format_bonus)
    rollout = act(cfg, policy, tokenizer, problems, verifier, (step,), clock)
    if judge is not None:
        rollout.rewards = learned_rewards(cfg, judge, rollout)
        clock.lap("score")
    rollout.rewards = rollout.rewards - cfg.end_penalty * ~rollout.ended
    return rollout, over_all_ranks([rollout], bool(cfg.monitor))


@torch.no_grad()
def learned_rewards(cfg: PPOConfig, judge: RewardModel, rollout: Rollout) -> Tensor:
    """The reward model's reward (B,) of each response."""
    rewards = []
    with together(), runtime.autocast(judge.device, cfg.precision):
        for some in torch.arange(len(rollout.problems)).split(cfg.micro_prompts):
            check()
            rewards.append(reply_rewards(judge, *pack_groups(rollout.select(some)), cfg.group).flatten())
    return torch.cat(rewards)


def judged(
    cfg: PPOConfig, model: ActorCritic, rollout: Rollout, reference_logprobs: Tensor | None, kl_coef: float,
    device: torch.device,
) -> tuple[Experience, dict]:
    """Advantages and returns of a rollout, and figures over all ranks."""
    mask = rollout.response_mask
    values = in_parts(rollout, cfg.micro_prompts, device, cfg.precision,
                      lambda part: recompute_with_values(model, model.policy.lm_head, part, cfg.temperature)[2])
    kl = torch.zeros_like(values)
    if reference_logprobs is not None:
        kl = kl_estimate(rollout.logprobs, reference_logprobs, "k1", mask)
    rewards = token_rewards(cfg, rollout)
    if cfg.kl_in == "reward":
        rewards = rewards - kl_coef * kl
    advantages, returns = gae(rewards, values, mask, cfg.gamma, cfg.lam)
    left, spread = moments(returns - values, mask)[1], moments(returns, mask)
    figures = {"kl": moments(kl, mask)[0], "value": moments(values, mask)[0], "return": spread[0],
               "explained_variance": 1 - left / spread[1] if spread[1] > 0 else 0.0}
    if cfg.whiten_advantages:
        advantages = masked_whiten(advantages, mask, *moments(advantages, mask))
    return Experience(values, advantages, returns, reference_logprobs), figures


def token_rewards(cfg: PPOConfig, rollout: Rollout) -> Tensor:
    """Rewards (B, T-1): that of the response at its last token, 0 elsewhere."""
    outcome = rollout.rewards
    if cfg.whiten_rewards:
        outcome = masked_whiten(outcome, torch.ones_like(outcome), *moments(outcome, torch.ones_like(outcome)),
                                shift_mean=False)
    last = rollout.prompt_width - 2 + rollout.lengths  # index t scores token t+1
    return torch.zeros_like(rollout.logprobs).scatter(1, last[:, None], outcome[:, None])


def update(
    cfg: PPOConfig, forward: nn.Module, model: ActorCritic, optimizers: Optimizers, rollout: Rollout,
    experience: Experience, kl_coef: float, prompts: Tensor, device: torch.device,
) -> dict:
    """One optimizer step on the responses to these prompts; returns sums over all ranks' tokens, loss and gradient
    norm. No step is taken, and `stepped` says so, where the policy has moved further than `kl_limit` already."""
    count = distributed.sum_over_ranks(int(rollout.response_mask[group_rows(prompts, cfg.group)].sum()))
    sums, loss = Counter(), 0.0
    optimizers.zero_grad()
    for some in accumulate(forward, prompts.split(cfg.micro_prompts)):
        micro, rows = rollout.select(some), group_rows(some, cfg.group)
        mask = micro.response_mask
        then = {name: None if x is None else x[rows, : mask.size(1)] for name, x in vars(experience).items()}
        with runtime.autocast(device, cfg.precision):
            logprobs, entropy, values = recompute_with_values(forward, model.policy.lm_head, micro, cfg.temperature,
                                                              entropy_gradient=cfg.entropy_coef > 0)
        per_token, seen = clipped_surrogate(logprobs, micro.logprobs, then["advantages"], mask, cfg.clip_low,
                                            cfg.clip_high)
        value_loss, value_seen = clipped_value_loss(values, then["values"], then["returns"], mask,
                                                    cfg.value_clip or None)
        per_token = per_token + cfg.value_coef * value_loss - cfg.entropy_coef * entropy
        if cfg.kl_in == "loss" and then["reference_logprobs"] is not None:
            per_token = per_token + kl_coef * kl_estimate(logprobs, then["reference_logprobs"], "k3", mask)
        share = reduce(per_token, mask, "token", count)
        (share * distributed.world_size()).backward()  # DDP averages over ranks, and the count is global already
        loss += share.detach()
        moved = kl_estimate(micro.logprobs, logprobs.detach(), "k3", mask)
        sums.update(token_sums({
            "entropy": entropy, "clip_fraction": seen["clipped"], "value_loss": value_loss, "moved": moved,
            "value_clip_fraction": value_seen["clipped"], "drift": (logprobs.detach() - micro.logprobs).abs(),
        }, mask))
    sums = distributed.sum_named(sums)
    stepped = not cfg.kl_limit or sums["moved"] <= cfg.kl_limit * sums["tokens"]
    grad_norm = clip_and_step(model, optimizers, cfg.max_grad_norm) if stepped else 0.0
    return sums | {"loss": float(distributed.sum_over_ranks(loss)), "grad_norm": grad_norm, "stepped": stepped}


def summary(updates: list[dict]) -> dict:
    """The figures of a step's updates as means over tokens; `drift` is that of the first, before anything moved,
    `moved` the KL between the policy and the one that sampled before the last."""
    tokens = sum(u["tokens"] for u in updates)
    means = ("entropy", "clip_fraction", "value_loss", "value_clip_fraction")
    taken = [u["grad_norm"] for u in updates if u["stepped"]]
    return {name: sum(u[name] for u in updates) / tokens for name in means} | {
        "drift": updates[0]["drift"] / updates[0]["tokens"],
        "moved": updates[-1]["moved"] / updates[-1]["tokens"],
        "loss": updates[-1]["loss"], "updates": len(taken), "grad_norm": sum(taken) / max(len(taken), 1),
    }


def adapted(cfg: PPOConfig, kl_coef: float, kl: float) -> float:
    """The KL's weight for the next step: raised where `kl` a token is above the target, lowered where it is below
    (Ziegler et al. 2019, section 2.2)."""
    if not cfg.kl_target:
        return kl_coef
    error = min(max(kl / cfg.kl_target - 1, -KL_ERROR), KL_ERROR)
    return kl_coef * (1 + KL_RATE * error)
