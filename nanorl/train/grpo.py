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

import copy
import time
from collections.abc import Iterator
from functools import partial
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from nanorl import checkpoint, distributed, runtime
from nanorl.data.prompts import PromptStream, check_disjoint, load_problems
from nanorl.evaluate import answer, heldout_problems
from nanorl.generate import Sampling, generate
from nanorl.metrics import Metrics
from nanorl.model import Transformer
from nanorl.objectives.advantages import group_advantages, informative_groups, soft_overlong_penalty
from nanorl.objectives.masking import masked_sum, overlong_mask
from nanorl.objectives.policy import count_for, grpo_loss, reduce
from nanorl.optim import Optimizers, clip_and_step
from nanorl.rewards.verifiers import gsm8k_reward
from nanorl.rollout import (
    Rollout,
    assemble,
    group_rows,
    merge,
    problem_prompt,
    recompute_logprobs,
    score,
    that_fit,
)
from nanorl.tokenizer import Tokenizer
from nanorl.train.progress import OptimConfig, restore, save, training_forward
from nanorl.train.supervised import sync_last


class GRPOConfig(OptimConfig):
    """GRPO's settings. The defaults are plain GRPO with DAPO's wider upper clip and without a KL term."""

    stage: ClassVar[str] = "grpo"

    problems: int = Field(20_000, ge=1, description="training problems to draw prompts from")
    prompts: int = Field(32, ge=1, description="prompts a step, over all processes")
    group: int = Field(8, ge=2, description="responses to each prompt")
    max_new_tokens: int = Field(96, ge=1, description="longest response in tokens")
    temperature: float = Field(1.0, gt=0, description="sampling temperature, also of the log-probs")
    format_bonus: float = Field(0.1, ge=0, lt=1, description="reward for a well-formed response")

    minibatches: int = Field(1, ge=1, description="optimizer steps over each rollout")
    epochs: int = Field(1, ge=1, description="passes over each rollout")
    micro_prompts: int = Field(32, ge=1, description="prompts (whole groups) a forward pass on one process")

    clip_low: float = Field(0.2, ge=0, lt=1, description="how far a ratio may fall below 1")
    clip_high: float = Field(0.28, ge=0, description="how far a ratio may rise above 1")
    ratio_level: Literal["token", "sequence"] = Field("token", description="ratio of each token, or GSPO's of the "
                                                      "whole response")
    reduction: Literal["token", "sequence", "constant"] = Field("token", description="what the loss is averaged over: "
                                                                "tokens (DAPO), responses (GRPO), a constant "
                                                                "(Dr. GRPO)")
    advantage_scale: Literal["std", "none"] = Field("std", description="divide by the group's standard deviation")
    baseline: Literal["mean", "leave_one_out"] = Field("mean", description="the group's mean, or that of the others")
    kl_coef: float = Field(0.0, ge=0, description="weight of the KL to the SFT model; 0 holds no reference")
    kl_kind: Literal["k1", "k2", "k3"] = Field("k3", description="estimator of the KL")
    dynamic_sampling: int = Field(0, ge=0, description="extra rounds of sampling to replace groups that are all right "
                                  "or all wrong (DAPO); 0 keeps them")
    overlong: Literal["keep", "mask", "penalty"] = Field("keep", description="responses cut off at max_new_tokens: "
                                                         "scored as they are, left out of the loss, or long ones "
                                                         "punished softly")
    overlong_buffer: int = Field(16, ge=1, description="tokens before max_new_tokens in which the penalty grows")

    eval_every: int = Field(10, ge=1, description="steps between looks at held-out problems")
    eval_problems: int = Field(500, ge=1, description="held-out problems kept for the final table, never looked at")
    dev_problems: int = Field(128, ge=1, description="held-out problems asked while training")
    keep_samples: int = Field(4, ge=0, description="responses a step written to samples.jsonl for reading")

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
    reference = copy.deepcopy(policy).eval().requires_grad_(False) if cfg.kl_coef > 0 else None
    problems, dev, too_long = choose_problems(cfg, tokenizer, policy.cfg.context_length)
    stream = PromptStream(problems, cfg.prompts, cfg.seed, 0, distributed.rank(), distributed.world_size())
    optimizers = cfg.build_optimizers(policy)
    progress = restore(cfg, policy, tokenizer, optimizers, stream)
    forward = training_forward(cfg, policy, device)
    with Metrics(cfg.folder, cfg.stage, cfg.steps, progress.step, cfg.tracker, cfg.model_dump()) as metrics:
        while progress.step < cfg.steps:
            clock = Clock()
            # 1. sample groups of responses; 2. score them
            rollout, sampled = sample(cfg, policy, tokenizer, stream, progress.step, clock)
            rewards = rollout.rewards.view(-1, cfg.group)
            advantages = group_advantages(rewards, cfg.advantage_scale, cfg.baseline).flatten()  # (B,)
            # 3. the log-probs that the sampler recorded are the old ones; those of a reference, if there is one
            reference_logprobs = reference_of(reference, rollout, cfg, device)
            clock.lap("score")
            # 4. update on minibatches of whole groups
            lr, updates = cfg.set_lr(optimizers, progress.step), []
            for prompts in minibatches(cfg, rollout, progress.step):
                updates.append(update(cfg, forward, policy, optimizers, rollout, advantages, reference_logprobs,
                                      prompts, device))
            clock.lap("update")
            # 5. figures, held-out accuracy, samples, checkpoint
            seconds = sum(clock.laps.values())
            tokens = distributed.sum_over_ranks(int(rollout.lengths.sum()))
            progress.step += 1
            progress.tokens += tokens
            progress.minutes += seconds / 60
            progress.loss_history.append(updates[-1]["loss"])
            record = {"step": progress.step, **sampled, **summary(updates), "lr": lr, "tokens": progress.tokens,
                      "skipped": optimizers.skipped, "prompts_too_long": too_long,
                      **{f"time/{name}": lap for name, lap in clock.laps.items()},
                      "time/step": seconds, "time/tokens_per_second": tokens / seconds}
            if progress.step == 1 or progress.step % cfg.eval_every == 0 or progress.step == cfg.steps:
                record |= look(cfg, policy, tokenizer, dev)
            if cfg.save_due(progress.step):
                save(cfg, policy, tokenizer, optimizers, stream, progress, record, f"sft step {parent['step']}")
            metrics.log(record)
            metrics.keep_samples(for_reading(rollout, progress.step, cfg.keep_samples))
            yield record


