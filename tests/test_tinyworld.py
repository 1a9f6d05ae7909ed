"""The embedded world: every problem is solved again here, from its words and from its lines, by other code."""

import random
import re
from fractions import Fraction

import pytest

from nanorl.data import tinyworld
from nanorl.data.tinyworld import is_heldout, problems, small_talk, stories
from nanorl.rewards.parsing import gold_answer

BOUNDS = [(10, 1), (20, 2), (50, 4), (200, 6)]
SETS = [problems(400, split, seed, *bounds) for split, seed, bounds in [
    ("train", 0, (10, 1)), ("train", 1, (20, 2)), ("train", 0, (50, 4)), ("heldout", 0, (50, 4)),
    ("heldout", 3, (200, 6))]]
ALL = [problem for some in SETS for problem in some]


# ---- solved again ----------------------------------------------------------------------------------------


def calculated(line):
    """`23+14=37` as (left, sign, right, result), checked."""
    left, sign, right, result = re.fullmatch(r"(\d+)([-+*/])(\d+)=(\d+)", line).groups()
    a, b = Fraction(left), Fraction(right)
    assert {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else None}[sign] == int(result), line
    return int(left), sign, int(right), int(result)


def lines_of(problem):
    *lines, last = problem["answer"].split("\n")
    return [calculated(line) for line in lines], last


def test_every_line_is_right_and_goes_on_from_the_one_before():
    for problem in ALL:
        lines, last = lines_of(problem)
        for before, line in zip(lines, lines[1:], strict=False):
            assert before[3] in line[::2], problem
        assert last == f"#### {lines[-1][3]}" and gold_answer(problem["answer"]) == lines[-1][3]


SAYINGS = [  # a pattern of the words in a sentence, and what they do to (what the first one has, the other one)
    (r"has (\d+) \w+$", lambda a, b, n: (n, b)),
    (r"has (\d+) \w+ with (\d+) \w+ each", lambda a, b, n, m: (n * m, b)),
    (r"(?:finds|buys|gives|gets) (\d+) more|gives (\d+) to FIRST", lambda a, b, n: (a + n, b)),
    (r"(?:gives away|loses|sells|drops) (\d+)", lambda a, b, n: (a - n, b)),
    (r"(?:gives away|loses|sells) half", lambda a, b: (Fraction(a) / 2, b)),
    (r"makes (\d+) equal heaps and keeps one", lambda a, b, n: (Fraction(a) / n, b)),
    (r"has (\d+) \w+ more than FIRST", lambda a, b, n: (a, a + n)),
    (r"has (\d+) \w+ fewer than FIRST", lambda a, b, n: (a, a - n)),
]
TIMES = {"twice": 2, "three times": 3, "four times": 4, "five times": 5}


def solved(question):
    """The answer to a question, read sentence by sentence without knowing how it was made."""
    first, a, b = question.split()[0], None, None
    *told, asked = re.findall(r"[^.?]+[.?]", question)
    for sentence in told:
        words = sentence.strip(" .").replace(first, "FIRST")
        factor = re.search(f"has ({'|'.join(TIMES)}) as many", words)
        if factor and words.startswith("Soon FIRST"):
            a = a * TIMES[factor[1]]
        elif factor:
            b = a * TIMES[factor[1]]
        else:
            match, do = next((match, do) for pattern, do in SAYINGS if (match := re.search(pattern, words)))
            a, b = do(a, b, *(int(n) for n in match.groups() if n))
    if "together" in asked:
        return a + b
    return a if asked.strip().endswith(f"does {first} have now?") else b


def test_the_words_say_what_the_solution_calculates():
    seen = set()
    for problem in ALL:
        assert solved(problem["question"]) == gold_answer(problem["answer"]), problem
        seen |= {sign for line in lines_of(problem)[0] for sign in line[1]}
    assert seen == set("+-*/")


def test_every_number_of_the_question_is_used():
    for problem in ALL:
        named = [int(n) for n in re.findall(r"\d+", problem["question"])]
        operands = [n for line in lines_of(problem)[0] for n in line[::2]]
        for n in named:
            assert n in operands, problem
            operands.remove(n)  # once for each time it is named


# ---- bounds and difficulty -------------------------------------------------------------------------------


@pytest.mark.parametrize("max_number, max_steps", BOUNDS)
def test_bounds_are_respected_and_used(max_number, max_steps):
    some = [lines_of(p)[0] for p in problems(600, max_number=max_number, max_steps=max_steps)]
    numbers = [n for lines in some for line in lines for n in (line[0], line[2], line[3])]
    assert min(numbers) >= 1 and max(numbers) <= max_number
    assert {len(lines) for lines in some} == set(range(1, max_steps + 1))
    assert max(numbers) > 0.8 * max_number


