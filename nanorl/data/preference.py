"""Pairs of replies, one better than the other -> packed rows for the reward model, DPO, ORPO and KTO.

A pair is a plain dict: {"prompt": messages, "chosen": text, "rejected": text}, the last message the user's. It comes
from the tiny world, from files or from the hub, where it may also be a pair of whole conversations (UltraFeedback,
Cui et al. 2023, arXiv:2310.01377) or of transcripts (HH-RLHF, Bai et al. 2022, arXiv:2204.05862):

    "\\n\\nHuman: How are you?\\n\\nAssistant: Fine."

Encoded it is three lists of ids, (prompt, chosen, rejected), and in a batch one row, in which neither reply sees the
other and the prompt is run once for both:

    tokens      p p p c c . | r r r . | pad      (B, T)
    documents   0 0 0 1 1 1 | 2 2 2 2 | -1       (B, T)
"""

from __future__ import annotations

import os
import random
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nanorl import chat
from nanorl.data import tinyworld
from nanorl.data.corpus import read_records
from nanorl.data.instruct import EpochBatches
from nanorl.data.prompts import HUB_NAME, hub_rows

if TYPE_CHECKING:
    from nanorl.tokenizer import Tokenizer

Encoded = tuple[list[int], list[int], list[int]]  # prompt, first reply, second reply
FILES = {"train": "train", "heldout": "test"}
ENDINGS = (".jsonl", ".jsonl.gz", ".jsonl.zst")
HUB_SPLITS = {"HuggingFaceH4/ultrafeedback_binarized": {"train": "train_prefs", "heldout": "test_prefs"}}
ROLES = {"Human": "user", "Assistant": "assistant"}
TURN = re.compile(r"(?:\A|\n\n)(Human|Assistant):")
HELD_OUT_ONE_IN = 10  # of a single file
MIN_PROMPT = 8  # tokens of a prompt that stay, however long the reply


# ---- loading -------------------------------------------------------------------------------------------


def load_pairs(
    source: str = "tinyworld", split: str = "train", n: int | None = None, seed: int = 0,
    max_number: int | None = None, max_steps: int | None = None, noise: float = 0.0,
) -> list[dict]:
    """`n` pairs of a split, "train" or "heldout", or fewer where the source holds fewer; all of them where `n` is None.

    source: "tinyworld" (endless, so it needs `n`; the last three are read by nothing else), a folder with train and
    test files, one file, or owner/name on the Hugging Face hub. Files are .jsonl, .jsonl.gz or .jsonl.zst. Of a single
    file one prompt in ten is held out, by its hash, so that no prompt stands on both sides. From files and hub the
    pairs come in an order drawn by `seed`: files are often sorted by where the pairs come from.

    Raises FileNotFoundError for a missing folder or file; ValueError for an unknown split, noise without tinyworld,
    and naming the record for one that is no pair.
    """
    if split not in FILES:
        raise ValueError(f'unknown split "{split}"; use one of {", ".join(FILES)}')
    if n is not None and n < 1:
        raise ValueError(f"{n} pairs asked for; ask for at least 1")
    if source == "tinyworld":
        if n is None:
            raise ValueError("tinyworld has no end; say how many pairs (n)")
        difficulty = {"max_number": max_number, "max_steps": max_steps}
        given = {name: value for name, value in difficulty.items() if value is not None}
        return tinyworld.preferences(n, split, seed, noise=noise, **given)
    if noise:
        raise ValueError(f"noise {noise} is made for tinyworld's pairs only; set it to 0 for {source}")
    place = Path(os.path.expanduser(source))
    if os.path.isdir(place):
        pairs = _from_file(_file_in(place, split))
    elif os.path.isfile(place):
        pairs = [pair for pair in _from_file(place) if is_heldout(pair) == (split == "heldout")]
    elif HUB_NAME.fullmatch(source):
        pairs = _from_hub(source, split)
    else:
        raise FileNotFoundError(f"{source} is not here; give tinyworld, a folder with train.jsonl and test.jsonl, a "
                                ".jsonl file, or a hub name such as HuggingFaceH4/ultrafeedback_binarized")
    if not pairs:
        raise ValueError(f"{source} has no {split} pairs; choose another source")
    random.Random(f"pairs {seed}").shuffle(pairs)
    return pairs[:n]


