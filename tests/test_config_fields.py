"""Every setting that a config offers is read somewhere: one that nothing reads would be a promise not kept."""

import ast
import inspect
from pathlib import Path

import pytest

import nanorl
from nanorl.config import StageConfig
from nanorl.data.prepare import PrepareConfig
from nanorl.evaluate import EvalConfig
from nanorl.model import ModelConfig
from nanorl.talk import ChatConfig
from nanorl.train.grpo import GRPOConfig
from nanorl.train.ppo import PPOConfig
from nanorl.train.preference import DPOConfig, KTOConfig, ORPOConfig, PairConfig
from nanorl.train.pretrain import PretrainConfig
from nanorl.train.progress import OptimConfig
from nanorl.train.reward import RewardConfig
from nanorl.train.rl import RLConfig
from nanorl.train.sft import SFTConfig
from nanorl.train.supervised import SupervisedConfig

PACKAGE = Path(nanorl.__file__).parent
CONFIGS = [StageConfig, PrepareConfig, ModelConfig, OptimConfig, SupervisedConfig, PretrainConfig, SFTConfig,
           PairConfig, RewardConfig, DPOConfig, ORPOConfig, KTOConfig, RLConfig, PPOConfig, GRPOConfig, EvalConfig,
           ChatConfig]
OWNERS = {"cfg", "config", "usual"}  # what the package calls a config; in its own class it is `self`


def fields_read(source: str) -> set[str]:
    """Names read as an attribute of a config: `cfg.steps`, `self.cfg.steps`, or `self.steps` in a class *Config.

    What a validator reads of its own class is not counted: that checks a field, it does not use it.
    """
    found = set()

    def visit(node: ast.AST, in_config: bool) -> None:
        if isinstance(node, ast.ClassDef):
            in_config = node.name.endswith("Config")
        if isinstance(node, ast.FunctionDef) and any("validator" in ast.unparse(d) for d in node.decorator_list):
            return
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = getattr(node.value, "id", getattr(node.value, "attr", None))
            if owner in OWNERS or (in_config and owner == "self"):
                found.add(node.attr)
        for child in ast.iter_child_nodes(node):
            visit(child, in_config)

    visit(ast.parse(source), False)
    return found


READ = set().union(*(fields_read(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))))


def test_these_are_all_the_configs():
    defined = {node.name for path in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text("utf-8")))
               if isinstance(node, ast.ClassDef) and node.name.endswith("Config")}
    assert defined == {config.__name__ for config in CONFIGS}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)
def test_every_field_is_read_and_explained(config):
    unread = [name for name in config.model_fields if name not in READ]
    assert not unread, f"{config.__name__} offers {', '.join(unread)}, and nothing reads it"
    for name, field in config.model_fields.items():
        assert field.description, f"{config.__name__}.{name} has no description"


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)
def test_every_number_has_a_bound(config):
    for name, field in config.model_fields.items():
        if field.annotation in (int, float, int | None):
            assert any(hasattr(bound, "ge") or hasattr(bound, "gt") for bound in field.metadata), name


def test_only_reading_counts():
    source = inspect.cleandoc("""
        class ToyConfig:
            a: int = 1

            def use(self):
                return self.b

            @model_validator(mode="after")
            def check(self):
                return self.c

        class Other:
            def use(self):
                return self.d + self.cfg.e

        cfg.f = 1
        rollout.g, cfg.h
    """)
    assert fields_read(source) == {"b", "e", "h"}
