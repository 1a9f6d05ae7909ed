"""Prompts to a `Rollout`: what a policy wrote, with what it was worth.

The frame of every per-token tensor here and in the RL objectives: sequences are (B, T), prompt first, and index
t of a (B, T-1) tensor speaks of token t+1. A row is [left padding, prompt, response, right padding]; all prompts
end in the same column, and the G rows of one prompt follow each other.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanorl.chat import encode_prompt
from nanorl.data.prompts import as_prompt, split_solution
from nanorl.generate import Completions
from nanorl.objectives.logprobs import selected_logprobs
from nanorl.objectives.masking import packed_targets, response_mask
from nanorl.tokenizer import Tokenizer


@dataclass
class Rollout:
    """P prompts, G responses to each, B = P x G rows of T = T_p + R tokens."""

    tokens: Tensor  # (B, T) int64
    mask: Tensor  # (B, T) bool, true on prompt and response
    response_mask: Tensor  # (B, T-1) bool, true where token t+1 belongs to the response, its end token included
    logprobs: Tensor  # (B, T-1) fp32, recorded while sampling, 0 outside the response
    rewards: Tensor  # (B,) fp32
    lengths: Tensor  # (B,) int64, response tokens
    ended: Tensor  # (B,) bool, the end token came before the limit
    prompt_width: int  # T_p
    group: int  # G
    parts: dict[str, Tensor] = field(default_factory=dict)  # the reward's parts, (B,) each
    texts: list[str] = field(default_factory=list)  # B responses, decoded
    problems: list[dict] = field(default_factory=list)  # P problems

    def select(self, prompts: Tensor) -> "Rollout":
        """The rows of these prompts (indices into P), cut to the longest response among them."""
        rows = group_rows(prompts, self.group)
        at = rows.to(self.tokens.device)
        T = self.prompt_width + int(self.lengths[at].max())
        return Rollout(
            self.tokens[at, :T], self.mask[at, :T], self.response_mask[at, : T - 1], self.logprobs[at, : T - 1],
            self.rewards[at], self.lengths[at], self.ended[at], self.prompt_width, self.group,
            {name: part[at] for name, part in self.parts.items()},
            [self.texts[i] for i in rows.tolist()], [self.problems[i] for i in prompts.tolist()],
        )


def group_rows(prompts: Tensor, group: int) -> Tensor:
    """The rows (of B) of these prompts' groups (indices into P)."""
    return (prompts[:, None] * group + torch.arange(group)).flatten()


def merge(rollouts: list[Rollout], pad: int) -> Rollout:
    """Several rollouts of one group size as one, their prompts aligned at the widest."""
    if len(rollouts) == 1:
        return rollouts[0]
    width = max(r.prompt_width for r in rollouts)
    after = max(r.tokens.size(1) - r.prompt_width for r in rollouts)

    def joined(name: str, fill: float) -> Tensor:
        """One (B, T) or (B, T-1) tensor of each, padded on both sides."""
        pieces = []
        for r in rollouts:
            right = after - (r.tokens.size(1) - r.prompt_width)
            pieces.append(F.pad(getattr(r, name), (width - r.prompt_width, right), value=fill))
        return torch.cat(pieces)

    return Rollout(
        tokens=joined("tokens", pad), mask=joined("mask", False), response_mask=joined("response_mask", False),
        logprobs=joined("logprobs", 0.0), prompt_width=width, group=rollouts[0].group,
        rewards=torch.cat([r.rewards for r in rollouts]), lengths=torch.cat([r.lengths for r in rollouts]),
        ended=torch.cat([r.ended for r in rollouts]),
        parts={name: torch.cat([r.parts[name] for r in rollouts]) for name in rollouts[0].parts},
        texts=[text for r in rollouts for text in r.texts], problems=[p for r in rollouts for p in r.problems],
    )


RewardFn = Callable[[str, str], dict[str, float]]  # (response, gold) -> {"reward": total, part: value, ...}


def problem_prompt(tokenizer: Tokenizer, problem: dict, think: bool = False) -> list[int]:
    """The chat prompt of a problem; with `think` the reply is opened with a reasoning block."""
    return encode_prompt(tokenizer, as_prompt(problem), think=think)


def assemble(done: Completions, group: int) -> Rollout:
    """Completions in the (B, T) frame, rewards still 0. Masks come from lengths, never from token ids."""
    width = done.prompts.size(1)
    tokens = torch.cat((done.prompts.repeat_interleave(group, dim=0), done.responses), dim=1)  # (B, T)
    written = response_mask(width, done.lengths, tokens.size(1))  # (B, T-1)
    return Rollout(
        tokens=tokens,
        mask=torch.cat((done.prompt_mask.repeat_interleave(group, dim=0), written[:, width - 1 :]), dim=1),
        response_mask=written,
        logprobs=F.pad(done.logprobs, (width - 1, 0)),
        rewards=torch.zeros(len(tokens), device=tokens.device),
        lengths=done.lengths,
        ended=done.ended,
        prompt_width=width,
        group=group,
    )