def choose_problems(cfg: GRPOConfig, tokenizer: Tokenizer, context_length: int) -> tuple[list[dict], list[dict], int]:
    """Problems to train on and held-out ones to look at, both without prompts too long for the context, and how
    many training prompts were."""
    problems = load_problems(cfg.data, "train", cfg.problems, cfg.seed + 2, cfg.max_number, cfg.max_steps)
    test, dev = heldout_problems(cfg, cfg.eval_problems, cfg.dev_problems)
    check_disjoint(problems, test + dev)
    fitting, too_long = that_fit(tokenizer, problems, context_length - 1)
    if not fitting:
        raise ValueError(f"none of {len(problems)} prompts fits a context of {context_length} tokens; pretrain with a "
                         "larger context_length")
    return fitting, dev, too_long


def sample(
    cfg: GRPOConfig, policy: Transformer, tokenizer: Tokenizer, stream: PromptStream, step: int, clock: "Clock"
) -> tuple[Rollout, dict]:
    """This rank's share of a step's rollout, and figures over all that was sampled on all ranks.

    With dynamic sampling, groups that are all right or all wrong are replaced by those of further prompts, for at
    most so many rounds; the rollout may then hold fewer groups than asked for.
    """
    rounds, kept = [], []
    for number in range(1 + cfg.dynamic_sampling):
        problems = [problem for _, problem in next(stream)]
        with runtime.autocast(policy.device, cfg.precision):
            done = generate(
                policy, [problem_prompt(tokenizer, p) for p in problems], Sampling(cfg.max_new_tokens, cfg.temperature),
                tokenizer.end_of_turn, tokenizer.pad, cfg.group,
                runtime.generator(cfg.seed, step, number, distributed.rank()),
            )
        clock.lap("rollout")
        rollout = assemble(done, cfg.group)
        score(rollout, tokenizer, problems, partial(gsm8k_reward, format_bonus=cfg.format_bonus))
        if cfg.overlong == "penalty":
            penalty = soft_overlong_penalty(rollout.lengths, cfg.max_new_tokens, cfg.overlong_buffer)
            rollout.rewards = rollout.rewards + penalty
        clock.lap("score")
        rounds.append(rollout)
        if not cfg.dynamic_sampling:
            break
        teaches = informative_groups(rollout.rewards.view(-1, cfg.group)).nonzero().squeeze(1).cpu()
        if len(teaches):
            kept.append(rollout.select(teaches))
        share = sum(len(r.problems) for r in kept) >= len(problems)
        if distributed.sum_over_ranks(int(share)) == distributed.world_size():
            break
    figures = over_all_ranks(rounds, cfg.group)
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
    sums = dict.fromkeys(("tokens", "entropy", "clipped", "drift", "kl"), 0.0)
    loss = 0.0
    optimizers.zero_grad()
    micros = prompts.split(cfg.micro_prompts)
    for i, some in enumerate(micros):
        micro, rows = rollout.select(some), group_rows(some, cfg.group)
        mask = whole[rows, : micro.tokens.size(1) - 1]
        with sync_last(forward, i, len(micros)):
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
        for name, value in (("tokens", mask), ("entropy", entropy), ("clipped", seen["clipped"]), ("drift", drift),
                            ("kl", seen.get("kl", torch.zeros_like(drift)))):
            sums[name] += float(masked_sum(value.detach().float(), mask))
    grad_norm = clip_and_step(policy, optimizers, cfg.max_grad_norm)
    sums = {name: distributed.sum_over_ranks(value) for name, value in sums.items()}
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


