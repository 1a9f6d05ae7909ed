"""Tokenizer: BPE against a slow twin and by hand, exact round trips, specials that text cannot produce."""

import base64
import gzip
import itertools
import json
import random
import time

import pytest
import regex
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from nanorl import tokenizer as module
from nanorl.tokenizer import MARKS, PATTERN, R50K_PATTERN, SPECIALS, Tokenizer, train_bpe

SENTENCES = [
    "Tom has 12 apples and eats 5. How many apples are left?",
    "12 - 5 = 7. Tom has 7 apples left.\n#### 7",
    "Mia's brother walks 3 miles, then 14 more miles; the café is at the end.",
]
# Few letters make many repeats, ties and overlaps ("aaaa"); the rest are bytes, digits and spaces.
CROWDED = st.lists(st.text(alphabet="aab é1'", max_size=30), max_size=6)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))  # any unicode but lone surrogates


@pytest.fixture(scope="module")
def tok():
    return Tokenizer.train(SENTENCES, 300)


# The slow twin: no word counts, no increments, no heap.


def words_of(texts):
    return [list(piece.encode()) for text in texts for piece in regex.findall(PATTERN, text)]


def slow_merge(word, pair, new):
    merged, at = [], 0
    while at < len(word):
        if tuple(word[at : at + 2]) == pair:
            merged.append(new)
            at += 2
        else:
            merged.append(word[at])
            at += 1
    return merged


def slow_train(texts, vocab_size=10_000):
    """The ranks, and the pair of ids behind each merge; as many merges as there are, up to vocab_size."""
    words, tokens, merges = words_of(texts), [bytes([byte]) for byte in range(256)], []
    while len(tokens) < vocab_size:
        counts = {}
        for word in words:
            for pair in zip(word, word[1:], strict=False):
                counts[pair] = counts.get(pair, 0) + 1
        if not counts:
            break
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        words = [slow_merge(word, best, len(tokens)) for word in words]
        tokens.append(tokens[best[0]] + tokens[best[1]])
        merges.append(best)
    return {token: rank for rank, token in enumerate(tokens)}, merges


def slow_encode(text, merges):
    ids = []
    for word in words_of([text]):
        for index, pair in enumerate(merges):
            word = slow_merge(word, pair, 256 + index)
        ids += word
    return ids


# Training


def learned(ranks):
    return sorted(ranks, key=ranks.get)[256:]


def test_merges_worked_out_by_hand():
    # Words: "low", " low", " lower". Pairs: l-o 3, o-w 3, space-l 2, w-e 1, e-r 1.
    # l-o ties with o-w and has the lower ids; then lo-w 3; space-low 2; e-r before " low"-e, lower ids again.
    assert learned(train_bpe(["low low lower"], 261)) == [b"lo", b"low", b" low", b"er", b" lower"]


def test_overlapping_pairs_are_merged_left_to_right():
    # "aaaaa" -> XXa, whose pairs are XX 1 and Xa 1; a (97) is lower than X (256), so X-a goes first.
    assert learned(train_bpe(["aaaaa"], 259)) == [b"aa", b"aaa", b"aaaaa"]


def test_pairs_never_cross_a_word():
    # Words: "ab", " ab", " ?!" twice, and " ", "1", "2", which have no pair.
    assert learned(train_bpe(["ab ab 12 12 ?! ?!"], 260)) == [b" ?", b"ab", b" ?!", b" ab"]
    tokens = learned(train_bpe(SENTENCES, 315))
    assert all(regex.fullmatch(PATTERN, token.decode()) for token in tokens if token.isascii())


@given(CROWDED)
def test_training_equals_the_slow_twin(texts):
    ranks, _ = slow_train(texts)
    assert train_bpe(texts, len(ranks)) == ranks
    with pytest.raises(ValueError, match="too small"):
        train_bpe(texts, len(ranks) + 1)


def test_training_equals_the_slow_twin_on_sentences():
    ranks, _ = slow_train(SENTENCES, 315)
    assert list(train_bpe(SENTENCES, 315).items()) == list(ranks.items())


