"""The command line: `python -m nanorl <command>`, over the same settings as the notebooks.

`--preset` is read first, so that the defaults in the help are that preset's. What a user can get wrong ends in one
line and exit status 2; with NANORL_DEBUG=1 in the environment it ends in the traceback.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args, get_origin

import tyro
from pydantic import TypeAdapter, ValidationError

from nanorl import config, distributed, evaluate, launch, stopping, talk
from nanorl.config import StageConfig
from nanorl.data.prepare import PrepareConfig, prepare

FOR_TRAINING = ("resume", "keep_last", "tracker", "label")  # settings that mean nothing where nothing is trained
FOR_RUNNING = ("device", "precision", *FOR_TRAINING)  # nor these to one that runs no model


@dataclasses.dataclass(frozen=True)
class Command:
    """One word of the command line."""

    summary: str  # a line for the list of commands
    about: str  # the rest of what there is to know, for its own help
    example: str  # flags worth trying
    config: type[StageConfig]
    run: Callable[[Any, dict], None]  # called with the config and the values of `flags`
    flags: dict[str, tuple] = dataclasses.field(default_factory=dict)  # no settings: name -> (type, default, help)
    hidden: tuple[str, ...] = ()  # settings that are no flags here


def commands() -> dict[str, Command]:
    """Every command by name, in the order of the course."""
    nproc = {"nproc": (int, 1, "processes on this machine; under torchrun leave it out")}
    of = {"of": (Literal[tuple(evaluate.STAGES)], "grpo", "the stage to judge")}
    as_json = {"json": (bool, False, "print JSON for programs: a list, one record a stage")}

    def training(stage: str, summary: str, about: str, example: str) -> Command:
        return Command(summary, about + "\n--resume goes on from its latest checkpoint, --resume auto too where there "
                       "is one, --resume PATH from another.", example, launch.STAGES[stage][1], run_stage, nproc)

    return {
        "prepare": Command(
            "make what the trainers read: tokenizer, corpus, conversations",
            "What is there already is left alone.", "--data path/to/gsm8k --tokenizer r50k_base",
            PrepareConfig, run_prepare, hidden=FOR_RUNNING),
        "pretrain": training(
            "pretrain", "train a model from nothing to predict the next token", "Needs `prepare`.", "--steps 2000"),
        "sft": training(
            "sft", "teach the pretrained model to answer in the chat form", "Needs `pretrain`.", "--lr 5e-4"),
        "reward": training(
            "reward", "train a reward model on pairs of replies, one better than the other", "Needs `sft`.",
            "--noise 0.2"),
        "dpo": training(
            "dpo", "teach the SFT model from pairs directly, against a reference", "Needs `sft`.",
            "--beta 0.05 --loss ipo"),
        "orpo": training(
            "orpo", "teach the SFT model from pairs directly, without a reference", "Needs `sft`.", "--weight 0.5"),
        "kto": training(
            "kto", "teach the SFT model from replies that are good or bad, no pairs needed", "Needs `sft`.",
            "--undesirable-weight 1.5"),
        "ppo": training(
            "ppo", "teach the SFT model to reason, by reinforcement learning with a critic",
            "Needs `sft`, and with --reward model also `reward`.", "--reward model --kl-coef 0.05 --monitor 20"),
        "grpo": training(
            "grpo", "teach the SFT model to reason, by reinforcement learning from checkable answers", "Needs `sft`.",
            "--nproc 2 --kl-coef 0.01"),
        "eval": Command(
            "judge one stage on held-out problems", "Prints its record of the table as JSON.", "--of sft",
            evaluate.EvalConfig, run_eval, of, FOR_TRAINING),
        "table": Command(
            "judge all finished stages of a run and compare them", "Accuracies come with 95% intervals.", "--json",
            evaluate.EvalConfig, run_table, as_json, FOR_TRAINING),
        "chat": Command(
            "talk to a trained model", "An empty line ends the conversation, /new starts it over.",
            '--think --prompt "Tom has 3 apples and buys 4 more. How many apples does Tom have?"',
            talk.ChatConfig, run_chat, hidden=FOR_TRAINING),
    }


# ---- what they do --------------------------------------------------------------------------------------

def run_prepare(cfg: PrepareConfig, _: dict) -> None:
    """Print a line about each product."""
    for line in prepare(cfg):
        print(line, flush=True)


def run_stage(cfg: StageConfig, flags: dict) -> None:
    """Train; the trainer itself reports its progress."""
    step = None
    for record in launch.launch(launch.STAGES[cfg.stage][0], cfg, flags["nproc"]):
        step = record["step"]
    if distributed.is_main():
        print(f"{cfg.stage}: {'nothing left to do' if step is None else f'step {step}'}, see {cfg.folder}")


def run_eval(cfg: evaluate.EvalConfig, flags: dict) -> None:
    """Print one stage's record."""
    record = evaluate.judge(cfg, flags["of"])
    if distributed.is_main():
        print(json.dumps(record, indent=2))


def run_table(cfg: evaluate.EvalConfig, flags: dict) -> None:
    """Print the table over the stages."""
    records = evaluate.stage_table(cfg)
    if distributed.is_main():
        print(json.dumps(records, indent=2) if flags["json"] else evaluate.format_table(records))


def run_chat(cfg: talk.ChatConfig, _: dict) -> None:
    """Answer one prompt, or hold a conversation."""
    talk.talk(cfg)


# ---- from words to settings ----------------------------------------------------------------------------

