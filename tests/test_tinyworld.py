"""The embedded world: every problem is solved again here, from its words and from its lines, by other code."""

import random
import re
from fractions import Fraction

import pytest

from nanorl.data import tinyworld
from nanorl.data.tinyworld import MISTAKES, is_heldout, preferences, problems, small_talk, stories
from nanorl.rewards.parsing import final_answer, gold_answer, well_formed
from nanorl.rewards.verifiers import correct

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


# ---- preference pairs --------------------------------------------------------------------------------------

KINDS = ("blurted", "unformatted", "miscopied", "miscounted")
in_each_world = pytest.mark.parametrize("max_number, max_steps", BOUNDS)


def pairs_and_problems(n, max_number, max_steps, split="train", **more):
    """Pairs beside the problems that they were made from."""
    pairs, told = (make(n, split, 0, max_number, max_steps, **extra)
                   for make, extra in ((preferences, more), (problems, {})))
    return list(zip(pairs, told, strict=True))


@in_each_world
def test_chosen_is_right_and_rejected_is_wrong_or_malformed(max_number, max_steps):
    seen = set()
    for pair, problem in pairs_and_problems(2000, max_number, max_steps, mistakes=KINDS):
        gold = problem["answer"]
        assert pair["prompt"] == [{"role": "user", "content": problem["question"]}]
        assert correct(pair["chosen"], gold) and well_formed(pair["chosen"])
        if pair["mistake"] == "unformatted":
            assert not well_formed(pair["rejected"])
        else:
            assert well_formed(pair["rejected"]) and not correct(pair["rejected"], gold)
            assert final_answer(pair["rejected"]) >= 0
        seen.add(pair["mistake"])
    assert seen == set(KINDS)


def test_what_each_mistake_looks_like():
    for pair, problem in pairs_and_problems(800, 50, 4, mistakes=KINDS):
        lines, gold = problem["answer"].split("\n#### ")
        assert pair["chosen"] == f"<think>{lines}</think><answer>{gold}</answer>"
        form = {"blurted": r"<answer>\d+</answer>", "unformatted": re.escape(f"{lines}\n{gold}"),
                "miscopied": re.escape(f"<think>{lines}</think>") + r"<answer>\d+</answer>",
                "miscounted": r"<think>(?s:.)+</think><answer>\d+</answer>"}[pair["mistake"]]
        assert re.fullmatch(form, pair["rejected"]), pair


@in_each_world
def test_a_miscounted_reply_has_one_wrong_line_that_is_carried_on(max_number, max_steps):
    """Every number of the question is still used as it was told, and every line goes on from the one before."""
    for pair, problem in pairs_and_problems(1500, max_number, max_steps, mistakes=("miscounted",)):
        thought, answer = re.fullmatch(r"<think>(.+)</think><answer>(\d+)</answer>", pair["rejected"], re.S).groups()
        lines, right = thought.split("\n"), problem["answer"].split("\n")[:-1]
        assert [re.sub(r"\d", "", line) for line in lines] == [re.sub(r"\d", "", line) for line in right]
        wrong, before, operands = 0, None, []
        for line in lines:
            left, sign, other, result = re.fullmatch(r"(\d+)([-+*/])(\d+)=(\d+)", line).groups()
            a, b = int(left), int(other)
            wrong += {"+": a + b, "-": a - b, "*": a * b, "/": Fraction(a, b or 1)}[sign] != int(result)
            assert before is None or before in (left, other), pair
            before, operands = result, [*operands, left, other]
        assert wrong == 1 and answer == before, pair
        for n in re.findall(r"\d+", problem["question"]):
            assert n in operands, pair
            operands.remove(n)


def test_a_carried_slip_leaves_an_equal_number_of_the_question_alone():
    """5-3=2 and then a gain of 2: only the first 2 is a result."""
    found = {tinyworld._miscounted(random.Random(seed), ["5-3=2", "2+2=4"])[0] for seed in range(200)}
    carried = {lines for lines in found if not lines.startswith("5-3=2")}
    assert carried == {f"5-3={n}\n{n}+2={n + 2}" for n in (0, 1, 3, 4, 5, 7, 12)}
    assert found - carried == {f"5-3=2\n2+2={n}" for n in (1, 2, 3, 5, 6, 7, 9, 14)}


