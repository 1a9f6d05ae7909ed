"""The rules of the house, read off the source: who imports whom, how long things are, what runs at import."""

import ast
from pathlib import Path

import pytest

import nanorl

PACKAGE = Path(nanorl.__file__).parent

# Low to high. A module imports only from modules that come before it, in its own layer too.
LAYERS = [
    ["paths", "runtime", "distributed", "metrics", "config", "stopping"],
    ["tokenizer", "chat"],
    ["data.download", "data.tinyworld", "data.store", "data.corpus", "data.instruct", "data.prompts", "data.preference",
     "data.prepare"],
    ["model", "heads", "pretrained"],
    ["objectives.masking", "objectives.logprobs", "objectives.language_model", "objectives.preference",
     "objectives.advantages", "objectives.policy"],
    ["generate", "rewards.parsing", "rewards.verifiers", "rewards.monitors", "rollout"],
    ["optim", "storage", "checkpoint"],
    ["statistics", "evaluate"],
    ["train.progress", "train.supervised", "train.pretrain", "train.sft", "train.preference",
     "train.reward", "train.rl", "train.ppo",
     "train.grpo"],
    ["launch", "talk", "__main__"],
    ["notebook"],
]
ORDER = [f"nanorl.{name}" for layer in LAYERS for name in layer]
PACKAGES = ["nanorl", "nanorl.data", "nanorl.objectives", "nanorl.rewards", "nanorl.train"]

RESERVED = {  # a foreign module -> the only modules of ours that may import it
    "torch.distributed": {"nanorl.distributed", "nanorl.launch"},
    "torch.multiprocessing": {"nanorl.distributed", "nanorl.launch"},
    "multiprocessing": set(),  # processes come from torch's elastic launcher
    "matplotlib": {"nanorl.notebook"},
    "ipywidgets": {"nanorl.notebook"},
    "IPython": {"nanorl.notebook"},
}
FILE_LINES, FUNCTION_LINES = 350, 60
DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
RISKS = ("shell", "allow_pickle")  # keywords
FORBIDDEN = {"eval", "exec", "compile", "os.system", "os.popen", "pickle.load", "pickle.loads", "yaml.load"}
PURE_CALLS = {"re.compile", "frozenset", "set", "dict", "tuple", "list", "range", "len", "sum", "sorted",
              "chr", "zip", "enumerate", "str", "bytes", "int", "float", "math.log", "math.sqrt", "TypeVar",
              "Path", "namedtuple", "Fraction", "Decimal", "type", "timedelta"}


def module_name(path: Path) -> str:
    parts = ["nanorl", *path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}