def parse(name: str, command: Command, words: list[str]) -> tuple[StageConfig, dict]:
    """The config and the other flags that `words` mean. ValueError, in one line, for what they cannot mean.

    tyro reads the words and writes the help; all it hands over is text and switches, which `config.resolve` turns
    into values and checks, as it does for the notebooks.
    """
    preset, words = take_preset(bare_resume(words))
    preset = config.resolve_preset(preset)
    defaults = config.preset_values(command.config, preset) | {"preset": preset}
    known = {setting: (info.annotation, defaults.get(setting, info.default), info.description)
             for setting, info in command.config.model_fields.items() if setting not in command.hidden}
    known |= command.flags
    words = checked(name, words, known)
    options = [(flag, shown_as(kind, about), default if kind is bool else str(default))
               for flag, (kind, default, about) in known.items()]
    read = tyro.cli(dataclasses.make_dataclass("Options", options), prog=f"python -m nanorl {name}", args=words,
                    description=f"{command.summary[0].upper()}{command.summary[1:]}. {command.about}\n\n"
                                f"example:\n  python -m nanorl {name} --preset {preset} {command.example}\n\n"
                                f"Defaults are those of preset {preset}; another --preset shows its own.")
    values = {flag: None if value == "None" else value for flag, value in vars(read).items() if flag != "preset"}
    flags = {flag: converted(flag, command.flags[flag][0], values.pop(flag)) for flag in command.flags}
    return config.resolve(command.config, preset, **values), flags


def shown_as(kind: Any, about: str) -> Any:
    """A flag's type for tyro, a switch or text, with its help and how that writes it: INT, {adamw,muon}, STR|None."""
    if kind is bool:
        return Annotated[bool, tyro.conf.arg(help=about)]
    parts = [kind] if get_origin(kind) is Literal else get_args(kind) or [kind]
    shown = ["{" + ",".join(get_args(part)) + "}" if get_origin(part) is Literal else
             "None" if part is type(None) else part.__name__.upper() for part in parts]
    return Annotated[str, tyro.conf.arg(help=about, metavar="|".join(shown))]


def converted(flag: str, kind: Any, text: str) -> Any:
    """The value of a flag that is no setting."""
    try:
        return TypeAdapter(kind).validate_python(text)
    except ValidationError as error:
        said = error.errors()[0]["msg"]
        raise ValueError(f"flag --{flag} is {text!r}: {said[0].lower()}{said[1:]}") from None


def checked(name: str, words: list[str], known: dict[str, tuple]) -> list[str]:
    """The words in the form --flag=value, which leaves tyro nothing to guess at. ValueError for the first that is
    neither a known flag nor its value, with the nearest flag that is known."""
    switches = [flag for flag, (kind, *_) in known.items() if kind is bool]
    flags = ["--" + flag.replace("_", "-") for flag in [*known, *(f"no_{flag}" for flag in switches)]]
    rest, result = iter(words), []
    for word in rest:
        flag, equals, value = word.partition("=")
        flag = flag.replace("_", "-")
        if flag in ("-h", "--help"):
            return ["--help"]
        if not flag.startswith("--"):
            raise ValueError(f"unexpected {config.shown(word)}; see python -m nanorl {name} --help")
        config.check_names([flag], flags, "flag")
        if flag.removeprefix("--").removeprefix("no-").replace("-", "_") in switches:
            if equals:
                raise ValueError(f"flag {flag} takes no value; see python -m nanorl {name} --help")
            result.append(flag)
            continue
        value = value if equals else next(rest, "--")
        if not equals and value.startswith("--"):
            raise ValueError(f"flag {flag} needs a value; see python -m nanorl {name} --help")
        result.append(f"{flag}={value}")
    return result


def take_preset(words: list[str]) -> tuple[str, list[str]]:
    """The value of --preset, "auto" where there is none, and the other words."""
    preset, rest, words = "auto", [], iter(words)
    for word in words:
        if word == "--preset":
            preset = next(words, "")
        elif word.startswith("--preset="):
            preset = word.partition("=")[2]
        else:
            rest.append(word)
    return preset, rest


def bare_resume(words: list[str]) -> list[str]:
    """The words with `latest` after a --resume that has no value."""
    result = []
    for i, word in enumerate(words):
        alone = word == "--resume" and (words[i + 1 :] or ["-"])[0].startswith("-")
        result += [word, "latest"] if alone else [word]
    return result


# ---- the way in ----------------------------------------------------------------------------------------

def overview() -> str:
    """The list of commands."""
    lines = [f"  {name:10}{command.summary}" for name, command in commands().items()]
    return "\n".join([
        "usage: python -m nanorl <command> [flags]", "",
        "From raw text to a model that reasons, stage by stage.", "",
        "commands, in the order of the course:", *lines, "",
        "python -m nanorl <command> --help     every flag of a command, with its default in the preset at hand",
        "torchrun ... -m nanorl -- <command>   the same on several GPUs or machines; the -- keeps --run from torchrun",
    ])


def main(words: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    words = sys.argv[1:] if words is None else words
    words = words[1:] if words[:1] == ["--"] else words
    if not words or words[0] in ("-h", "--help"):
        print(overview())
        return 0
    try:
        known = commands()
        config.check_names(words[:1], known, "command")
        command = known[words[0]]
        command.run(*parse(words[0], command, words[1:]))
        distributed.close()
    except stopping.Stopped as stopped:
        if distributed.is_main():
            sys.stderr.write(f"nanorl: {stopped}\n")
        distributed.close()
        return stopped.status
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError, FloatingPointError, launch.WorkerError) as error:
        if os.environ.get("NANORL_DEBUG"):
            raise
        text = config.one_line_error(error) if isinstance(error, ValidationError) else str(error)
        sys.stderr.write(f"nanorl: error: {' '.join(text.split())}\n")  # in one piece, other ranks write too
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
