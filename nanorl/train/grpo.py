"""GRPO: reinforcement learning from answers that a program can check, without a critic.

For each prompt the policy writes a group of responses. A response is worth how much better it did than its
group: that mean is the baseline that PPO needs a critic for. A step, in order:

 1. sample a group of responses to each prompt of the step;
 2. score them, and turn rewards into group-relative advantages;
 3. take the log-probs that the sampler recorded as the old ones; a reference's, where there is a KL term;
 4. update: clipped policy loss over minibatches of whole groups;
 5. measure, log, save.

Follows GRPO (Shao et al. 2024, arXiv:2402.03300) as a family: the clip's two sides, token, sequence or constant
reduction, dynamic sampling and overlong handling of DAPO (arXiv:2503.14476), no division by the standard
deviation (Dr. GRPO, arXiv:2503.20783), sequence-level ratios (GSPO, arXiv:2507.18071), leave-one-out baseline
(RLOO, arXiv:2402.14740). Simplified: outcome rewards only, and sampling waits for the update.
"""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from nanorl import checkpoint, distributed, runtime
from nanorl.data.prompts import PromptStream
from nanorl.heads import frozen_copy
from nanorl.model import Transformer
from nanorl.objectives.advantages import group_advantages, informative_groups, soft_overlong_penalty
from nanorl.objectives.masking import overlong_mask
from nanorl.objectives.policy import count_for, grpo_loss, reduce
from nanorl.optim import Optimizers, clip_and_step
from nanorl.rewards.verifiers import gsm8k_reward
from nanorl.rollout import Rollout, group_rows, merge, recompute_logprobs
from nanorl.tokenizer import Tokenizer
from nanorl.train.progress import accumulate, guard, restore, session, training_forward
from nanorl.train.rl import (
    Clock,
    RLConfig,
    act,
    choose_problems,
    for_reading,
    look,
    minibatches,
    over_all_ranks,
    precision_drift,
    reference_of,
    token_sums,
    watch,
)


class GRPOConfig(RLConfig):
    """GRPO's settings. The defaults are plain GRPO with DAPO's wider upper clip and without a KL term."""

    stage: ClassVar[str] = "grpo"

    group: int = Field(8, ge=2, description="responses to each prompt")
    clip_high: float = Field(0.28, ge=0, description="how far a ratio may rise above 1")
    ratio_level: Literal["token", "sequence"] = Field("token", description="ratio of each token, or GSPO's of the "
                                                      "whole response")
    reduction: Literal["token", "sequence", "constant"] = Field("token", description="what the loss is averaged over: "
                                                                "tokens (DAPO), responses (GRPO), a constant "
                                                                "(Dr. GRPO)")
    advantage_scale: Literal["std", "none"] = Field("std", description="divide by the group's standard deviation")
    baseline: Literal["mean", "leave_one_out"] = Field("mean", description="the group's mean, or that of the others")
    kl_kind: Literal["k1", "k2", "k3"] = Field("k3", description="estimator of the KL")
    dynamic_sampling: int = Field(0, ge=0, description="extra rounds of sampling to replace groups that are all right "
                                  "or all wrong (DAPO); 0 keeps them")
    overlong: Literal["keep", "mask", "penalty"] = Field("keep", description="responses cut off at max_new_tokens: "
                                                         "scored as they are, left out of the loss, or long ones "
                                                         "punished softly")
    overlong_buffer: int = Field(16, ge=1, description="tokens before max_new_tokens in which the penalty grows")

    @model_validator(mode="after")
    def _check_penalty(self) -> "GRPOConfig":
        if self.overlong == "penalty" and self.overlong_buffer > self.max_new_tokens:
            raise ValueError(f"overlong_buffer {self.overlong_buffer} is longer than max_new_tokens "
                             f"{self.max_new_tokens}; lower it")
        return self


