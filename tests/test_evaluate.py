"""Judging: who is asked what, what counts as right, and the table. The answers are scripted, so all is known."""

from types import SimpleNamespace

import pytest
import torch

from nanorl import checkpoint, evaluate, paths
from nanorl.config import resolve
from nanorl.data.prompts import load_problems, solved_conversation
from nanorl.data.tinyworld import problems
from nanorl.evaluate import Answers, EvalConfig, answer, format_table, heldout_problems, judge, prompt_of, stage_table
from nanorl.generate import Completions, Sampling, left_pad
from nanorl.model import ModelConfig, Transformer
from nanorl.statistics import wilson
from nanorl.tokenizer import Tokenizer

TOKENIZER = Tokenizer.train([f"Question: {p['question']}\nAnswer: {p['answer']}" for p in problems(300)], 320)
MODEL = SimpleNamespace(cfg=SimpleNamespace(context_length=200), device=torch.device("cpu"))


class Script:
    """Stands in for `generate`: writes scripted replies, ends them with the end token, notes what it was asked."""

    def __init__(self, reply):
        self.reply = reply  # (prompt as text, number in the group) -> reply; one that ends in "..." is cut off
        self.calls = []

    def __call__(self, model, prompts, sampling, stop, pad, group, generator):
        texts = [TOKENIZER.decode(p) for p in prompts]
        self.calls.append(dict(prompts=texts, sampling=sampling, stop=stop, group=group, seed=generator.initial_seed()))
        replies = [self.reply(text, i) for text in texts for i in range(group)]
        ended = [not reply.endswith("...") for reply in replies]
        ids = [TOKENIZER.encode_with_marks(reply.removesuffix("...")) + [stop] * end
               for reply, end in zip(replies, ended, strict=True)]
        width = max(map(len, ids))
        return Completions(
            *left_pad(prompts, pad, MODEL.device), responses=torch.tensor([r + [pad] * (width - len(r)) for r in ids]),
            lengths=torch.tensor([len(r) for r in ids]), logprobs=torch.zeros(len(ids), width),
            ended=torch.tensor(ended),
        )


@pytest.fixture
def script(monkeypatch):
    def install(reply):
        monkeypatch.setattr(evaluate, "generate", made := Script(reply))
        return made

    return install


GREEDY = Sampling(50, temperature=0)
WORDS = "one two three four five six seven eight nine ten".split()


def numbered(n=10):
    """Problems of unequal length; number i asks for i, and mentions i as a word at its end."""
    return [{"question": f"How many{' very' * (7 * i % 5)} {WORDS[i]}", "answer": f"#### {i}"} for i in range(n)]


def number_in(text):
    return next(i for i, word in enumerate(WORDS) if f" {word}" in text)


# ---- answers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [3, 4, 512])
def test_answers_come_in_the_order_of_the_problems(script, monkeypatch, batch):
    monkeypatch.setattr(evaluate, "BATCH", batch)
    asked = script(lambda text, i: f"<answer>{number_in(text)}</answer>")
    answers = answer(MODEL, TOKENIZER, numbered(), GREEDY)
    assert answers.texts == [[f"<answer>{i}</answer>"] for i in range(10)]
    assert answers.correct.all() and answers.correct.shape == answers.lengths.shape == (10, 1)
    assert answers.accuracy == 1.0 and answers.skipped == 0
    sizes = [len(call["prompts"]) for call in asked.calls]
    assert sum(sizes) == 10 and max(sizes) <= batch and len(sizes) == -(-10 // batch)
    assert len({call["seed"] for call in asked.calls}) == len(sizes)  # no two batches draw the same numbers


def test_a_group_of_answers_to_each_problem(script, monkeypatch):
    """Problem i gets i right answers of 4: 0 + 1 + 2 + 3 + 4 of 20."""
    monkeypatch.setattr(evaluate, "BATCH", 8)
    asked = script(lambda text, i: f"<answer>{number_in(text) if i < number_in(text) else 77}</answer>")
    answers = answer(MODEL, TOKENIZER, numbered(5), Sampling(50), group=4)
    assert answers.correct.sum(dim=1).tolist() == [0, 1, 2, 3, 4] and answers.accuracy == 0.5
    assert [len(call["prompts"]) for call in asked.calls] == [2, 2, 1]  # 8 completions at a time
    assert answers.interval() == wilson(10, 20)
    # one of k right: 1 - C(4-c, k) / C(4, k) for c = 0..4 right ones
    assert answers.pass_at(1) == pytest.approx(0.5)
    assert answers.pass_at(2) == pytest.approx((0 + 3 / 6 + 5 / 6 + 1 + 1) / 5)
    assert answers.pass_at(4) == pytest.approx(4 / 5)
    with pytest.raises(ValueError, match="pass@5 from 4 samples"):
        answers.pass_at(5)


def test_pass_at_k_and_interval_of_a_hand_made_record():
    answers = Answers([["a"] * 4] * 2, torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0]]).bool(), None, None, 0)
    assert answers.pass_at(2) == pytest.approx((1 - 1 / 6) / 2) and answers.interval() == wilson(2, 8)