def is_heldout(pair: dict) -> bool:
    """Whether a pair of a single file is held out: decided by its prompt alone."""
    return zlib.crc32(repr(pair["prompt"]).encode()) % HELD_OUT_ONE_IN == 0


def _file_in(folder: Path, split: str) -> Path:
    """The file of a split in a folder."""
    choices = [folder / (FILES[split] + ending) for ending in ENDINGS]
    return next((path for path in choices if path.is_file()), choices[0])


def _from_file(path: Path) -> list[dict]:
    return [as_pair(record, f"{path}:{number}") for number, record in read_records(path)]


def _from_hub(name: str, split: str) -> list[dict]:
    part = HUB_SPLITS.get(name, FILES)[split]
    rows = hub_rows(name, None, part, "not", "a file")
    return [as_pair(row, f"{name} {part}[{i}]") for i, row in enumerate(rows)]


# ---- forms of a pair -----------------------------------------------------------------------------------


def as_pair(record: dict, where: str) -> dict:
    """A pair in the standard form, of a record in any of the forms above; ValueError, naming `where`, if it is none."""
    try:
        chosen, rejected = (_conversation(record, side) for side in ("chosen", "rejected"))
        return _joined(chosen, rejected)
    except ValueError as error:
        raise ValueError(f"{where}: {error}; fix or delete it") from None


def _conversation(record: dict, side: str) -> list[dict]:
    """The whole conversation of one side, the reply its last message."""
    reply, prompt = record.get(side), record.get("prompt")
    if not isinstance(reply, str | list):
        raise ValueError(f"no text or messages under {side!r}")
    if not isinstance(prompt, str | list | None):
        raise ValueError("'prompt' is neither text nor messages")
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
    if isinstance(reply, list):  # messages, the prompt among them or before them
        messages = reply if len(reply) > 1 else [*before, *reply]
    elif prompt is None:
        messages = split_transcript(reply)
    else:
        messages = [*before, {"role": "assistant", "content": reply}]
    try:
        chat.check_messages(messages)
        for message in messages:
            message["content"].encode("utf-8")  # half of a character has no place in UTF-8, nor in a tokenizer
    except ValueError as error:
        raise ValueError(f"{side}: {error}") from None
    return [{"role": m["role"], "content": m["content"]} for m in messages]


def split_transcript(text: str) -> list[dict]:
    """The turns of "\\n\\nHuman: ...\\n\\nAssistant: ..." as messages. Turns of one side in a row are joined.

    Raises ValueError where it does not begin with a turn.
    """
    first, *rest = TURN.split(text)
    if first.strip() or not rest:
        raise ValueError(f'a transcript must begin with "Human:" or "Assistant:", not {text[:40]!r}')
    messages: list[dict] = []
    for role, content in zip(rest[::2], rest[1::2], strict=True):
        if messages and messages[-1]["role"] == ROLES[role]:
            messages[-1]["content"] = f"{messages[-1]['content']}\n\n{content.strip()}".strip()
        else:
            messages.append({"role": ROLES[role], "content": content.strip()})
    return messages


def _joined(chosen: list[dict], rejected: list[dict]) -> dict:
    """The pair of two conversations that have all but a reply in common. Where they part earlier than in their last
    message, that is where the pair is: what was said later answers different replies."""
    at = 0
    while at < min(len(chosen), len(rejected)) - 1 and chosen[at] == rejected[at]:
        at += 1
    if at == 0 or chosen[at - 1]["role"] != "user" or {chosen[at]["role"], rejected[at]["role"]} != {"assistant"}:
        raise ValueError("chosen and rejected must have a user's message in common that both reply to")
    if not chosen[at]["content"].strip() and not rejected[at]["content"].strip():
        raise ValueError("both replies are empty")
    return {"prompt": chosen[:at], "chosen": chosen[at]["content"], "rejected": rejected[at]["content"]}


# ---- encoding ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PairReport:
    """What `encode_pairs` did with its pairs."""

    pairs: int
    equal: int = 0  # dropped: both replies the same, after truncation
    truncated_prompts: int = 0
    truncated_replies: int = 0


