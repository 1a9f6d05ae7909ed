"""How good a model is: answers to held-out problems, with intervals, and the table over the stages.

Every stage is asked the same held-out problems. A chat model gets the chat prompt; the pretrained one, which
has never seen a chat, gets the beginning of a document, `Question: ...\\nAnswer:`, and its answer is the number
after `####`.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from nanorl import checkpoint, distributed, paths, runtime, storage
from nanorl.config import StageConfig
from nanorl.data.prompts import load_problems, split_solution
from nanorl.generate import Completions, Sampling, generate
from nanorl.model import Transformer
from nanorl.rewards.parsing import final_answer, well_formed
from nanorl.rewards.verifiers import correct
from nanorl.rollout import problem_prompt
from nanorl.statistics import pass_at_k, wilson
from nanorl.stopping import together
from nanorl.tokenizer import Tokenizer

Form = Literal["chat", "think", "document"]
BATCH = 512  # completions sampled together


@dataclass
class Answers:
    """P problems, G answers each. A problem whose prompt does not fit has G empty, wrong answers."""

    texts: list[list[str]]  # P x G
    correct: Tensor  # (P, G) bool
    formed: Tensor  # (P, G) bool, the answer is in the form asked for, and ended
    lengths: Tensor  # (P, G) int64, tokens
    skipped: int  # problems that did not fit

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return float(self.correct.float().mean())

    def interval(self) -> tuple[float, float]:
        """Wilson's 95% interval of the accuracy; with G above 1 it takes the answers as independent."""
        return wilson(int(self.correct.sum()), self.correct.numel())

    def pass_at(self, k: int) -> float:
        """Probability that one of k answers is right, by the unbiased estimator, averaged over problems."""
        G = self.correct.size(1)
        return sum(pass_at_k(G, int(c), k) for c in self.correct.sum(dim=1)) / len(self.correct)