def imports(name: str, tree: ast.AST) -> list[str]:
    """Dotted names of everything that a module imports or reaches as `torch.<name>`, wherever it does."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*name.split(".")[:-node.level], *filter(None, [node.module])])
            found += [f"{base}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch":
            found.append(f"torch.{node.attr}")
    return found


def under(imported: str, module: str) -> bool:
    return imported == module or imported.startswith(module + ".")


def bad_imports(name: str, source: str) -> list[str]:
    """What a module may not import."""
    below = [] if name in PACKAGES else ORDER[:ORDER.index(name)]
    found = []
    for imported in imports(name, ast.parse(source)):
        if under(imported, "nanorl") and imported != "nanorl.__version__":
            if not any(under(imported, module) for module in below):
                found.append(imported)
        found += [imported for module, owners in RESERVED.items()
                  if under(imported, module) and name not in owners]
        pure = name.startswith(("nanorl.rewards.", "nanorl.objectives."))
        if pure and under(imported, "nanorl") and not under(imported, name.rpartition(".")[0]):
            found.append(imported)
        if name.startswith("nanorl.rewards.") and under(imported, "torch"):
            found.append(imported)
    return found


def runs_at_import(name: str, source: str) -> list[str]:
    """Top-level statements that are neither definitions nor constants."""
    found = []
    for number, node in enumerate(ast.parse(source).body):
        docstring = number == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        constant = isinstance(node, (ast.Assign, ast.AnnAssign)) and all(
            ast.unparse(call.func) in PURE_CALLS or getattr(call.func, "attr", "") == "join"
            for call in ast.walk(node) if isinstance(call, ast.Call))
        typing_only = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        main = isinstance(node, ast.If) and name == "nanorl.__main__" and "__name__" in ast.unparse(node.test)
        if not (docstring or constant or typing_only or main or isinstance(node, DEFINITIONS)):
            found.append(f"line {node.lineno}: {ast.unparse(node)[:60]}")
    return found


def runs_text(source: str) -> list[str]:
    """Calls that run code out of text or files, or a shell."""
    found = []
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        if name in FORBIDDEN or any(given.get(risk) not in (None, "False") for risk in RISKS):
            found.append(ast.unparse(call)[:60])
        if name == "torch.load" and given.get("weights_only") != "True":
            found.append(f"{ast.unparse(call)[:60]} without weights_only=True")
    return found


def too_long(source: str) -> list[str]:
    found = []
    lines = len(source.splitlines())
    if lines > FILE_LINES:
        found.append(f"the file has {lines} lines")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = node.end_lineno - node.lineno + 1
            if lines > FUNCTION_LINES:
                found.append(f"{node.name} has {lines} lines")
    return found


@pytest.mark.parametrize("name", SOURCES)
def test_module_keeps_the_rules(name):
    assert name in ORDER + PACKAGES, f"{name} has no layer: give it a place in LAYERS"
    assert bad_imports(name, SOURCES[name]) == []
    assert runs_at_import(name, SOURCES[name]) == []
    assert runs_text(SOURCES[name]) == []
    assert too_long(SOURCES[name]) == []
    assert ast.get_docstring(ast.parse(SOURCES[name])), "a module says what it holds"


def test_no_drawers():
    assert not {"utils", "common", "helpers", "misc"} & {name.rpartition(".")[2] for name in SOURCES}


@pytest.mark.parametrize("name, source", [
    ("nanorl.paths", "from nanorl import config"),  # upwards in a layer
    ("nanorl.model", "from nanorl.train import grpo"),
    ("nanorl.model", "def f():\n    import nanorl.train.grpo"),  # hidden in a function
    ("nanorl.model", "from nanorl import model"),
    ("nanorl.data.corpus", "from . import prompts"),
    ("nanorl.data.corpus", "from ..model import Transformer"),
    ("nanorl.data", "from nanorl.data import corpus"),  # a package's __init__ imports nothing of ours
    ("nanorl.model", "import torch.distributed as dist"),
    ("nanorl.model", "from torch import distributed"),
    ("nanorl.model", "import torch\ndef f(): torch.distributed.barrier()"),
    ("nanorl.launch", "import multiprocessing"),
    ("nanorl.evaluate", "from matplotlib import pyplot"),
    ("nanorl.objectives.policy", "from nanorl.model import Transformer"),
    ("nanorl.objectives.policy", "from nanorl import config"),
    ("nanorl.rewards.parsing", "import torch"),
])
def test_bad_imports_are_seen(name, source):
    assert bad_imports(name, source)


@pytest.mark.parametrize("name, source", [
    ("nanorl.config", "from nanorl import paths, runtime"),
    ("nanorl.data.corpus", "from nanorl.data.tinyworld import problems\nfrom . import download"),
    ("nanorl.objectives.policy", "import torch\nfrom nanorl.objectives.masking import masked_mean"),
    ("nanorl.distributed", "import torch.distributed as dist"),
    ("nanorl.notebook", "def f():\n    import matplotlib.pyplot as plt"),
    ("nanorl.__main__", "from nanorl import __version__, launch"),
])
def test_good_imports_pass(name, source):
    assert bad_imports(name, source) == []


@pytest.mark.parametrize("source", ["print(1)", "for i in range(3): pass", "DATA = open('x').read()",
                                    "import torch\ntorch.manual_seed(0)", "if __name__ == '__main__': main()",
                                    "NOW = time.time()", "x = 1\n'not a docstring'"])
def test_side_effects_are_seen(source):
    assert runs_at_import("nanorl.model", source)


@pytest.mark.parametrize("source", [
    "eval('1+1')", "def f(x):\n    exec(x)", "torch.load(path)", "torch.load(path, weights_only=False)",
    "torch.load(path, weights_only=safe)", "subprocess.run(words, shell=True)", "os.system('ls')", "pickle.load(file)",
    "compile(text, 'x', 'exec')", "yaml.load(text)", "np.load(path, allow_pickle=True)",
])
def test_text_that_would_run_is_seen(source):
    assert runs_text(source)


def test_long_code_is_seen():
    assert too_long("x = 1\n" * 351) == ["the file has 351 lines"]
    assert too_long("def f():\n" + "    x = 1\n" * 60) == ["f has 61 lines"]
    assert too_long("def f():\n" + "    x = 1\n" * 59) == []
