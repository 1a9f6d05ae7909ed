"""What GRPO and PPO share: settings, prompts, the sampling of a scored rollout, and how it is looked at."""

import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from nanorl import distributed, runtime
from nanorl.data.prompts import check_disjoint, load_problems
from nanorl.evaluate import answer, heldout_problems
from nanorl.generate import Sampling, generate
from nanorl.model import Transformer
from nanorl.objectives.masking import masked_sum
from nanorl.rewards.monitors import Monitor, hollow, repetition
from nanorl.rollout import RewardFn, Rollout, assemble, group_rows, problem_prompt, recompute_logprobs, score, that_fit
from nanorl.stopping import check, together
from nanorl.tokenizer import Tokenizer
from nanorl.train.progress import OptimConfig


class RLConfig(OptimConfig):
    """What both say about prompts, sampling, the clip and the looks at held-out problems."""

    problems: int = Field(20_000, ge=1, description="training problems to draw prompts from")
    prompts: int = Field(32, ge=1, description="prompts a step, over all processes")
    group: int = Field(1, ge=1, description="responses to each prompt")
    max_new_tokens: int = Field(96, ge=1, description="longest response in tokens")
    temperature: float = Field(1.0, gt=0, description="sampling temperature, also of the log-probs")
    format_bonus: float = Field(0.1, ge=0, lt=1, description="reward for a well-formed response")

    minibatches: int = Field(1, ge=1, description="optimizer steps over each rollout")
    epochs: int = Field(1, ge=1, description="passes over each rollout")
    micro_prompts: int = Field(32, ge=1, description="prompts (whole groups) a forward pass on one process")
    clip_low: float = Field(0.2, ge=0, lt=1, description="how far a ratio may fall below 1")
    clip_high: float = Field(0.2, ge=0, description="how far a ratio may rise above 1")
    kl_coef: float = Field(0.0, ge=0, description="weight of the KL to the SFT model; 0 holds no reference")

    eval_every: int = Field(10, ge=1, description="steps between looks at held-out problems")
    eval_problems: int = Field(500, ge=1, description="held-out problems kept for the final table, never looked at")
    dev_problems: int = Field(128, ge=1, description="held-out problems asked while training")
    keep_samples: int = Field(4, ge=0, description="responses a step written to samples.jsonl for reading")
    monitor: int = Field(0, ge=0, description="steps of the window in which reward and truth are compared, with a "
                         "warning when they part; 0 does not compare")

    def look_due(self, step: int) -> bool:
        """Whether held-out problems are to be looked at after `step` steps; the first is one of them."""
        return step == 1 or super().look_due(step)


def choose_problems(cfg: RLConfig, tokenizer: Tokenizer, context_length: int) -> tuple[list[dict], list[dict], int]:
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


def act(
    cfg: RLConfig, policy: Transformer, tokenizer: Tokenizer, problems: list[dict], reward: RewardFn,
    seeds: tuple[int, ...], clock: "Clock",
) -> Rollout:
    """This rank's rollout of some problems, scored. `seeds` tell one call from another, in all steps and ranks.

    Raises `GivenUp`, on all ranks, where one has been asked to stop.
    """
    prompts = [problem_prompt(tokenizer, p) for p in problems]
    sampling = Sampling(cfg.max_new_tokens, cfg.temperature)
    with together(), runtime.autocast(policy.device, cfg.precision):
        done = generate(policy, prompts, sampling, tokenizer.end_of_turn, tokenizer.pad, cfg.group,
                        runtime.generator(cfg.seed, *seeds, distributed.rank()))
    clock.lap("rollout")
    rollout = assemble(done, cfg.group)
    score(rollout, tokenizer, problems, reward)
    clock.lap("score")
    return rollout


def over_all_ranks(rollouts: list[Rollout], monitored: bool = False) -> dict:
    """What was sampled, in figures: means over every response of every rank; with `monitored` those of how a reward
    is commonly hacked as well."""
    sums = {"n": 0.0, "reward": 0.0, "length": 0.0, "ended": 0.0}
    for r in rollouts:
        figures = {"n": len(r.rewards), "reward": r.rewards.sum(), "length": r.lengths.sum(), "ended": r.ended.sum()}
        figures |= {name: part.sum() for name, part in r.parts.items() if name != "reward"}
        if monitored:
            figures["repetition"] = sum(map(repetition, r.texts))
            figures["hollow"] = sum(map(hollow, r.parts["correct"].tolist(), r.parts["format"].tolist()))
        for name, value in figures.items():
            sums[name] = sums.get(name, 0.0) + float(value)
    sums = distributed.sum_named(sums)
    n = sums.pop("n")
    return {name: value / n for name, value in sums.items()}


