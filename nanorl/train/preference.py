"""Learning from preferences without a reward model: DPO, ORPO and KTO, in the supervised loop.

A row holds a prompt once and two replies behind it, `documents` 0, 1 and 2, neither of which sees the other. For
DPO and ORPO these are the chosen and the rejected one; for KTO, which learns from single replies that are good or bad,
the reply and another prompt's, by which it estimates how far the policy has moved.

The reference of DPO and KTO is the SFT model that training starts from. Its log-probs of every reply are computed
once, before the first step. ORPO needs none. Follows DPO (Rafailov et al. 2023, arXiv:2305.18290), ORPO (Hong et al.
2024, arXiv:2403.07691) and KTO (Ethayarajh et al. 2024, arXiv:2402.01306). Simplified: the mismatched pairs of KTO
are fixed for the whole run, so that their reference log-probs can be computed once too, and ORPO starts from the SFT
model as the others do, so that the table compares like with like.
"""

import itertools
from collections.abc import Iterator
from functools import partial
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from tqdm import tqdm

from nanorl import checkpoint, distributed, runtime
from nanorl.data.preference import PairBatches, collate, encode_pairs, load_pairs, unpaired
from nanorl.objectives.logprobs import selected_logprobs
from nanorl.objectives.masking import packed_targets
from nanorl.objectives.preference import dpo_loss, kto_baseline, kto_loss, orpo_loss
from nanorl.statistics import wilson
from nanorl.tokenizer import Tokenizer
from nanorl.train import supervised


class PairConfig(supervised.SupervisedConfig):
    """What everything that learns from pairs says about them; the reward model too."""

    preferences: str = Field("tinyworld", min_length=1, description="pairs: tinyworld (built in), a folder with "
                             "train.jsonl and test.jsonl, one .jsonl file, or a hub name such as "
                             "HuggingFaceH4/ultrafeedback_binarized")
    pairs: int = Field(4_000, ge=1, description="pairs to learn from")
    dev_pairs: int = Field(500, ge=1, description="held-out pairs")
    noise: float = Field(0.0, ge=0, lt=0.5, description="share of tinyworld's training pairs with the two swapped")


class DPOConfig(PairConfig):
    """DPO's settings."""

    stage: ClassVar[str] = "dpo"

    beta: float = Field(0.1, gt=0, description="how dear it is to move away from the reference")
    loss: Literal["sigmoid", "ipo"] = Field("sigmoid", description="DPO's loss, or IPO's, which has a target margin")
    label_smoothing: float = Field(0.0, ge=0, lt=0.5, description="share of pairs taken to be labelled wrongly")


class ORPOConfig(PairConfig):
    """ORPO's settings."""

    stage: ClassVar[str] = "orpo"

    weight: float = Field(0.2, ge=0, description="weight of the odds ratio beside the likelihood of the chosen reply")


class KTOConfig(PairConfig):
    """KTO's settings."""

    stage: ClassVar[str] = "kto"

    beta: float = Field(0.1, gt=0, description="how dear it is to move away from the reference")
    desirable_weight: float = Field(1.0, ge=0, description="weight of good replies")
    undesirable_weight: float = Field(1.0, ge=0, description="weight of bad replies")


def train(cfg: DPOConfig | ORPOConfig | KTOConfig) -> Iterator[dict]:
    """Train the run's `sft` model on pairs; yields one record a step, leaves stage `dpo`, `orpo` or `kto`.

    Raises FileNotFoundError, with the command that helps, where there is no SFT model; ValueError where no pair fits.
    """
    device = distributed.setup(runtime.pick_device(cfg.device))
    runtime.seed_everything(cfg.seed)
    policy, tokenizer, parent = checkpoint.parent_of(cfg, "sft")
    policy.to(device)
    batches = {}
    for split, epochs in (("train", None), ("heldout", 1)):
        rows, known = pairs_of(cfg, tokenizer, split), {}
        if cfg.stage == "kto":
            rows, known["desirable"] = unpaired(rows, cfg.context_length)
        if cfg.stage != "orpo":  # the policy is still what it starts from
            known["reference"] = reference_logprobs(cfg, policy, rows, tokenizer.pad, split, device)
        batches[split] = partial(pair_batches, cfg, rows, tokenizer.pad, epochs, known)

    def losses(model: nn.Module, batch: dict) -> tuple[Tensor, dict]:
        """Losses (B,) and figures of a micro-batch."""
        logprobs, lengths = pair_logprobs(model, policy.lm_head, batch["tokens"], batch["documents"])  # (B, 2) each
        first, second = logprobs.unbind(dim=1)
        if cfg.stage == "orpo":
            return orpo_loss(first / lengths[:, 0], second / lengths[:, 1], cfg.weight)
        ref_first, ref_second = batch["reference"].unbind(dim=1)
        if cfg.stage == "dpo":
            return dpo_loss(first, second, ref_first, ref_second, cfg.beta, cfg.label_smoothing, cfg.loss)
        return kto_loss(first, ref_first, batch["desirable"], batch["baseline"], cfg.beta, cfg.desirable_weight,
                        cfg.undesirable_weight)

    job = supervised.Job(
        policy, tokenizer, batches["train"](),
        dev_batches=lambda: itertools.islice(batches["heldout"](), cfg.eval_batches),
        losses=losses, count=count, parent=f"sft step {parent['step']}", report=interval,
        ready=lambda batch: with_baseline(cfg, policy, batch, device) if cfg.stage == "kto" else batch,
    )
    yield from supervised.train(cfg, job, device)


