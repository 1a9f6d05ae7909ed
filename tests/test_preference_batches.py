"""Pairs of replies as token ids: encoding and truncation, KTO's rows, and the batches."""

import random
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanorl import chat
from nanorl.data.preference import (
    MIN_PROMPT,
    PairBatches,
    PairReport,
    collate,
    encode_pair,
    encode_pairs,
    truncate,
    unpaired,
)
from nanorl.tokenizer import Tokenizer

USER, ASSISTANT, SYSTEM = ({"role": role, "content": text} for role, text in (
    ("user", "Hi?"), ("assistant", "Yes."), ("system", "Be kind.")))
PAD = 99
TOKENIZER = Tokenizer.from_ranks({bytes([byte]): byte for byte in range(256)})  # one token a byte


def pair_of(prompt: str, chosen: str = "good", rejected: str = "bad") -> dict:
    return {"prompt": [{"role": "user", "content": prompt}], "chosen": chosen, "rejected": rejected}


def one_line(error: pytest.ExceptionInfo, *parts: str) -> None:
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


# ---- encoding ----------------------------------------------------------------------------------------------


def test_encoding_by_hand() -> None:
    special, end = TOKENIZER.special, TOKENIZER.end_of_turn
    prompt, chosen, rejected = encode_pair(TOKENIZER, pair_of("Hi", "<think>2</think>", "n<|end|>"))
    assert prompt == [special["<|user|>"], *b"Hi", end, special["<|assistant|>"]]
    assert chosen == [special["<think>"], *b"2", special["</think>"], end]
    assert rejected == [*b"n<|end|>", end]  # a reply cannot end itself
    assert encode_pair(TOKENIZER, pair_of("Hi", "yes", ""))[2] == [end]


@pytest.mark.parametrize("prompt", [[USER], [SYSTEM, USER], [USER, ASSISTANT, USER], [USER, USER]])
def test_prompt_and_reply_are_the_whole_conversation(prompt: list[dict]) -> None:
    pair = {"prompt": prompt, "chosen": chat.reply("1+1=2", "2"), "rejected": "no idea \u00e9"}
    ids, *replies = encode_pair(TOKENIZER, pair)
    for side, reply in zip(("chosen", "rejected"), replies, strict=True):
        whole, mask = chat.encode_conversation(TOKENIZER, [*prompt, {"role": "assistant", "content": pair[side]}])
        assert ids + reply == whole and mask[len(ids) :] == [1] * len(reply) and not mask[len(ids) - 1]


def ids(start: int, n: int) -> list[int]:
    return list(range(start, start + n))


@pytest.mark.parametrize(("sizes", "longest", "kept"), [
    ((20, 5, 3), 25, (20, 5, 3)),  # fits exactly
    ((20, 5, 3), 24, (19, 5, 3)),  # the prompt gives way to the longer reply
    ((20, 3, 5), 24, (19, 3, 5)),
    ((20, 5, 3), 13, (8, 5, 3)),  # to MIN_PROMPT
    ((20, 5, 3), 12, (8, 4, 3)),  # then the reply gives way
    ((20, 5, 3), 9, (8, 1, 1)),
    ((4, 5, 3), 9, (4, 5, 3)),  # a prompt shorter than that stays whole
    ((4, 9, 3), 9, (4, 5, 3)),
    ((8, 9, 8), 16, (8, 8, 8)),
])
def test_truncation_by_hand(sizes: tuple, longest: int, kept: tuple) -> None:
    assert MIN_PROMPT == 8
    prompt, first, second = truncate((ids(100, sizes[0]), ids(200, sizes[1]), ids(300, sizes[2])), longest)
    assert prompt == ids(100 + sizes[0] - kept[0], kept[0])  # its end
    assert first == ids(200, kept[1]) and second == ids(300, kept[2])  # their beginnings


@given(st.tuples(*[st.integers(1, 40)] * 3), st.integers(MIN_PROMPT + 1, 60))
def test_nothing_is_longer_than_the_limit_or_cut_without_need(sizes: tuple, longest: int) -> None:
    whole = ids(100, sizes[0]), ids(200, sizes[1]), ids(300, sizes[2])
    prompt, *replies = truncate(whole, longest)
    assert prompt == whole[0][sizes[0] - len(prompt) :] and len(prompt) >= min(sizes[0], MIN_PROMPT)
    for reply, all_of_it in zip(replies, whole[1:], strict=True):
        assert reply == all_of_it[: len(reply)] and reply
        assert len(prompt) + len(reply) <= longest
        if len(reply) < len(all_of_it):  # cut: the prompt is as short as it may be, and there is no place left
            assert len(prompt) == min(sizes[0], MIN_PROMPT) and len(prompt) + len(reply) == longest
    if len(prompt) < sizes[0]:
        assert len(prompt) == MIN_PROMPT or len(prompt) + max(map(len, replies)) == longest


