"""The presets that the package carries: each file resolves, and its settings can work together."""

import json
from pathlib import Path

import pytest

import nanorl
from nanorl.config import StageConfig, preset_values, resolve
from nanorl.data.prepare import PrepareConfig
from nanorl.evaluate import EvalConfig
from nanorl.model import ModelConfig, Transformer
from nanorl.train.grpo import GRPOConfig
from nanorl.train.ppo import PPOConfig
from nanorl.train.preference import DPOConfig, KTOConfig, ORPOConfig
from nanorl.train.pretrain import PretrainConfig
from nanorl.train.reward import RewardConfig
from nanorl.train.sft import SFTConfig

FOLDER = Path(nanorl.__file__).parent / "configs"
PRESETS = ("smoke", "cpu", "gpu")
CONFIGS = (PrepareConfig, PretrainConfig, SFTConfig, GRPOConfig, EvalConfig, RewardConfig, DPOConfig, ORPOConfig,
           KTOConfig, PPOConfig)
each_preset = pytest.mark.parametrize("preset", PRESETS)


def settings(config: type[StageConfig], preset: str) -> StageConfig:
    """What `resolve` gives, without asking whether this machine has a GPU."""
    return config(preset=preset, **preset_values(config, preset))


@each_preset
def test_a_preset_has_a_file_for_each_stage_and_no_other(preset):
    stages = {"base", *(config.stage for config in CONFIGS)}
    assert {path.stem for path in (FOLDER / preset).glob("*.json")} == stages
    assert {path.name for path in FOLDER.iterdir()} == set(PRESETS)


@each_preset
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.stage)
def test_each_file_resolves(preset, config):
    cfg = settings(config, preset)
    said = json.loads((FOLDER / preset / "base.json").read_text())
    said |= json.loads((FOLDER / preset / f"{config.stage}.json").read_text())
    assert {name: getattr(cfg, name) for name in said} == said and cfg.preset == preset
    if preset != "gpu":
        assert resolve(config, preset) == cfg


@each_preset
def test_the_settings_of_a_preset_can_work_together(preset):
    prepare, pretrain, sft, grpo, evaluation, *_ = (settings(config, preset) for config in CONFIGS)
    common = StageConfig.model_fields.keys() - {"preset"}
    for other in (pretrain, sft, grpo, evaluation):  # one run, one name, one tokenizer, one kind of problem
        assert all(getattr(other, name) == getattr(prepare, name) for name in common)
        assert other.run_name == prepare.run_name
    assert pretrain.window <= pretrain.context_length
    for stage in (pretrain, sft):
        assert stage.batch_size % stage.micro_batch_size == 0 or stage.batch_size < stage.micro_batch_size
    for stage in (pretrain, sft, grpo):
        assert stage.warmup < stage.steps and stage.eval_every <= stage.steps
    assert grpo.max_new_tokens < grpo.context_length / 2  # a question needs room too
    assert grpo.minibatches <= grpo.prompts <= grpo.problems
    assert evaluation.eval_problems == grpo.eval_problems  # those that training promises never to look at
    assert evaluation.max_new_tokens >= grpo.max_new_tokens
    assert evaluation.eval_group >= 8  # pass@8


@each_preset
def test_the_model_of_a_preset_has_a_sensible_shape(preset):
    shape = ModelConfig.of(settings(PretrainConfig, preset))
    if preset == "gpu":
        shape = ModelConfig.of(shape, n_blocks=1, vocab_size=300)  # the rest is only more of it
    size = Transformer(shape).n_parameters()
    assert (20_000 if preset == "smoke" else 200_000) < size
    assert preset == "gpu" or size < 3_000_000