def over_all_ranks(rollouts: list[Rollout], group: int) -> dict:
    """What was sampled, in figures: means over every response of every rank."""
    sums = {"n": 0.0, "reward": 0.0, "correct": 0.0, "format": 0.0, "length": 0.0, "ended": 0.0, "informative": 0.0}
    for r in rollouts:
        sums["n"] += len(r.rewards)
        sums["reward"] += float(r.rewards.sum())
        sums["correct"] += float(r.parts["correct"].sum())
        sums["format"] += float(r.parts["format"].sum())
        sums["length"] += float(r.lengths.sum())
        sums["ended"] += float(r.ended.sum())
        sums["informative"] += float(informative_groups(r.rewards.view(-1, group)).sum()) * group
    sums = {name: distributed.sum_over_ranks(value) for name, value in sums.items()}
    n = sums.pop("n")
    return {name: value / n for name, value in sums.items()}


def reference_of(
    reference: Transformer | None, rollout: Rollout, cfg: GRPOConfig, device: torch.device
) -> Tensor | None:
    """Log-probs (B, T-1) of the whole rollout under the frozen reference; None where there is none."""
    if reference is None:
        return None
    result = torch.zeros_like(rollout.logprobs)
    with torch.no_grad(), runtime.autocast(device, cfg.precision):
        for some in torch.arange(len(rollout.problems)).split(cfg.micro_prompts):
            part, _ = recompute_logprobs(reference, reference.lm_head, rollout.select(some), cfg.temperature)
            result[group_rows(some, cfg.group), : part.size(1)] = part
    return result


def minibatches(cfg: GRPOConfig, rollout: Rollout, step: int) -> Iterator[Tensor]:
    """Indices of prompts for each optimizer step of a rollout: every prompt once an epoch, in random order."""
    n = len(rollout.problems)
    for epoch in range(cfg.epochs):
        order = torch.randperm(n, generator=runtime.generator(cfg.seed, step, epoch))
        for part in order.tensor_split(cfg.minibatches):
            yield part if len(part) else order[:1]


def look(cfg: GRPOConfig, policy: Transformer, tokenizer: Tokenizer, dev: list[dict]) -> dict:
    """Greedy accuracy and response length on held-out problems."""
    answers = answer(policy, tokenizer, dev, Sampling(cfg.max_new_tokens, temperature=0), precision=cfg.precision)
    return {"dev_accuracy": answers.accuracy, "dev_length": float(answers.lengths.float().mean())}


def for_reading(rollout: Rollout, step: int, n: int) -> list[dict]:
    """The first `n` responses of a rollout."""
    return [
        {"step": step, "question": rollout.problems[i // rollout.group]["question"], "response": rollout.texts[i],
         "answer": rollout.problems[i // rollout.group]["answer"], "reward": float(rollout.rewards[i])}
        for i in range(min(n, len(rollout.texts)))
    ]


class Clock:
    """Seconds spent in the parts of a step."""

    def __init__(self):
        self.laps: dict[str, float] = {}
        self.last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Add the time since the last lap to `name`."""
        now = time.perf_counter()
        self.laps[name] = self.laps.get(name, 0.0) + now - self.last
        self.last = now
