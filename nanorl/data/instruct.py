"""Conversations -> packed rows in HDF5 -> batches for supervised fine-tuning.

A row is `row_length` tokens that hold one or more whole conversations, then padding:

    tokens      q q a a . | q a a a a . | pad pad      (R, T)
    loss_mask   0 0 1 1 1 | 0 1 1 1 1 1 | 0   0        (R, T)  1 on assistant content and its end token
    documents   0 0 0 0 0 | 1 1 1 1 1 1 | -1  -1       (R, T)  which conversation of the row; -1 is padding

The model lets a token see its own document only and counts positions from each document's start, so the
loss of a packed row is the sum of the losses of its conversations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import h5py
import numpy as np
import torch

from nanorl.data.corpus import check_shards
from nanorl.data.store import H5Reader, append, atomic_h5, describe

if TYPE_CHECKING:
    from nanorl.tokenizer import Tokenizer

OPEN_ROWS = 64  # rows that still take conversations while packing
BLOCK_ROWS = 1024  # rows written at a time


@dataclass(frozen=True)
class PackReport:
    """What `pack` did. `tokens` and `learned` count real tokens and those under the loss mask."""

    rows: int
    conversations: int  # packed; the dropped ones are not among them
    dropped: int  # longer than a row
    tokens: int
    learned: int
    padding: float  # share of all places in rows that hold padding


@dataclass
class _Row:
    tokens: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    documents: list[int] = field(default_factory=list)

    def add(self, ids: Sequence[int], mask: Sequence[int]) -> None:
        document = self.documents[-1] + 1 if self.documents else 0
        self.tokens.extend(ids)
        self.loss_mask.extend(mask)
        self.documents.extend([document] * len(ids))


def pack(
    conversations: Iterable[tuple[Sequence[int], Sequence[int]]],
    row_length: int,
    path: str | Path,
    tokenizer: Tokenizer,
) -> PackReport:
    """Pack (ids, mask) pairs into rows of `row_length`, write them to `path`, report what was done.

    First fit, in order: a conversation goes to the first open row with room for it. Simplified: only the
    last OPEN_ROWS rows are open, so that packing takes linear time and little memory. No conversation is
    split; one longer than a row is dropped and counted. The file appears under its name only when it is
    complete.

    Raises ValueError where a conversation is empty or its mask has another length, and where none fits a row.
    """
    path = Path(path)
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    count: Counter[str] = Counter()
    with atomic_h5(path) as file:
        shape, limit, chunks = (0, row_length), (None, row_length), (8, row_length)
        for name, kind in (("tokens", dtype), ("loss_mask", np.uint8), ("documents", np.int32)):
            file.create_dataset(name, shape, kind, maxshape=limit, chunks=chunks, fletcher32=True)
        rows = _fill(conversations, row_length, count)
        while block := list(islice(rows, BLOCK_ROWS)):
            _write(file, block, row_length, tokenizer.pad)
            count["rows"] += len(block)
        if not count["rows"]:
            raise ValueError(
                f"no conversation fits a row of {row_length} tokens ({count['dropped']} are longer); "
                "raise context_length or check the data"
            )
        report = PackReport(
            rows=count["rows"],
            conversations=count["packed"],
            dropped=count["dropped"],
            tokens=count["tokens"],
            learned=count["learned"],
            padding=1 - count["tokens"] / (count["rows"] * row_length),
        )
        describe(file, "rows", tokenizer, **asdict(report))
    return report


def _fill(
    conversations: Iterable[tuple[Sequence[int], Sequence[int]]], row_length: int, count: Counter[str]
) -> Iterator[_Row]:
    """The rows, each as soon as it takes no more conversations; counts what went in and what did not."""
    open_rows: list[_Row] = []
    for ids, mask in conversations:
        if not len(ids) or len(ids) != len(mask):
            raise ValueError(
                f"conversation {count['packed'] + count['dropped']} has {len(ids)} tokens and a mask of "
                f"{len(mask)}; both must have the same length, at least 1"
            )
        if len(ids) > row_length:
            count["dropped"] += 1
            continue
        row = next((row for row in open_rows if len(row.tokens) + len(ids) <= row_length), None)
        if row is None:
            if len(open_rows) == OPEN_ROWS:
                yield open_rows.pop(0)
            row = _Row()
            open_rows.append(row)
        row.add(ids, mask)
        count.update(packed=1, tokens=len(ids), learned=int(sum(mask)))
    yield from open_rows


def _write(file: h5py.File, rows: list[_Row], row_length: int, pad: int) -> None:
    for name, filler in (("tokens", pad), ("loss_mask", 0), ("documents", -1)):
        block = np.full((len(rows), row_length), filler, file[name].dtype)
        for i, row in enumerate(rows):
            block[i, : len(row.tokens)] = getattr(row, name)
        append(file[name], block)


class EpochBatches:
    """Which of `n` things make up each batch: every one once an epoch, in an order drawn from (seed, epoch).

    An epoch is `batches_per_epoch` = ceil(n / batch_size) batches whose sizes differ by one at most, none above
    `batch_size`, so there is no tiny last batch and a set smaller than a batch is one short batch. `epochs=None` goes
    on for ever. A rank takes [rank::world] of each, so ranks are disjoint and see equally many batches. `position`,
    the number of the next batch since the start, is the integer to save; it means the same on any number of ranks.

    Raises ValueError where a batch has fewer things than there are ranks (never with batch_size >= 2 * world and
    n >= world); `source` names them in that error.
    """

    def __init__(
        self, n: int, batch_size: int, seed: int = 0, epochs: int | None = None, position: int = 0, rank: int = 0,
        world: int = 1, source: str = "the data",
    ):
        check_shards(batch_size, world)
        if n < 1:
            raise ValueError(f"{source}: no rows to make batches of; check the data that they are made from")
        self.n, self.batch_size, self.seed, self.epochs, self.position = n, batch_size, seed, epochs, position
        self.rank, self.world = rank, world
        self.batches_per_epoch = -(-n // batch_size)
        smallest = n // self.batches_per_epoch
        if smallest < world:
            raise ValueError(
                f"{source}: {n} rows in batches of {batch_size} make a batch of {smallest}, too few for {world} "
                f"processes; lower nproc or use batch_size {2 * world}"
            )
        self._epoch, self._order = -1, np.arange(0)

    def __iter__(self) -> EpochBatches:
        return self

    def next_indices(self) -> tuple[np.ndarray, int]:
        """This rank's part of the next batch, and the epoch it belongs to; StopIteration after the last."""
        epoch, place = divmod(self.position, self.batches_per_epoch)
        if self.epochs is not None and epoch >= self.epochs:
            raise StopIteration
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng([self.seed, epoch]).permutation(self.n)
        start, end = (self.n * i // self.batches_per_epoch for i in (place, place + 1))
        self.position += 1
        return self._order[start:end][self.rank :: self.world], epoch


class RowBatches(EpochBatches):
    """Iterator of batches of packed rows.

    Yields a dict: tokens (B_local, T) int64, loss_mask (B_local, T) bool, documents (B_local, T) int64, and epoch, an
    integer from 0. Raises ValueError as above, for a damaged file and for one made with another tokenizer than
    `tokenizer`, where that is given.
    """

    def __init__(
        self,
        path: str | Path,
        batch_size: int,
        seed: int = 0,
        epochs: int | None = None,
        position: int = 0,
        rank: int = 0,
        world: int = 1,
        tokenizer: Tokenizer | None = None,
    ):
        self.reader = H5Reader(path, "rows", tokenizer)
        self.rows, self.row_length = self.reader.shape
        super().__init__(self.rows, batch_size, seed, epochs, position, rank, world, str(path))

    def __next__(self) -> dict:
        mine, epoch = self.next_indices()
        batch = {name: self._read(name, mine) for name in ("tokens", "loss_mask", "documents")}
        return {**batch, "loss_mask": batch["loss_mask"].bool(), "epoch": epoch}

    def _read(self, name: str, rows: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(self.reader.read(name, rows))  # (B_local, T)