def answer(
    model: Transformer,
    tokenizer: Tokenizer,
    problems: list[dict],
    sampling: Sampling,
    group: int = 1,
    form: Form = "chat",
    seed: int = 0,
    precision: str = "fp32",
) -> Answers:
    """`group` answers to each problem, in the problems' order. Ranks share the work and all get the result.

    form: "chat" asks in the chat template, "think" also opens the reply with <think>, so that the model is made
    to reason, "document" begins a document. The sampled text of problem i depends on `seed` and on the problems
    in its batch, not on the number of ranks. ValueError where there are no problems, or `group` is below 1.
    """
    if not problems or group < 1:
        raise ValueError(f"{len(problems)} problems and a group of {group}; give at least one of each")
    stop = tokenizer.end_of_text if form == "document" else tokenizer.end_of_turn
    prompts = [prompt_of(tokenizer, problem, form) for problem in problems]
    fits = [i for i, prompt in enumerate(prompts) if len(prompt) < model.cfg.context_length]
    fits.sort(key=lambda i: len(prompts[i]))  # batches of like length
    size = max(1, BATCH // group)
    batches = [fits[start : start + size] for start in range(0, len(fits), size)]
    mine = []
    with together():
        for number, batch in distributed.shard(list(enumerate(batches))):
            with runtime.autocast(model.device, precision):
                done = generate(model, [prompts[i] for i in batch], sampling, stop, tokenizer.pad, group,
                                runtime.generator(seed, number))
            mine += zip(batch, _judged(done, tokenizer, [problems[i] for i in batch], group, form), strict=True)
    nothing = [("", False, False, 0)] * group
    found = dict(distributed.gather_objects(mine))
    rows = [found.get(i, nothing) for i in range(len(problems))]
    return Answers(
        texts=[[a[0] for a in row] for row in rows],
        correct=torch.tensor([[a[1] for a in row] for row in rows]),
        formed=torch.tensor([[a[2] for a in row] for row in rows]),
        lengths=torch.tensor([[a[3] for a in row] for row in rows]),
        skipped=len(problems) - len(fits),
    )


def prompt_of(tokenizer: Tokenizer, problem: dict, form: Form) -> list[int]:
    """The ids that a problem is asked with."""
    if form == "document":
        return tokenizer.encode(f"Question: {problem['question'].strip()}\nAnswer:")
    return problem_prompt(tokenizer, problem, think=form == "think")


def _judged(
    done: Completions, tokenizer: Tokenizer, problems: list[dict], group: int, form: Form
) -> list[list[tuple[str, bool, bool, int]]]:
    """(text, right, well formed, tokens) of each completion, a list a problem."""
    golds = [split_solution(problem["answer"])[1] for problem in problems]
    rows = [[] for _ in problems]
    opening = "<think>" if form == "think" else ""
    for i, (ids, n, ended) in enumerate(
        zip(done.responses.tolist(), done.lengths.tolist(), done.ended.tolist(), strict=True)
    ):
        text = opening + tokenizer.decode(ids[:n])
        form_ok = final_answer(text) is not None if form == "document" else well_formed(text)
        rows[i // group].append((text, correct(text, golds[i // group]), bool(ended and form_ok), n))
    return rows


# ---- the table over the stages -------------------------------------------------------------------------

STAGES = {"pretrain": "base"} | {stage: stage for stage in ("sft", "dpo", "orpo", "kto", "ppo", "grpo")}


class EvalConfig(StageConfig):
    """How the stages are judged: one evaluation for all of them."""

    stage: ClassVar[str] = "eval"

    eval_problems: int = Field(500, ge=1, description="held-out problems that each stage is asked")
    eval_group: int = Field(8, ge=1, description="sampled answers to each, for the sampled accuracy and pass@8")
    max_new_tokens: int = Field(96, ge=1, description="longest answer in tokens")
    temperature: float = Field(1.0, gt=0, description="temperature of the sampled answers")


def heldout_problems(cfg: StageConfig, n_test: int, n_dev: int = 0) -> tuple[list[dict], list[dict]]:
    """Held-out problems for the last word and, disjoint from them, for a look now and then while training.

    The same for every seed of a run, so that seeds can be compared. Where a file holds too few for both, the
    test problems come first and the rest are for development; ValueError where nothing is left for those.
    """
    problems = load_problems(cfg.data, "heldout", n_test + n_dev, 0, cfg.max_number, cfg.max_steps)
    test, dev = problems[:n_test], problems[n_test:]
    if n_dev and not dev:
        raise ValueError(f"{cfg.data} holds {len(problems)} held-out problems, none left for development after "
                         f"{n_test} for the test; lower eval_problems")
    return test, dev


def judge(cfg: EvalConfig, stage: str) -> dict:
    """The table's record of one finished stage: FileNotFoundError where there is none."""
    model, tokenizer, state = checkpoint.parent_of(cfg, stage)
    model.to(distributed.setup(runtime.pick_device(cfg.device)))
    problems, _ = heldout_problems(cfg, cfg.eval_problems)
    form = "document" if stage == "pretrain" else "chat"
    sampled = Sampling(cfg.max_new_tokens, cfg.temperature)
    greedy = Sampling(cfg.max_new_tokens, temperature=0)

    def ask(sampling: Sampling, group: int, form: Form) -> Answers:
        return answer(model, tokenizer, problems, sampling, group, form, seed=cfg.seed, precision=cfg.precision)

    one, many = ask(greedy, 1, form), ask(sampled, cfg.eval_group, form)
    low, high = one.interval()
    record = {
        "stage": STAGES[stage], "n": len(problems), "greedy": one.accuracy, "greedy_low": low, "greedy_high": high,
        "sampled": many.accuracy, "pass_at_8": many.pass_at(8) if cfg.eval_group >= 8 else None,
        "format_rate": float(one.formed.float().mean()), "mean_length": float(one.lengths.float().mean()),
        "minutes": state["minutes"], "seed": state["cfg"]["seed"], "skipped": one.skipped,
    }
    if form == "chat":  # the same model when it is made to reason
        made = ask(greedy, 1, "think")
        low, high = made.interval()
        record |= {"made_to_reason": made.accuracy, "made_to_reason_low": low, "made_to_reason_high": high}
    return record


def stage_table(cfg: EvalConfig) -> list[dict]:
    """One record a finished stage of the run, in the order of the course.

    greedy            accuracy at temperature 0, with its 95% interval greedy_low to greedy_high
    sampled           accuracy of `eval_group` answers at the sampling temperature
    pass_at_8         probability that one of 8 sampled answers is right
    format_rate       share of greedy answers that ended and have the form asked for
    mean_length       tokens of a greedy answer
    made_to_reason    greedy accuracy when the reply is opened with <think>, with its interval
    minutes           training time of the stage alone; seed: of its training; n: problems; skipped: too long

    FileNotFoundError where no stage is finished.
    """
    done = [stage for stage in STAGES if is_finished(cfg, stage)]
    if not done:
        checkpoint.parent_of(cfg, "pretrain")  # raises, with the command that helps
    return [judge(cfg, stage) for stage in done]


def is_finished(cfg: StageConfig, stage: str) -> bool:
    """Whether the run has a finished model of this stage."""
    path = checkpoint.latest(paths.stage_dir(cfg.run_name, stage))
    if path is None:
        return False
    about = storage.read_manifest(path)  # small, and says so
    return bool((checkpoint.load(path) if about is None else about).get("finished"))


def format_table(records: list[dict]) -> str:
    """The records as a table for reading, accuracies in percent. ValueError where there are none."""
    if not records:
        raise ValueError("there are no records to make a table of; judge a finished stage first")
    head = ("stage", "greedy (95% interval)", "sampled", "pass@8", "made to reason", "format", "tokens", "minutes")
    rows = [head]
    for r in records:
        made, best = r.get("made_to_reason"), r["pass_at_8"]
        rows.append((
            r["stage"], f"{r['greedy']:6.1%} ({r['greedy_low']:.1%} - {r['greedy_high']:.1%})", f"{r['sampled']:.1%}",
            "-" if best is None else f"{best:.1%}", "-" if made is None else f"{made:.1%}", f"{r['format_rate']:.1%}",
            f"{r['mean_length']:.1f}", f"{r['minutes']:.1f}",
        ))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    note = f"{records[0]['n']} held-out problems, seed {records[0]['seed']}"
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], note])