REPLIES = [  # reply, right, formed
    ("<answer>4</answer>", True, True),
    ("<think>2+2=4</think><answer>4</answer>", True, True),
    ("<answer>5</answer>", False, True),
    ("<think>2+2=4<answer>4</answer>", True, False),
    ("4", False, False),
    ("<answer>4</answer>...", True, False),  # cut off before its end token
    ("", False, False),
]


@pytest.mark.parametrize("reply, right, formed", REPLIES)
def test_right_and_well_formed_are_two_questions(script, reply, right, formed):
    script(lambda text, i: reply)
    answers = answer(MODEL, TOKENIZER, [{"question": "2 and 2?", "answer": "2+2=4\n#### 4"}], GREEDY)
    assert (answers.correct.item(), answers.formed.item()) == (right, formed)
    ids = TOKENIZER.encode_with_marks(reply.removesuffix("..."))
    assert answers.lengths.item() == len(ids) + (not reply.endswith("..."))  # the end token counts


def test_a_model_made_to_reason_is_judged_with_the_mark_that_the_prompt_gave(script):
    asked = script(lambda text, i: "2+2=4</think><answer>4</answer>")
    answers = answer(MODEL, TOKENIZER, [{"question": "2 and 2?", "answer": "#### 4"}], GREEDY, form="think")
    assert asked.calls[0]["prompts"] == ["<|user|>2 and 2?<|assistant|><think>"]
    assert answers.texts == [["<think>2+2=4</think><answer>4</answer>"]] and answers.formed.all()


def test_the_pretrained_model_is_asked_by_a_document(script):
    asked = script(lambda text, i: " 2+2=4\n#### 4" if "2 and 2" in text else " I do not know")
    two = [{"question": " 2 and 2?\n", "answer": "#### 4"}, {"question": "3 and 3?", "answer": "#### 6"}]
    answers = answer(MODEL, TOKENIZER, two, GREEDY, form="document")
    assert sorted(asked.calls[0]["prompts"]) == ["Question: 2 and 2?\nAnswer:", "Question: 3 and 3?\nAnswer:"]
    assert asked.calls[0]["stop"] == TOKENIZER.end_of_text
    assert answers.correct.tolist() == answers.formed.tolist() == [[True], [False]]


def test_the_prompt_is_how_the_solved_conversation_begins():
    problem = problems(1)[0]
    assert TOKENIZER.decode(prompt_of(TOKENIZER, problem, "chat")) == f"<|user|>{problem['question']}<|assistant|>"
    assert solved_conversation(problem, True)[0]["content"] == problem["question"]


def test_problems_that_do_not_fit_are_wrong_and_counted(script):
    asked = script(lambda text, i: f"<answer>{number_in(text)}</answer>")
    four = numbered(4)
    four[1]["question"] = "x " * 300
    answers = answer(MODEL, TOKENIZER, four, Sampling(50), group=2)
    assert answers.skipped == 1 and answers.correct.tolist() == [[True] * 2, [False] * 2, [True] * 2, [True] * 2]
    assert answers.texts[1] == ["", ""] and answers.lengths[1].tolist() == [0, 0] and not answers.formed[1].any()
    assert sum(len(call["prompts"]) for call in asked.calls) == 3
    nothing = answer(MODEL, TOKENIZER, four[1:2], GREEDY)
    assert nothing.skipped == 1 and nothing.accuracy == 0 and nothing.texts == [[""]]


# ---- held-out problems -----------------------------------------------------------------------------------


def test_held_out_problems_are_the_same_for_every_seed_and_disjoint():
    one, two = (heldout_problems(resolve(EvalConfig, "smoke", seed=seed), 30, 20) for seed in (0, 5))
    assert one == two and [len(some) for some in one] == [30, 20]
    test, dev = ({p["question"] for p in some} for some in one)
    assert test.isdisjoint(dev)
    assert heldout_problems(resolve(EvalConfig, "smoke"), 30)[0] == one[0]  # with or without any for development
    assert heldout_problems(resolve(EvalConfig, "smoke"), 30)[1] == []


def test_a_small_file_is_for_the_test_first(tmp_path):
    lines = [f'{{"question": "q{i}?", "answer": "#### {i}"}}\n' for i in range(5)]
    (tmp_path / "test.jsonl").write_text("".join(lines))
    cfg = resolve(EvalConfig, "smoke", data=str(tmp_path))
    assert [len(some) for some in heldout_problems(cfg, 3, 10)] == [3, 2]
    with pytest.raises(ValueError, match="holds 5 held-out problems, none left for development after 5 for the test; "
                       "lower eval_problems"):
        heldout_problems(cfg, 5, 10)


