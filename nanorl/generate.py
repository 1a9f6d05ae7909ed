"""Sampling from a language model: a naive version that is plainly right, and the fast one that equals it.

Both choose a token the same way. A row has its own stream of uniform numbers, one a token; the token is the
first whose cumulative probability exceeds the number. So what a row says depends neither on its neighbours in
the batch nor on when they finish, and the two versions produce the same tokens from the same streams.

The fast version (`generate`) runs the prompts once, each shared by its whole group, left-padded to one batch;
keeps a KV cache; and lets finished rows leave the batch.

Shapes: P prompts, G completions of each (the group), B = P x G rows, R the longest response, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nanorl import runtime
from nanorl.model import KVCache, ModelConfig, Transformer
from nanorl.stopping import check

LEAVE_AT = 0.9  # rows leave in batches: once fewer than this share of the rows at hand is still writing


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen. temperature 0 is greedy; top_k 0 and top_p 1 leave the distribution whole."""

    max_new_tokens: int = 64
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        if not self.temperature >= 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ValueError(
                f"temperature {self.temperature}, top_k {self.top_k}, top_p {self.top_p}: "
                "temperature and top_k must be at least 0, top_p above 0 and at most 1"
            )


@dataclass
class Completions:
    """What `generate` returns. The end token is part of the response; after it comes padding."""

    prompts: Tensor  # (P, T_p) int64, left-padded
    prompt_mask: Tensor  # (P, T_p) bool, true on real tokens
    responses: Tensor  # (B, R) int64, right-padded; rows of one prompt follow each other
    lengths: Tensor  # (B,) int64, tokens of the response, end token included
    logprobs: Tensor  # (B, R) fp32, log-probability of each token at the sampling temperature, 0 on padding
    ended: Tensor  # (B,) bool, whether the end token came before the limit

    @classmethod
    def blank(cls, prompts: Tensor, prompt_mask: Tensor, rows: int, width: int, pad: int) -> "Completions":
        """Room for `rows` responses of at most `width` tokens, nothing written yet."""
        device = prompts.device
        return cls(
            prompts, prompt_mask,
            responses=torch.full((rows, width), pad, device=device),
            lengths=torch.zeros(rows, dtype=torch.long, device=device),
            logprobs=torch.zeros(rows, width, device=device),
            ended=torch.zeros(rows, dtype=torch.bool, device=device),
        )

    def trim(self) -> "Completions":
        """Cut to the longest response."""
        R = int(self.lengths.max())
        self.responses, self.logprobs = self.responses[:, :R], self.logprobs[:, :R]
        return self


@torch.inference_mode()
def generate(
    model: Transformer,
    prompts: list[list[int]],
    sampling: Sampling,
    stop: int,
    pad: int,
    group: int = 1,
    generator: torch.Generator | None = None,
    on_token: Callable[[int], None] | None = None,
) -> Completions:
    """`group` completions of each prompt.

    `stop` is the token that ends a response, `pad` fills the rest. `generator` is a CPU generator (the default
    one where None). Log-probs are those of the whole distribution at the sampling temperature (at 1 for greedy),
    before top-k and top-p cut it. `on_token` is called with each token of the first row as it comes.
    Stops at `max_new_tokens`, or where a row fills the context.

    Raises ValueError for a prompt that is empty, leaves no room in the context or has unknown ids; `GivenUp` where a
    run that listens for it (see `stopping`) has been asked to stop.
    """
    check_prompts(prompts, group, model.cfg)
    device = model.device
    tokens, mask = left_pad(prompts, pad, device)
    B = len(prompts) * group
    limits = (model.cfg.context_length - mask.sum(dim=1)).clamp(max=sampling.max_new_tokens).repeat_interleave(group)
    R = int(limits.max())
    uniforms = torch.rand(B, R, generator=generator).to(device)
    out = Completions.blank(tokens, mask, B, R, pad)
    with runtime.evaluating(model):
        # 1. prefill: each prompt once, then its cache and its last logits are handed to the whole group
        cache = KVCache()
        hidden = model(tokens, mask=mask, cache=cache, return_hidden=True)[:, -1]  # (P, C)
        logits = model.lm_head(hidden).repeat_interleave(group, dim=0)  # (B, V)
        cache = cache.repeat(group, room=R)
        rows = torch.arange(B, device=device)  # which row of the output each row at hand writes
        writing = torch.ones_like(rows, dtype=torch.bool)
        for t in range(R):
            check()
            # 2. choose a token for each row
            chosen, logprob = choose(logits, uniforms[rows, t], sampling)
            chosen, logprob = chosen.masked_fill(~writing, pad), logprob.masked_fill(~writing, 0.0)
            out.responses[rows, t], out.logprobs[rows, t] = chosen, logprob
            out.lengths[rows] += writing
            if on_token is not None and t < int(out.lengths[0]):
                on_token(int(out.responses[0, t]))
            # 3. a row stops after the end token or at its limit
            ended = writing & (chosen == stop)
            out.ended[rows] |= ended
            writing = writing & ~ended & (limits[rows] > t + 1)
            n = int(writing.sum())
            if n == 0:
                break
            # 4. finished rows leave, then everyone else reads the token it wrote; one that is done but still here reads
            # padding, so that it never grows beyond the context
            if n < LEAVE_AT * len(rows):
                keep = writing.nonzero().squeeze(1)
                rows, chosen, writing = rows[keep], chosen[keep], writing[keep]
                cache.select(keep)
            logits = model(chosen.unsqueeze(1), mask=writing.unsqueeze(1), cache=cache)[:, -1]
    return out.trim()