def test_a_slip_under_a_sum_of_two_results_is_carried_into_both():
    found = {tinyworld._miscounted(random.Random(seed), ["4+2=6", "6*2=12", "6+12=18"])[0] for seed in range(300)}
    assert "4+2=7\n7*2=14\n7+14=21" in found and "4+2=6\n6*2=13\n6+13=19" in found


def test_a_slip_that_needs_a_fraction_or_less_than_nothing_is_drawn_again():
    for lines in (["2*4=8", "8/4=2"], ["9-4=5", "5-5=0"]):
        for seed in range(200):
            *_, last = tinyworld._miscounted(random.Random(seed), lines)[0].split("\n")
            a, sign, b, result = re.fullmatch(r"(\d+)([-/])(\d+)=(\d+)", last).groups()
            assert int(a) % int(b) == 0 if sign == "/" else int(a) >= int(b)


def test_mistakes_come_in_the_shares_of_the_list_and_of_this_one_by_default():
    assert MISTAKES == ("blurted", "blurted", "unformatted", "miscopied", "miscopied")
    found = [pair["mistake"] for pair in preferences(4000)]
    for kind, share in (("blurted", 0.4), ("unformatted", 0.2), ("miscopied", 0.4), ("miscounted", 0)):
        assert found.count(kind) / 4000 == pytest.approx(share, abs=0.03)  # four standard deviations
    assert {pair["mistake"] for pair in preferences(50, mistakes=["miscounted"])} == {"miscounted"}


def test_noise_swaps_a_share_and_changes_nothing_else():
    plain = preferences(3000, seed=2)
    swapped = []
    for noise in (0.0, 0.1, 0.4, 1.0):
        noisy = preferences(3000, seed=2, noise=noise)
        turned = [a["chosen"] != b["chosen"] for a, b in zip(plain, noisy, strict=True)]
        for a, b, turn in zip(plain, noisy, turned, strict=True):
            assert b == ({**a, "chosen": a["rejected"], "rejected": a["chosen"]} if turn else a)
        assert sum(turned) / 3000 == pytest.approx(noise, abs=0.03)
        swapped.append({i for i, turn in enumerate(turned) if turn})
    assert swapped[0] == set() and swapped[1] < swapped[2] < swapped[3] == set(range(3000))


def test_pairs_are_the_same_for_the_same_arguments_and_touch_no_global_generator():
    state = random.getstate()
    assert preferences(60, "heldout", 4, 30, 3, 0.2) == preferences(60, "heldout", 4, 30, 3, 0.2)
    assert random.getstate() == state
    assert preferences(20, noise=0.3) == preferences(50, noise=0.3)[:20]
    assert preferences(50) != preferences(50, seed=1) and preferences(0) == []
    assert all(pair.keys() == {"prompt", "chosen", "rejected", "mistake"} for pair in preferences(9))


def test_pairs_of_the_two_splits_have_no_chain_of_sums_in_common():
    train, heldout = preferences(2000, "train"), preferences(300, "heldout")
    assert {p["chosen"] for p in train}.isdisjoint(p["chosen"] for p in heldout)
    assert {p["prompt"][0]["content"] for p in train}.isdisjoint(p["prompt"][0]["content"] for p in heldout)


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


@pytest.mark.parametrize("arguments, message", [
    (dict(mistakes=("blurted", "rude")), r"mistakes \['blurted', 'rude'\] must be among blurted, unformatted, "),
    (dict(mistakes=()), r"mistakes \[\] must be among"),
    (dict(noise=-0.1), "noise is -0.1; it is a share, from 0 to 1"),
    (dict(noise=1.5), "noise is 1.5; it is a share"),
    (dict(noise=float("nan")), "noise is nan; it is a share"),
    (dict(split="test"), "split 'test' is not one of train, heldout"),
    (dict(max_number=9), "max_number 9 and max_steps 3 leave no room"),
])
def test_arguments_that_make_no_pairs(arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        preferences(3, **arguments)
    assert "\n" not in str(error.value)
