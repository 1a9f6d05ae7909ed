"""Whatever comes in, drawn by hypothesis: a right result or a ValueError of one line, and no other exception."""

import gzip
import json
import time

import pytest
import zstandard
from bad_files import rows_at, tokens_at
from bad_inputs import CONFIGS, tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from test_checkpoint import tiny_state
from tiny_run import same

from nanorl import chat, checkpoint, config, storage
from nanorl.__main__ import commands, parse
from nanorl.data.corpus import TokenBatches, read_records
from nanorl.data.instruct import RowBatches
from nanorl.data.preference import as_pair, split_transcript
from nanorl.data.prompts import as_document, split_solution
from nanorl.rewards.monitors import repetition
from nanorl.rewards.parsing import final_answer, first_number, gold_answer, well_formed
from nanorl.tokenizer import Tokenizer

TEXT = st.text(st.characters(), max_size=20)  # lone surrogates among them
SCALARS = st.none() | st.booleans() | st.integers(-(10**40), 10**40) | st.floats() | TEXT
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=8)
ROLES = st.sampled_from(["system", "user", "assistant", "robot"])
MESSAGES = st.lists(st.fixed_dictionaries({"role": ROLES | JSON, "content": TEXT | JSON}) | JSON, max_size=4) | JSON
TOKENIZER = tokenizer()


def attempt(call, *arguments):
    """What the call returns, or None where it raises a ValueError of one line; anything else spreads."""
    try:
        return call(*arguments)
    except ValueError as error:
        assert type(error) is ValueError, repr(error)
        assert len(str(error).splitlines()) == 1
        return None


def damages(data):
    """Contents with one byte changed, or cut at any length."""
    place = st.integers(0, len(data) - 1)
    flipped = st.tuples(place, st.integers(1, 255)).map(
        lambda at: data[: at[0]] + bytes([data[at[0]] ^ at[1]]) + data[at[0] + 1 :])
    return flipped | place.map(lambda length: data[:length])


# ---- settings and words --------------------------------------------------------------------------------

FIELDS = [(cls, name) for cls in CONFIGS.values() for name in cls.model_fields if name != "preset"]


@settings(max_examples=600)
@given(st.sampled_from(FIELDS), JSON)
def test_any_value_of_any_field(field, value):
    cls, name = field
    cfg = attempt(lambda: config.resolve(cls, "smoke", **{name: value}))
    assert cfg is None or type(cfg) is cls


@given(st.sampled_from(list(CONFIGS.values())), st.dictionaries(TEXT, JSON, min_size=1, max_size=2))
def test_any_names_of_settings(cls, given):
    assert attempt(lambda: config.resolve(cls, "smoke", **given)) is None or given.keys() <= cls.model_fields.keys()


WORDS = st.sampled_from(["--seed", "--seed=1", "--steps", "3", "--lr=nan", "--resume", "--preset", "smoke",
    "--no-compile",
                         "--run", "a", "--of", "sft", "--json", "None", "--", "=", "--raw"]) | st.text(
                             st.characters(exclude_categories=["C", "Z"]), max_size=9)


@settings(max_examples=150)
@given(st.sampled_from(list(commands())), st.lists(WORDS, max_size=4))
def test_any_words_of_a_command(name, words):
    words = [word for word in words if not word.startswith(("-h", "--h"))]
    found = attempt(parse, name, commands()[name], words)
    assert found is None or isinstance(found[0], config.StageConfig)


# ---- texts and records ---------------------------------------------------------------------------------

@settings(max_examples=300)
@given(MESSAGES)
def test_any_conversation(messages):
    found = attempt(chat.encode_conversation, TOKENIZER, messages)
    if found is not None:
        ids, mask = found
        assert len(ids) == len(mask) and ids.count(TOKENIZER.end_of_turn) == len(messages)
        assert sum(mask) == sum(len(TOKENIZER.encode_with_marks(m["content"])) + 1 for m in messages
                                if m["role"] == "assistant")
    attempt(chat.encode_prompt, TOKENIZER, messages)


@settings(max_examples=300)
@given(st.fixed_dictionaries({"chosen": MESSAGES | TEXT, "rejected": MESSAGES | TEXT,
    "prompt": MESSAGES | TEXT}) | st.dictionaries(
    TEXT, JSON, max_size=3))
def test_any_record_of_a_pair(record):
    pair = attempt(as_pair, record, "file:1")
    assert pair is None or pair["prompt"][-1]["role"] == "user"


