"""Problems from every source, their forms, and the endless stream of prompts."""

import json
import sys
import types
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanorl import chat
from nanorl.data import prompts
from nanorl.data.prompts import PromptStream, load_problems, split_solution

ROOT = Path(__file__).resolve().parents[1]
GSM8K = next((p for p in (ROOT / "shared/data/gsm8k", ROOT.parent / "shared/data/gsm8k") if p.is_dir()), None)
CLIPS = {
    "question": "Natalia sold 48 clips in April and half as many in May. How many in all?",
    "answer": "In May: 48/2 = <<48/2=24>>24 clips.\nIn all: 48+24 = <<48+24=72>>72 clips.\n#### 72",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, n in (("train", 9), ("test", 4)):
        rows = [{"question": f"{name} {i}?", "answer": f"so\n#### {i}", "more": 1} for i in range(n)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def one_line(error: pytest.ExceptionInfo, *parts: str) -> None:
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


# ---- loading -------------------------------------------------------------------------------------------


def test_tinyworld_is_deterministic_and_disjoint() -> None:
    train = load_problems("tinyworld", "train", n=200, max_number=20, max_steps=2)
    heldout = load_problems("tinyworld", "heldout", n=50, max_number=20, max_steps=2)
    assert (len(train), len(heldout)) == (200, 50)
    assert train == load_problems("tinyworld", "train", n=200, max_number=20, max_steps=2)
    assert train != load_problems("tinyworld", "train", n=200, seed=1, max_number=20, max_steps=2)
    assert all(int(split_solution(problem["answer"])[1]) <= 20 for problem in train)
    prompts.check_disjoint(train, heldout)


def test_folder(folder: Path) -> None:
    train = load_problems(str(folder), "train")
    assert train == [{"question": f"train {i}?", "answer": f"so\n#### {i}"} for i in range(9)]
    assert [problem["question"] for problem in load_problems(str(folder), "heldout")] == [
        "test 0?", "test 1?", "test 2?", "test 3?"
    ]  # fmt: skip
    assert load_problems(str(folder), "train", n=100) == train


def test_some_of_a_folder(folder: Path) -> None:
    everything = load_problems(str(folder), "train")
    some = load_problems(str(folder), "train", n=5)
    places = [everything.index(problem) for problem in some]
    assert len(places) == 5 and places == sorted(set(places))
    assert some == load_problems(str(folder), "train", n=5)
    assert any(some != load_problems(str(folder), "train", n=5, seed=seed) for seed in (1, 2, 3))


@pytest.mark.skipif(GSM8K is None, reason="shared/data/gsm8k is not here")
def test_real_gsm8k() -> None:
    train, heldout = load_problems(str(GSM8K), "train"), load_problems(str(GSM8K), "heldout")
    assert (len(train), len(heldout)) == (7473, 1319)
    prompts.check_disjoint(train, heldout)
    for problem in train + heldout:
        reasoning, gold = split_solution(problem["answer"])
        assert "<<" not in reasoning and "####" not in reasoning and reasoning
        assert gold.lstrip("-").replace(",", "").replace(".", "").isdigit()


@pytest.mark.parametrize(
    "line, reason",
    [
        ('{"question": "cut', "not JSON"),
        ('{"question": "q"}', 'no text in field "answer"'),
        ('{"answer": "#### 1"}', 'no text in field "question"'),
        ('{"question": 3, "answer": "#### 1"}', 'no text in field "question"'),
        ('{"question": " ", "answer": "#### 1"}', "question is empty"),
        ('{"question": "q", "answer": "42"}', "#### 42"),
        ('{"question": "q", "answer": "42 ####  "}', "#### 42"),
        ("7", "a JSON int"),
    ],
)
def test_bad_line_is_named(folder: Path, line: str, reason: str) -> None:
    with (folder / "train.jsonl").open("a") as file:
        file.write("\n" + line + "\n")
    with pytest.raises(ValueError) as error:
        load_problems(str(folder))
    one_line(error, "train.jsonl:11:", reason)


def test_missing_and_empty(folder: Path) -> None:
    (folder / "test.jsonl").unlink()
    with pytest.raises(FileNotFoundError) as error:
        load_problems(str(folder), "heldout")
    one_line(error, "test.jsonl does not exist", "train.jsonl and test.jsonl")
    (folder / "train.jsonl").write_text("\n")
    with pytest.raises(ValueError) as error:
        load_problems(str(folder))
    one_line(error, "train.jsonl holds no problems", '"question"')
    with pytest.raises(FileNotFoundError) as error:
        load_problems(str(folder / "gone"))
    one_line(error, "gone is no folder here", "tinyworld", "openai/gsm8k")
    with pytest.raises(ValueError) as error:
        load_problems(str(folder / "train.jsonl"))
    one_line(error, "train.jsonl is a file", "folder")


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match='unknown split "test"; use one of train, heldout'):
        load_problems("tinyworld", "test", n=1)
    with pytest.raises(ValueError, match="say how many"):
        load_problems("tinyworld")
    with pytest.raises(ValueError, match="at least 1"):
        load_problems("tinyworld", n=0)


def fake_hub(monkeypatch, load_dataset) -> None:
    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)


