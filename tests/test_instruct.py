"""Conversations -> packed rows -> batches: nothing split or lost, masks aligned, ranks disjoint, resume."""

from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanorl import chat
from nanorl.data import instruct
from nanorl.data.instruct import EpochBatches, PackReport, RowBatches, pack
from nanorl.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_ranks({bytes([byte]): byte for byte in range(256)})


def read_rows(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    with h5py.File(path) as file:
        return file["tokens"][:], file["loss_mask"][:], file["documents"][:]


def unpack(path: Path) -> list[tuple[list[int], list[int]]]:
    """The conversations of a file, row by row: (ids, mask)."""
    found = []
    for tokens, mask, documents in zip(*read_rows(path), strict=True):
        for document in range(documents.max() + 1):
            places = np.flatnonzero(documents == document)
            assert (np.diff(places) == 1).all()
            found.append((tokens[places].tolist(), mask[places].tolist()))
    return found


def make_rows(path: Path, tokenizer: Tokenizer, rows: int) -> Path:
    """A file of `rows` rows, one conversation each, whose first token is the row's number."""
    pack([([row, 7, 7], [0, 1, 1]) for row in range(rows)], row_length=4, path=path, tokenizer=tokenizer)
    return path


def numbers(batch: dict) -> list[int]:
    return batch["tokens"][:, 0].tolist()


def one_line(error: pytest.ExceptionInfo, *parts: str) -> None:
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


# ---- packing -------------------------------------------------------------------------------------------


def test_packing_by_hand(tmp_path: Path, tokenizer: Tokenizer) -> None:
    conversations = [
        ([1, 2, 3], [0, 1, 1]),
        ([4, 5, 6, 7], [0, 0, 1, 1]),  # no room after the first: a second row
        ([8, 9], [0, 1]),  # fits the first row
        ([0] * 7, [0] * 7),  # longer than a row: dropped
        ([10], [0]),  # fills the first row
    ]
    report = pack(conversations, row_length=6, path=tmp_path / "a.h5", tokenizer=tokenizer)
    tokens, mask, documents = read_rows(tmp_path / "a.h5")
    pad = tokenizer.pad
    assert tokens.tolist() == [[1, 2, 3, 8, 9, 10], [4, 5, 6, 7, pad, pad]]
    assert mask.tolist() == [[0, 1, 1, 0, 1, 0], [0, 0, 1, 1, 0, 0]]
    assert documents.tolist() == [[0, 0, 0, 1, 1, 2], [0, 0, 0, 0, -1, -1]]
    assert report == PackReport(rows=2, conversations=4, dropped=1, tokens=10, learned=5, padding=1 - 10 / 12)


LENGTHS = st.lists(st.integers(1, 14), min_size=1, max_size=40).filter(lambda lengths: min(lengths) <= 10)


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, bits=st.integers(0), open_rows=st.integers(1, 5), block=st.integers(1, 4))
def test_every_token_once_nothing_split_masks_aligned(
    tmp_path_factory, tokenizer: Tokenizer, lengths: list[int], bits: int, open_rows: int, block: int
) -> None:
    ids = iter(range(100_000))
    conversations = [
        ([next(ids) for _ in range(n)], [(bits >> (n + i)) & 1 for i in range(n)]) for n in lengths
    ]
    wide = Tokenizer(
        "wide", tokenizer.pattern, tokenizer.ranks, vocab_size=100_000
    )  # room to tell tokens apart
    path = tmp_path_factory.mktemp("pack") / "a.h5"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(instruct, "OPEN_ROWS", open_rows)
        patch.setattr(instruct, "BLOCK_ROWS", block)
        report = pack(iter(conversations), row_length=10, path=path, tokenizer=wide)
    kept = [pair for pair in conversations if len(pair[0]) <= 10]
    assert sorted(unpack(path)) == sorted(kept)  # whole, once, each with its own mask
    tokens, mask, documents = read_rows(path)
    padding = documents == -1
    assert (tokens[padding] == wide.pad).all() and (mask[padding] == 0).all()
    assert (np.diff(padding.astype(int), axis=1) >= 0).all()  # only at the end of a row
    assert not padding[:, 0].any()  # no empty row
    assert report.rows == len(tokens) and report.conversations == len(kept)
    assert report.dropped == len(conversations) - len(kept)
    assert report.tokens == (~padding).sum() and report.learned == mask.sum()
    assert report.padding == pytest.approx(padding.mean())


def test_first_fit_leaves_little_padding(tmp_path: Path, tokenizer: Tokenizer) -> None:
    lengths = np.random.default_rng(0).integers(5, 40, size=2000)
    report = pack((([1] * n, [1] * n) for n in lengths), 128, tmp_path / "a.h5", tokenizer)
    assert report.padding < 0.02