def pairs_of(cfg: PairConfig, tokenizer: Tokenizer, split: str) -> list[tuple]:
    """A split's encoded pairs: (prompt, chosen, rejected) ids each. What was cut or dropped is said in a line."""
    train = split == "train"
    pairs = load_pairs(cfg.preferences, split, cfg.pairs if train else cfg.dev_pairs, cfg.seed + 3 if train else 0,
                       cfg.max_number, cfg.max_steps, cfg.noise if train else 0.0)
    encoded, report = encode_pairs(tokenizer, pairs, cfg.context_length)
    if not encoded:
        raise ValueError(f"all {report.pairs} {split} pairs of {cfg.preferences} are equal after truncation to "
                         f"{cfg.context_length} tokens; pretrain with a larger context_length")
    if distributed.is_main() and (report.equal or report.truncated_prompts or report.truncated_replies):
        tqdm.write(f"{cfg.stage}: of {report.pairs} {split} pairs {report.equal} equal after truncation were dropped, "
                   f"{report.truncated_prompts} prompts and {report.truncated_replies} replies cut")
    return encoded


def pair_batches(
    cfg: PairConfig, rows: list[tuple], pad: int, epochs: int | None, known: dict[str, Tensor] | None = None
) -> PairBatches:
    """Batches of this rank's packed rows, with what is known of them beforehand: for DPO and KTO the reference's
    log-probs (B, 2), for KTO which replies are good (B,)."""
    return PairBatches(rows, cfg.batch_size, cfg.seed, pad, epochs, distributed.rank(), distributed.world_size(), known)


def pair_logprobs(model: nn.Module, lm_head: nn.Linear, tokens: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs of both replies of packed rows (B, T), and their lengths in tokens: (B, 2) each, in one pass.

    `model` may be wrapped in DDP, `lm_head` is the raw module's.
    """
    rows, before, where = packed_targets(documents)
    hidden = model(tokens, documents=documents, shared=documents == 0, return_hidden=True)  # (B, T, C)
    values, _ = selected_logprobs(hidden[rows, before], lm_head.weight, tokens[where])
    logprobs = torch.zeros(tokens.shape, device=tokens.device).masked_scatter(where, values)  # (B, T)
    each = torch.stack((documents == 1, documents == 2), dim=1)  # (B, 2, T)
    return (logprobs[:, None] * each).sum(dim=2), each.sum(dim=2)


def count(batch: dict) -> int:
    """The rows of a batch: each has one loss."""
    return len(batch["tokens"])


@torch.no_grad()
def reference_logprobs(
    cfg: PairConfig, reference: nn.Module, rows: list[tuple], pad: int, split: str, device: torch.device
) -> Tensor:
    """The reference's log-probs (N, 2) of every row's replies, on the CPU. Ranks share the work."""
    mine = []
    size = cfg.micro_batch_size
    starts = distributed.shard(range(0, len(rows), size))
    for start in tqdm(starts, desc=f"reference, {split}", unit="batch", leave=False, disable=not distributed.is_main()):
        batch = supervised.to_device(collate(rows[start : start + size], pad), device)
        with runtime.autocast(device, cfg.precision):
            logprobs, _ = pair_logprobs(reference, reference.lm_head, batch["tokens"], batch["documents"])
        mine.append((start, logprobs.cpu()))
    return torch.cat([logprobs for _, logprobs in sorted(distributed.gather_objects(mine), key=lambda part: part[0])])


@torch.no_grad()
def with_baseline(cfg: KTOConfig, policy: nn.Module, batch: dict, device: torch.device) -> dict:
    """A batch with KTO's `baseline` (B,): how far the policy has moved from the reference, on the mismatched replies
    of the whole batch of all ranks."""
    total = 0.0
    for micro in supervised.split(batch, cfg.micro_batch_size):
        with runtime.autocast(device, cfg.precision):
            logprobs, _ = pair_logprobs(policy, policy.lm_head, micro["tokens"], micro["documents"])
        total += float((logprobs[:, 1] - micro["reference"][:, 1]).sum())
    moved = kto_baseline(distributed.sum_over_ranks(total), distributed.sum_over_ranks(count(batch)))
    return batch | {"baseline": moved.to(device).expand(count(batch))}


def interval(held_out: dict) -> dict:
    """The 95% interval of the accuracy on held-out pairs, and how many those were; ties count half."""
    n = held_out["count"]
    low, high = wilson(round(held_out["dev_accuracy"] * n), n)
    return {"dev_accuracy_low": low, "dev_accuracy_high": high, "dev_pairs": n}
