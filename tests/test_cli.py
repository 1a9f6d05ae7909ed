"""The command line, called as a user would: what it prints, and how it fails."""

import json
import shlex
import subprocess
import sys

import pytest
import torch

from nanorl import checkpoint, config, paths, talk
from nanorl.__main__ import bare_resume, commands, main, parse
from nanorl.metrics import read_metrics
from nanorl.tokenizer import Tokenizer
from nanorl.train.pretrain import PretrainConfig

TINY = "--device cpu --precision fp32 --run cli --vocab-size 300 --context-length 112 --max-steps 1".split()


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANORL_HOME", str(tmp_path_factory.mktemp("home")))
        patch.delenv("WORLD_SIZE", raising=False)
        patch.delenv("NANORL_DEBUG", raising=False)
        patch.setenv("COLUMNS", "100")
        yield


@pytest.fixture(scope="module")
def trained():
    """A run of three steps a stage."""
    shape = "--n-embed 32 --n-head 2 --n-kv-head 1 --n-blocks 2 --window 48".split()
    assert main(["prepare", *TINY[4:], "--documents", "200", "--conversations", "60"]) == 0
    assert main(["pretrain", *TINY, *shape, "--steps", "3", "--batch-size=4", "--save-every", "2"]) == 0
    assert main(["sft", *TINY, "--steps", "3", "--batch_size", "4"]) == 0
    small = "--steps 3 --prompts 2 --group 2 --max-new-tokens 6 --dev-problems 4 --problems 50".split()
    assert main(["grpo", *TINY, *small, "--no-compile"]) == 0


def failed(words: list[str], capsys) -> str:
    """The one line that a command fails with."""
    capsys.readouterr()
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("nanorl: error: ") and err.count("\n") == 1
    return err.removeprefix("nanorl: error: ").strip()


# Help ---------------------------------------------------------------------------------------------------------