def test_a_packed_chat_reads_as_the_chats(tmp_path: Path, tokenizer: Tokenizer) -> None:
    chats = [
        [{"role": "user", "content": f"{i}+{i}?"}, {"role": "assistant", "content": f"{2 * i}"}]
        for i in (1, 2)
    ]
    pack(
        (chat.encode_conversation(tokenizer, messages) for messages in chats),
        64,
        tmp_path / "a.h5",
        tokenizer,
    )
    (batch,) = RowBatches(tmp_path / "a.h5", batch_size=8, epochs=1, tokenizer=tokenizer)
    documents, tokens = batch["documents"][0], batch["tokens"][0]
    assert chat.render(tokenizer, tokens[documents == 1]) == "<|user|>2+2?<|end|>\n<|assistant|>4<|end|>"
    assert chat.render(tokenizer, tokens[batch["loss_mask"][0]]) == "2<|end|>\n4<|end|>"


@pytest.mark.parametrize("bad", [([], []), ([1, 2], [1]), ([1], [0, 1])])
def test_a_crooked_conversation_is_refused(tmp_path: Path, tokenizer: Tokenizer, bad: tuple) -> None:
    with pytest.raises(ValueError) as error:
        pack([([1, 2], [0, 1]), bad], 8, tmp_path / "a.h5", tokenizer)
    one_line(error, "conversation 1", "same length")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("conversations, dropped", [([], 0), ([([1] * 9, [1] * 9)] * 3, 3)])
def test_nothing_to_pack_is_an_error(
    tmp_path: Path, tokenizer: Tokenizer, conversations, dropped: int
) -> None:
    with pytest.raises(ValueError) as error:
        pack(conversations, 8, tmp_path / "a.h5", tokenizer)
    one_line(error, "row of 8 tokens", f"({dropped} are longer)", "context_length")
    assert not list(tmp_path.iterdir())


# ---- batches -------------------------------------------------------------------------------------------


