"""Pairs of replies from every source and in every form; transcripts; what is no pair."""

import gzip
import json
import random
import sys
import types
from collections import Counter
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from nanorl.data import tinyworld
from nanorl.data.preference import as_pair, is_heldout, load_pairs, split_transcript

USER, ASSISTANT, SYSTEM = ({"role": role, "content": text} for role, text in (
    ("user", "Hi?"), ("assistant", "Yes."), ("system", "Be kind.")))


def said(role: str, content: str) -> dict:
    return {"role": role, "content": content}


def pair_of(prompt: str, chosen: str = "good", rejected: str = "bad") -> dict:
    return {"prompt": [said("user", prompt)], "chosen": chosen, "rejected": rejected}


def write(path: Path, records: list[dict]) -> Path:
    data = "".join(json.dumps(record) + "\n" for record in records).encode()
    pack = {".gz": gzip.compress, ".zst": zstandard.compress}.get(path.suffix, bytes)
    path.write_bytes(pack(data))
    return path


def records(n: int, start: int = 0) -> list[dict]:
    return [{"prompt": f"question {i}", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(start, start + n)]


def asked(pairs: list[dict]) -> list[str]:
    """The last message of each prompt."""
    return [pair["prompt"][-1]["content"] for pair in pairs]


def one_line(error: pytest.ExceptionInfo, *parts: str) -> None:
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


# ---- forms of a pair ---------------------------------------------------------------------------------------

HH = "\n\nHuman: Hi?\n\nAssistant: {}"
STANDARD = {"prompt": [USER], "chosen": "yes", "rejected": "no"}


@pytest.mark.parametrize(("record", "pair"), [
    (STANDARD, STANDARD),
    ({"prompt": "Hi?", "chosen": "yes", "rejected": "no", "source": "more"}, STANDARD),
    ({"prompt": [SYSTEM, USER, ASSISTANT, USER], "chosen": "yes", "rejected": "no"},
     {**STANDARD, "prompt": [SYSTEM, USER, ASSISTANT, USER]}),
    ({"chosen": [USER, said("assistant", "yes")], "rejected": [USER, said("assistant", "no")]}, STANDARD),
    ({"prompt": "Hi?", "chosen": [USER, said("assistant", "yes")], "rejected": [USER, said("assistant", "no")]},
     STANDARD),
    ({"prompt": [USER], "chosen": [said("assistant", "yes")], "rejected": [said("assistant", "no")]}, STANDARD),
    ({"prompt": "Hi?", "chosen": [said("assistant", "yes")], "rejected": [said("assistant", "no")]}, STANDARD),
    ({"prompt": "Hi?", "chosen": "yes", "rejected": [said("assistant", "no")]}, STANDARD),
    ({"chosen": HH.format("yes"), "rejected": HH.format("no")}, STANDARD),
    ({"prompt": None, "chosen": HH.format(" yes\n"), "rejected": HH.format("no ")}, STANDARD),
    ({"prompt": "Hi?", "chosen": "yes", "rejected": ""}, {**STANDARD, "rejected": ""}),
    ({"prompt": [{**USER, "name": "Tom"}], "chosen": "yes", "rejected": "no"}, STANDARD),
    # they part before their last message: there the pair is
    ({"chosen": HH.format("yes\n\nHuman: Why?\n\nAssistant: So."), "rejected": HH.format("no")}, STANDARD),
    ({"chosen": HH.format("yes\n\nHuman: Why?\n\nAssistant: So."),
      "rejected": HH.format("no\n\nHuman: Oh.\n\nAssistant: So.")}, STANDARD),
    # alike up to their last message
    ({"chosen": HH.format("a\n\nHuman: b\n\nAssistant: c"), "rejected": HH.format("a\n\nHuman: b\n\nAssistant: d")},
     {"prompt": [USER, said("assistant", "a"), said("user", "b")], "chosen": "c", "rejected": "d"}),
])
def test_every_form_becomes_the_standard_one(record: dict, pair: dict) -> None:
    assert as_pair(record, "here") == pair


MESSAGE_IN_COMMON = "chosen and rejected must have a user's message in common that both reply to"
BAD = [
    ({"prompt": "Hi?", "chosen": "yes"}, "no text or messages under 'rejected'"),
    ({"prompt": "Hi?", "rejected": "yes"}, "no text or messages under 'chosen'"),
    ({"prompt": "Hi?", "chosen": "yes", "rejected": 3}, "no text or messages under 'rejected'"),
    ({"prompt": 5, "chosen": "yes", "rejected": "no"}, "'prompt' is neither text nor messages"),
    ({"prompt": {}, "chosen": "yes", "rejected": "no"}, "'prompt' is neither text nor messages"),
    ({"prompt": ["Hi?"], "chosen": "yes", "rejected": "no"}, 'chosen: message 0 must be {"role": ..., "content": ...}'),
    ({"prompt": [said("human", "Hi?")], "chosen": "yes", "rejected": "no"}, "chosen: message 0 has unknown role"),
    ({"prompt": [said("user", 5)], "chosen": "yes", "rejected": "no"}, "chosen: message 0 (user) has content of"),
    ({"prompt": "Hi?", "chosen": "yes", "rejected": [{"content": "no"}]}, "rejected: message 1 must be"),
    ({"prompt": "Hi \ud83d?", "chosen": "yes", "rejected": "no"}, "chosen: 'utf-8' codec can't encode"),
    ({"prompt": "Hi?", "chosen": "yes", "rejected": "n\udc00"}, "rejected: 'utf-8' codec can't encode"),
    ({"prompt": "Hi?", "chosen": " ", "rejected": ""}, "both replies are empty"),
    ({"prompt": [USER, ASSISTANT], "chosen": "yes", "rejected": "no"}, MESSAGE_IN_COMMON),
    ({"prompt": [], "chosen": "yes", "rejected": "no"}, MESSAGE_IN_COMMON),
    ({"prompt": "Hi?", "chosen": [], "rejected": []}, MESSAGE_IN_COMMON),
    ({"chosen": [], "rejected": []}, "chosen: a conversation needs at least one message"),
    ({"chosen": "", "rejected": HH.format("no")}, 'a transcript must begin with "Human:" or "Assistant:", not \'\''),
    ({"chosen": "yes", "rejected": "no"}, "a transcript must begin with"),
    ({"chosen": "\n\nHuman: Hi?", "rejected": "\n\nHuman: Hi?"}, MESSAGE_IN_COMMON),
    ({"chosen": "\n\nAssistant: yes", "rejected": "\n\nAssistant: no"}, MESSAGE_IN_COMMON),
    ({"chosen": HH.format("yes"), "rejected": "\n\nHuman: Ho?\n\nAssistant: no"}, MESSAGE_IN_COMMON),
    ({"chosen": HH.format("a\n\nHuman: b\n\nAssistant: c"), "rejected": HH.format("a\n\nHuman: B\n\nAssistant: d")},
     MESSAGE_IN_COMMON),
]


@pytest.mark.parametrize(("record", "reason"), BAD)
def test_a_record_that_is_no_pair_is_named_with_its_line(tmp_path: Path, record: dict, reason: str) -> None:
    path = write(tmp_path / "train.jsonl", [*records(2), record])
    with pytest.raises(ValueError) as error:
        load_pairs(str(tmp_path))
    one_line(error, f"{path}:3: ", reason, "; fix or delete it")


# ---- transcripts -------------------------------------------------------------------------------------------


def test_turns_by_hand() -> None:
    assert split_transcript("\n\nHuman: How are you?\n\nAssistant: Fine.") == [
        said("user", "How are you?"), said("assistant", "Fine.")]
    assert split_transcript("Assistant: Ask me.\n\nHuman: Why?\n\nAssistant:") == [
        said("assistant", "Ask me."), said("user", "Why?"), said("assistant", "")]
    assert split_transcript("\n\nHuman: one\n\nHuman:  two \n\nAssistant: a\n\nb\n\nAssistant: \n\nAssistant: c") == [
        said("user", "one\n\ntwo"), said("assistant", "a\n\nb\n\nc")]
    assert split_transcript("\n\nHuman: one\n\nHuman: \n\nAssistant: a") == [
        said("user", "one"), said("assistant", "a")]
    # no turn begins within a line, after one line end, or with another name
    text = "He said Human: no\nAssistant: no\n\nHumans: no"
    assert split_transcript(f"\n\nHuman: {text}") == [said("user", text)]


@given(st.lists(st.text("aH: \né", max_size=12).map(str.strip), min_size=1, max_size=6), st.integers(0, 1))
def test_a_transcript_made_of_turns_gives_the_turns_back(contents: list[str], first: int) -> None:
    names = [("Human", "Assistant")[(first + i) % 2] for i in range(len(contents))]
    roles = {"Human": "user", "Assistant": "assistant"}
    text = "".join(f"\n\n{name}: {content}" for name, content in zip(names, contents, strict=True))
    turns = [said(roles[name], content) for name, content in zip(names, contents, strict=True)]
    assert split_transcript(text) == turns


TURNS = st.tuples(st.sampled_from(["Human", "Assistant"]), st.sampled_from(["a", "b c", "d\n\ne"]))


@given(st.lists(TURNS, min_size=1))
def test_turns_alternate_and_keep_every_word(turns: list[tuple[str, str]]) -> None:
    messages = split_transcript("".join(f"\n\n{name}: {content}" for name, content in turns))
    assert all(a["role"] != b["role"] for a, b in zip(messages, messages[1:], strict=False))
    assert "\n\n".join(m["content"] for m in messages) == "\n\n".join(content for _, content in turns)


def test_the_real_transcripts(shared_data: Path) -> None:
    path = shared_data / "hh-rlhf" / "harmless-base-test.jsonl.gz"
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    train, heldout = load_pairs(str(path), "train"), load_pairs(str(path), "heldout")
    assert len(train) + len(heldout) == 2312 and 180 < len(heldout) < 280
    pairs = train + heldout
    for pair in pairs:
        roles = [message["role"] for message in pair["prompt"]]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
        assert pair["chosen"] != pair["rejected"]
    marked = [pair[side] for pair in pairs for side in ("chosen", "rejected") if "\n\nHuman:" in pair[side]]
    assert len(marked) == 1 and marked[0].startswith("Human: ")  # an assistant that wrote "Human:" itself, twice
    turns = Counter(len(pair["prompt"]) for pair in pairs)
    assert (turns[1], turns[3], max(turns)) == (662, 584, 35)
    assert sum(not pair["chosen"] for pair in pairs) == 4  # said nothing, and was preferred
    assert {str(p["prompt"]) for p in train}.isdisjoint(str(p["prompt"]) for p in heldout)


# ---- sources -----------------------------------------------------------------------------------------------


def test_tinyworld() -> None:
    assert load_pairs("tinyworld", n=30) == tinyworld.preferences(30)
    given = load_pairs("tinyworld", "heldout", 30, 5, max_number=20, max_steps=2, noise=0.3)
    assert given == tinyworld.preferences(30, "heldout", 5, 20, 2, 0.3)


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_a_folder_and_a_file_of_each_kind(tmp_path: Path, ending: str) -> None:
    write(tmp_path / f"train{ending}", records(30))
    write(tmp_path / f"test{ending}", records(5, start=30))
    train, heldout = load_pairs(str(tmp_path)), load_pairs(str(tmp_path), "heldout")
    number = {f"question {i}": i for i in range(35)}
    for pairs, expected in ((train, range(30)), (heldout, range(30, 35))):
        assert sorted(number[question] for question in asked(pairs)) == list(expected)
        for pair in pairs:
            i = number[pair["prompt"][0]["content"]]
            assert pair == pair_of(f"question {i}", f"good {i}", f"bad {i}")
    whole = write(tmp_path / f"some{ending}", records(300))
    both = load_pairs(str(whole)) + load_pairs(str(whole), "heldout")
    assert sorted(asked(both)) == sorted(f"question {i}" for i in range(300))


def test_the_order_is_drawn_by_seed(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", records(40))
    write(tmp_path / "test.jsonl", records(40))
    state = random.getstate()
    for split in ("train", "heldout"):
        first = asked(load_pairs(str(tmp_path), split))
        assert first == asked(load_pairs(str(tmp_path), split))
        assert first != [f"question {i}" for i in range(40)] != asked(load_pairs(str(tmp_path), split, seed=1)) != first
        assert asked(load_pairs(str(tmp_path), split, n=7)) == first[:7]
        assert asked(load_pairs(str(tmp_path), split, n=99)) == first
    assert random.getstate() == state


def test_of_one_file_one_prompt_in_ten_is_held_out_with_all_its_pairs(tmp_path: Path) -> None:
    some = records(2000)
    path = write(tmp_path / "pairs.jsonl", [*some, *({**record, "chosen": "another"} for record in some)])
    train, heldout = load_pairs(str(path)), load_pairs(str(path), "heldout", seed=3)
    assert len(train) + len(heldout) == 4000 and 0.08 < len(heldout) / 4000 < 0.12
    assert set(asked(train)).isdisjoint(asked(heldout))
    assert set(Counter(asked(train)).values()) == set(Counter(asked(heldout)).values()) == {2}
    assert not any(map(is_heldout, train)) and all(map(is_heldout, heldout))
    assert sorted(asked(heldout)) == sorted(asked(load_pairs(str(path), "heldout", seed=4)))
    assert is_heldout(pair_of("x")) == is_heldout(pair_of("x", "other", "replies"))
    held = [i for i in range(40) if is_heldout(pair_of(f"question {i}"))]
    assert held == [3, 21]  # so that a change of the split, which would leak what was held out before, is noticed


def fake_hub(monkeypatch, load_dataset) -> None:
    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)


def test_hub(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    whole = {"prompt": "Hi?", "prompt_id": "1", "score_chosen": 8.0, "chosen": [USER, said("assistant", "yes")],
             "rejected": [USER, said("assistant", "no")], "messages": []}
    wanted = []

    def load_dataset(name: str, config: None, split: str) -> list[dict]:
        assert config is None
        wanted.append((name, split))
        return [{"chosen": HH.format("yes"), "rejected": HH.format("no")} if "hh" in name else whole]

    fake_hub(monkeypatch, load_dataset)
    names = {"HuggingFaceH4/ultrafeedback_binarized": ("train_prefs", "test_prefs"),
             "Anthropic/hh-rlhf": ("train", "test")}
    for name, splits in names.items():
        assert load_pairs(name, "train") == load_pairs(name, "heldout") == [STANDARD]
        assert wanted[-2:] == [(name, split) for split in splits]


def test_hub_errors(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)

    def offline(name: str, config: None, split: str) -> list[dict]:
        raise ConnectionError("cannot reach the hub\nand a long story")

    fake_hub(monkeypatch, offline)
    with pytest.raises(ValueError) as error:
        load_pairs("Anthropic/hh-rlhf", "heldout")
    one_line(error, "Anthropic/hh-rlhf", "test split", "ConnectionError: cannot reach the hub", "or give a file")
    fake_hub(monkeypatch, lambda name, config, split: [*[STANDARD] * 2, {"text": "no pair"}])
    with pytest.raises(ValueError) as error:
        load_pairs("someone/else")
    one_line(error, "someone/else train[2]: no text or messages under 'chosen'")
    fake_hub(monkeypatch, lambda name, config, split: [])
    with pytest.raises(ValueError) as error:
        load_pairs("someone/else")
    one_line(error, "someone/else has no train pairs")


@pytest.mark.parametrize(("arguments", "reason"), [
    (dict(split="test"), 'unknown split "test"; use one of train, heldout'),
    (dict(n=0), "0 pairs asked for; ask for at least 1"),
    (dict(n=-3), "-3 pairs asked for"),
    (dict(), "tinyworld has no end; say how many pairs (n)"),
    (dict(n=5, noise=2.0), "noise is 2.0"),
    (dict(source=".", noise=0.1), "noise 0.1 is made for tinyworld's pairs only; set it to 0 for ."),
])
def test_bad_arguments(arguments: dict, reason: str) -> None:
    with pytest.raises(ValueError) as error:
        load_pairs(**arguments)
    one_line(error, reason)


def test_missing_empty_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as missing:
        load_pairs(str(tmp_path / "nowhere"))
    one_line(missing, f"{tmp_path / 'nowhere'} is not here; give tinyworld, a folder")
    with pytest.raises(FileNotFoundError) as missing:
        load_pairs(str(tmp_path), "heldout")
    one_line(missing, f"{tmp_path / 'test.jsonl'} does not exist")
    (tmp_path / "train.jsonl").write_text("\n\n")
    with pytest.raises(ValueError) as error:
        load_pairs(str(tmp_path))
    one_line(error, f"{tmp_path} has no train pairs")
    held = next(record for record in records(100) if is_heldout(as_pair(record, "")))
    path = write(tmp_path / "one.jsonl", [held])
    assert len(load_pairs(str(path), "heldout")) == 1
    with pytest.raises(ValueError) as error:
        load_pairs(str(path), "train")
    one_line(error, f"{path} has no train pairs")
    for line in ("{", "[1, 2]", '"text"'):
        path.write_text(json.dumps(held) + f"\n\n{line}\n")
        with pytest.raises(ValueError) as error:
            load_pairs(str(path))
        one_line(error, f"{path}:3: ", "fix or delete the line")


@pytest.mark.parametrize("ending", [".jsonl.gz", ".jsonl.zst"])
@pytest.mark.parametrize("keep", [0.0, 0.02, 0.5, 0.99])
def test_a_packed_file_that_was_cut_off(tmp_path: Path, ending: str, keep: float) -> None:
    path = write(tmp_path / f"pairs{ending}", records(2000))
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data))])
    with pytest.raises(ValueError) as error:
        load_pairs(str(path))
    one_line(error, str(path))


@pytest.mark.parametrize("at", [1, 12, 200, -6])
def test_a_damaged_gz_file(tmp_path: Path, at: int) -> None:
    path = write(tmp_path / "pairs.jsonl.gz", records(2000))
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(ValueError) as error:
        load_pairs(str(path))
    one_line(error, str(path))
