"""Bad input of every kind at every way in: an error in one line that names the remedy, or the right result."""

import ast
import re
from pathlib import Path

import pytest
from bad_files import FILES
from bad_inputs import CONFIGS, LONG, SETTINGS, TEXTS, WORDS
from bad_numbers import NUMBERS
from bad_runs import RUNS

import nanorl
from nanorl.__main__ import commands

PACKAGE = Path(nanorl.__file__).parent
TABLE = [*SETTINGS, *WORDS, *TEXTS, *NUMBERS, *FILES, *RUNS]
LONGEST = 300  # characters of a message, paths aside


@pytest.mark.parametrize("row", TABLE, ids=lambda row: ascii(f"{row.entry}: {row.wrong}")[1:-1])
def test_bad_input(tmp_path, monkeypatch, row):
    monkeypatch.setenv("NANORL_HOME", str(tmp_path / "home"))
    if row.error is None:
        assert row.call(tmp_path) == row.result
        return
    with pytest.raises(row.error) as caught:
        row.call(tmp_path)
    message = str(caught.value).replace(str(tmp_path), "").replace(LONG, "")
    assert type(caught.value).__module__ in ("builtins", "nanorl.storage"), "an exception of a library's own"
    assert not isinstance(caught.value, UnicodeError | KeyError)
    assert len(message.splitlines()) == 1 and len(message) <= LONGEST, message
    assert all(word in message for word in row.words), message
    raised_in = Path(caught.traceback[-1].path)
    assert raised_in.is_relative_to(PACKAGE), f"raised in {raised_in}: {message}"


def promises(path: Path) -> set[str]:
    """The public functions, methods and classes of a module whose docstring names an error, as "module.name"."""
    found = set()

    def look(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                if re.search(r"\b(ValueError|FileNotFoundError|OSError|CannotWrite)\b", ast.get_docstring(node) or ""):
                    found.add(f"{prefix}.{node.name}")
                if isinstance(node, ast.ClassDef):
                    look(node.body, f"{prefix}.{node.name}")

    look(ast.parse(path.read_text(encoding="utf-8")).body, ".".join(path.relative_to(PACKAGE).with_suffix("").parts))
    return found


ELSEWHERE = {  # need several processes, a full disk or a run, and are tested with them
    "distributed.setup", "storage.lock", "storage.write_with_manifest", "train.progress.restore",
        "train.progress.session",
    "train.progress.guard", "train.supervised.train", "talk.default_stage",
}


def test_whatever_promises_an_error_is_in_the_table():
    promised = set().union(*map(promises, PACKAGE.rglob("*.py"))) - ELSEWHERE
    assert promised - {row.entry for row in TABLE} == set()


def test_every_command_and_every_stage_is_in_the_table():
    tried = {row.wrong.partition(" ")[0] for row in TABLE if row.entry.startswith("__main__.")}
    assert set(commands()) <= tried
    resolved = {row.wrong.partition(":")[0] for row in TABLE if row.entry == "config.resolve"}
    assert {cls.stage for cls in CONFIGS.values()} <= resolved


def test_no_row_stands_twice():
    names = [(row.entry, row.wrong) for row in TABLE]
    assert sorted(set(names)) == sorted(names)