def test_hub(monkeypatch) -> None:
    asked = []

    def load_dataset(name: str, config: str | None, split: str) -> list[dict]:
        asked.append((name, config, split))
        return [CLIPS]

    fake_hub(monkeypatch, load_dataset)
    assert load_problems("openai/gsm8k", "train") == [CLIPS]
    assert load_problems("openai/gsm8k", "heldout") == [CLIPS]
    assert load_problems("someone/else", "train") == [CLIPS]
    assert asked == [
        ("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test"), ("someone/else", None, "train")
    ]  # fmt: skip


def test_hub_errors(monkeypatch) -> None:
    def offline(name: str, config: str | None, split: str) -> list[dict]:
        raise ConnectionError("cannot reach the hub\nand a long story")

    fake_hub(monkeypatch, offline)
    with pytest.raises(ValueError) as error:
        load_problems("openai/gsm8k", "heldout")
    one_line(error, "openai/gsm8k", "test split", "cannot reach the hub", "folder of jsonl files")
    fake_hub(monkeypatch, lambda name, config, split: [{"text": "no problem"}])
    with pytest.raises(ValueError) as error:
        load_problems("someone/else")
    one_line(error, "someone/else train[0]", 'no text in field "question"')
    fake_hub(monkeypatch, lambda name, config, split: [])
    with pytest.raises(ValueError) as error:
        load_problems("someone/else")
    one_line(error, "someone/else has an empty train split")


def test_check_disjoint() -> None:
    train = [{"question": "How many  apples?"}, {"question": "How many pears?"}]
    prompts.check_disjoint(train, [{"question": "How many plums?"}])
    prompts.check_disjoint([], [])
    with pytest.raises(ValueError) as error:
        prompts.check_disjoint(train, [{"question": "how many apples?\n"}, {"question": "new"}])
    one_line(error, "1 held-out questions", "how many apples?", "remove")


# ---- forms ---------------------------------------------------------------------------------------------


def test_split_solution_by_hand() -> None:
    assert split_solution(CLIPS["answer"]) == ("In May: 48/2 = 24 clips.\nIn all: 48+24 = 72 clips.", "72")
    assert split_solution("#### 1,234") == ("", "1,234")
    assert split_solution("a\n####18\nafter") == ("a", "18")
    assert split_solution("#### 1\n#### -2 ") == ("#### 1", "-2")
    with pytest.raises(ValueError, match="no result"):
        split_solution("just 42")


def test_forms_of_a_problem() -> None:
    question = CLIPS["question"]
    reasoning = "In May: 48/2 = 24 clips.\nIn all: 48+24 = 72 clips."
    assert prompts.as_document(CLIPS) == f"Question: {question}\nAnswer: {reasoning}\n#### 72"
    user = {"role": "user", "content": question}
    assert prompts.as_prompt(CLIPS) == [user]
    assert prompts.solved_conversation(CLIPS, reason=True) == [
        user, {"role": "assistant", "content": f"<think>{reasoning}</think><answer>72</answer>"}
    ]  # fmt: skip
    assert prompts.solved_conversation(CLIPS, reason=False) == [
        user, {"role": "assistant", "content": "<answer>72</answer>"}
    ]  # fmt: skip
    assert prompts.solved_conversation(CLIPS, reason=False)[1]["content"] == chat.reply(None, "72")


# ---- stream --------------------------------------------------------------------------------------------


def problems(n: int) -> list[dict]:
    return [{"question": str(i), "answer": f"#### {i}"} for i in range(n)]


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 12), size=st.integers(1, 9), seed=st.integers(0, 5), skip=st.integers(0, 40))
def test_stream_sees_all_once_an_epoch_and_resumes(n: int, size: int, seed: int, skip: int) -> None:
    stream = PromptStream(problems(n), size, seed)
    seen = []
    while len(seen) < max(3 * n, skip + size):
        batch = next(stream)
        assert len(batch) == size and stream.position == len(seen) + size
        assert all(problem == {"question": str(i), "answer": f"#### {i}"} for i, problem in batch)
        seen += [i for i, _ in batch]
    for epoch in range(3):
        assert sorted(seen[epoch * n : (epoch + 1) * n]) == list(range(n))
    resumed = PromptStream(problems(n), size, seed, position=skip)
    assert [i for i, _ in next(resumed)] == seen[skip : skip + size]


def test_stream_order() -> None:
    first = [i for i, _ in next(PromptStream(problems(50), 100))]
    assert first[:50] != first[50:]  # reshuffled
    assert first != [i for i, _ in next(PromptStream(problems(50), 100, seed=1))]
    assert first == sum(
        ([i for i, _ in batch] for batch, _ in zip(PromptStream(problems(50), 10), range(10), strict=False)),
        [],
    )


@pytest.mark.parametrize("world", [2, 3])
def test_stream_ranks_share_the_batch(world: int) -> None:
    whole = next(PromptStream(problems(20), 7, position=14))
    parts = [next(PromptStream(problems(20), 7, position=14, rank=r, world=world)) for r in range(world)]
    assert parts == [whole[rank::world] for rank in range(world)]


def test_stream_errors() -> None:
    with pytest.raises(ValueError, match="no problems"):
        PromptStream([], 4)
    with pytest.raises(ValueError, match="batch of 0 rows"):
        PromptStream(problems(3), 0)
    with pytest.raises(ValueError, match="batch of 2 rows leaves some of 3 processes without any"):
        PromptStream(problems(3), 2, world=3)
