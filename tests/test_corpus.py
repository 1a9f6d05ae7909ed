"""Text -> token file -> windows: readers, errors, exact contents, order, shards and resume."""

import json
import multiprocessing
import pickle
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from nanorl.data import corpus
from nanorl.data.corpus import TokenBatches, read_texts, token_info, write_tokens
from nanorl.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
PILE = next(
    (p for p in (ROOT / "shared/data/pile_shape", ROOT.parent / "shared/data/pile_shape") if p.is_dir()), None
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_ranks({bytes([byte]): byte for byte in range(256)})  # one token a byte, 9 specials


@pytest.fixture
def token_file(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    write_tokens((f"document number {i}" for i in range(50)), tokenizer, tmp_path / "train.h5")
    return tmp_path / "train.h5"


def write_jsonl(path: Path, texts: list[str]) -> Path:
    data = "".join(json.dumps({"text": text, "meta": {}}) + "\n" for text in texts).encode()
    path.write_bytes(zstandard.compress(data) if path.suffix == ".zst" else data)
    return path


def one_line(error: pytest.ExceptionInfo, *parts: str) -> None:
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


# ---- reading -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.zst"])
def test_reads_json_lines(tmp_path: Path, name: str) -> None:
    texts = ["one", "two\nlines", "dr\u00e9i \u2014 \U0001f600", "four"]
    path = write_jsonl(tmp_path / name, texts)
    assert list(read_texts(path)) == texts
    assert list(read_texts(path, lines=2)) == texts[:2]


def test_reads_a_folder_in_order_with_lines_of_each_file(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "01.jsonl.zst", ["c", "d", "e"])
    write_jsonl(tmp_path / "00.jsonl", ["a", "b"])
    (tmp_path / "02.txt").write_text("f\ng\nh\n")
    (tmp_path / "notes.md").write_text("not read")
    assert list(read_texts(tmp_path)) == ["a", "b", "c", "d", "e", "f\ng\nh\n"]
    assert list(read_texts(tmp_path, lines=2)) == ["a", "b", "c", "d", "f\ng\n"]


def test_reads_zst_of_several_frames_and_lines_across_them(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(corpus, "READ_BYTES", 7)
    data = b'{"text": "first"}\n{"text": "second"}\n{"text": "no newline at the end"}'
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(zstandard.compress(data[:25]) + zstandard.compress(data[25:]))
    assert list(read_texts(path)) == ["first", "second", "no newline at the end"]


def test_skips_empty_lines_and_empty_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n\n   \n{"text": ""}\n{"text": "b"}\n')
    assert list(read_texts(path)) == ["a", "b"]


@settings(max_examples=50, deadline=None)
@given(text=st.text(alphabet="ab\n\r\u00e9", max_size=60), piece=st.integers(1, 20))
def test_txt_pieces_join_to_the_file(tmp_path_factory, text: str, piece: int) -> None:
    path = tmp_path_factory.mktemp("txt") / "a.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "TEXT_PIECE", piece)
        pieces = list(read_texts(path))
    assert "".join(pieces) == text
    assert all(len(part) < 2 * piece for part in pieces)  # a line without end does not fill the memory


@pytest.mark.parametrize(
    "line, reason",
    [
        ('{"text": "cut', "not JSON"),
        ("[1, 2]", "a JSON list"),
        ('{"txt": "x"}', 'field "text"'),
        ('{"text": 5}', 'field "text"'),
        ('{"text": "\\ud800"}', "half of a character"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_bad_line_is_named(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "fine"}\n\n' + line + "\n")
    with pytest.raises(ValueError) as error:
        list(read_texts(path))
    one_line(error, "bad.jsonl:3:", reason, "fix or delete the line")


def test_bad_bytes_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "\xff\xfe"}\n')
    with pytest.raises(ValueError) as error:
        list(read_texts(tmp_path / "a.jsonl"))
    one_line(error, "a.jsonl:1:")
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 noir")
    with pytest.raises(ValueError) as error:
        list(read_texts(tmp_path / "a.txt"))
    one_line(error, "a.txt", "save it as UTF-8")


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.99])
def test_truncated_zst_is_an_error(tmp_path: Path, keep: float) -> None:
    path = write_jsonl(tmp_path / "a.jsonl.zst", [str(i) * 50 for i in range(2000)])
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(ValueError) as error:
        list(read_texts(path))
    one_line(error, "a.jsonl.zst is truncated", "download it again")


def test_damaged_zst_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.zst").write_bytes(b"this is not zstd")
    with pytest.raises(ValueError) as error:
        list(read_texts(tmp_path / "a.jsonl.zst"))
    one_line(error, "a.jsonl.zst is damaged", "download it again")


def test_missing_and_unknown_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="gone.jsonl does not exist"):
        list(read_texts(tmp_path / "gone.jsonl"))
    with pytest.raises(FileNotFoundError, match="holds no text"):
        list(read_texts(tmp_path))
    (tmp_path / "a.pdf").write_text("x")
    with pytest.raises(ValueError, match=r"a.pdf is no text file known here; give one of \.jsonl"):
        list(read_texts(tmp_path / "a.pdf"))


@pytest.mark.skipif(PILE is None, reason="shared/data/pile_shape is not here")
def test_real_file_in_the_pile_shape(tmp_path: Path, tokenizer: Tokenizer) -> None:
    texts = list(read_texts(PILE / "val.jsonl.zst"))
    info = write_tokens(texts, tokenizer, tmp_path / "val.h5")
    assert info["documents"] == len(texts)
    assert info["tokens"] == info["source_bytes"] + len(texts)  # a byte a token, an end token a document
    row = next(TokenBatches(tmp_path / "val.h5", 1, 40))["tokens"][0]
    assert tokenizer.decode(row[1:-1].tolist()).strip("\ufffd") in "".join(texts)


# ---- writing -------------------------------------------------------------------------------------------


def test_contents_by_hand(tmp_path: Path, tokenizer: Tokenizer) -> None:
    end = tokenizer.end_of_text
    info = write_tokens(["ab", "\u00e9"], tokenizer, tmp_path / "deep" / "a.h5")
    with h5py.File(tmp_path / "deep" / "a.h5") as file:
        assert file["tokens"][:].tolist() == [97, 98, end, 0xC3, 0xA9, end]
        assert file["tokens"].dtype == np.uint16
    assert info == token_info(tmp_path / "deep" / "a.h5")
    assert info == {
        "tokens": 6, "documents": 2, "source_bytes": 4, "vocab_size": 265, "tokenizer_hash": tokenizer.hash
    }  # fmt: skip


def test_large_vocabulary_needs_wider_integers(tmp_path: Path, tokenizer: Tokenizer) -> None:
    wide = Tokenizer("wide", tokenizer.pattern, tokenizer.ranks, vocab_size=(1 << 16) + 1)
    write_tokens(["a"], wide, tmp_path / "a.h5")
    with h5py.File(tmp_path / "a.h5") as file:
        assert file["tokens"].dtype == np.uint32


@settings(max_examples=25, deadline=None)
@given(
    texts=st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=8), min_size=1, max_size=12),
    documents=st.integers(1, 5),
    characters=st.integers(1, 20),
)
def test_blocks_change_nothing(tmp_path_factory, tokenizer, texts, documents, characters) -> None:
    path = tmp_path_factory.mktemp("blocks") / "a.h5"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "BLOCK_DOCUMENTS", documents)
        patch.setattr(corpus, "BLOCK_CHARACTERS", characters)
        write_tokens(iter(texts), tokenizer, path)
    expected = [token for text in texts for token in [*tokenizer.encode(text), tokenizer.end_of_text]]
    with h5py.File(path) as file:
        assert file["tokens"][:].tolist() == expected