def train(cfg: GRPOConfig) -> Iterator[dict]:
    """Train the run's `sft` model on problems with checkable answers; yields one record a step, leaves `grpo`.

    Raises FileNotFoundError, with the command that helps, where there is no SFT model; ValueError where no prompt
    fits the context, or a training problem is among the held-out ones.
    """
    device = distributed.setup(runtime.pick_device(cfg.device))
    runtime.seed_everything(cfg.seed)
    policy, tokenizer, parent = checkpoint.parent_of(cfg, "sft")
    policy.to(device).train()
    reference = frozen_copy(policy) if cfg.kl_coef > 0 else None
    problems, dev, too_long = choose_problems(cfg, tokenizer, policy.cfg.context_length)
    stream = PromptStream(problems, cfg.prompts, cfg.seed, 0, distributed.rank(), distributed.world_size())
    optimizers = cfg.build_optimizers(policy)
    progress = restore(cfg, policy, tokenizer, optimizers, stream)
    forward = training_forward(cfg, policy, device)
    came_from = f"sft step {parent['step']}"
    with session(cfg, policy, tokenizer, optimizers, stream, progress, came_from,
                 partial(look, cfg, policy, tokenizer, dev)) as run:
        yield from run.close_open_step()
        while progress.step < cfg.steps:
            clock = Clock()
            # 1. sample groups of responses; 2. score them
            rollout, sampled = sample(cfg, policy, tokenizer, stream, progress.step, clock)
            rewards = rollout.rewards.view(-1, cfg.group)
            advantages = group_advantages(rewards, cfg.advantage_scale, cfg.baseline).flatten()  # (B,)
            # 3. the log-probs that the sampler recorded are the old ones; those of a reference, if there is one
            reference_logprobs = reference_of(reference, rollout, cfg, device)
            if progress.step == 0:
                sampled |= precision_drift(cfg, policy, rollout, device)
            clock.lap("score")
            # 4. update on minibatches of whole groups
            if cfg.epochs * cfg.minibatches > 1:
                run.remember_weights()
            lr, updates = cfg.set_lr(optimizers, progress.step), []
            for prompts in minibatches(cfg, rollout, progress.step):
                updates.append(update(cfg, forward, policy, optimizers, rollout, advantages, reference_logprobs,
                                      prompts, device))
            clock.lap("update")
            # 5. figures, held-out accuracy, samples, checkpoint
            tokens = distributed.sum_over_ranks(int(rollout.lengths.sum()))
            progress.add(tokens, sum(clock.laps.values()), updates[-1]["loss"])
            record = {"step": progress.step, **sampled, **summary(updates), "lr": lr, "tokens": progress.tokens,
                      "skipped": optimizers.skipped, "prompts_too_long": too_long, **clock.figures(tokens)}
            record |= watch(cfg, progress.history, record)
            guard(cfg, record, stream)
            yield from run.close_step(record, for_reading(rollout, progress.step, cfg.keep_samples))


def sample(
    cfg: GRPOConfig, policy: Transformer, tokenizer: Tokenizer, stream: PromptStream, step: int, clock: "Clock"
) -> tuple[Rollout, dict]:
    """This rank's share of a step's rollout, and figures over all that was sampled on all ranks.

    With dynamic sampling, groups that are all right or all wrong are replaced by those of further prompts, for at
    most so many rounds; the rollout may then hold fewer groups than asked for.
    """
    reward, rounds, kept = partial(gsm8k_reward, format_bonus=cfg.format_bonus), [], []
    for number in range(1 + cfg.dynamic_sampling):
        problems = [problem for _, problem in next(stream)]
        rollout = act(cfg, policy, tokenizer, problems, reward, (step, number), clock)
        if cfg.overlong == "penalty":
            penalty = soft_overlong_penalty(rollout.lengths, cfg.max_new_tokens, cfg.overlong_buffer)
            rollout.rewards = rollout.rewards + penalty
        teaches = informative_groups(rollout.rewards.view(-1, cfg.group))
        rollout.parts["informative"] = teaches.float().repeat_interleave(cfg.group)
        rounds.append(rollout)
        if not cfg.dynamic_sampling:
            break
        if teaches.any():
            kept.append(rollout.select(teaches.nonzero().squeeze(1).cpu()))
        enough = sum(len(r.problems) for r in kept) >= len(problems)
        if distributed.sum_over_ranks(int(enough)) == distributed.world_size():
            break
    figures = over_all_ranks(rounds, bool(cfg.monitor))
    if not cfg.dynamic_sampling:
        return rounds[0], figures
    whole = merge(kept or [rounds[-1].select(torch.arange(1))], tokenizer.pad)  # a rank never comes empty-handed
    return whole.select(torch.arange(min(len(problems), len(whole.problems)))), figures