# ---- the table -------------------------------------------------------------------------------------------

FIELDS = {"stage", "n", "greedy", "greedy_low", "greedy_high", "sampled", "pass_at_8", "format_rate", "mean_length",
          "minutes", "seed", "skipped"}
MADE = {"made_to_reason", "made_to_reason_low", "made_to_reason_high"}


@pytest.fixture
def run_of_two(monkeypatch, tmp_path):
    """A run with finished `pretrain` and `sft` stages of a random model, and a `grpo` that was cut short."""
    monkeypatch.setenv("NANORL_HOME", str(tmp_path))
    cfg = resolve(EvalConfig, "smoke", seed=3, eval_problems=12, max_new_tokens=6)
    paths.run_dir(cfg.run_name).mkdir()
    TOKENIZER.save(paths.run_dir(cfg.run_name) / "tokenizer.json")
    torch.manual_seed(0)
    shape = ModelConfig(vocab_size=320, context_length=192, n_embed=16, n_head=2, n_kv_head=1, n_blocks=1)
    for stage, minutes, finished in (("pretrain", 1.5, True), ("sft", 0.5, True), ("grpo", 0.1, False)):
        checkpoint.save(paths.stage_dir(cfg.run_name, stage), {
            "model_state_dict": Transformer(shape).state_dict(), "model_cfg": shape.model_dump(), "stage": stage,
            "cfg": {"tokenizer": "bpe", "seed": 3}, "step": 7, "finished": finished, "minutes": minutes,
            "tokenizer_hash": TOKENIZER.hash})
    return cfg


def test_the_table_has_a_record_for_each_finished_stage(run_of_two):
    base, sft = stage_table(run_of_two)
    assert set(base) == FIELDS and set(sft) == FIELDS | MADE
    assert [r["stage"] for r in (base, sft)] == ["base", "sft"]
    assert [r["minutes"] for r in (base, sft)] == [1.5, 0.5] and base["seed"] == sft["seed"] == 3
    for record in (base, sft):
        assert record["n"] == 12 and record["skipped"] == 0 and 0 < record["mean_length"] <= 6
        assert record["greedy_low"] <= record["greedy"] <= record["greedy_high"]
    assert stage_table(run_of_two) == [base, sft]  # nothing of it is left to chance


def test_a_record_says_what_was_answered(run_of_two, script):
    """Greedy is right on 9 of 12, sampling on 3 of 8 each, made to reason on all: what the record must say."""
    heldout = load_problems("tinyworld", "heldout", 12, 0, run_of_two.max_number, run_of_two.max_steps)
    gold = {p["question"]: (i, p["answer"].rpartition(" ")[2]) for i, p in enumerate(heldout)}

    def reply(text, i):
        number, right = next(value for question, value in gold.items() if question in text)
        if text.endswith("<think>"):
            return f"so</think><answer>{right}</answer>"
        if asked.calls[-1]["sampling"].temperature == 0:
            return f"<answer>{right}</answer>" if number < 9 else "what?"
        return f"<answer>{right if i < 3 else 999}</answer>"

    asked = script(reply)
    record = judge(run_of_two, "sft")
    assert (record["n"], record["greedy"], record["format_rate"]) == (12, 0.75, 0.75)
    assert (record["greedy_low"], record["greedy_high"]) == wilson(9, 12)
    assert record["sampled"] == pytest.approx(3 / 8) and record["pass_at_8"] == 1.0
    assert (record["made_to_reason"], record["made_to_reason_low"]) == (1.0, wilson(12, 12)[0])
    assert [(call["sampling"].temperature, call["group"]) for call in asked.calls] == [(0, 1), (1.0, 8), (0, 1)]
    assert all(call["stop"] == TOKENIZER.end_of_turn for call in asked.calls)

    few = run_of_two.model_copy(update={"eval_group": 4})
    assert judge(few, "sft")["pass_at_8"] is None  # 4 answers do not say it


def test_the_table_for_reading(run_of_two):
    text = format_table(stage_table(run_of_two))
    head, line, base, sft, note = text.splitlines()
    assert head.startswith("stage  greedy (95% interval)") and set(line) == {"-"}
    assert base.startswith("base") and sft.startswith("sft") and note == "12 held-out problems, seed 3"


def test_a_table_of_nothing_names_the_command(monkeypatch, tmp_path):
    monkeypatch.setenv("NANORL_HOME", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="make it with: python -m nanorl pretrain --preset smoke$") as error:
        stage_table(resolve(EvalConfig, "smoke"))
    assert "\n" not in str(error.value)
