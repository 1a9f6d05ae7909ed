"""Text files -> one long row of tokens in HDF5 -> random windows for pretraining.

A token file holds one dataset, `tokens` (N,), uint16 where the vocabulary allows it and uint32 else: every
document's tokens followed by the end-of-text token. Its attributes say which tokenizer made it, how many
documents it holds and how many bytes of text they were (what bits per byte needs).

Simplified: windows are drawn with replacement, so an "epoch" does not exist here, and a window may begin in
the middle of a document and run over its end, as in nanoGPT.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import zstandard
from tqdm import tqdm

from nanorl.data.store import REMEDY, H5Reader, append, atomic_h5, describe

if TYPE_CHECKING:
    from nanorl.tokenizer import Tokenizer

SUFFIXES = (".jsonl", ".jsonl.zst", ".txt")
TEXT_PIECE = 1 << 20  # characters; a .txt file marks no documents: it is cut at line ends near this size
BLOCK_DOCUMENTS = 1024  # documents encoded and appended at a time, or fewer ...
BLOCK_CHARACTERS = 1 << 22  # ... where they are long
READ_BYTES = 1 << 18
CHUNK_TOKENS = 1 << 14  # HDF5 chunk: what one random read costs


# ---- reading -------------------------------------------------------------------------------------------


def read_texts(path: str | Path, lines: int | None = None, field: str = "text") -> Iterator[str]:
    """Documents of a `.jsonl`, `.jsonl.zst` or `.txt` file, or of every such file of a folder, sorted.

    Each line of a .jsonl file is an object whose `field` is one document. A .txt file is cut at line ends
    into pieces of about a million characters; joined, they are the file. `lines` takes that many lines of
    each file, and empty documents are left out. Memory stays at one document whatever the size of the file.

    Raises FileNotFoundError for a missing path; ValueError naming file and line for a line that is not such
    an object, for text that is not UTF-8 and for a truncated .zst file.
    """
    for file in _text_files(Path(os.path.expanduser(path))):
        if file.name.endswith(".txt"):
            yield from _read_pieces(file, lines)
            continue
        for number, record in read_records(file, lines):
            text = text_field(record, field, f"{file}:{number}")
            if text.strip():
                yield text


def text_field(record: dict, field: str, where: str) -> str:
    """record[field]; ValueError that begins with `where` if it is missing, not text or not valid Unicode."""
    text = record.get(field)
    if not isinstance(text, str):
        raise ValueError(f'{where}: no text in field "{field}"; fix or delete the line')
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f'{where}: field "{field}" holds half of a character ({text[error.start]!r}); '
            "fix or delete the line"
        ) from None
    return text


def read_records(path: str | Path, lines: int | None = None) -> Iterator[tuple[int, dict]]:
    """(line number from 1, object) for each line of a .jsonl, .jsonl.gz or .jsonl.zst file, empty lines skipped.

    Raises FileNotFoundError, or ValueError naming file and line where a line is not a JSON object.
    """
    path = Path(path)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path} does not exist; check the path")
    source = _zst_lines(path) if path.name.endswith(".zst") else _plain_lines(path)
    for number, line in enumerate(source, start=1):
        if lines is not None and number > lines:
            return
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, absurd nesting
            reason = str(error).splitlines()[0]
            raise ValueError(f"{path}:{number}: not JSON ({reason}); fix or delete the line") from None
        if not isinstance(record, dict):
            raise ValueError(
                f"{path}:{number}: a JSON {type(record).__name__} where an object was expected; "
                "fix or delete the line"
            )
        yield number, record


def _text_files(path: Path) -> list[Path]:
    if os.path.isfile(path):
        if not path.name.endswith(SUFFIXES):
            raise ValueError(f"{path} is no text file known here; give one of {', '.join(SUFFIXES)}")
        return [path]
    if not os.path.isdir(path):
        raise FileNotFoundError(f"{path} does not exist; check the path")
    files = sorted(file for file in path.iterdir() if file.name.endswith(SUFFIXES))
    if not files:
        raise FileNotFoundError(f"{path} holds no text; put {', '.join(SUFFIXES)} files there")
    return files


def _plain_lines(path: Path) -> Iterator[bytes]:
    try:
        with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as file:
            yield from file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is truncated or damaged ({error}); download it again") from None


def _zst_lines(path: Path) -> Iterator[bytes]:
    rest = b""
    for piece in _decompressed(path):
        *whole, rest = (rest + piece).split(b"\n")
        yield from whole
    if rest:
        yield rest


def _decompressed(path: Path) -> Iterator[bytes]:
    """Decompressed pieces of a file of one or more zstd frames.

    A stream reader ends quietly inside a broken frame; a decompression object knows whether its frame ended.
    """
    frame = None
    with path.open("rb") as file:
        while data := file.read(READ_BYTES):
            while data:
                if frame is None:
                    frame = zstandard.ZstdDecompressor().decompressobj()
                try:
                    piece = frame.decompress(data)
                except zstandard.ZstdError as error:
                    raise ValueError(f"{path} is damaged ({error}); download it again") from None
                if piece:
                    yield piece
                if not frame.eof:
                    break
                data, frame = frame.unused_data, None
    if frame is not None:
        raise ValueError(f"{path} is truncated: it ends inside a zstd frame; download it again")


def _read_pieces(path: Path, lines: int | None) -> Iterator[str]:
    piece: list[str] = []
    size = taken = 0
    try:
        with path.open(encoding="utf-8", newline="") as file:
            while (lines is None or taken < lines) and (line := file.readline(TEXT_PIECE)):
                taken += line.endswith(("\n", "\r"))
                piece.append(line)
                size += len(line)
                if size >= TEXT_PIECE:
                    yield "".join(piece)
                    piece, size = [], 0
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text (byte {error.start}: {error.reason}); save it as UTF-8"
        ) from None
    if piece:
        yield "".join(piece)


# ---- writing -------------------------------------------------------------------------------------------


def write_tokens(
    texts: Iterable[str], tokenizer: Tokenizer, path: str | Path, progress: bool = False
) -> dict:
    """Encode `texts` in blocks, append them to a token file, return its `token_info`.

    The file appears under its name only when it is complete. Raises ValueError where there is no text.
    """
    path = Path(path)
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    documents = source_bytes = 0
    bar = tqdm(desc=path.name, unit="B", unit_scale=True, disable=not progress)
    with atomic_h5(path) as file, bar:
        tokens = file.create_dataset("tokens", (0,), dtype, maxshape=(None,), chunks=(CHUNK_TOKENS,), fletcher32=True)
        for block in _blocks(texts):
            encoded = tokenizer.encode_batch(block)
            ended = [np.array([*ids, tokenizer.end_of_text], dtype) for ids in encoded]
            append(tokens, np.concatenate(ended))
            block_bytes = sum(len(text.encode("utf-8")) for text in block)
            documents += len(block)
            source_bytes += block_bytes
            bar.update(block_bytes)
        if not source_bytes:
            raise ValueError(f"no text to write to {path}; check the data that it is made from")
        describe(file, "tokens", tokenizer, documents=documents, source_bytes=source_bytes)
    return token_info(path)


def _blocks(texts: Iterable[str]) -> Iterator[list[str]]:
    block: list[str] = []
    size = 0
    for text in texts:
        block.append(text)
        size += len(text)
        if len(block) >= BLOCK_DOCUMENTS or size >= BLOCK_CHARACTERS:
            yield block
            block, size = [], 0
    if block:
        yield block


# ---- batches -------------------------------------------------------------------------------------------


def token_info(path: str | Path, tokenizer: Tokenizer | None = None) -> dict:
    """What a token file holds: tokens, documents, source_bytes, vocab_size (integers), tokenizer_hash."""
    reader = H5Reader(path, "tokens", tokenizer)
    attrs = reader.file.attrs
    info = {"tokens": reader.shape[0]}
    for name in ("documents", "source_bytes", "vocab_size"):
        if not isinstance(attrs.get(name), np.integer):
            raise ValueError(f"{path} does not say its {name}; {REMEDY}")
        info[name] = int(attrs[name])
    info["tokenizer_hash"] = reader.tokenizer_hash
    reader.close()
    return info


class TokenBatches:
    """Endless iterator of {"tokens": (B_local, T+1) int64}: windows of a token file, with T targets each.

    Batch number `position` holds `batch_size` random windows that follow from (seed, position) alone, and a
    rank takes its rows [rank::world]: the order of the data does not depend on the number of processes, and
    the state to save is the integer `position`, the number of the next batch.
    """

    def __init__(
        self,
        path: str | Path,
        batch_size: int,
        length: int,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        position: int = 0,
        tokenizer: Tokenizer | None = None,
    ):
        check_shards(batch_size, world)
        self.reader = H5Reader(path, "tokens", tokenizer)
        self.batch_size, self.length, self.seed = batch_size, length, seed
        self.rank, self.world, self.position = rank, world, position
        self.windows = self.reader.shape[0] - length  # places where length + 1 tokens fit
        if self.windows < 1:
            raise ValueError(
                f"{path} holds {self.windows + length} tokens, less than one window of "
                f"{length + 1}; prepare more text or use a smaller context_length"
            )

    def __iter__(self) -> TokenBatches:
        return self

    def __next__(self) -> dict:
        draw = np.random.default_rng([self.seed, self.position])
        starts = draw.integers(self.windows, size=self.batch_size)[self.rank :: self.world]
        rows = self.reader.read("tokens", [slice(start, start + self.length + 1) for start in starts])
        self.position += 1
        return {"tokens": torch.from_numpy(rows)}  # (B_local, T+1)


def check_shards(rows: int, world: int) -> None:
    """Raise ValueError where `rows` rows of a batch leave one of `world` processes with none."""
    if rows < max(world, 1):
        raise ValueError(
            f"a batch of {rows} rows leaves some of {world} processes without any; "
            "raise batch_size or lower nproc"
        )