@torch.inference_mode()
def generate_naive(
    model: Transformer, prompt: list[int], sampling: Sampling, stop: int, uniforms: list[float]
) -> tuple[list[int], list[float]]:
    """One completion of one prompt, running the whole sequence again for each token: the reference.

    `uniforms` has one number in [0, 1) for each token that may come. Returns tokens and their log-probs.
    """
    sequence, logprobs = list(prompt), []
    for u in uniforms[: sampling.max_new_tokens]:
        if len(sequence) == model.cfg.context_length:
            break
        logits = model(torch.tensor([sequence], device=model.device))[:, -1]
        chosen, logprob = choose(logits, torch.tensor([u], device=model.device), sampling)
        sequence.append(int(chosen))
        logprobs.append(float(logprob))
        if sequence[-1] == stop:
            break
    return sequence[len(prompt) :], logprobs


def choose(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """One token a row from logits (B, V) by numbers (B,) in [0, 1): ids (B,) and log-probs (B,) in fp32."""
    logits = logits.float()
    if sampling.temperature == 0:
        chosen = logits.argmax(dim=-1)
        return chosen, logits.log_softmax(dim=-1).gather(-1, chosen[:, None]).squeeze(-1)
    logprobs = (logits / sampling.temperature).log_softmax(dim=-1)
    kept = truncate(logprobs, sampling.top_k, sampling.top_p)
    cumulative = kept.exp().cumsum(dim=-1)
    # right=True: strictly greater, so that a token of probability 0 is never chosen
    target = uniforms[:, None] * cumulative[:, -1:]
    chosen = torch.searchsorted(cumulative, target, right=True).clamp(max=logits.size(-1) - 1)
    return chosen.squeeze(-1), logprobs.gather(-1, chosen).squeeze(-1)


def truncate(logprobs: Tensor, top_k: int, top_p: float) -> Tensor:
    """Log-probs (B, V) with -inf outside the `top_k` likeliest and outside the smallest set that holds `top_p`.

    Top-k first, then the nucleus of what is left (Holtzman et al. 2019). The likeliest token always stays.
    """
    if top_k and top_k < logprobs.size(-1):
        kth = logprobs.topk(top_k, dim=-1).values[:, -1:]
        logprobs = logprobs.masked_fill(logprobs < kth, float("-inf"))
    if top_p < 1:
        ordered, index = logprobs.sort(dim=-1, descending=True)
        probabilities = ordered.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities  # mass of the likelier tokens
        drop = torch.zeros_like(before, dtype=torch.bool).scatter(-1, index, before >= top_p)
        logprobs = logprobs.masked_fill(drop, float("-inf"))
    return logprobs


def left_pad(prompts: list[list[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts of unequal length as (P, T_p) tokens that all end in the last column, and the mask of real ones."""
    width = max(map(len, prompts))
    tokens = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts], device=device)
    mask = torch.tensor([[False] * (width - len(p)) + [True] * len(p) for p in prompts], device=device)
    return tokens, mask


def check_prompts(prompts: list[list[int]], group: int, cfg: ModelConfig) -> None:
    """Raises ValueError unless every prompt has a token, leaves room for one more, and has known ids only."""
    if group < 1:
        raise ValueError(f"group is {group}; it must be at least 1")
    if not prompts:
        raise ValueError("no prompts to complete; give at least one")
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {i} is empty; it needs at least one token")
        if len(prompt) >= cfg.context_length:
            raise ValueError(
                f"prompt {i} has {len(prompt)} tokens, and the context holds {cfg.context_length}, "
                "response included; shorten the prompt"
            )
        if not 0 <= min(prompt) <= max(prompt) < cfg.vocab_size:
            odd = next(token for token in prompt if not 0 <= token < cfg.vocab_size)
            raise ValueError(f"prompt {i} has id {odd}, the model knows 0 to {cfg.vocab_size - 1}; encode it with the "
                             "model's own tokenizer")
