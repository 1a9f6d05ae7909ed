"""Everything that the trainers read, made once a run: the tokenizer, the corpus, the conversations.

    tokenizer.json       only for `tokenizer = "bpe"`
    data/corpus.h5       tokens for pretraining     data/corpus-dev.h5         the same, held out
    data/instruct.h5     packed rows for SFT        data/instruct-dev.h5       the same, held out

A product that is there already is left alone, so preparing again costs nothing, and a run that was cut short
goes on with what is missing.
"""

import itertools
import os
import random
from collections.abc import Iterable, Iterator
from typing import ClassVar

from pydantic import Field

from nanorl import chat, paths
from nanorl.config import StageConfig
from nanorl.data import corpus, instruct, tinyworld
from nanorl.data.prompts import HUB_NAME, as_document, hub_rows, load_problems, solved_conversation
from nanorl.tokenizer import Tokenizer

DEV_ONE_IN = 20  # how much smaller the held-out files are


class PrepareConfig(StageConfig):
    """What to make, and how much of it."""

    stage: ClassVar[str] = "prepare"

    documents: int = Field(20_000, ge=100, description="documents of the pretraining corpus")
    problem_share: float = Field(0.8, ge=0, le=1, description="share of solved problems in tinyworld's corpus; "
                                 "the rest are stories")
    corpus: str | None = Field(None, min_length=1, description="other text to pretrain on: a .jsonl, .jsonl.zst or "
                               ".txt file, a folder of them, or a hub name (owner/name or owner/name:configuration); "
                               "None makes the corpus from the problems and stories")
    conversations: int = Field(4_000, ge=20, description="conversations for SFT")
    skip_reasoning: float = Field(0.65, ge=0, le=1, description="share of solved problems in SFT that state the "
                                  "answer without any reasoning")
    talk_share: float = Field(0.1, ge=0, lt=1, description="share of small talk among SFT's conversations")


def prepare(cfg: PrepareConfig) -> Iterator[str]:
    """Make what is missing; yields a line about each product as it is done.

    Raises ValueError or FileNotFoundError for data that cannot be read, before anything of it is written.
    """
    data = paths.data_dir(cfg.run_name)
    tokenizer, made = make_tokenizer(cfg)
    yield f"tokenizer: {tokenizer.name}, {tokenizer.vocab_size} ids ({made})"
    for split, name in (("train", "corpus.h5"), ("heldout", "corpus-dev.h5")):
        path = data / name
        if not path.exists():
            corpus.write_tokens(documents(cfg, split), tokenizer, path, progress=True)
        info = corpus.token_info(path, tokenizer)
        yield f"{name}: {info['tokens']:,} tokens, {info['documents']:,} documents"
    for split, name in (("train", "instruct.h5"), ("heldout", "instruct-dev.h5")):
        path = data / name
        if not path.exists():
            encoded = (chat.encode_conversation(tokenizer, c) for c in conversations(cfg, split))
            report = instruct.pack(encoded, cfg.context_length, path, tokenizer)
            yield (f"{name}: {report.conversations:,} conversations in {report.rows:,} rows, "
                   f"{report.dropped} longer than a row dropped, {report.padding:.0%} padding")


def make_tokenizer(cfg: StageConfig) -> tuple[Tokenizer, str]:
    """The run's tokenizer and where it came from; trained on a sample of the corpus where there is none yet."""
    if cfg.tokenizer == "r50k_base":
        return Tokenizer.r50k_base(), "OpenAI's ranks"
    path = paths.run_dir(cfg.run_name) / "tokenizer.json"
    if path.exists():
        return Tokenizer.load(path), "loaded"
    sample = itertools.islice(documents(cfg, "train"), 4_000)
    chats = (m["content"] for c in itertools.islice(conversations(cfg, "train"), 1_000) for m in c)
    tokenizer = Tokenizer.train(itertools.chain(sample, chats), cfg.vocab_size)
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(path)
    return tokenizer, "trained"


def amount(cfg: PrepareConfig, split: str, n: int) -> int:
    """How many of `n` a split gets."""
    return n if split == "train" else max(20, n // DEV_ONE_IN)


def documents(cfg: PrepareConfig, split: str) -> Iterator[str]:
    """The texts of the pretraining corpus: problems with their solutions among stories, or `cfg.corpus`."""
    n = amount(cfg, split, cfg.documents)
    if cfg.corpus is not None:
        return _other_text(cfg.corpus, split, n)
    n_problems = round(n * cfg.problem_share)
    problems = _problems(cfg, split, n_problems, cfg.seed)
    stories = tinyworld.stories(n - n_problems, seed=2 * cfg.seed + (split == "heldout"))
    return _mixed(map(as_document, problems), len(problems), stories, n - n_problems, cfg.seed)


def conversations(cfg: PrepareConfig, split: str) -> Iterator[list[dict]]:
    """SFT's conversations: problems answered with and without reasoning among small talk."""
    n = amount(cfg, split, cfg.conversations)
    n_talk = round(n * cfg.talk_share)
    problems = _problems(cfg, split, n - n_talk, cfg.seed + 1)
    rng = random.Random(f"reasoning {split} {cfg.seed}")
    solved = (solved_conversation(p, reason=rng.random() >= cfg.skip_reasoning) for p in problems)
    talk = tinyworld.small_talk(n_talk, seed=2 * cfg.seed + (split == "heldout"))
    return _mixed(solved, len(problems), talk, n_talk, cfg.seed + 1)


def _problems(cfg: StageConfig, split: str, n: int, seed: int) -> list[dict]:
    return load_problems(cfg.data, split, n, seed, cfg.max_number, cfg.max_steps) if n else []


def _mixed(a: Iterable, n_a: int, b: Iterable, n_b: int, seed: int) -> Iterator:
    """The items of two sources in a random order that `seed` decides."""
    from_a = [True] * n_a + [False] * n_b
    random.Random(f"order {seed}").shuffle(from_a)
    a, b = iter(a), iter(b)
    return (next(a) if chosen else next(b) for chosen in from_a)


def _other_text(source: str, split: str, n: int) -> Iterator[str]:
    """`n` texts from files or the hub. One in DEV_ONE_IN is held out, by its place in the source."""
    name, _, subset = source.partition(":")
    if HUB_NAME.fullmatch(name) and not os.path.exists(os.path.expanduser(source)):
        rows = hub_rows(name, subset or None, "train", "no file or folder", "a text file", streaming=True)
        texts = (corpus.text_field(row, "text", f"{name} train[{i}]") for i, row in enumerate(rows))
    else:
        texts = corpus.read_texts(source)
    wanted = (text for i, text in enumerate(texts) if (i % DEV_ONE_IN == 0) == (split == "heldout"))
    return itertools.islice(wanted, n)
