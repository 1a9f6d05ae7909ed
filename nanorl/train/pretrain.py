"""Pretraining: a Transformer from nothing, learning to predict the next token of random windows of text."""

import itertools
import math
from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field
from torch import Tensor, nn

from nanorl import config, distributed, paths, runtime
from nanorl.data.corpus import TokenBatches, token_info
from nanorl.data.prepare import make_tokenizer
from nanorl.model import ModelConfig, Transformer
from nanorl.objectives.language_model import next_token_loss
from nanorl.train import supervised


class PretrainConfig(supervised.SupervisedConfig, ModelConfig):
    """Pretraining's settings: the loop's, and the shape of the model."""

    stage: ClassVar[str] = "pretrain"

    window: int = Field(128, ge=2, description="tokens of a training window, at most the context length")


def losses(model: nn.Module, batch: dict) -> tuple[Tensor, dict]:
    """Per-token losses (B, T-1) of windows (B, T)."""
    return next_token_loss(model(batch["tokens"]), batch["tokens"]), {}


def count(batch: dict) -> int:
    """Every token of a window but the first is a target."""
    return batch["tokens"][:, 1:].numel()


def train(cfg: PretrainConfig) -> Iterator[dict]:
    """Train a model from nothing on the run's corpus; yields one record a step, leaves stage `pretrain`.

    Each held-out loss also comes as bits per byte, which can be compared between tokenizers.
    Raises FileNotFoundError where the corpus has not been prepared, ValueError for a window that is longer than
    the context.
    """
    if cfg.window > cfg.context_length:
        raise ValueError(f"window {cfg.window} is longer than context_length {cfg.context_length}; lower window")
    device = distributed.setup(runtime.pick_device(cfg.device))
    runtime.seed_everything(cfg.seed)
    data = paths.data_dir(cfg.run_name)
    needed = [data / "corpus.h5", *([paths.run_dir(cfg.run_name) / "tokenizer.json"] if cfg.tokenizer == "bpe" else [])]
    for path in needed:
        if not path.is_file():
            raise FileNotFoundError(f"no {path}; make it with: {config.command_for('prepare', cfg)}")
    tokenizer, _ = make_tokenizer(cfg)
    model = Transformer(ModelConfig.of(cfg, vocab_size=tokenizer.vocab_size))
    info = token_info(data / "corpus-dev.h5", tokenizer)
    tokens_per_byte = info["tokens"] / info["source_bytes"]

    def batches(name: str, seed: int) -> TokenBatches:
        return TokenBatches(data / name, cfg.batch_size, cfg.window - 1, seed, distributed.rank(),
                            distributed.world_size(), tokenizer=tokenizer)

    job = supervised.Job(
        model, tokenizer, batches("corpus.h5", cfg.seed),
        dev_batches=lambda: itertools.islice(batches("corpus-dev.h5", 0), cfg.eval_batches),
        losses=losses, count=count,
        report=lambda found: {"bits_per_byte": bits_per_byte(found["dev_loss"], tokens_per_byte)},
    )
    yield from supervised.train(cfg, job, device)


def bits_per_byte(nats_per_token: float, tokens_per_byte: float) -> float:
    """A loss that does not depend on the tokenizer: bits that the model needs for a byte of text."""
    return nats_per_token / math.log(2) * tokens_per_byte