@given(st.text(st.sampled_from("#\n<>=1 ")) | TEXT)
def test_any_solution(answer):
    parts = attempt(split_solution, answer)
    assert parts is None or as_document({"question": "?", "answer": answer}).endswith(f"#### {parts[1]}")


@given(st.lists(st.integers(-(10**20), 10**20) | st.integers(0, 300), max_size=30))
def test_any_ids_are_some_text(ids):
    assert isinstance(TOKENIZER.decode(ids), str) and isinstance(chat.render(TOKENIZER, ids), str)


@pytest.mark.parametrize("piece", ["1,", "<think>", "<answer>", "#### ", "9", "- ", ".", "1/", "1e", "<<", "<<1", ">>",
    "a ", "a",
                                   "\n\nHuman:", "\n\n", "\u0664"])
def test_ten_times_the_text_takes_about_ten_times_as_long(piece):
    def seconds(length):
        text, best = (piece * length)[:length], float("inf")
        for _ in range(2):
            start = time.process_time()
            for call in (final_answer, first_number, gold_answer, well_formed, repetition):
                call(text)
            attempt(split_solution, text + "\n#### 1")
            attempt(split_transcript, "Human:" + text)
            best = min(best, time.process_time() - start)
        return best

    short, long = seconds(10_000), seconds(100_000)
    assert long < 1 and long < 40 * max(short, 0.002), f"{short:.4f} s for 10 kB, {long:.4f} s for 100 kB"


# ---- files ---------------------------------------------------------------------------------------------

LINES = b"".join(json.dumps({"text": f"line {i}"}).encode() + b"\n" for i in range(30))


@settings(max_examples=150)
@given(st.data())
@pytest.mark.parametrize("ending, pack", [(".jsonl", bytes), (".jsonl.gz", lambda text: gzip.compress(text, mtime=0)),
                                          (".jsonl.zst", zstandard.ZstdCompressor(write_checksum=True).compress)])
def test_a_file_of_records_with_any_damage(tmp_path_factory, ending, pack, data):
    path = tmp_path_factory.getbasetemp() / f"records{ending}"
    path.write_bytes(data.draw(damages(pack(LINES)) | st.binary(max_size=60)))
    records = attempt(lambda: list(read_records(path)))
    assert records is None or all(isinstance(record, dict) for _, record in records)


@settings(max_examples=250)
@given(st.data())
def test_a_tokenizer_file_with_any_damage(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "tokenizer.json"
    TOKENIZER.save(path)
    path.write_bytes(data.draw(damages(path.read_bytes())))
    found = attempt(Tokenizer.load, path)
    assert found is None or found.hash == TOKENIZER.hash


READERS = {
    "tokens": (tokens_at, lambda path: next(TokenBatches(path, 4, 8, tokenizer=TOKENIZER))),
    "rows": (rows_at, lambda path: next(RowBatches(path, 4, tokenizer=TOKENIZER))),
}


@pytest.mark.parametrize("kind", READERS)
def test_an_hdf5_file_with_any_damage(tmp_path, kind):
    """Its checksums see to it: where a batch is read, it is the right one."""
    make, read = READERS[kind]
    whole = make(tmp_path / "whole.h5")
    right, path = read(whole), tmp_path / "damaged.h5"

    @settings(max_examples=300)
    @given(damages(whole.read_bytes()))
    def any_damage(content):
        path.write_bytes(content)
        found = attempt(read, path)
        assert found is None or same(found, right)

    any_damage()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint, its bytes and those of its manifest."""
    path = checkpoint.save(tmp_path_factory.mktemp("saved"), tiny_state())
    return path, path.read_bytes(), storage.manifest_of(path).read_bytes()


@settings(max_examples=100)
@given(st.data())
def test_a_checkpoint_with_any_damage(saved, data):
    path, whole, manifest = saved
    storage.manifest_of(path).write_bytes(manifest)
    path.write_bytes(data.draw(damages(whole)))
    assert attempt(checkpoint.load, path) is None
    storage.manifest_of(path).unlink()
    state = attempt(checkpoint.load, path)
    assert state is None or attempt(checkpoint.model_from, state) is None or state["model_state_dict"]


@settings(max_examples=100)
@given(st.data())
def test_a_manifest_with_any_damage(saved, data):
    path, whole, manifest = saved
    path.write_bytes(whole)
    storage.manifest_of(path).write_bytes(data.draw(damages(manifest)))
    state = attempt(checkpoint.load, path)
    assert state is None or state["loss_history"] == [2.5, 1.25]