def test_a_batch(tmp_path: Path, tokenizer: Tokenizer) -> None:
    batch = next(RowBatches(make_rows(tmp_path / "a.h5", tokenizer, 5), batch_size=2))
    assert {name: value.dtype for name, value in batch.items() if name != "epoch"} == {
        "tokens": torch.int64, "loss_mask": torch.bool, "documents": torch.int64
    }  # fmt: skip
    assert batch["tokens"].shape == batch["loss_mask"].shape == batch["documents"].shape
    assert batch["tokens"][:, 1:].tolist() == [[7, 7, tokenizer.pad]] * len(batch["tokens"])
    assert batch["loss_mask"].int().tolist() == [[0, 1, 1, 0]] * len(batch["tokens"])
    assert batch["documents"].tolist() == [[0, 0, 0, -1]] * len(batch["tokens"])
    assert batch["epoch"] == 0


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 23), batch_size=st.integers(1, 9), world=st.integers(1, 4), seed=st.integers(0, 3))
def test_every_row_once_an_epoch_on_any_number_of_ranks(
    tmp_path_factory, tokenizer: Tokenizer, rows: int, batch_size: int, world: int, seed: int
) -> None:
    path = make_rows(tmp_path_factory.mktemp("rows") / "a.h5", tokenizer, rows)
    whole = list(RowBatches(path, batch_size, seed=seed, epochs=2))
    for epoch in (0, 1):
        batches = [numbers(batch) for batch in whole if batch["epoch"] == epoch]
        sizes = [len(batch) for batch in batches]
        assert sorted(sum(batches, [])) == list(range(rows))
        assert len(batches) == -(-rows // batch_size)
        assert max(sizes) <= batch_size and max(sizes) - min(sizes) <= 1
    if min(len(batch["tokens"]) for batch in whole) < world:
        with pytest.raises(ValueError):
            RowBatches(path, batch_size, seed=seed, world=world)
        return
    ranks = [list(RowBatches(path, batch_size, seed, epochs=2, rank=r, world=world)) for r in range(world)]
    assert {len(batches) for batches in ranks} == {len(whole)}  # ranks never wait for each other
    for position, batch in enumerate(whole):
        for rank in range(world):
            assert numbers(ranks[rank][position]) == numbers(batch)[rank::world]


def test_order_changes_with_epoch_and_seed_and_repeats(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = make_rows(tmp_path / "a.h5", tokenizer, 30)

    def order(**kwargs) -> list[int]:
        return sum((numbers(batch) for batch in RowBatches(path, 7, **kwargs)), [])

    first = order(epochs=2)
    assert first == order(epochs=2)
    assert first[:30] != first[30:]
    assert first[:30] != order(epochs=1, seed=1)


@pytest.mark.parametrize("position", [0, 1, 4, 5, 9, 14])
def test_resume_at_any_position(tmp_path: Path, tokenizer: Tokenizer, position: int) -> None:
    path = make_rows(tmp_path / "a.h5", tokenizer, 18)  # 5 batches an epoch
    whole = [(batch["epoch"], numbers(batch)) for batch in RowBatches(path, 4, epochs=3)]
    rest = RowBatches(path, 4, epochs=3, position=position)
    assert [(batch["epoch"], numbers(batch)) for batch in rest] == whole[position:]
    assert rest.position == len(whole) == 15


def test_endless_and_small_sets(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = make_rows(tmp_path / "a.h5", tokenizer, 3)
    batches = RowBatches(path, batch_size=100)  # a set smaller than a batch: short batches, one an epoch
    for epoch in range(5):
        batch = next(batches)
        assert batch["epoch"] == epoch and sorted(numbers(batch)) == [0, 1, 2]
    assert [batch["epoch"] for batch in RowBatches(path, batch_size=100, epochs=2)] == [0, 1]
    assert list(RowBatches(path, batch_size=100, epochs=2, position=2)) == []


def test_a_rank_without_rows_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = make_rows(tmp_path / "a.h5", tokenizer, 3)
    with pytest.raises(ValueError) as error:
        RowBatches(path, batch_size=8, world=4)
    one_line(error, "3 rows", "4 processes", "lower nproc")
    with pytest.raises(ValueError) as error:
        RowBatches(path, batch_size=2, world=3)
    one_line(error, "batch of 2 rows", "3 processes")


def test_another_tokenizer_kind_or_a_damaged_file_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = make_rows(tmp_path / "a.h5", tokenizer, 3)
    other = Tokenizer.train(["aaaa bbbb aaaa"], 267)
    with pytest.raises(ValueError) as error:
        RowBatches(path, 2, tokenizer=other)
    one_line(error, "a.h5", tokenizer.hash[:12], other.hash[:12], "prepare")
    with pytest.raises(ValueError) as error:
        instruct.H5Reader(path, "tokens")
    one_line(error, "a.h5 is a file of rows, not of tokens")
    path.write_bytes(path.read_bytes()[:1500])
    with pytest.raises(ValueError) as error:
        RowBatches(path, 2)
    one_line(error, "a.h5 is damaged or truncated", "prepare")
    with pytest.raises(FileNotFoundError) as error:
        RowBatches(tmp_path / "gone.h5", 2)
    one_line(error, "gone.h5 does not exist", "prepare")


# ---- which things make up a batch, whatever they are ---------------------------------------------------


def drawn(batches: EpochBatches, n: int) -> list[tuple[list[int], int]]:
    """The next `n` batches of indices, each with its epoch."""
    found = (batches.next_indices() for _ in range(n))
    return [(indices.tolist(), epoch) for indices, epoch in found]


def test_indices_by_hand() -> None:
    batches = EpochBatches(7, 3)
    assert batches.batches_per_epoch == 3
    first, second = (np.random.default_rng([0, epoch]).permutation(7).tolist() for epoch in (0, 1))
    assert drawn(batches, 4) == [(first[:2], 0), (first[2:4], 0), (first[4:], 0), (second[:2], 1)]
    assert batches.position == 4


@given(n=st.integers(1, 40), batch_size=st.integers(1, 12), world=st.integers(1, 4), start=st.integers(0, 9))
def test_ranks_share_each_batch_from_any_position(n: int, batch_size: int, world: int, start: int) -> None:
    per_epoch = -(-n // batch_size)
    if batch_size < world or n // per_epoch < world:
        with pytest.raises(ValueError):
            EpochBatches(n, batch_size, world=world)
        return
    whole = drawn(EpochBatches(n, batch_size, seed=3), start + 2 * per_epoch)
    for epoch in range(len(whole) // per_epoch):
        one = whole[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(i for indices, _ in one for i in indices) == list(range(n))
        assert {found for _, found in one} == {epoch}
    for rank in range(world):
        batches = EpochBatches(n, batch_size, 3, position=start, rank=rank, world=world)
        assert drawn(batches, 2 * per_epoch) == [(indices[rank::world], epoch) for indices, epoch in whole[start:]]


def test_a_position_may_be_set_back_and_forth() -> None:
    batches = EpochBatches(10, 4)
    whole = drawn(batches, 9)
    for position in (7, 0, 3, 2, 8):
        batches.position = position
        assert drawn(batches, 1) == whole[position : position + 1]


def test_after_the_last_epoch_it_stops_and_stays_so() -> None:
    batches = EpochBatches(5, 2, epochs=2)
    assert len(drawn(batches, 6)) == 6
    for _ in range(2):
        with pytest.raises(StopIteration):
            batches.next_indices()
        assert batches.position == 6


def test_too_few_things_are_named() -> None:
    with pytest.raises(ValueError) as error:
        EpochBatches(0, 4, source="the pairs")
    one_line(error, "the pairs: no rows to make batches of", "check the data")
    with pytest.raises(ValueError) as error:
        EpochBatches(9, 4, world=4, source="the pairs")
    one_line(error, "the pairs: 9 rows in batches of 4 make a batch of 3, too few for 4 processes", "batch_size 8")
    assert EpochBatches(9, 8, world=4).batches_per_epoch == 2  # that advice works
    with pytest.raises(ValueError) as error:
        EpochBatches(9, 1, world=2)
    one_line(error, "batch of 1 rows", "2 processes")