def test_the_program_lists_its_commands():
    done = subprocess.run([sys.executable, "-m", "nanorl"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == ""
    for name in ("prepare", "pretrain", "sft", "grpo", "eval", "table", "chat"):
        assert f"\n  {name} " in done.stdout


@pytest.mark.parametrize("name", ["prepare", "pretrain", "sft", "grpo", "eval", "table", "chat"])
def test_help_tells_all_a_learner_needs(name, capsys):
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert not stop.value.code
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    command = commands()[name]
    assert f"python -m nanorl {name} --preset smoke {command.example}" in text
    for field, info in command.config.model_fields.items():
        assert ("--" + field.replace("_", "-") + " " in text.replace(",", " ")) == (field not in command.hidden)
        assert field in command.hidden or info.description in text.replace("- ", "-")


def test_help_shows_the_defaults_of_the_preset(capsys):
    shown = {}
    for preset in ("smoke", "cpu"):
        with pytest.raises(SystemExit):
            main(["pretrain", "--help", f"--preset={preset}"])
        shown[preset] = " ".join(capsys.readouterr().out.replace("│", " ").split())
        steps = config.preset_values(PretrainConfig, preset)["steps"]
        assert f"training steps (default: {steps})" in shown[preset]
    assert "(default: cpu)" in shown["cpu"]


def test_an_example_in_the_help_is_one_that_parses():
    for name, command in commands().items():
        parse(name, command, shlex.split(command.example))


# Stages -------------------------------------------------------------------------------------------------------

def test_stages_leave_their_artifacts(trained, capsys):
    for stage in ("pretrain", "sft", "grpo"):
        state = checkpoint.load(checkpoint.latest(paths.stage_dir("cli", stage)))
        assert state["finished"] and state["step"] == 3 and state["cfg"]["precision"] == "fp32"
    assert state["cfg"]["group"] == 2 and state["cfg"]["compile"] is False


def test_resume_alone_goes_on_from_the_latest(trained, capsys):
    folder = paths.stage_dir("cli", "pretrain")
    before = checkpoint.load(folder / "step_000003.pt")
    shape = "--n-embed 32 --n-head 2 --n-kv-head 1 --n-blocks 2 --window 48 --steps 3 --batch-size 4".split()
    words = ["pretrain", *TINY, *shape, "--resume"]
    assert main(words) == 0
    assert "pretrain: nothing left to do" in capsys.readouterr().out
    assert main([*words, "step_000002.pt"]) == 0  # a path goes on from there, to the same end
    assert "pretrain: step 3" in capsys.readouterr().out
    after = checkpoint.load(folder / "step_000003.pt")
    assert [r["step"] for r in read_metrics(folder)] == [1, 2, 3]
    assert all(torch.equal(w, after["model_state_dict"][n]) for n, w in before["model_state_dict"].items())


def test_torchrun_starts_the_same_command(trained):
    words = ["sft", *TINY, "--steps", "2", "--batch-size", "4"]
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
                           "nanorl", "--", *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sft: step 2, see") == 1  # rank 0 alone speaks
    assert checkpoint.load(checkpoint.latest(paths.stage_dir("cli", "sft")))["step"] == 2


@pytest.mark.parametrize("words, meant", [
    (["--resume"], ["--resume", "latest"]),
    (["--resume", "--steps", "3"], ["--resume", "latest", "--steps", "3"]),
    (["--resume", "runs/x.pt", "--steps", "3"], ["--resume", "runs/x.pt", "--steps", "3"]),
    (["--resume=x.pt"], ["--resume=x.pt"]), ([], []),
])
def test_a_bare_resume_means_latest(words, meant):
    assert bare_resume(words) == meant


# Judging ------------------------------------------------------------------------------------------------------

ASKED = "--eval-problems 6 --eval-group 8 --max-new-tokens 4".split()


def test_table_as_json_is_a_list_of_records(trained, capsys):
    capsys.readouterr()
    assert main(["table", *TINY, *ASKED, "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert [r["stage"] for r in records] == ["base", "sft", "grpo"]
    for record in records:
        assert {"stage", "n", "greedy", "greedy_low", "greedy_high", "sampled", "pass_at_8", "format_rate",
                "mean_length", "minutes", "seed"} <= record.keys()
        assert record["n"] == 6 and 0 <= record["greedy_low"] <= record["greedy"] <= record["greedy_high"] <= 1
    assert main(["table", *TINY, *ASKED]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["base", "sft", "grpo"]


def test_eval_judges_one_stage(trained, capsys):
    capsys.readouterr()
    assert main(["eval", *TINY, *ASKED, "--of", "sft"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["stage"] == "sft" and record["n"] == 6


# Talking ------------------------------------------------------------------------------------------------------

def chat(capsys, *words: str) -> str:
    capsys.readouterr()
    assert main(["chat", *TINY, "--max-new-tokens", "12", *words]) == 0
    return capsys.readouterr().out


def test_chat_answers_one_prompt(trained, capsys):
    reply = chat(capsys, "--prompt", "Tom has 3 apples.", "--seed", "0")
    assert reply.endswith("\n") and reply == chat(capsys, "--prompt", "Tom has 3 apples.")  # the seed decides
    assert chat(capsys, "--prompt", "Tom has 3 apples.", "--think").startswith("<think>")
    greedy = chat(capsys, "--prompt", "Tom", "--raw", "--greedy")
    assert greedy == chat(capsys, "--prompt", "Tom", "--raw", "--temperature", "0", "--of", "pretrain")
    assert chat(capsys, "--prompt", "-3 + 5")
    assert chat(capsys, "--prompt=--x")
    assert chat(capsys, "--prompt", "", "--raw", "--top-k", "5", "--top-p", "0.9")  # nothing is a beginning too


def test_chat_streams_what_it_returns(trained):
    for settings in (dict(), dict(raw=True), dict(think=True, of="sft")):
        session, pieces = talk.Talk(talk.ChatConfig(run="cli", preset="smoke", max_new_tokens=30, **settings)), []
        reply = session.say("Tom has 3 apples.", pieces.append)
        assert "".join(pieces) == reply and len(pieces) > 10


def test_pieces_are_whole_characters():
    tokenizer = Tokenizer.train(["Tom has 3 apples."] * 20, 268)
    text, pieces = "Zoë paid 3 € 🙂", []
    out = talk.Pieces(tokenizer, pieces.append)
    for token in [*tokenizer.encode(text), tokenizer.end_of_turn, tokenizer.special["<think>"]]:
        out(token)
    out.finish()
    assert "".join(pieces) == text + "<think>" and all("\ufffd" not in piece for piece in pieces)
    pieces.clear()
    out(tokenizer.encode("🙂")[0])  # and one that is cut off
    out.finish()
    assert "".join(pieces) == "\ufffd"


def test_a_conversation_goes_on(trained, capsys, monkeypatch):
    lines = iter(["Tom has 3 apples.", "x " * 500, "/new", "And now?", ""])
    monkeypatch.setattr("builtins.input", lambda prompt="": next(lines))
    out = chat(capsys).splitlines()
    assert out[0].startswith("grpo of run cli")
    assert sum(line.startswith("error: prompt 0 has ") and "shorten the prompt" in line for line in out) == 1
    assert next(lines, "all read") == "all read"


def test_a_conversation_remembers_what_fits(trained):
    session = talk.Talk(talk.ChatConfig(run="cli", preset="smoke", max_new_tokens=8, system="Be brief."))
    for n in range(1, 9):
        reply = session.say("Tom has 3 apples.", lambda text: None)
        roles = [m["role"] for m in session.messages]
        assert roles == ["system"] + ["user", "assistant"] * (len(roles) // 2)
        assert session.messages[-1]["content"] == reply
        if n == 2:
            assert len(roles) == 5
    assert len(roles) < 17  # the oldest were forgotten, the system message was not
    before = list(session.messages)
    with pytest.raises(ValueError, match="the context holds 112"):
        session.say("x " * 500, lambda text: None)
    assert session.messages == before
    session.forget()
    assert session.messages == before[:1]


# Errors -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("words, message", [
    ("gpro", "unknown command 'gpro'; did you mean 'grpo'?"),
    ("grpo --stpes 3", "unknown flag '--stpes'; did you mean '--steps'?"),
    ("pretrain --no-compil", "unknown flag '--no-compil'; did you mean '--no-compile'?"),
    ("table --nproc 2", "unknown flag '--nproc'"),
    ("grpo --steps 0", "config field 'steps' is '0': input should be greater than or equal to 1"),
    ("grpo --group 1", "config field 'group' is '1': input should be greater than or equal to 2"),
    ("grpo --steps three", "config field 'steps' is 'three': input should be a valid integer"),
    ("grpo --reduction tokens", "config field 'reduction' is 'tokens': input should be 'token', 'sequence' or"),
    ("grpo --overlong penalty --overlong-buffer 400", "overlong_buffer 400 is longer than max_new_tokens 24; lower"),
    ("grpo --run", "flag --run needs a value; see python -m nanorl grpo --help"),
    ("grpo --run --seed 1", "flag --run needs a value"),
    ("grpo 3", "unexpected '3'; see python -m nanorl grpo --help"),
    ("grpo --compile 3", "unexpected '3'"),
    ("grpo --compile=3", "flag --compile takes no value"),
    ("grpo -s 3", "unexpected '-s'"),
    ("grpo --lr -1", "config field 'lr' is '-1': input should be greater than 0"),
    ("grpo --nproc 0", "nproc is 0; it must be at least 1"),
    ("grpo --nproc two", "flag --nproc is 'two': input should be a valid integer"),
    ("eval --of base", "flag --of is 'base': input should be 'pretrain', 'sft', 'dpo', 'orpo', 'kto', 'ppo' or 'grpo'"),
    ("grpo --preset", "unknown preset ''"),
    ("grpo --preset cpuu", "unknown preset 'cpuu'; did you mean 'cpu'?"),
    ("grpo --device tpu --run none", "unknown device 'tpu'; choose auto, cpu"),
    ("pretrain --run none", "make it with: python -m nanorl prepare --preset smoke --run none"),
    ("sft --run none", "make it with: python -m nanorl pretrain --preset smoke --run none"),
    ("grpo --run none --resume", "make it with: python -m nanorl sft --preset smoke --run none"),
    ("eval --run none --of sft", "make it with: python -m nanorl sft --preset smoke --run none"),
    ("table --run none", "make it with: python -m nanorl pretrain --preset smoke --run none"),
    ("chat --run none --prompt hi", "make it with: python -m nanorl sft --preset smoke --run none"),
    ("prepare --run ../up", "run '../up' is not a folder under"),
    ("prepare --run none --data nowhere/gsm8k", "nowhere/gsm8k"),
])
def test_mistakes_are_one_line(words, message, capsys):
    assert message in failed(words.split(), capsys)


def test_a_resume_from_nowhere_says_where_it_looked(trained, capsys):
    message = failed(["sft", *TINY, "--resume", "nowhere.pt"], capsys)
    assert message.startswith("no checkpoint to resume from at nowhere.pt") and "step_00000" in message


def test_a_prompt_that_does_not_fit_is_one_line(trained, capsys):
    message = failed(["chat", *TINY, "--prompt", "x " * 500], capsys)
    assert "the context holds 112, response included; shorten the prompt" in message


def test_debug_shows_where(monkeypatch):
    monkeypatch.setenv("NANORL_DEBUG", "1")
    with pytest.raises(ValueError, match="did you mean '--steps'"):
        main(["grpo", "--stpes", "3"])
