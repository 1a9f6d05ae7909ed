"""HDF5 files of tokens: written whole or not at all, checked when they are opened, read from any process.

Each part has a checksum, the chunks of data sets with `fletcher32=True` too: damage is found where it is read, before
HDF5 itself could stumble over it, or in the training.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np

if TYPE_CHECKING:
    from nanorl.tokenizer import Tokenizer

REMEDY = "delete it and run `python -m nanorl prepare` again"
HOLDS = {"tokens": (1, ["tokens"]), "rows": (2, ["tokens", "loss_mask", "documents"])}  # kind: dimensions, data sets


def append(dataset: h5py.Dataset, values: np.ndarray) -> None:
    """Grow a resizable dataset along its first axis by `values`."""
    start = dataset.shape[0]
    dataset.resize(start + len(values), axis=0)
    dataset[start:] = values


@contextmanager
def atomic_h5(path: Path) -> Iterator[h5py.File]:
    """A new HDF5 file that takes its name when the block ends well, and leaves nothing behind else."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with h5py.File(part, "w", libver="latest") as file:  # the format in which each part has a checksum
            yield file
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def describe(file: h5py.File, kind: str, tokenizer: Tokenizer, **numbers: float) -> None:
    """Write what `H5Reader` checks, and numbers by name, as attributes. Texts are of fixed length: others would be kept
    in the one part of a file that has no checksum."""
    file.attrs.update(kind=np.bytes_(kind), tokenizer_hash=np.bytes_(tokenizer.hash), vocab_size=tokenizer.vocab_size)
    file.attrs.update(numbers)


class H5Reader:
    """An HDF5 file opened when a process first reads it: an instance may be pickled, or cross a fork.

    `shape` is that of each of its data sets.
    """

    def __init__(self, path: str | Path, kind: str, tokenizer: Tokenizer | None = None):
        """Check that the file opens, is of this kind ("tokens" or "rows") and was made with `tokenizer`.

        FileNotFoundError if it is absent; ValueError if it is damaged, or of another kind or tokenizer.
        """
        self.path = Path(path)
        self._file: h5py.File | None = None
        self._pid = -1
        dimensions, names = HOLDS[kind]
        file = self.file
        try:
            found, self.tokenizer_hash = (_text(file.attrs.get(name)) for name in ("kind", "tokenizer_hash"))
            self.vocab_size = file.attrs.get("vocab_size")
            shapes = {name: _shape(file.get(name)) for name in names}
        except (OSError, KeyError, RuntimeError) as error:
            raise self._damaged(error) from None
        if found != kind:
            raise ValueError(f"{self.path} is a file of {found}, not of {kind}; {REMEDY}")
        if tokenizer is not None and self.tokenizer_hash != tokenizer.hash:
            raise ValueError(f"{self.path} was made with tokenizer {self.tokenizer_hash[:12]}, this one is "
                             f"{tokenizer.hash[:12]}; {REMEDY}")
        for name in names:
            if len(shapes[name]) != dimensions or shapes[name] != shapes[names[0]]:
                raise ValueError(f"{self.path} has no {name} of the right shape; {REMEDY}")
        self.shape = shapes[names[0]]

    @property
    def file(self) -> h5py.File:
        if self._file is None or self._pid != os.getpid():
            if not self.path.is_file():
                raise FileNotFoundError(f"{self.path} does not exist; run `python -m nanorl prepare` first")
            try:
                self._file, self._pid = h5py.File(self.path, "r"), os.getpid()
            except OSError as error:
                raise self._damaged(error) from None
        return self._file

    def read(self, name: str, places: Sequence[Any]) -> np.ndarray:
        """Rows or slices of equal length of a data set, stacked, as int64. ValueError where they cannot be read, or
        are tokens that the vocabulary does not have."""
        try:
            found = np.stack([self.file[name][place] for place in places]).astype(np.int64)
        except (OSError, RuntimeError) as error:
            raise self._damaged(error) from None
        if name == "tokens" and self.vocab_size is not None and found.size and found.max() >= self.vocab_size:
            raise ValueError(f"{self.path} holds token {found.max()}, the vocabulary has {self.vocab_size}; {REMEDY}")
        return found

    def close(self) -> None:
        if self._file is not None and self._pid == os.getpid():
            self._file.close()
        self._file = None

    def _damaged(self, error: Exception) -> ValueError:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return ValueError(f"{self.path} is damaged or truncated ({reason:.80}); {REMEDY}")

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_file": None}


def _text(attribute: Any) -> str:
    return attribute.decode("utf-8", "replace") if isinstance(attribute, bytes) else str(attribute)


def _shape(data: Any) -> tuple[int, ...]:
    """The shape of a data set of whole numbers; () for anything else."""
    return data.shape if isinstance(data, h5py.Dataset) and data.dtype.kind in "iu" else ()
