"""Problems with a checkable answer -> documents, conversations and endless batches of prompts.

A problem is a plain dict in GSM8K's form (Cobbe et al. 2021, arXiv:2110.14168):

    {"question": "Tom has 3 apples and buys 4 more. How many?", "answer": "3 + 4 = <<3+4=7>>7\\n#### 7"}

The same form comes from the embedded tiny world, from a folder with train.jsonl and test.jsonl, and from the
Hugging Face hub. `split` is "train" or "heldout"; held-out problems are the test set where there are files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from nanorl import chat
from nanorl.data import tinyworld
from nanorl.data.corpus import check_shards, read_records, text_field

FILES = {"train": "train.jsonl", "heldout": "test.jsonl"}
HUB_SPLITS = {"train": "train", "heldout": "test"}
HUB_CONFIGS = {"openai/gsm8k": "main"}  # data sets with several configurations: the one meant here
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")  # owner/name
CALCULATOR_MARK = re.compile(r"<<[^<\n]*?>>")


# ---- loading -------------------------------------------------------------------------------------------


def load_problems(
    data: str = "tinyworld",
    split: str = "train",
    n: int | None = None,
    seed: int = 0,
    max_number: int | None = None,
    max_steps: int | None = None,
) -> list[dict]:
    """`n` problems of a split, or fewer where the source holds fewer; all of them where `n` is None.

    data: "tinyworld" (endless, so it needs `n`; `max_number` and `max_steps` set its difficulty and are
    read by nothing else), a folder with train.jsonl and test.jsonl, or owner/name on the Hugging Face hub.
    From files and hub the `n` are drawn by `seed` without replacement and keep their order.

    Raises FileNotFoundError for a missing folder or file; ValueError for an unknown split, and naming the
    line for a bad line, a missing field, an answer without "#### result", or an empty file.
    """
    if split not in FILES:
        raise ValueError(f'unknown split "{split}"; use one of {", ".join(FILES)}')
    if n is not None and n < 1:
        raise ValueError(f"{n} problems asked for; ask for at least 1")
    if data == "tinyworld":
        if n is None:
            raise ValueError("tinyworld has no end; say how many problems (n)")
        difficulty = {"max_number": max_number, "max_steps": max_steps}
        given = {name: value for name, value in difficulty.items() if value is not None}
        return list(tinyworld.problems(n, split=split, seed=seed, **given))
    folder = Path(os.path.expanduser(data))
    if os.path.isdir(folder):
        problems = _from_file(folder / FILES[split])
    elif os.path.exists(folder):
        raise ValueError(f"{data} is a file; give the folder that holds {' and '.join(FILES.values())}")
    elif HUB_NAME.fullmatch(data):
        problems = _from_hub(data, split)
    else:
        raise FileNotFoundError(
            f'{data} is no folder here; give "tinyworld", a folder that holds '
            f"{' and '.join(FILES.values())}, or a hub name such as openai/gsm8k"
        )
    if n is None or n >= len(problems):
        return problems
    chosen = np.random.default_rng(seed).choice(len(problems), n, replace=False)
    return [problems[i] for i in sorted(chosen)]


def _from_file(path: Path) -> list[dict]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; the folder must hold {' and '.join(FILES.values())}")
    problems = [_checked(record, f"{path}:{number}") for number, record in read_records(path)]
    if not problems:
        raise ValueError(
            f'{path} holds no problems; each line must be like {{"question": "...", "answer": "..."}}'
        )
    return problems


def hub_rows(
    name: str, subset: str | None, split: str, what: str, instead: str, **options: bool
) -> Iterator[dict]:
    """The rows of a split of a data set on the hub; ValueError where there are none to be had. `what` the name is not
    here, and what could be given `instead`, are for that error; `options` are those of `datasets.load_dataset`."""
    import datasets  # slow to import, and needed by nothing else

    try:
        yield from datasets.load_dataset(name, subset, split=split, **options)
    except Exception as error:  # the hub's client raises many kinds: offline, no such name, no such split
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:100]
        raise ValueError(f"{name} is {what} here, and the hub gave no {split} split of it ({reason}); check name and "
                         f"network, or give {instead}") from error


def _from_hub(name: str, split: str) -> list[dict]:
    rows = hub_rows(name, HUB_CONFIGS.get(name), HUB_SPLITS[split], "no folder", "a folder of jsonl files")
    problems = [_checked(row, f"{name} {HUB_SPLITS[split]}[{i}]") for i, row in enumerate(rows)]
    if not problems:
        raise ValueError(f"{name} has an empty {HUB_SPLITS[split]} split; choose another data set")
    return problems


def _checked(record: dict, where: str) -> dict:
    problem = {field: text_field(record, field, where) for field in ("question", "answer")}
    if not problem["question"].strip():
        raise ValueError(f"{where}: the question is empty; fix or delete the line")
    try:
        split_solution(problem["answer"])
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return problem


def check_disjoint(train: Iterable[dict], heldout: Iterable[dict]) -> None:
    """Raise ValueError where a held-out question, spacing and case aside, is also one of `train`."""
    seen = {_plain(problem["question"]) for problem in train}
    shared = [problem["question"] for problem in heldout if _plain(problem["question"]) in seen]
    if shared:
        example = " ".join(shared[0].split())[:80]
        raise ValueError(
            f"{len(shared)} held-out questions are also in the training set, such as "
            f'"{example}"; remove them from one of the two'
        )


def _plain(question: str) -> str:
    return " ".join(question.lower().split())


# ---- forms of a problem --------------------------------------------------------------------------------


def split_solution(answer: str) -> tuple[str, str]:
    """A GSM8K answer -> (reasoning without calculator marks and result line, result as written).

    >>> split_solution("48/2 = <<48/2=24>>24 clips.\\n#### 24")
    ('48/2 = 24 clips.', '24')

    Raises ValueError where there is no "#### result".
    """
    reasoning, mark, result = answer.rpartition("####")
    gold = result.strip().partition("\n")[0].strip()
    if not mark or not gold:
        raise ValueError('answer has no result; it must end in a line like "#### 42"')
    return CALCULATOR_MARK.sub("", reasoning).strip(), gold


def as_document(problem: dict) -> str:
    """The problem as plain text for pretraining: "Question: ...\\nAnswer: ...\\n#### 42"."""
    reasoning, gold = split_solution(problem["answer"])
    return f"Question: {problem['question'].strip()}\nAnswer: {reasoning}\n#### {gold}"


def as_prompt(problem: dict) -> list[dict]:
    """The question alone, as messages: what a model is asked in SFT, RL and evaluation."""
    return [{"role": "user", "content": problem["question"].strip()}]


def solved_conversation(problem: dict, reason: bool) -> list[dict]:
    """Question and right answer as messages, the reasoning before the answer or (reason=False) left out."""
    reasoning, gold = split_solution(problem["answer"])
    reply = chat.reply(reasoning if reason else None, gold)
    return [*as_prompt(problem), {"role": "assistant", "content": reply}]


# ---- batches -------------------------------------------------------------------------------------------


class PromptStream:
    """Endless iterator of batches [(index into problems, problem), ...], reshuffled every time all were seen.

    `position` counts problems handed out, over all ranks, and is the integer to save: the k-th problem ever
    handed out follows from (seed, k) alone, so a run resumes exactly, even with another batch size or
    number of ranks. A rank takes [rank::world] of each batch. A batch may run over the end of an epoch; it
    is always full.
    """

    def __init__(
        self,
        problems: list[dict],
        batch_size: int,
        seed: int = 0,
        position: int = 0,
        rank: int = 0,
        world: int = 1,
    ):
        if not problems:
            raise ValueError("no problems to draw prompts from; check the data")
        check_shards(batch_size, world)
        self.problems, self.batch_size, self.seed, self.position = problems, batch_size, seed, position
        self.rank, self.world = rank, world
        self._epoch, self._order = -1, np.arange(0)

    def __iter__(self) -> Iterator[list[tuple[int, dict]]]:
        return self

    def __next__(self) -> list[tuple[int, dict]]:
        indices = [self._index(k) for k in range(self.position, self.position + self.batch_size)]
        self.position += self.batch_size
        return [(i, self.problems[i]) for i in indices[self.rank :: self.world]]

    def _index(self, k: int) -> int:
        epoch, place = divmod(k, len(self.problems))
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng([self.seed, epoch]).permutation(len(self.problems))
        return int(self._order[place])