def test_difficulty_grows_with_both_bounds():
    def measure(max_number, max_steps):
        some = [lines_of(p)[0] for p in problems(600, max_number=max_number, max_steps=max_steps)]
        return (sum(len(lines) for lines in some) / len(some),
                sum(line[3] for lines in some for line in lines) / sum(len(lines) for lines in some))

    steps, sizes = zip(*(measure(*bounds) for bounds in BOUNDS), strict=True)
    assert list(steps) == sorted(steps) and steps[-1] > 2 * steps[0]
    assert list(sizes) == sorted(sizes) and sizes[-1] > 3 * sizes[0]
    assert measure(100, 3)[1] > measure(30, 3)[1] and measure(50, 5)[0] > measure(50, 2)[0]


def test_kinds_of_story_are_many():
    """Questions differ in more than names, things and numbers; an answer cannot be guessed."""
    some = problems(3000, max_number=50, max_steps=4)
    names, things = "|".join(tinyworld.NAMES), "|".join(tinyworld.THINGS)
    shapes = {re.sub(r"\d+", "N", re.sub(f"{names}|{things}", "_", p["question"])) for p in some}
    answers = [p["answer"].rpartition(" ")[2] for p in some]
    assert len(shapes) > 1000
    assert max(map(answers.count, set(answers))) < 0.08 * len(some)


# ---- determinism and splits ------------------------------------------------------------------------------


def test_the_same_call_gives_the_same_problems_and_touches_no_global_generator():
    state = random.getstate()
    assert problems(50, "heldout", 4, 30, 3) == problems(50, "heldout", 4, 30, 3)
    assert list(stories(5, 1)) == list(stories(5, 1)) and list(small_talk(5, 1)) == list(small_talk(5, 1))
    assert random.getstate() == state
    assert problems(20) == problems(50)[:20]  # asking for more changes nothing of the beginning
    assert problems(50) != problems(50, seed=1)
    assert list(stories(5)) != list(stories(5, 1)) and list(small_talk(9)) != list(small_talk(9, 1))


def test_the_first_problem_is_what_it_always_was():
    """So that a change of the world, which makes old checkpoints and curves incomparable, is noticed."""
    question = "Joe has 23 shells. Joe finds 9 more. Joe finds 5 more. Joe sells 3. How many shells does Joe have now?"
    assert problems(1) == [{"question": question, "answer": "23+9=32\n32+5=37\n37-3=34\n#### 34"}]


def test_splits_are_disjoint_in_their_chains_of_sums():
    for bounds in BOUNDS:
        train, heldout = problems(2000, "train", 0, *bounds), problems(300, "heldout", 0, *bounds)
        more = problems(2000, "train", 5, *bounds)
        assert not any(map(is_heldout, train + more)) and all(map(is_heldout, heldout))
        assert {p["answer"] for p in train + more}.isdisjoint(p["answer"] for p in heldout)
        assert {p["question"] for p in train + more}.isdisjoint(p["question"] for p in heldout)
        for some in (train, heldout):
            assert len({p["question"] for p in some}) == len(some)


def test_about_one_problem_in_ten_is_held_out():
    rng = random.Random(0)
    drawn = [p for _ in range(4000) if (p := tinyworld._problem(rng, 50, 4)) is not None]
    assert 0.08 < sum(map(is_heldout, drawn)) / len(drawn) < 0.12


# ---- other text ------------------------------------------------------------------------------------------


def test_stories_and_small_talk_hold_no_numbers():
    talk = list(small_talk(200))
    for text in [*stories(200), *(m["content"] for c in talk for m in c)]:
        assert not re.search(r"\d|\{|\}", text) and text.strip() == text and text[-1] in ".?"
    assert all([m["role"] for m in c] == ["user", "assistant"] for c in talk)
    assert len(set(stories(200))) > 190


def test_a_story_on_request_is_about_what_was_asked_for():
    told = [c for c in small_talk(300) if c[0]["content"].startswith("Tell me a story")]
    assert len(told) > 20
    for question, reply in told:
        animal = question["content"].rstrip(".").split()[-1]
        assert f"met a {animal}." in reply["content"]


# ---- errors ----------------------------------------------------------------------------------------------


def test_more_problems_than_there_are_is_an_error(monkeypatch):
    monkeypatch.setattr(tinyworld, "NAMES", ("Tom", "Ann"))
    monkeypatch.setattr(tinyworld, "THINGS", ("pens",))
    with pytest.raises(ValueError) as error:
        problems(600, "heldout", max_number=10, max_steps=1)
    assert re.fullmatch(r"only \d+ of 600 different heldout problems exist with max_number 10 and max_steps 1; "
                        "raise one of the two or ask for fewer", str(error.value))


@pytest.mark.parametrize("arguments, message", [
    (dict(split="test"), "split 'test' is not one of train, heldout"),
    (dict(max_number=9), "max_number 9 and max_steps 3 leave no room for a story; use max_number of at least 10"),
    (dict(max_steps=0), "max_number 40 and max_steps 0 leave no room"),
    (dict(max_steps=7), "use max_number of at least 10 and max_steps from 1 to 6"),
])
def test_arguments_that_make_no_world(arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        problems(3, **arguments)
    assert "\n" not in str(error.value)