def reference_of(
    reference: Transformer | None, rollout: Rollout, cfg: RLConfig, device: torch.device
) -> Tensor | None:
    """Log-probs (B, T-1) of the whole rollout under the frozen reference; None where there is none."""
    if reference is None:
        return None
    return in_parts(rollout, cfg.micro_prompts, device, cfg.precision,
                    lambda part: recompute_logprobs(reference, reference.lm_head, part, cfg.temperature)[0])


@torch.no_grad()
def in_parts(
    rollout: Rollout, size: int, device: torch.device, precision: str, f: Callable[[Rollout], Tensor]
) -> Tensor:
    """`f`, which gives (B', T'-1) tensors, of the whole rollout, `size` prompts at a time, without gradients."""
    result = torch.zeros_like(rollout.logprobs)
    with together():
        for some in torch.arange(len(rollout.problems)).split(size):
            check()
            with runtime.autocast(device, precision):
                part = f(rollout.select(some))
            result[group_rows(some, rollout.group).to(result.device), : part.size(1)] = part
    return result


def precision_drift(cfg: RLConfig, policy: Transformer, rollout: Rollout, device: torch.device) -> dict:
    """What bf16 costs: the mean difference, over the tokens of all ranks, of the log-probs that the sampler recorded
    from those in fp32, as `drift_from_fp32`. Nothing where the run is in fp32."""
    if runtime.resolve_precision(device, cfg.precision) == "fp32":
        return {}
    exact = in_parts(rollout, cfg.micro_prompts, device, "fp32",
                     lambda part: recompute_logprobs(policy, policy.lm_head, part, cfg.temperature)[0])
    return {"drift_from_fp32": moments((exact - rollout.logprobs).abs(), rollout.response_mask)[0]}


def minibatches(cfg: RLConfig, rollout: Rollout, step: int) -> Iterator[Tensor]:
    """Indices of prompts for each optimizer step of a rollout: every prompt once an epoch, in random order."""
    n = len(rollout.problems)
    for epoch in range(cfg.epochs):
        order = torch.randperm(n, generator=runtime.generator(cfg.seed, step, epoch))
        for part in order.tensor_split(cfg.minibatches):
            yield part if len(part) else order[:1]


def token_sums(figures: dict[str, Tensor], mask: Tensor) -> dict[str, float]:
    """The sums of per-token figures (B, T-1) over the tokens that count, and under "tokens" how many those are."""
    ones = {"tokens": torch.ones_like(mask, dtype=torch.float32)}
    return {name: float(masked_sum(x.detach().float(), mask)) for name, x in (ones | figures).items()}


def moments(x: Tensor, mask: Tensor) -> tuple[float, float]:
    """Mean and population variance of the counted values of (B, T-1) tensors, over all ranks."""
    n = max(distributed.sum_over_ranks(float(mask.sum())), 1.0)
    mean = distributed.sum_over_ranks(float(masked_sum(x.float(), mask))) / n
    return mean, distributed.sum_over_ranks(float(masked_sum((x.float() - mean).square(), mask))) / n


def look(cfg: RLConfig, policy: Transformer, tokenizer: Tokenizer, dev: list[dict]) -> dict:
    """Greedy accuracy and response length on held-out problems."""
    answers = answer(policy, tokenizer, dev, Sampling(cfg.max_new_tokens, temperature=0), precision=cfg.precision)
    return {"dev_accuracy": answers.accuracy, "dev_length": float(answers.lengths.float().mean())}


def watch(cfg: RLConfig, history: dict[str, list[float]], record: dict) -> dict:
    """Whether reward and truth have parted, as a figure of the record; the first time, and whenever it starts again,
    as a warning too. `history` is the run's, and grows."""
    if not cfg.monitor:
        return {}
    already = history.get("parted", [])[-1:] == [1.0]
    reason = Monitor(cfg.monitor, history).add(record)
    if reason and not already and distributed.is_main():
        warnings.warn(f"{cfg.stage} step {record['step']}: {reason}", stacklevel=2)
    return {"parted": float(bool(reason))}


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

    def figures(self, tokens: int) -> dict[str, Any]:
        """The laps, their sum, and `tokens` by that sum, as figures of a record."""
        seconds = sum(self.laps.values())
        return {**{f"time/{name}": lap for name, lap in self.laps.items()},
                "time/step": seconds, "time/tokens_per_second": tokens / seconds}