@given(CROWDED, st.text(alphabet="aab é1'", max_size=30))
def test_tiktoken_encodes_as_the_merges_do(texts, text):
    ranks, merges = slow_train(texts)
    assert Tokenizer.from_ranks(ranks).encode(text) == slow_encode(text, merges)


@given(st.permutations(SENTENCES * 2))
@settings(max_examples=10)
def test_the_order_of_texts_does_not_matter(texts):
    assert train_bpe(iter(texts), 315) == train_bpe(SENTENCES * 2, 315)


def test_vocabulary_is_exactly_what_was_asked(tok):
    assert tok.vocab_size == 300 == tok.encoding.n_vocab
    assert len(tok.ranks) == 300 - len(SPECIALS)
    assert list(tok.special.items()) == [(token, 291 + index) for index, token in enumerate(SPECIALS)]
    assert (tok.end_of_text, tok.pad, tok.end_of_turn) == (291, 291, 295)
    assert Tokenizer.train([], 265).vocab_size == 265


def test_digits_stand_alone(tok):
    assert tok.encode("1234") == [ord(digit) for digit in "1234"]
    pieces = ["It", "'s", " ", "3", ".", "1", "4", " ", " (", "pi", ")", "\n"]
    assert regex.findall(PATTERN, "It's 3.14  (pi)\n") == pieces


@pytest.mark.parametrize(
    "texts, vocab_size, message",
    [
        (["too little"], 4096, "too small, 3823 tokens short.*give more text or lower vocab_size"),
        (["abc"], 264, "vocab_size 264 is below 265"),
        ("one string", 300, "got one string; wrap it in a list"),
        (["fine", "bad \ud800"], 300, "lone surrogate, '.ud800' at character"),
    ],
)
def test_training_errors_are_one_line(texts, vocab_size, message):
    with pytest.raises(ValueError, match=message) as error:
        Tokenizer.train(texts, vocab_size)
    assert "\n" not in str(error.value)


def test_a_pattern_that_skips_characters_is_refused():
    with pytest.raises(ValueError, match="skips characters of 'a b'"):
        train_bpe(["a b"], 257, pattern=r"\w+")


def test_4096_ids_from_10_megabytes_in_a_minute(shared_data):
    texts = [(shared_data / f"gsm8k/{part}.jsonl").read_text(encoding="utf-8") for part in ("train", "test")]
    with gzip.open(shared_data / "hh-rlhf/harmless-base-test.jsonl.gz", "rt", encoding="utf-8") as lines:
        texts += [json.loads(line)["chosen"] for line in lines]
    size, rng = sum(len(text.encode()) for text in texts), random.Random(0)
    while size < 10_000_000:  # the rest are random words, which hardly repeat: harder than any language
        texts.append(" ".join("".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 9))) for _ in range(1000)))
        size += len(texts[-1])
    start = time.process_time()
    assert Tokenizer.train(texts, 4096).vocab_size == 4096
    assert time.process_time() - start < 60


# Round trips


@given(TEXT)
def test_any_text_comes_back(tok, text):
    ids = tok.encode(text)
    assert tok.decode(ids) == text
    assert tok.decode_bytes(ids) == text.encode()
    assert tok.encode_bytes(text.encode()) == ids


BROKEN = st.builds(lambda a, b, c: a.encode() + b + c.encode(), TEXT, st.binary(), TEXT)


@given(st.one_of(st.binary(), BROKEN))
def test_any_bytes_come_back(tok, data):
    ids = tok.encode_bytes(data)
    assert tok.decode_bytes(ids) == data
    assert max(ids, default=0) < len(tok.ranks)
    assert tok.decode(ids) == data.decode("utf-8", errors="replace")


def test_each_single_byte_is_its_own_id(tok):
    assert [tok.encode_bytes(bytes([byte])) for byte in range(256)] == [[byte] for byte in range(256)]


@pytest.mark.parametrize("unit", [" ", "\n ", "a", "7", "!", "' ", "é"])
def test_very_long_runs_neither_crash_nor_change(tok, unit):
    text = unit * 300_000 + "x"
    assert tok.decode(tok.encode(text)) == text