def update(
    cfg: GRPOConfig, forward: nn.Module, policy: Transformer, optimizers: Optimizers, rollout: Rollout,
    advantages: Tensor, reference_logprobs: Tensor | None, prompts: Tensor, device: torch.device,
) -> dict:
    """One optimizer step on these prompts' groups; returns sums over all ranks' tokens, and loss and gradient norm.

    Without a KL term a group with advantage 0 throughout has no gradient: it is counted, but not computed.
    """
    whole = rollout.response_mask if cfg.overlong != "mask" else overlong_mask(rollout.response_mask, rollout.ended)
    rows = group_rows(prompts, cfg.group)
    count = distributed.sum_over_ranks(count_for(whole[rows], cfg.reduction, cfg.max_new_tokens))
    if reference_logprobs is None:
        teaches = (advantages.view(-1, cfg.group) != 0).any(dim=1).cpu()[prompts]
        prompts = prompts[teaches] if teaches.any() else prompts[:1]  # a rank takes part even with nothing to say
    sums, loss = Counter(), 0.0
    optimizers.zero_grad()
    for some in accumulate(forward, prompts.split(cfg.micro_prompts)):
        micro, rows = rollout.select(some), group_rows(some, cfg.group)
        mask = whole[rows, : micro.tokens.size(1) - 1]
        with runtime.autocast(device, cfg.precision):
            logprobs, entropy = recompute_logprobs(forward, policy.lm_head, micro, cfg.temperature)
        per_token, seen = grpo_loss(
            logprobs, micro.logprobs, advantages[rows, None], mask,
            None if reference_logprobs is None else reference_logprobs[rows, : mask.size(1)],
            cfg.kl_coef, cfg.kl_kind, cfg.clip_low, cfg.clip_high, cfg.ratio_level,
        )
        share = reduce(per_token, mask, cfg.reduction, count)
        (share * distributed.world_size()).backward()  # DDP averages over ranks, and the count is global already
        loss += share.detach()
        drift = (logprobs.detach() - micro.logprobs).abs()
        kl = seen.get("kl", torch.zeros_like(drift))
        sums.update(token_sums({"entropy": entropy, "clipped": seen["clipped"], "drift": drift, "kl": kl}, mask))
    grad_norm = clip_and_step(policy, optimizers, cfg.max_grad_norm)
    sums = distributed.sum_named(sums)
    return sums | {"loss": float(distributed.sum_over_ranks(loss)), "grad_norm": grad_norm}


def summary(updates: list[dict]) -> dict:
    """The figures of a step's updates as means over tokens; `drift` is that of the first, before anything moved."""
    tokens = max(sum(u["tokens"] for u in updates), 1.0)
    record = {name: sum(u[name] for u in updates) / tokens for name in ("entropy", "kl")}
    return record | {
        "clip_fraction": sum(u["clipped"] for u in updates) / tokens,
        "drift": updates[0]["drift"] / max(updates[0]["tokens"], 1.0),
        "loss": updates[-1]["loss"],
        "grad_norm": sum(u["grad_norm"] for u in updates) / len(updates),
    }
