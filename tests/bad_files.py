"""Bad files of data: missing, cut short, garbled, empty or of another kind.

Rows as in bad_inputs.py. Files are made in the folder that a call gets.
"""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import zstandard
from bad_inputs import PROBLEM, absent, bad, right, tokenizer

from nanorl import config, evaluate
from nanorl.data import corpus, download, instruct, prompts
from nanorl.data.preference import load_pairs

# ---- lines of JSON -------------------------------------------------------------------------------------

GOOD = {"text": "once upon a time", "question": "1+1?", "answer": "#### 2", "prompt": "hi"} | {
    "chosen": "a", "rejected": "b"}
LINES = [  # whatever is read from the line
    ("no JSON", b"once upon a time", "not JSON"), ("cut short", b'{"text": "once', "not JSON"),
    ("a list", b"[1, 2]", "list"),
    ("a number", b"7", "int"), ("a text", b'"hi"', "str"), ("null", b"null", "NoneType"), ("no keys", b"{}", ":2"),
    ("invalid UTF-8", b'{"text": "\xff\xfe"}', "not JSON"), ("a million brackets", b"[" * 10**6, "not JSON"),
    ("a number of 5,000 digits", b'{"text": ' + b"9" * 5_000 + b"}", "not JSON"), ("zero bytes", bytes(40), "not JSON"),
    *((f"{name} is {value!r}"[:40], json.dumps(GOOD | dict.fromkeys(GOOD, value)).encode(), ":2")
      for name, value in (("text", 7), ("text", None), ("text", []), ("text", {}), ("half a character", "\ud83d"))),
    ("NaN", b'{"text": NaN, "question": NaN, "answer": Infinity, "chosen": NaN, "rejected": NaN}', ":2"),
]
READERS: dict[str, Callable[[Path], Any]] = {
    "data.corpus.read_texts": lambda path: list(corpus.read_texts(path)),
    "data.preference.load_pairs": lambda path: load_pairs(str(path)),
    "data.prompts.load_problems": lambda path: prompts.load_problems(str(path.parent)),
}


def reading(entry: str, content: bytes, name: str = "train.jsonl") -> Callable[[Path], Any]:
    """The call of a reader on a file with this content."""
    def call(folder: Path) -> Any:
        (folder / name).write_bytes(content)
        return READERS[entry](folder / name)

    return call


