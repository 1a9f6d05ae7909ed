"""One Transformer: GPT-2 at one setting, Llama or Qwen2 at another.

Shapes: B batch, T time, C channels (`n_embed`), H heads, D = C / H head size, V vocabulary, N blocks.

    tokens (B, T) -> embedding (B, T, C) -> N x [x + attention(norm(x)); x + mlp(norm(x))] -> norm -> logits (B, T, V)

What may vary (`ModelConfig`): learned or rotary positions, LayerNorm or RMSNorm, GELU, squared ReLU or SwiGLU,
biases, normalised queries and keys, fewer key-value heads than query heads, tied embeddings.

Three ways to say which positions may see which, and never two at once:

* nothing: plain causal attention, every row full;
* `mask` (B, T), true on real tokens: left-padded prompts. Positions count real tokens only, so a prompt gives
  the same logits alone and padded in a batch;
* `documents` (B, T): packed rows, -1 on padding. A position sees its own document only, and positions restart with
  each. With `shared` (B, T), true on the tokens of a prompt at the row's start, every document of the row sees that
  prompt too and continues its positions: a whole group of responses in one row, their prompt run once.

A `KVCache` continues any of the first two.

Follows: GPT-2 (Radford et al. 2019), RoPE (Su et al. 2021), RMSNorm (Zhang and Sennrich 2019), SwiGLU (Shazeer
2020), squared ReLU (So et al. 2021), grouped queries (Ainslie et al. 2023). Left out: dropout, biases per
projection, sliding windows, scaled RoPE.
"""

import math
from contextlib import nullcontext
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn


class ModelConfig(BaseModel):
    """The shape of a Transformer."""

    model_config = ConfigDict(extra="forbid")

    vocab_size: int = Field(512, ge=2, description="number of token ids")
    context_length: int = Field(256, ge=2, description="longest sequence in tokens")
    n_embed: int = Field(128, ge=8, description="channels of the residual stream")
    n_head: int = Field(4, ge=1, description="query heads")
    n_kv_head: int = Field(4, ge=1, description="key-value heads; fewer than n_head shares each among several")
    n_blocks: int = Field(4, ge=1, description="Transformer blocks")
    position: Literal["learned", "rope"] = Field("rope", description="learned position embeddings or RoPE")
    norm: Literal["layernorm", "rmsnorm"] = Field("rmsnorm", description="normalisation before each layer")
    mlp: Literal["gelu", "relu2", "swiglu"] = Field("relu2", description="activation of the MLP")
    n_hidden: int | None = Field(None, ge=8, description="channels inside the MLP; None: 4 x n_embed, 8/3 x for swiglu")
    bias: bool = Field(False, description="biases in linear layers and LayerNorm")
    qk_norm: bool = Field(False, description="RMS-normalise queries and keys per head")
    tie_embeddings: bool = Field(False, description="lm_head shares the token embedding's weight")
    rope_theta: float = Field(10000.0, gt=1, description="base of RoPE's frequencies")
    norm_eps: float = Field(1e-5, gt=0, description="epsilon of the normalisations")

    @model_validator(mode="after")
    def _check_heads(self) -> "ModelConfig":
        if self.n_embed % self.n_head:
            raise ValueError(f"n_embed {self.n_embed} must be a multiple of n_head {self.n_head}")
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_head {self.n_head} must be a multiple of n_kv_head {self.n_kv_head}")
        if self.position == "rope" and (self.n_embed // self.n_head) % 2:
            raise ValueError(f"RoPE needs an even head size; n_embed / n_head is {self.n_embed // self.n_head}")
        return self

    @classmethod
    def of(cls, cfg: BaseModel | dict, **changes) -> "ModelConfig":
        """The shape out of any config or dict that carries these fields, with `changes` on top."""
        given = cfg if isinstance(cfg, dict) else cfg.model_dump()
        return cls(**{name: given[name] for name in cls.model_fields if name in given} | changes)


class KVCache:
    """Keys and values of the positions seen so far, one pair of (B, H_kv, T, D) tensors a block.

    `forward_hidden(tokens, cache=cache)` reads and extends it. Where a buffer has room (`repeat(..., room=n)`)
    new positions are written in place, which is what sampling wants; where it has none they are concatenated,
    which autograd can follow. (Training shares a prompt through `shared` instead, see the module's docstring.)
    """

    def __init__(self):
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.mask: Tensor | None = None  # (B, length) true on real tokens
        self.length = 0

    def append(self, block: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add (B, H_kv, T, D) keys and values of one block; returns all of that block's, old and new."""
        end = self.length + k.size(2)
        for store, new in ((self.keys, k), (self.values, v)):
            if block == len(store):
                store.append(new)
            elif end <= store[block].size(2):
                store[block][:, :, self.length : end] = new
            else:
                store[block] = torch.cat((store[block][:, :, : self.length], new), dim=2)
        return self.keys[block][:, :, :end], self.values[block][:, :, :end]

    def repeat(self, n: int, room: int = 0) -> "KVCache":
        """Each row `n` times in a row, with space for `room` more positions."""
        cache = KVCache()
        cache.length, cache.mask = self.length, self.mask.repeat_interleave(n, dim=0)
        for source, target in ((self.keys, cache.keys), (self.values, cache.values)):
            for x in source:
                x = x[:, :, : self.length].repeat_interleave(n, dim=0)
                target.append(F.pad(x, (0, 0, 0, room)) if room else x)
        return cache

    def select(self, rows: Tensor) -> None:
        """Keep only these rows, in this order."""
        self.mask = self.mask[rows]
        self.keys = [k[rows] for k in self.keys]
        self.values = [v[rows] for v in self.values]


class Attention(nn.Module):
    """Causal self-attention with one fused projection for queries, keys and values."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.n_head, self.n_kv_head, self.head_size = cfg.n_head, cfg.n_kv_head, cfg.n_embed // cfg.n_head
        self.qk_norm, self.eps = cfg.qk_norm, cfg.norm_eps
        self.qkv = nn.Linear(cfg.n_embed, (cfg.n_head + 2 * cfg.n_kv_head) * self.head_size, bias=cfg.bias)
        self.out = nn.Linear(cfg.n_embed, cfg.n_embed, bias=cfg.bias)

    def forward(self, x: Tensor, rotation: Tensor | None, allowed: Tensor | None, cache: KVCache | None, block: int):
        B, T, C = x.shape
        H, K, D = self.n_head, self.n_kv_head, self.head_size
        q, k, v = self.qkv(x).view(B, T, H + 2 * K, D).transpose(1, 2).split((H, K, K), dim=1)  # (B, H|K, T, D)
        if self.qk_norm:
            q, k = F.rms_norm(q, (D,), eps=self.eps), F.rms_norm(k, (D,), eps=self.eps)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        if cache is not None:
            k, v = cache.append(block, k, v)
        y = attend(q, k, v, allowed)
        return self.out(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    """Two linear layers around an activation; SwiGLU has a third that gates."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        gated = cfg.mlp == "swiglu"
        hidden = cfg.n_hidden or (-(-8 * cfg.n_embed // 3 // 8) * 8 if gated else 4 * cfg.n_embed)
        self.kind = cfg.mlp
        self.up = nn.Linear(cfg.n_embed, hidden, bias=cfg.bias)
        self.gate = nn.Linear(cfg.n_embed, hidden, bias=cfg.bias) if gated else None
        self.down = nn.Linear(hidden, cfg.n_embed, bias=cfg.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "gelu":
            return self.down(F.gelu(self.up(x), approximate="tanh"))
        if self.kind == "relu2":
            h = F.relu(self.up(x))
            return self.down(h * h)  # square() would leave autocast's bf16
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and MLP, each after a norm and added to the residual stream."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.norm_1, self.attention = make_norm(cfg), Attention(cfg)
        self.norm_2, self.mlp = make_norm(cfg), MLP(cfg)

    def forward(self, x: Tensor, *context) -> Tensor:
        x = x + self.attention(self.norm_1(x), *context)
        return x + self.mlp(self.norm_2(x))


class Transformer(nn.Module):
    """A decoder-only language model. `cfg` is kept on it, so that a checkpoint can rebuild it."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg = cfg
        self.tokens = nn.Embedding(cfg.vocab_size, cfg.n_embed)
        self.positions = nn.Embedding(cfg.context_length, cfg.n_embed) if cfg.position == "learned" else None
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.n_blocks))
        self.norm = make_norm(cfg)
        self.lm_head = nn.Linear(cfg.n_embed, cfg.vocab_size, bias=False)
        if cfg.position == "rope":
            angles = rope_angles(cfg.context_length, cfg.n_embed // cfg.n_head, cfg.rope_theta)
            self.register_buffer("rope", torch.stack((angles.cos(), angles.sin())), persistent=False)  # (2, T, D/2)
        self.apply(self._init)
        for name, p in self.named_parameters():  # the residual stream sums 2N layers
            if name.endswith(("attention.out.weight", "mlp.down.weight")):
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * cfg.n_blocks))
        if cfg.tie_embeddings:
            self.lm_head.weight = self.tokens.weight

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)

    @property
    def device(self) -> torch.device:
        return self.tokens.weight.device

    def n_parameters(self) -> int:
        """How many parameters there are; tied ones count once."""
        return sum(p.numel() for p in self.parameters())

    def forward(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        documents: Tensor | None = None,
        shared: Tensor | None = None,
        cache: KVCache | None = None,
        return_hidden: bool = False,
    ) -> Tensor:
        """Logits (B, T, V), or with `return_hidden` what `lm_head` consumes, (B, T, C)."""
        hidden = self.forward_hidden(tokens, mask, documents, shared, cache)
        return hidden if return_hidden else self.lm_head(hidden)

    def forward_hidden(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        documents: Tensor | None = None,
        shared: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Hidden states (B, T, C) after the last norm.

        `mask` (B, T) bool, `documents` (B, T) int, `shared` (B, T) bool and `cache` as in the module's docstring.
        With a cache, `tokens` are the new positions only; they may be padded on either side, as `mask` says.

        Raises ValueError where the sequence is longer than the context.
        """
        if documents is not None:
            if mask is not None or cache is not None:
                raise ValueError("documents cannot be combined with mask or cache; pass one of them")
            positions, allowed = self._packed(documents, shared)
        else:
            positions, allowed = self._padded(tokens, mask, cache)
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions(positions)
        rotation = self.rope[:, positions].unsqueeze(-3) if self.cfg.position == "rope" else None  # (2, B, 1, T, D/2)
        for i, block in enumerate(self.blocks):
            x = block(x, rotation, allowed, cache, i)
        if cache is not None:
            cache.length += tokens.size(1)
        return self.norm(x)

    def _packed(self, documents: Tensor, shared: Tensor | None) -> tuple[Tensor, Tensor]:
        """Position of each token of packed rows (B, T), and which keys each may see (B, 1, T, T)."""
        T = documents.size(1)
        index = torch.arange(T, device=documents.device)
        starts = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
        positions = index - torch.where(starts, index, 0).cummax(dim=1).values
        visible = documents[:, :, None] == documents[:, None, :]  # (B, T, T)
        if shared is not None:
            positions = positions + shared.sum(dim=1, keepdim=True) * ~shared
            visible = visible | shared[:, None, :]
        positions = positions.masked_fill(documents < 0, 0)
        self._check_length(int(positions.max()) + 1)
        return positions, (visible & causal(T, T, documents.device)).unsqueeze(1)

    def _padded(
        self, tokens: Tensor, mask: Tensor | None, cache: KVCache | None
    ) -> tuple[Tensor, Tensor | None]:
        """Position of each token (B, T) or (1, T), and which keys each may see: (B, 1, T, past + T), None = causal."""
        T, device = tokens.size(1), tokens.device
        if mask is None and cache is None:
            self._check_length(T)
            return torch.arange(T, device=device).unsqueeze(0), None
        seen = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
        n_past = 0
        if cache is not None:
            if cache.mask is not None:
                n_past = cache.mask.sum(dim=1, keepdim=True)  # (B, 1) real tokens before these
                seen = torch.cat((cache.mask, seen), dim=1)
            cache.mask = seen
        new = seen[:, -T:]
        positions = (n_past + new.cumsum(dim=1) - 1).clamp(min=0)
        if T > 1 or seen.size(1) > self.cfg.context_length:  # reading the number waits for a GPU: not at each step
            self._check_length(int(positions.max()) + 1)
        allowed = seen[:, None, :] & causal(T, seen.size(1), device)  # (B, T, past + T)
        if T == seen.size(1):  # padding on the left sees itself, so that its softmax has something to sum over
            allowed = allowed | torch.eye(T, dtype=torch.bool, device=device)
        return positions, allowed.unsqueeze(1)

    def _check_length(self, length: int) -> None:
        if length > self.cfg.context_length:
            raise ValueError(
                f"sequence of {length} tokens does not fit the context of {self.cfg.context_length}; "
                "shorten it or build the model with a larger context_length"
            )


def attend(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None) -> Tensor:
    """Softmax attention of q (B, H, T, D) over k and v (B, K, S, D), where H / K heads share a key-value head.

    `allowed` (B, 1, T, S) bool, None for causal. On a CPU it runs in fp32 whatever autocast says: there the fused
    kernel's backward takes 2.5 times as long in bf16.
    """
    B, H, T, D = q.shape
    K = k.size(1)
    cpu = q.device.type == "cpu"
    with torch.autocast(q.device.type, enabled=False) if cpu else nullcontext():
        if cpu:
            q, k, v = q.float(), k.float(), v.float()
        if T == 1 and K < H:  # one query a row: heads that share a key-value head become its queries
            return F.scaled_dot_product_attention(q.reshape(B, K, H // K, D), k, v, attn_mask=allowed).view(B, H, 1, D)
        causal_only = allowed is None and T > 1
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, is_causal=causal_only, enable_gqa=K < H)


def make_norm(cfg: ModelConfig) -> nn.Module:
    """The configured normalisation over the channels."""
    if cfg.norm == "rmsnorm":
        return nn.RMSNorm(cfg.n_embed, eps=cfg.norm_eps)
    return nn.LayerNorm(cfg.n_embed, eps=cfg.norm_eps, bias=cfg.bias)


def causal(n_queries: int, n_keys: int, device: torch.device) -> Tensor:
    """(n_queries, n_keys) bool: the last query sees every key, each earlier one a key less."""
    ones = torch.ones(n_queries, n_keys, dtype=torch.bool, device=device)
    return ones.tril(n_keys - n_queries)


def rope_angles(length: int, head_size: int, theta: float) -> Tensor:
    """(length, head_size / 2): position times frequency, the frequencies falling geometrically to 1 / theta."""
    frequencies = theta ** (-torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
    return torch.arange(length, dtype=torch.float32)[:, None] * frequencies


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn each pair (x_i, x_{i + D/2}) of x (B, H, T, D) by its position's angle; rotation (2, B, 1, T, D/2)."""
    cos, sin = rotation.to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