def test_texts_stream_block_by_block(tmp_path: Path, tokenizer: Tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(corpus, "BLOCK_DOCUMENTS", 3)
    drawn = encoded = most = 0

    def texts():
        nonlocal drawn, most
        for i in range(20):
            drawn += 1
            most = max(most, drawn - encoded)
            yield f"text {i}"

    class Counting:
        vocab_size, end_of_text, hash = tokenizer.vocab_size, tokenizer.end_of_text, tokenizer.hash

        def encode_batch(self, block: list[str]) -> list[list[int]]:
            nonlocal encoded
            encoded += len(block)
            return tokenizer.encode_batch(block)

    write_tokens(texts(), Counting(), tmp_path / "a.h5")
    assert (encoded, most) == (20, 3)


def test_a_failed_write_leaves_the_old_file(token_file: Path, tokenizer: Tokenizer) -> None:
    before = token_file.read_bytes()

    def broken():
        yield "some text"
        raise ValueError("bad line")

    with pytest.raises(ValueError, match="bad line"):
        write_tokens(broken(), tokenizer, token_file)
    assert token_file.read_bytes() == before
    assert list(token_file.parent.iterdir()) == [token_file]


def test_no_text_is_an_error(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError) as error:
        write_tokens([], tokenizer, tmp_path / "a.h5")
    one_line(error, "no text", "a.h5")
    assert not list(tmp_path.iterdir())


# ---- batches -------------------------------------------------------------------------------------------


def test_batches_are_windows_of_the_file(token_file: Path) -> None:
    with h5py.File(token_file) as file:
        tokens = file["tokens"][:].astype(np.int64)
    windows = {tuple(window) for window in np.lib.stride_tricks.sliding_window_view(tokens, 9)}
    batches = TokenBatches(token_file, batch_size=5, length=8)
    for _ in range(20):
        batch = next(batches)["tokens"]
        assert batch.shape == (5, 9) and batch.dtype == torch.int64
        assert all(tuple(row) in windows for row in batch.tolist())


def test_first_and_last_token_are_reached(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write_tokens(["abc"], tokenizer, tmp_path / "a.h5")  # 4 tokens
    rows = next(TokenBatches(tmp_path / "a.h5", batch_size=30, length=2))["tokens"].tolist()
    end = tokenizer.end_of_text
    assert {tuple(row) for row in rows} == {(97, 98, 99), (98, 99, end)}
    whole = next(TokenBatches(tmp_path / "a.h5", batch_size=2, length=3))["tokens"].tolist()
    assert whole == [[97, 98, 99, end]] * 2


def test_order_follows_from_seed_and_position(token_file: Path) -> None:
    def take(n: int, **kwargs) -> torch.Tensor:
        batches = TokenBatches(token_file, batch_size=4, length=8, **kwargs)
        return torch.stack([next(batches)["tokens"] for _ in range(n)])

    assert torch.equal(take(6), take(6))
    assert torch.equal(take(6)[4:], take(2, position=4))  # resume
    assert not torch.equal(take(6), take(6, seed=1))
    assert not torch.equal(take(1), take(1, position=1))
    batches = TokenBatches(token_file, batch_size=4, length=8, position=7)
    next(batches)
    assert batches.position == 8


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_share_the_batch_of_one_process(token_file: Path, world: int) -> None:
    def batch(rank: int, world: int) -> torch.Tensor:
        return next(TokenBatches(token_file, 7, 8, position=3, rank=rank, world=world))["tokens"]

    for rank in range(world):
        assert torch.equal(batch(rank, world), batch(0, 1)[rank::world])


def test_survives_pickling(token_file: Path) -> None:
    batches = TokenBatches(token_file, batch_size=4, length=8)
    next(batches)
    copy = pickle.loads(pickle.dumps(batches))
    assert torch.equal(next(copy)["tokens"], next(batches)["tokens"])


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="this system cannot fork")
def test_survives_a_fork(token_file: Path) -> None:
    batches = TokenBatches(token_file, batch_size=4, length=8)
    next(batches)  # the file is open in this process
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=lambda: queue.put(next(batches)["tokens"].tolist()))
    child.start()
    assert queue.get(timeout=20) == next(batches)["tokens"].tolist()
    child.join()


