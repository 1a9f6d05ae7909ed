"""The hygiene of the committed notebooks: what must hold for nbval, papermill and a reader on the web."""

import ast
import json
import re
from pathlib import Path

import nbformat
import pytest

import nanorl

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").rglob("*.ipynb"))
COURSE = [path for path in NOTEBOOKS if path.parent.name == "notebooks"]
PATHS = re.compile(r"(?<![\w.:/])/(?:home|root|tmp|Users|var|mnt|work)/\w")
IGNORED = "nbval-ignore-output"


def code_cells(path: Path) -> list:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def plain(source: str) -> str:
    """Source that `ast` can read: without IPython's magics."""
    return "\n".join("" if line.lstrip().startswith(("%", "!")) else line for line in source.splitlines())


def functions(tree: ast.AST) -> dict[str, str]:
    """What each function does, without its docstring."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            found[node.name] = "\n".join(ast.dump(line) for line in body)
    return found


def test_every_chapter_is_there_with_its_solutions():
    names = {path.stem for path in COURSE}
    assert {"00_tokenizer", "01_pretrain", "02_sft", "05_grpo"} <= names
    solved = {path.stem.removesuffix("_solutions") for path in NOTEBOOKS if path.parent.name == "solutions"}
    assert solved == {name[:2] for name in names}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_form(path):
    raw = path.read_text(encoding="utf-8")
    assert len(raw) < 500_000, f"{len(raw):,} characters: lower the resolution of its figures"
    notebook = nbformat.reads(raw, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert "widgets" not in notebook.metadata
    assert "papermill" not in notebook.metadata
    counts = [cell.execution_count for cell in code_cells(path)]
    assert counts == list(range(1, len(counts) + 1)), "run it from top to bottom in a fresh kernel"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs(path):
    for cell in code_cells(path):
        head = cell.source[:60]
        for output in cell.outputs:
            assert output.output_type != "error", head
            assert output.get("name") != "stderr", head
            text = json.dumps(output.get("text", "")) + json.dumps(
                {kind: data for kind, data in output.get("data", {}).items() if not kind.startswith("image/")}
            )
            assert not PATHS.search(text), f"a path of the machine that ran it: {head}"
            if any(kind.startswith("image/") for kind in output.get("data", {})):
                assert IGNORED in cell.metadata.get("tags", []), f"a figure is not the same everywhere: {head}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_are_short_and_explained(path):
    in_a_row = 0
    for cell in nbformat.read(path, as_version=4).cells:
        in_a_row = in_a_row + 1 if cell.cell_type == "code" else 0
        assert in_a_row <= 2, f"three code cells in a row: {cell.source[:60]}"
        if cell.cell_type == "code":
            lines = [line for line in cell.source.splitlines() if line.strip()]
            loops = any(isinstance(node, ast.For | ast.While) for node in ast.walk(ast.parse(plain(cell.source))))
            assert len(lines) <= (40 if loops else 25), f"{len(lines)} lines: {cell.source[:60]}"


@pytest.mark.parametrize("path", COURSE, ids=lambda path: path.stem)
def test_parameters(path):
    first, second = code_cells(path)[:2]
    assert "parameters" in first.metadata.get("tags", [])
    tree = ast.parse(first.source)
    assert all(isinstance(node, ast.Assign) for node in tree.body), "flat assignments only"
    names = [node.targets[0].id for node in tree.body]
    assert "PRESET" in names
    for line in first.source.splitlines():
        assert re.fullmatch(r"[A-Z_]+ = \S.*  # \S.*", line), f"one line and a comment each: {line}"
    assert "check_parameters(" in second.source
    for name in names:
        assert f'"{name}"' in second.source, f"{name} is not among the names that are checked"


@pytest.fixture(scope="module")
def package() -> dict[str, str]:
    """Every function of the package."""
    found = {}
    for module in Path(nanorl.__file__).parent.rglob("*.py"):
        found |= functions(ast.parse(module.read_text(encoding="utf-8")))
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_copies_of_the_package(path, package):
    for cell in code_cells(path):
        for name, body in functions(ast.parse(plain(cell.source))).items():
            assert package.get(name) != body, f"{name} is copied from the package; import it"
