"""What comes back from a checkpoint: a strictly loaded model, a stage by name, a file of weights."""

import pytest
import safetensors.torch
import torch
from test_checkpoint import SHAPE, names, one_line, tiny_state

from nanorl import checkpoint, paths
from nanorl.model import ModelConfig, Transformer
from nanorl.tokenizer import Tokenizer

TEXTS = ["Tom has 3 apples and 4 pears. The cat sat on the mat.", "one two three four five six"] * 20


# Models from checkpoints ------------------------------------------------------------------------------------

@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_a_model_comes_back_from_its_own_config(prefix):
    state = tiny_state()
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**SHAPE))
    state["model_state_dict"] = {prefix + name: value for name, value in state["model_state_dict"].items()}
    again = checkpoint.model_from(state)
    tokens = torch.randint(0, 300, (2, 8))
    assert not again.training and torch.equal(model.eval()(tokens), again(tokens))


@pytest.mark.parametrize("tied", [False, True])
def test_tied_embeddings_stay_tied(tmp_path, tied):
    model = Transformer(ModelConfig(**SHAPE, tie_embeddings=tied))
    state = tiny_state(model_state_dict=model.state_dict(), model_cfg=model.cfg.model_dump())
    again = checkpoint.model_from(checkpoint.load(checkpoint.save(tmp_path, state)))
    assert (again.lm_head.weight is again.tokens.weight) == tied


def rename(weights):
    weights["blocks.0.attention.query.weight"] = weights.pop("blocks.0.attention.qkv.weight")


def drop(weights):
    del weights["norm.weight"]


def add(weights):
    weights["value_head.weight"] = torch.zeros(1, 16)


def reshape(weights):
    weights["lm_head.weight"] = torch.zeros(301, 16)


@pytest.mark.parametrize("spoil, message", [
    (rename, r"no weight 'blocks.0.attention.qkv.weight'"), (drop, r"no weight 'norm.weight'"),
    (add, r"a weight 'value_head.weight' that the model lacks"),
    (reshape, r"'lm_head.weight' has shape \(301, 16\) in the checkpoint and \(300, 16\)"),
])
def test_weights_load_strictly_or_not_at_all(spoil, message):
    weights = dict(tiny_state(seed=1)["model_state_dict"])
    spoil(weights)
    model = Transformer(ModelConfig(**SHAPE))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=message) as error:
        checkpoint.load_weights(model, weights)
    one_line(error)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_resuming_another_shape_or_tokenizer_names_the_first_difference():
    state = tiny_state(5)
    cfg = dict(state["model_cfg"])
    checkpoint.check_same_shape(state, cfg)
    checkpoint.check_same_shape(state, cfg, "0" * 64)
    with pytest.raises(ValueError, match="step 5 has n_embed = 16, this run 32; set n_embed to 16") as error:
        checkpoint.check_same_shape(state, {**cfg, "n_embed": 32, "n_blocks": 9})
    one_line(error)
    with pytest.raises(ValueError, match=r"another tokenizer \(00000000, this run has abababab\)") as error:
        checkpoint.check_same_shape(state, cfg, "ab" * 32)
    one_line(error)


# Stages by name ---------------------------------------------------------------------------------------------

@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty home, and presets that do not move with the package's own files."""
    def config_file(preset, name):
        return tmp_path / "configs" / preset / f"{name}.json"

    for preset, content in (("cpu", "{}"), ("gpu", '{"data": "openai/gsm8k", "tokenizer": "r50k_base"}')):
        config_file(preset, "base").parent.mkdir(parents=True)
        config_file(preset, "base").write_text(content)
    monkeypatch.setattr(paths, "config_file", config_file)
    monkeypatch.setenv("NANORL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def finished_stage(run, stage="sft", **changes):
    tokenizer = Tokenizer.train(TEXTS, 300)
    paths.run_dir(run).mkdir(parents=True, exist_ok=True)
    tokenizer.save(paths.run_dir(run) / "tokenizer.json")
    state = tiny_state(40, **{"finished": True, "tokenizer_hash": tokenizer.hash, "stage": stage, **changes})
    checkpoint.save(paths.stage_dir(run, stage), state)
    return tokenizer


def test_require_returns_model_tokenizer_and_state(home):
    tokenizer = finished_stage("cpu")
    artifact = checkpoint.require("sft", "cpu", "cpu")
    model, again, state = artifact
    assert artifact.model is model and not model.training and model.cfg == ModelConfig(**SHAPE)
    assert again.hash == tokenizer.hash and again.encode("the cat") == tokenizer.encode("the cat")
    assert state["step"] == 40


@pytest.mark.parametrize("run, preset, settings, command", [
    ("cpu", "cpu", {}, "sft --preset cpu"),
    ("cpu", "cpu", dict(data="tinyworld", tokenizer="bpe", seed=0), "sft --preset cpu"),
    ("cpu-seed3", "cpu", dict(seed=3), "sft --preset cpu --seed 3"),
    ("cpu-my-gsm-r50k_base", "cpu", dict(data="/data/my gsm", tokenizer="r50k_base"),
     "sft --preset cpu --data '/data/my gsm' --tokenizer r50k_base"),
    ("mine", "cpu", dict(seed=3, max_steps=4), "sft --preset cpu --seed 3 --max-steps 4 --run mine"),
    ("gpu-gsm8k-r50k_base", "gpu", dict(data="openai/gsm8k", tokenizer="r50k_base"), "sft --preset gpu"),
])
def test_a_missing_stage_names_the_exact_command(home, run, preset, settings, command):
    with pytest.raises(FileNotFoundError) as error:
        checkpoint.require("sft", run, preset, **settings)
    message = one_line(error)
    assert message.endswith(f"make it with: python -m nanorl {command}")
    assert str(home / run / "sft") in message


def test_an_unfinished_stage_names_the_command_that_finishes_it(home):
    finished_stage("cpu", finished=False)
    with pytest.raises(FileNotFoundError, match="stopped at step 40; finish it with: "
                       "python -m nanorl sft --preset cpu --resume latest$") as error:
        checkpoint.require("sft", "cpu", "cpu")
    one_line(error)


def test_a_missing_or_other_tokenizer_is_refused(home):
    finished_stage("cpu")
    file = paths.run_dir("cpu") / "tokenizer.json"
    file.unlink()
    with pytest.raises(FileNotFoundError, match="no tokenizer at .* nanorl prepare --preset cpu$") as error:
        checkpoint.require("sft", "cpu", "cpu")
    one_line(error)
    Tokenizer.train([text.upper() for text in TEXTS], 300).save(file)
    with pytest.raises(ValueError, match="with another tokenizer .*tokenizer.json.*nanorl sft") as error:
        checkpoint.require("sft", "cpu", "cpu")
    one_line(error)


# Export -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("tied", [False, True])
def test_export_holds_the_same_weights_and_reloads_strictly(tmp_path, tied):
    model = Transformer(ModelConfig(**SHAPE, tie_embeddings=tied))
    state = tiny_state(model_state_dict=model.state_dict(), model_cfg=model.cfg.model_dump())
    path = checkpoint.export(state, tmp_path / "out" / "model.safetensors")
    assert names(path.parent) == ["model.safetensors"]
    weights = safetensors.torch.load_file(path)
    again = Transformer(ModelConfig(**SHAPE, tie_embeddings=tied))
    checkpoint.load_weights(again, weights)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata()["stage"] == "sft" and '"n_blocks": 2' in file.metadata()["model_cfg"]