def test_another_tokenizer_is_refused(token_file: Path, tokenizer: Tokenizer) -> None:
    other = Tokenizer.train(["aaaa bbbb aaaa"], 267)
    TokenBatches(token_file, 2, 8, tokenizer=tokenizer)
    for read in (
        lambda: TokenBatches(token_file, 2, 8, tokenizer=other),
        lambda: token_info(token_file, other),
    ):
        with pytest.raises(ValueError) as error:
            read()
        one_line(error, "train.h5", tokenizer.hash[:12], other.hash[:12], "prepare")


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.95])
def test_truncated_token_file(token_file: Path, keep: float) -> None:
    data = token_file.read_bytes()
    token_file.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(ValueError) as error:
        TokenBatches(token_file, 2, 8)
    one_line(error, "train.h5 is damaged or truncated", "prepare")


def test_missing_foreign_or_short_token_file(token_file: Path) -> None:
    with pytest.raises(FileNotFoundError) as error:
        TokenBatches(token_file.with_name("gone.h5"), 2, 8)
    one_line(error, "gone.h5 does not exist", "prepare")
    with pytest.raises(ValueError) as error:
        TokenBatches(token_file, 2, 10_000)
    one_line(error, "train.h5 holds 940 tokens", "10001", "context_length")
    with h5py.File(token_file.with_name("other.h5"), "w") as file:
        file["tokens"] = [1, 2, 3]
    with pytest.raises(ValueError) as error:
        TokenBatches(token_file.with_name("other.h5"), 1, 2)
    one_line(error, "other.h5", "not of tokens", "prepare")


def test_a_rank_without_rows_is_refused(token_file: Path) -> None:
    with pytest.raises(ValueError) as error:
        TokenBatches(token_file, batch_size=2, length=8, world=3)
    one_line(error, "batch of 2 rows", "3 processes", "batch_size")