@given(TEXT, st.characters(categories=["Cs"]), TEXT)
def test_lone_surrogates_are_refused(tok, before, surrogate, after):
    message = f"lone surrogate.*at character {len(before)}, not UTF-8; clean it"
    for call in (tok.encode, tok.encode_with_marks, lambda text: tok.encode_batch(["fine", text])):
        with pytest.raises(ValueError, match=message):
            call(before + surrogate + after)


@given(st.lists(TEXT, max_size=5))
def test_batches_equal_single_texts(tok, texts):
    one_by_one = [tok.encode(text) for text in texts]
    assert tok.encode_batch(texts) == tok.encode_batch(texts, threads=3) == one_by_one


# Special tokens

SPECIAL_TEXT = st.lists(st.one_of(st.sampled_from(SPECIALS), TEXT, st.text(alphabet="<|/>adnet", max_size=8)))


@given(SPECIAL_TEXT.map("".join))
def test_text_never_gives_a_special_id(tok, text):
    for ids in (tok.encode(text), *tok.encode_batch([text]), tok.encode_bytes(text.encode())):
        assert set(ids).isdisjoint(tok.special.values())
        assert tok.decode(ids) == text


@given(SPECIAL_TEXT.map("".join))
def test_marks_are_the_only_specials_of_encode_with_marks(tok, text):
    ids = tok.encode_with_marks(text)
    marks = [token for token in regex.findall("|".join(MARKS), text)]
    used = [index for index in ids if index in tok.special.values()]
    assert used == [tok.special[mark] for mark in marks]
    assert tok.decode(ids) == text


def test_decode_drops_ends_and_unknown_ids(tok):
    special, a = tok.special, ord("a")
    ids = [special["<|user|>"], a, special["<|end|>"], special["<think>"], a, special["</think>"], tok.pad]
    assert tok.decode(ids) == "<|user|>a<think>a</think>"
    assert tok.decode(ids, keep_ends=True) == "<|user|>a<|end|><think>a</think><|endoftext|>"
    assert tok.decode([-1, a, 300, 10**9]) == "a"
    assert tok.decode([]) == ""
    assert tok.decode([0xC3]) == "\ufffd"  # the first half of an é
    with pytest.raises(KeyError):
        tok.decode_bytes([300])


def test_decode_takes_tensors_and_arrays(tok):
    torch = pytest.importorskip("torch")
    ids = torch.tensor(tok.encode("Tom eats"))
    assert tok.decode(ids) == tok.decode(ids.numpy()) == "Tom eats"


# Files and identity


def test_save_and_load(tok, tmp_path):
    path = tmp_path / "new" / "folder" / "tokenizer.json"
    tok.save(path)
    again = Tokenizer.load(path)
    assert [file.name for file in path.parent.iterdir()] == ["tokenizer.json"]
    assert (again.hash, again.name, again.vocab_size) == (tok.hash, "bpe", 300)
    assert (again.ranks, again.special, again.pattern) == (tok.ranks, tok.special, tok.pattern)
    assert again.encode(SENTENCES[2]) == tok.encode(SENTENCES[2])


def test_hash_is_of_pattern_and_ranks():
    ranks = train_bpe(SENTENCES, 270)
    swapped = {**ranks, b"a": ranks[b"b"], b"b": ranks[b"a"]}
    hashes = [
        Tokenizer.from_ranks(ranks).hash,
        Tokenizer.from_ranks(swapped).hash,
        Tokenizer.from_ranks(ranks, PATTERN + "|x").hash,
        Tokenizer.from_ranks(train_bpe(SENTENCES, 271)).hash,
    ]
    assert len(set(hashes)) == 4
    assert Tokenizer.from_ranks(dict(reversed(ranks.items())), name="other").hash == hashes[0]


def test_the_hash_is_the_same_on_every_machine():
    assert Tokenizer.train(["low low lower"], 270).hash[:16] == "58421a5c526bca4d"


def damage(saved, **changes):
    return json.dumps({**saved, **changes})