@given(st.text("ab ", max_size=40), st.text("ab<think>", max_size=40), st.text("ab", max_size=40), st.integers(9, 60))
def test_encoded_pairs_fit_and_keep_what_they_should(prompt: str, chosen: str, rejected: str, longest: int) -> None:
    pair = pair_of(prompt, chosen, rejected)
    whole = encode_pair(TOKENIZER, pair)
    encoded, report = encode_pairs(TOKENIZER, [pair], longest)
    if not encoded:
        short = truncate(whole, longest)
        assert report == PairReport(1, equal=1) and short[1] == short[2]
        return
    (found,) = encoded
    assert found[0] == whole[0][len(whole[0]) - len(found[0]) :] and found[0][-1] == TOKENIZER.special["<|assistant|>"]
    for reply, all_of_it in zip(found[1:], whole[1:], strict=True):
        assert len(found[0]) + len(reply) <= longest and reply == all_of_it[: len(reply)]
    assert report == PairReport(1, 0, int(len(found[0]) < len(whole[0])), int(found[1:] != whole[1:]))


def test_what_was_done_to_the_pairs_is_counted() -> None:
    # a prompt has 3 tokens beside its text, a reply 1
    pairs = [
        pair_of("q" * 5, "good", "bad"),  # 8 + 5: fits
        pair_of("q" * 5, "same", "same"),
        pair_of("q" * 12, "good", "bad"),  # 15 + 5 of 16: the prompt is cut
        pair_of("q" * 5, "b" * 9, "a" * 3),  # 8 + 10: one reply is cut
        pair_of("q" * 5, "b" * 9, "a" * 9),  # both are
        pair_of("q" * 5, "b" * 9, "b" * 8 + "a"),  # and then they are equal
        pair_of("q" * 9, "a" * 9, "b" * 9),  # 12 + 10: all three are cut
    ]
    encoded, report = encode_pairs(TOKENIZER, iter(pairs), 16)
    assert report == PairReport(pairs=7, equal=2, truncated_prompts=2, truncated_replies=3)
    end, special = TOKENIZER.end_of_turn, TOKENIZER.special
    assert [tuple(map(len, parts)) for parts in encoded] == [(8, 5, 4), (11, 5, 4), (8, 8, 4), (8, 8, 8), (8, 8, 8)]
    assert encoded[0] == encode_pair(TOKENIZER, pairs[0])
    assert encoded[1] == ([*b"qqqqqqqqq", end, special["<|assistant|>"]], [*b"good", end], [*b"bad", end])
    assert encoded[2][1:] == ([*b"bbbbbbbb"], [*b"aaa", end])
    assert encode_pairs(TOKENIZER, [], 16) == ([], PairReport(0))


@pytest.mark.parametrize("longest", [8, 0, -1])
def test_a_context_without_room_for_a_reply(longest: int) -> None:
    with pytest.raises(ValueError) as error:
        encode_pairs(TOKENIZER, [pair_of("q")], longest)
    one_line(error, f"a context of {longest} tokens has no room for a reply; use more than 8")


# ---- taken apart for KTO -----------------------------------------------------------------------------------


def test_unpaired_by_hand() -> None:
    encoded = [([1, 1], [10], [20, 20, 20]), ([2], [11, 11], [21]), ([3, 3, 3], [12], [22, 22])]
    rows, good = unpaired(encoded, longest=5)
    assert rows == [
        ([1, 1], [10], [11, 11]), ([2], [11, 11], [12]), ([3, 3, 3], [12], [20, 20]),  # the last one is cut: 3 + 2
        ([1, 1], [20, 20, 20], [21]), ([2], [21], [22, 22]), ([3, 3, 3], [22, 22], [10]),
    ]
    assert good.dtype == torch.bool and good.tolist() == [True] * 3 + [False] * 3
    assert encoded[0] == ([1, 1], [10], [20, 20, 20])  # what went in is as it was


def test_one_pair_taken_apart() -> None:
    rows, good = unpaired([([1], [10], [20])], longest=9)
    assert rows == [([1], [10], [20]), ([1], [20], [10])] and good.tolist() == [True, False]


@given(st.integers(2, 9), st.integers(1, 6), st.integers(12, 20))
def test_a_mismatched_reply_is_that_of_another_prompt(n: int, size: int, longest: int) -> None:
    encoded = [(ids(100 * i, MIN_PROMPT), [100 * i + 50] * size, [100 * i + 60] * size) for i in range(n)]
    encoded = [truncate(parts, longest) for parts in encoded]
    rows, good = unpaired(encoded, longest)
    assert len(rows) == len(good) == 2 * n and int(good.sum()) == n
    for (prompt, reply, other), is_good in zip(rows, good.tolist(), strict=True):
        whose = prompt[0] // 100
        assert reply == encoded[whose][1 if is_good else 2] and other[0] // 100 != whose
        assert 1 <= len(other) and len(prompt) + len(other) <= longest
    started = Counter(other[0] for _, _, other in rows)
    assert started == Counter(reply[0] for _, reply, _ in rows)  # every reply once