def score(rollout: Rollout, tokenizer: Tokenizer, problems: list[dict], reward: RewardFn) -> None:
    """Decode each response and fill in rewards and their parts."""
    rollout.problems = problems
    golds = [split_solution(p["answer"])[1] for p in problems for _ in range(rollout.group)]
    responses = rollout.tokens[:, rollout.prompt_width :].tolist()
    lengths = rollout.lengths.tolist()
    rollout.texts = [tokenizer.decode(ids[:n]) for ids, n in zip(responses, lengths, strict=True)]
    scores = [reward(text, gold) for text, gold in zip(rollout.texts, golds, strict=True)]
    device = rollout.tokens.device
    rollout.parts = {name: torch.tensor([float(s[name]) for s in scores], device=device) for name in scores[0]}
    rollout.rewards = rollout.parts["reward"]


def that_fit(tokenizer: Tokenizer, problems: list[dict], longest: int) -> tuple[list[dict], int]:
    """The problems whose prompt has at most `longest` tokens, and how many have more."""
    kept = [p for p in problems if len(problem_prompt(tokenizer, p)) <= longest]
    return kept, len(problems) - len(kept)


def recompute_logprobs(
    model: nn.Module, lm_head: nn.Linear, rollout: Rollout, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies (B, T-1) of the response tokens under `model`, 0 elsewhere, in fp32.

    The G responses of a prompt are packed behind it into one row: the prompt runs once, forward and backward, and
    padding is what is left at the end of P rows, not of P x G. `model` may be wrapped in DDP, `lm_head` is the raw
    module's. Gradients flow through the log-probs, not through the entropies.
    """
    tokens, documents = pack_groups(rollout)  # (P, S)
    hidden = model(tokens, documents=documents, shared=documents == 0, return_hidden=True)  # (P, S, C)
    rows, before, where = packed_targets(documents)
    found = selected_logprobs(hidden[rows, before], lm_head.weight, tokens[where], temperature)
    return unpacked(rollout, found[0]), unpacked(rollout, found[1])


def recompute_with_values(
    model: nn.Module, lm_head: nn.Linear, rollout: Rollout, temperature: float, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The same under an `ActorCritic`, and as a third the critic's values (B, T-1): entry t is what it expects before
    token t+1 is written. With `entropy_gradient` gradients flow through the entropies too, for an entropy bonus."""
    tokens, documents = pack_groups(rollout)
    hidden, values = model(tokens, documents, documents == 0)  # (P, S, C), (P, S)
    rows, before, where = packed_targets(documents)
    found = selected_logprobs(hidden[rows, before], lm_head.weight, tokens[where], temperature,
                              entropy_gradient=entropy_gradient)
    return unpacked(rollout, found[0]), unpacked(rollout, found[1]), unpacked(rollout, values[rows, before])


def unpacked(rollout: Rollout, found: Tensor) -> Tensor:
    """One number (N,) for each response token, in order, as (B, T-1), 0 elsewhere."""
    return torch.zeros_like(rollout.logprobs).masked_scatter(rollout.response_mask, found)


def pack_groups(rollout: Rollout) -> tuple[Tensor, Tensor]:
    """Each prompt and its group's responses in one row: tokens (P, S) and documents (P, S), both int64.

    Documents are 0 on the prompt, 1 to G on the responses in order, -1 on the padding at the row's end.
    """
    G, T = rollout.group, rollout.tokens.size(1)
    P, device = len(rollout.tokens) // G, rollout.tokens.device
    documents = torch.arange(1, G + 1, device=device).view(1, G, 1).expand(P, G, T).clone()
    documents[:, :, : rollout.prompt_width] = 0
    kept = rollout.mask.view(P, G, T).clone()
    kept[:, 1:, : rollout.prompt_width] = False  # the prompt once
    kept = kept.view(P, G * T)
    lengths = kept.sum(dim=1, keepdim=True)
    real = torch.arange(int(lengths.max()), device=device) < lengths  # (P, S)
    packed = [torch.zeros_like(real, dtype=torch.long), torch.full_like(real, -1, dtype=torch.long)]
    packed[0][real] = rollout.tokens.view(P, G * T)[kept]
    packed[1][real] = documents.view(P, G * T)[kept]
    return packed[0], packed[1]
