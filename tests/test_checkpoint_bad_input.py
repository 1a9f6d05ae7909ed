"""What is no checkpoint, or one of another model, is refused in one line that says what is wrong and what to do."""

import os
import pickle

import pytest
import safetensors.torch
import torch
from test_checkpoint import one_line, tiny_state
from torch import nn

from nanorl import checkpoint
from nanorl.model import ModelConfig, Transformer

WEIGHT = "blocks.0.attention.out.weight"


class Trap:
    """Makes a folder where it is unpickled."""

    def __reduce__(self):
        return (os.mkdir, (os.environ["NANORL_TRAP"],))


def sprung(monkeypatch, tmp_path):
    """Where the trap would leave its folder."""
    monkeypatch.setenv("NANORL_TRAP", str(tmp_path / "sprung"))
    return tmp_path / "sprung"


# ---- files of another kind -------------------------------------------------------------------------------

FILES = {
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("step 1, loss 2.5\n" * 50),
    "JSON": lambda path: path.write_text('{"step": 1}'),
    "zeros": lambda path: path.write_bytes(bytes(5_000)),
    "safetensors": lambda path: safetensors.torch.save_file({"weight": torch.zeros(3)}, path),
    "an empty zip": lambda path: path.write_bytes(b"PK\x05\x06" + bytes(18)),
    "a pickled module": lambda path: torch.save(nn.Linear(2, 2), path),
    "a pickle with code": lambda path: path.write_bytes(pickle.dumps(Trap(), protocol=2)),
    "code in an old pickle": lambda path: torch.save(Trap(), path, _use_new_zipfile_serialization=False),
    "code among the keys": lambda path: torch.save(tiny_state() | {"metrics": Trap()}, path),
    "code among the weights": lambda path: torch.save(tiny_state(model_state_dict={"weight": Trap()}), path),
}


@pytest.mark.parametrize("kind", FILES)
def test_another_file_under_the_name_of_a_checkpoint(tmp_path, monkeypatch, kind):
    trap = sprung(monkeypatch, tmp_path)
    good = checkpoint.save(tmp_path, tiny_state(1))
    FILES[kind](tmp_path / "step_000002.pt")
    with pytest.raises(ValueError, match="step_000002.pt is truncated or damaged .*resume from") as error:
        checkpoint.load(tmp_path / "step_000002.pt")
    assert str(good) in one_line(error)
    with pytest.warns(UserWarning, match="using step 1 instead"):
        assert checkpoint.to_resume("latest", tmp_path)["step"] == 1
    assert not trap.exists()


def test_the_trap_works(tmp_path, monkeypatch):
    trap = sprung(monkeypatch, tmp_path)
    pickle.loads(pickle.dumps(Trap()))
    assert trap.is_dir()


def test_a_folder_is_no_checkpoint(tmp_path):
    (tmp_path / "step_000001.pt").mkdir()
    with pytest.raises(FileNotFoundError, match="no checkpoint at .*step_000001.pt") as error:
        checkpoint.load(tmp_path / "step_000001.pt")
    one_line(error)


# ---- states that lack something --------------------------------------------------------------------------

@pytest.mark.parametrize("key", checkpoint.REQUIRED)
def test_a_key_is_missing(tmp_path, key):
    state = tiny_state()
    del state[key]
    torch.save(state, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=f"other.pt is not a checkpoint of nanorl .no '{key}'") as error:
        checkpoint.load(tmp_path / "other.pt")
    assert "run the stage again" in one_line(error)


@pytest.mark.parametrize("key, value, said", [
    ("model_state_dict", [torch.zeros(2)], "its 'model_state_dict' is a list, not a dict"),
    ("model_state_dict", None, "its 'model_state_dict' is a NoneType, not a dict"),
    ("model_state_dict", {"lm_head.weight": [1.0]}, "its weight 'lm_head.weight' is a list"),
    ("model_state_dict", {7: torch.zeros(2)}, "its weight 7 is a Tensor"),
    ("model_cfg", "small", "its 'model_cfg' is a str, not a dict"),
    ("cfg", None, "its 'cfg' is a NoneType, not a dict"),
    ("stage", 3, "its 'stage' is a int, not a str"),
    ("step", "3", "its 'step' is a str, not a int"),
    ("step", 3.0, "its 'step' is a float, not a int"),
    ("step", torch.tensor(3), "its 'step' is a Tensor, not a int"),
])
def test_a_key_is_of_another_type(tmp_path, key, value, said):
    torch.save(tiny_state() | {key: value}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="is not a checkpoint of nanorl") as error:
        checkpoint.load(tmp_path / "other.pt")
    assert said in one_line(error)


# ---- weights of another model ----------------------------------------------------------------------------

def renamed(weights):
    weights["attention.weight"] = weights.pop(WEIGHT)


def lost(weights):
    del weights[WEIGHT]


def added(weights):
    weights["blocks.9.weight"] = torch.zeros(2)


def reshaped(weights):
    weights[WEIGHT] = weights[WEIGHT].flatten()


@pytest.mark.parametrize("change, said", [
    (renamed, f"no weight '{WEIGHT}'"), (lost, f"no weight '{WEIGHT}'"),
    (added, "a weight 'blocks.9.weight' that the model lacks"),
    (reshaped, rf"weight '{WEIGHT}' has shape \(256,\) in the checkpoint and \(16, 16\) in the model"),
])
def test_weights_that_do_not_fit(tmp_path, change, said):
    state = tiny_state()
    change(state["model_state_dict"])
    state = checkpoint.load(checkpoint.save(tmp_path, state))
    with pytest.raises(ValueError, match=said) as error:
        checkpoint.model_from(state)
    one_line(error)
    model = Transformer(ModelConfig(**state["model_cfg"]))
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(ValueError, match=said):
        checkpoint.load_weights(model, state["model_state_dict"])
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize("changes, said", [
    ({"n_blocks": 0}, "'n_blocks' is 0"), ({"n_head": "two"}, "'n_head' is 'two'"), ({"depth": 3}, "'depth' is 3"),
    ({"n_head": 3}, "n_head"), ({7: 8}, "keywords must be strings"),
])
def test_a_model_config_that_describes_no_model(changes, said):
    state = tiny_state()
    state["model_cfg"] |= changes
    with pytest.raises(ValueError, match="the sft checkpoint describes no model .*train it again") as error:
        checkpoint.model_from(state)
    assert said in one_line(error)


def test_a_weight_of_a_reward_model_or_a_critic_is_missing():
    for head in ("head.weight", "value_head.weight"):
        state = tiny_state()
        weights = {f"body.{name}": x for name, x in state["model_state_dict"].items()}
        state["model_state_dict"] = weights | {head: torch.zeros(1, 16)}
        with pytest.raises(ValueError, match="the checkpoint has no weight") as error:
            checkpoint.model_from(state)
        one_line(error)


@pytest.mark.parametrize("name", ["notes.txt", "step_1.pt", "step_000001.pt.bak", "step_00000x.pt", "model.pt"])
def test_a_file_of_another_name_is_no_checkpoint_of_the_folder(tmp_path, name):
    (tmp_path / name).write_bytes(b"something else")
    assert checkpoint.latest(tmp_path) is None
    with pytest.raises(FileNotFoundError, match=r"\(in .*: none\); start without resume"):
        checkpoint.to_resume("latest", tmp_path)
    checkpoint.save(tmp_path, tiny_state(1), keep_last=1)
    assert (tmp_path / name).read_bytes() == b"something else"