def encode_pairs(tokenizer: Tokenizer, pairs: Iterable[dict], longest: int) -> tuple[list[Encoded], PairReport]:
    """The pairs as ids, each reply with its end token, prompt and reply together at most `longest` tokens.

    Of a prompt that is too long the end stays, as much as the longer reply leaves room for, and both replies see the
    same; at least MIN_PROMPT tokens stay, or all where it has fewer, and then the reply is cut at its end.
    Raises ValueError where `longest` leaves no room for a reply.
    """
    if longest <= MIN_PROMPT:
        raise ValueError(f"a context of {longest} tokens has no room for a reply; use more than {MIN_PROMPT}")
    encoded, seen = [], {"pairs": 0, "equal": 0, "truncated_prompts": 0, "truncated_replies": 0}
    for pair in pairs:
        whole = encode_pair(tokenizer, pair)
        prompt, chosen, rejected = cut = truncate(whole, longest)
        seen["pairs"] += 1
        if chosen == rejected:
            seen["equal"] += 1
            continue
        seen["truncated_prompts"] += len(prompt) < len(whole[0])
        seen["truncated_replies"] += cut[1:] != whole[1:]
        encoded.append(cut)
    return encoded, PairReport(**seen)


def encode_pair(tokenizer: Tokenizer, pair: dict) -> Encoded:
    """Prompt and replies of a pair as ids, nothing cut."""
    prompt = chat.encode_prompt(tokenizer, pair["prompt"])
    replies = ([{"role": "assistant", "content": pair[side]}] for side in ("chosen", "rejected"))
    chosen, rejected = (chat.encode_conversation(tokenizer, reply)[0][1:] for reply in replies)  # the marker is prompt
    return prompt, chosen, rejected


def truncate(encoded: Encoded, longest: int) -> Encoded:
    """Prompt and each reply in at most `longest` tokens, as `encode_pairs` says."""
    prompt, first, second = encoded
    kept = min(len(prompt), max(MIN_PROMPT, longest - max(len(first), len(second))))
    return prompt[len(prompt) - kept :], first[: longest - kept], second[: longest - kept]


def unpaired(encoded: Sequence[Encoded], longest: int) -> tuple[list[Encoded], Tensor]:
    """Pairs taken apart for KTO: 2N rows (prompt, reply, mismatched reply), and which replies are good, (2N,) bool.

    All chosen replies first, then all rejected. The mismatched reply of a row is that of the next row, the last row's
    that of the first: another prompt's, unless there is one pair only.
    """
    singles = [(p, c) for p, c, _ in encoded] + [(p, r) for p, _, r in encoded]
    others = [reply for _, reply in singles[1:] + singles[:1]]
    rows = [(p, reply, other[: longest - len(p)]) for (p, reply), other in zip(singles, others, strict=True)]
    return rows, torch.arange(len(singles)) < len(encoded)


# ---- batches -------------------------------------------------------------------------------------------


class PairBatches(EpochBatches):
    """Iterator of batches of encoded pairs, or of KTO's rows, in the order and with the rules of `EpochBatches`.

    Yields `collate` of this rank's rows, and "index" (B_local,), their places in `encoded`. What is `known` of every
    row, tensors (N, ...) by name, comes along, (B_local, ...) each.
    """

    def __init__(
        self, encoded: Sequence[Encoded], batch_size: int, seed: int, pad: int, epochs: int | None = None,
        rank: int = 0, world: int = 1, known: Mapping[str, Tensor] | None = None,
    ):
        super().__init__(len(encoded), batch_size, seed, epochs, 0, rank, world, "the pairs")
        self.encoded, self.pad, self.known = encoded, pad, known or {}

    def __next__(self) -> dict:
        mine, _ = self.next_indices()
        index = torch.from_numpy(mine)
        return {**collate([self.encoded[i] for i in mine], self.pad), "index": index,
                **{name: x[index] for name, x in self.known.items()}}


def collate(encoded: Sequence[Encoded], pad: int) -> dict:
    """Encoded pairs as packed rows: "tokens" and "documents" (B, T) int64."""
    width = max(sum(map(len, parts)) for parts in encoded)
    tokens = torch.full((len(encoded), width), pad)
    documents = torch.full((len(encoded), width), -1)
    for row, parts in enumerate(encoded):
        ids = [index for part in parts for index in part]
        tokens[row, : len(ids)] = torch.tensor(ids)
        documents[row, : len(ids)] = torch.tensor([number for number, part in enumerate(parts) for _ in part])
    return {"tokens": tokens, "documents": documents}