TEXT = b"".join(json.dumps(GOOD).encode() + b"\n" for _ in range(50))
PACKED = {".jsonl.zst": zstandard.ZstdCompressor(write_checksum=True).compress(TEXT), ".jsonl.gz": gzip.compress(TEXT)}
DAMAGE = [
    ("cut short", lambda data: data[: len(data) // 2], "truncated"),
    ("cut at its end", lambda data: data[:-1], "truncated"),
    ("not compressed", lambda data: TEXT, "damaged"),
    ("garbled", lambda data: data[:20] + bytes(20) + data[40:], "damaged"),
    ("garbage behind it", lambda data: data + b"garbage" * 9, "damaged"),
]
TEXT_FILES = [
    *(bad(entry, wrong, reading(entry, json.dumps(GOOD).encode() + b"\n" + line + b"\n"), "train.jsonl:2", words)
      for entry in READERS for wrong, line, words in LINES),
    *(bad(entry, f"{ending} {wrong}", reading(entry, damage(PACKED[ending]), f"all{ending}"), f"all{ending}", words,
          "download it again")
      for entry, ending in (("data.corpus.read_texts", ".jsonl.zst"), ("data.preference.load_pairs", ".jsonl.zst"),
                            ("data.preference.load_pairs", ".jsonl.gz")) for wrong, damage, words in DAMAGE),
    *(bad(entry, f"empty {name}", reading(entry, b"\n\n", name), words)
      for entry, name, words in (("data.prompts.load_problems", "train.jsonl", "holds no problems"),
                                 ("data.preference.load_pairs", "all.jsonl", "no train pairs"))),
    *(bad(entry, "another kind of file", reading(entry, b"a,b\n", "all.csv"), "all.csv", words)
      for entry, words in (("data.corpus.read_texts", ".jsonl.zst, .txt"), ("data.preference.load_pairs", "not JSON"))),
    bad("data.corpus.read_texts", "no UTF-8", reading("data.corpus.read_texts", b"a\xff", "a.txt"), "save it as UTF-8"),
    right("data.corpus.read_texts", "only empty texts", reading("data.corpus.read_texts", b'{"text": " "}\n'), []),
    bad("data.prompts.load_problems", "a file", lambda folder: prompts.load_problems(written(folder / "a.jsonl", TEXT)),
        "give the folder"),
    absent("data.prompts.load_problems", "no test.jsonl", lambda folder: prompts.load_problems(str(folder), "heldout"),
           "test.jsonl does not exist"),
    absent("data.preference.load_pairs", "an empty folder", lambda folder: load_pairs(str(folder)), "train.jsonl"),
    absent("data.corpus.read_texts", "an empty folder", lambda folder: list(corpus.read_texts(folder)),
        "holds no text"),
    absent("data.corpus.read_records", "a folder", lambda folder: list(corpus.read_records(folder)), "check the path"),
    bad("data.corpus.read_records", "a list", lambda folder: list(corpus.read_records(written(folder / "a", b"[]"))),
        ":1"),
    bad("data.prompts.hub_rows", "nothing there", lambda _: list(
        prompts.hub_rows("a/b", None, "train", "no file", "one")), "a/b is no file here",
        "the hub gave no train split", "give one"),
    bad("evaluate.heldout_problems", "too few", lambda folder: few_problems(folder), "lower eval_problems"),
    bad("data.download.fetch", "another checksum", lambda folder: download.fetch(
        "http://a/b", written(folder / "a", b"x"), "0" * 64), "delete it"),
]


def written(path: Path, content: bytes | str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def few_problems(folder: Path) -> Any:
    written(folder / "test.jsonl", json.dumps(PROBLEM))
    return evaluate.heldout_problems(config.resolve(evaluate.EvalConfig, "smoke", data=str(folder)), 5, 5)


# ---- token files and packed rows -----------------------------------------------------------------------

def tokens_at(path: Path) -> Path:
    corpus.write_tokens(["once upon a time"] * 9, tokenizer(), path)
    return path


def rows_at(path: Path) -> Path:
    instruct.pack([([65, 66], [0, 1])] * 9, 4, path, tokenizer())
    return path


def changed(change: Callable[[h5py.File], Any]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with h5py.File(path, "r+") as file:
            change(file)

    return damage


def replaced(file: h5py.File, name: str, values: Any) -> None:
    del file[name]
    file[name] = values


OPENERS: dict[str, tuple[Callable, Callable]] = {
    "data.corpus.token_info": (tokens_at, lambda path: corpus.token_info(path, tokenizer())),
    "data.corpus.TokenBatches": (tokens_at, lambda path: next(corpus.TokenBatches(path, 2, 4, tokenizer=tokenizer()))),
    "data.instruct.RowBatches": (rows_at, lambda path: next(instruct.RowBatches(path, 2, tokenizer=tokenizer()))),
}
H5_DAMAGE: list[tuple[str, Callable[[Path], Any], str]] = [
    ("empty", lambda path: path.write_bytes(b""), "truncated"),
    ("text", lambda path: path.write_text("hi" * 999), "damaged"),
    ("cut short", lambda path: path.write_bytes(path.read_bytes()[:-99]), "truncated"),
    ("no head", lambda path: path.write_bytes(bytes(512) + path.read_bytes()[512:]), "damaged"),
    ("no kind", changed(lambda file: file.attrs.pop("kind")), "not of"),
    ("another kind", changed(lambda file: file.attrs.update(kind="pictures")), "pictures"),
    ("another tokenizer", changed(lambda file: file.attrs.update(tokenizer_hash="0" * 64)), "00000000"),
    ("no tokens", changed(lambda file: file.pop("tokens")), "tokens"),
    ("tokens of another shape", changed(lambda file: replaced(file, "tokens", np.zeros((2, 2, 2), np.uint16))),
        "tokens"),
    ("tokens that are text", changed(lambda file: replaced(file, "tokens", "once upon a time")), "tokens"),
    ("tokens that are fractions", changed(lambda file: replaced(
        file, "tokens", np.full(file["tokens"].shape, 0.5))), "tokens"),
]
H5_FILES = [
    *(bad(entry, wrong, lambda folder, make=make, damage=damage, read=read: damaged(
        make(folder / "x.h5"), damage, read), "x.h5", words, "prepare")
      for entry, (make, read) in OPENERS.items() for wrong, damage, words in H5_DAMAGE),
    *(absent(entry, "missing", lambda folder, read=read: read(folder / "x.h5"), "nanorl prepare")
      for entry, (_, read) in OPENERS.items()),
    bad("data.corpus.token_info", "no count of bytes", lambda folder: damaged(
        tokens_at(folder / "x.h5"), changed(lambda file: file.attrs.pop("source_bytes")), corpus.token_info),
        "source_bytes"),
    bad("data.store.H5Reader.read", "an id beyond the vocabulary", lambda folder: damaged(
        tokens_at(folder / "x.h5"), changed(lambda file: replaced(file, "tokens", np.full(99, 9_999, np.uint16))),
        OPENERS["data.corpus.TokenBatches"][1]), "9999", "prepare"),
    bad("data.instruct.RowBatches", "no loss mask", lambda folder: damaged(
        rows_at(folder / "x.h5"), changed(lambda file: file.pop("loss_mask")), OPENERS["data.instruct.RowBatches"][1]),
        "loss_mask", "prepare"),
    bad("data.instruct.RowBatches", "documents of another length", lambda folder: damaged(
        rows_at(folder / "x.h5"), changed(lambda file: replaced(file, "documents", np.zeros((1, 4), np.int32))),
        OPENERS["data.instruct.RowBatches"][1]), "documents", "prepare"),
    bad("data.corpus.TokenBatches", "shorter than a window", lambda folder: corpus.TokenBatches(
        tokens_at(folder / "x.h5"), 2, 999), "less than one window of 1000"),
    bad("data.corpus.TokenBatches", "a batch of none", lambda folder: corpus.TokenBatches(
        tokens_at(folder / "x.h5"), 0, 4), "batch of 0 rows"),
    *(bad("data.corpus.write_tokens", wrong, lambda folder, texts=texts: corpus.write_tokens(
        texts, tokenizer(), folder / "x.h5"), words)
      for wrong, texts, words in (("no documents", [], "no text"), ("empty", ["", ""], "no text"),
                                  ("half a character", ["\ud800"], "surrogate"))),
    *(bad("data.instruct.pack", wrong, lambda folder, c=c: instruct.pack(c, 4, folder / "x.h5", tokenizer()), words)
      for wrong, c, words in (("none", [], "no conversation fits"), ("an empty one", [([], [])], "0 tokens"),
                              ("too long", [([1] * 5, [1] * 5)], "1 are longer"),
                              ("a short mask", [([1, 2], [1])], "mask of 1"))),
]


def damaged(path: Path, damage: Callable[[Path], Any], read: Callable[[Path], Any]) -> Any:
    damage(path)
    return read(path)


FILES = [*TEXT_FILES, *H5_FILES]