# ---- batches -----------------------------------------------------------------------------------------------


def test_collate_by_hand() -> None:
    batch = collate([([1, 2, 3], [4, 5], [6]), ([7], [8], [9, 9, 9, 9, 9, 9])], pad=PAD)
    assert batch["tokens"].tolist() == [[1, 2, 3, 4, 5, 6, PAD, PAD], [7, 8, 9, 9, 9, 9, 9, 9]]
    assert batch["documents"].tolist() == [[0, 0, 0, 1, 1, 2, -1, -1], [0, 1, 2, 2, 2, 2, 2, 2]]
    assert batch["tokens"].dtype == batch["documents"].dtype == torch.int64 and batch.keys() == {"tokens", "documents"}


def some(n: int) -> list[tuple]:
    """Encoded pairs of different lengths whose first token says which one it is."""
    return [([i, 50], [51] * (1 + i % 3), [52] * (1 + i % 4)) for i in range(n)]


def places(batches: PairBatches, n: int | None = None) -> list[list[int]]:
    """The places of the pairs of each batch, of the next n or of all."""
    return [next(batches)["index"].tolist() for _ in range(n)] if n else [b["index"].tolist() for b in batches]


def test_a_batch_holds_the_pairs_that_it_names() -> None:
    encoded = some(7)
    for batch in PairBatches(encoded, 3, 0, PAD, epochs=2):
        index = batch["index"]
        assert index.dtype == torch.int64 and batch["tokens"][:, 0].tolist() == index.tolist()
        expected = collate([encoded[i] for i in index.tolist()], PAD)
        assert batch.keys() == {"tokens", "documents", "index"}
        assert all(torch.equal(batch[name], expected[name]) for name in expected)


def test_batches_of_kto_rows_know_which_replies_are_good() -> None:
    rows, good = unpaired([([i], [10 + i], [20 + i]) for i in range(5)], longest=9)
    for batch in PairBatches(rows, 4, 0, PAD, epochs=1):
        assert (batch["tokens"][:, 1] < 20).tolist() == good[batch["index"]].tolist()


@given(st.integers(4, 23), st.integers(1, 9), st.integers(1, 4), st.integers(0, 3))
def test_every_pair_once_an_epoch_on_any_number_of_ranks(n: int, size: int, world: int, seed: int) -> None:
    size = max(size, 2 * world)
    alone = places(PairBatches(some(n), size, seed, PAD, epochs=2))
    shards = [places(PairBatches(some(n), size, seed, PAD, 2, rank, world)) for rank in range(world)]
    assert {len(shard) for shard in shards} == {len(alone)}
    for whole, *parts in zip(alone, *shards, strict=True):
        assert [whole[rank::world] for rank in range(world)] == parts and all(parts) and len(whole) <= size
    half = len(alone) // 2
    for epoch in (alone[:half], alone[half:]):
        assert sorted(i for batch in epoch for i in batch) == list(range(n))


@pytest.mark.parametrize("position", [0, 1, 3, 4, 5, 9])
@pytest.mark.parametrize("world", [1, 2])
def test_a_position_is_all_that_is_needed_to_go_on(position: int, world: int) -> None:
    made = [PairBatches(some(10), 4, 1, PAD, None, world - 1, world) for _ in range(2)]
    first = places(made[0], 12)
    assert made[0].position == 12
    made[1].position = position
    assert places(made[1], 12 - position) == first[position:]


def test_order_follows_from_seed_and_epoch_and_nothing_else() -> None:
    state = random.getstate(), torch.get_rng_state()
    first = places(PairBatches(some(20), 5, 0, PAD), 8)
    assert first == places(PairBatches(some(20), 5, 0, PAD), 8)
    assert first[:4] != first[4:] and first != places(PairBatches(some(20), 5, 1, PAD), 8)
    assert random.getstate() == state[0] and torch.equal(torch.get_rng_state(), state[1])


def test_a_set_smaller_than_a_batch_is_one_short_batch() -> None:
    finite = places(PairBatches(some(3), 8, 0, PAD, epochs=1))
    assert [sorted(batch) for batch in finite] == [[0, 1, 2]]
    assert [sorted(batch) for batch in places(PairBatches(some(3), 8, 0, PAD), 5)] == [[0, 1, 2]] * 5


def test_too_few_pairs_for_the_ranks() -> None:
    with pytest.raises(ValueError) as error:
        PairBatches(some(5), 2, 0, PAD, rank=0, world=2)
    one_line(error, "the pairs: 5 rows in batches of 2 make a batch of 1, too few for 2 processes")
    with pytest.raises(ValueError) as error:
        PairBatches(some(9), 1, 0, PAD, world=2)
    one_line(error, "a batch of 1 rows leaves some of 2 processes without any")