@pytest.mark.parametrize(
    "write, message",
    [
        (lambda saved: json.dumps(saved)[:-20], "JSONDecodeError"),
        (lambda saved: "[]", "TypeError"),
        (lambda saved: "{}", "KeyError: 'version'"),
        (lambda saved: damage(saved, version=99), "version 99, this code reads 1"),
        (lambda saved: damage(saved, pattern="."), "does not match its sha256"),
        (lambda saved: damage(saved, pattern="("), "cannot use"),
        (lambda saved: damage(saved, ranks=saved["ranks"][:-1]), "does not match its sha256"),
        (lambda saved: damage(saved, ranks=saved["ranks"] + saved["ranks"][:1]), "each once"),
        (lambda saved: damage(saved, ranks=saved["ranks"][1:]), "lack 1 of the 256 single bytes"),
        (lambda saved: damage(saved, vocab_size=5), "vocab_size 5 is below the 300 ids in use"),
    ],
)
def test_damaged_files_are_one_line_errors(tok, tmp_path, write, message):
    path = tmp_path / "tokenizer.json"
    tok.save(path)
    path.write_text(write(json.loads(path.read_text())))
    with pytest.raises(ValueError, match=message) as error:
        Tokenizer.load(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(FileNotFoundError, match="no tokenizer at .*; train one"):
        Tokenizer.load(tmp_path / "absent.json")


# r50k_base


def test_r50k_ids(r50k):
    assert r50k.vocab_size == 50_304 and r50k.vocab_size % 64 == 0
    assert list(r50k.special.values()) == list(range(50_256, 50_265))
    assert r50k.end_of_text == r50k.pad == 50_256 and r50k.end_of_turn == 50_260
    assert r50k.encode("Hello world") == [15496, 995]
    assert r50k.decode([15496, 50_265, 50_303, 995]) == "Hello world"


@given(st.lists(st.one_of(TEXT, st.text(alphabet=" \n\t'sab12,."))).map("".join))
def test_r50k_text_is_as_in_gpt2(r50k, text):
    assert r50k.encode(text) == tiktoken.get_encoding("r50k_base").encode_ordinary(text)
    assert r50k.decode(r50k.encode(text)) == text


def test_r50k_cut_in_whitespace_changes_no_id(r50k):
    gpt2 = tiktoken.get_encoding("r50k_base")
    for count, tail in itertools.product((255, 256, 257, 258, 1000, 5001), ("", "x", "\n", "\nx")):
        for blank in (" ", "\n", "\t"):
            text = blank * count + tail
            assert r50k.encode(text) == gpt2.encode_ordinary(text)


@given(SPECIAL_TEXT.map("".join))
@settings(max_examples=50)
def test_r50k_text_never_gives_a_special_id(r50k, text):
    assert max(r50k.encode(text), default=0) < 50_256
    assert r50k.decode(r50k.encode_with_marks(text)) == text


def test_r50k_is_saved_whole(r50k, tmp_path):
    r50k.save(tmp_path / "r50k.json")
    again = Tokenizer.load(tmp_path / "r50k.json")
    assert (again.hash, again.vocab_size, again.name) == (r50k.hash, 50_304, "r50k_base")
    assert r50k.hash[:16] == "fa6c43bac6e77ffb"


def test_r50k_without_ranks_names_the_remedy(monkeypatch):
    def offline(name):
        raise ConnectionError("network\nunreachable")

    monkeypatch.setattr(module.tiktoken, "get_encoding", offline)
    message = r"r50k_base \(ConnectionError\).*set TIKTOKEN_CACHE_DIR"
    with pytest.raises(FileNotFoundError, match=message) as error:
        Tokenizer.r50k_base()
    assert "\n" not in str(error.value)


def test_saved_files_are_plain_json(tok, tmp_path):
    tok.save(tmp_path / "tokenizer.json")
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    assert saved["version"] == 1 and saved["sha256"] == tok.hash and saved["special"] == tok.special
    assert base64.b64decode(saved["ranks"][65]) == b"A"
    assert R50K_PATTERN != PATTERN == saved["pattern"]
