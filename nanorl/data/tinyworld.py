"""The embedded world: text that a small model can learn from nothing, made by rule from a seed.

Texts of one cast of people and things:

* stories: a few plain sentences, for the corpus and for small talk;
* small talk: a question and a reply without numbers;
* word problems of graded difficulty, in GSM8K's record form:
  `{"question": ..., "answer": "23+14=37\\n37-9=28\\n#### 28"}`.
* preference pairs: a problem with a right, reasoned reply and a worse one.

A problem is a start (`Tom has 23 apples.`), some events (`Tom gives away 9.`) and a closing question. Each
event that needs arithmetic adds one line to the worked solution. Difficulty is two numbers: how many lines the
solution may have (`max_steps`) and how large any number in it may be (`max_number`).

Train and held-out problems are disjoint by construction: the *numbers* of a problem, that is its solution
lines without the story around them, are hashed, and one hash in ten belongs to the held-out split. So a
held-out problem is not a known sum told about another person: its chain of sums occurs nowhere in training.

Everything is a pure function of the seed: the same call gives the same text on every machine.
"""

import random
import re
import zlib
from collections.abc import Iterator, Sequence

from nanorl.chat import reply

NAMES = ("Tom", "Ann", "Ben", "Mia", "Sam", "Eva", "Leo", "Zoe", "Max", "Ida", "Joe", "Kim")
THINGS = ("apples", "pens", "shells", "stones", "cards", "coins", "books", "plums", "beads", "nuts")
GAINS = ("{a} finds {n} more.", "{a} buys {n} more.", "{b} gives {n} to {a}.", "{a} gets {n} more from {b}.")
LOSSES = ("{a} gives away {n}.", "{a} loses {n}.", "{a} sells {n}.", "{a} drops {n}.")
HALVES = ("{a} gives away half.", "{a} loses half.", "{a} sells half.")
WORDS = {2: "twice", 3: "three times", 4: "four times", 5: "five times"}
BOXES = ("boxes", "bags", "jars", "rows")

ANIMALS = ("fox", "bird", "cat", "dog", "frog", "hen", "bear", "mouse")
PLACES = ("river", "hill", "forest", "garden", "lake", "field")
MOODS = ("sad", "tired", "hungry", "lost", "cold", "shy")
GIFTS = ("a warm hat", "a red kite", "some bread", "a small lamp", "a soft blanket", "a song")

MISTAKES = ("blurted", "blurted", "unformatted", "miscopied", "miscopied")  # what is wrong with rejected replies
HELD_OUT_ONE_IN = 10
SPLITS = ("train", "heldout")


def problems(
    n: int, split: str = "train", seed: int = 0, max_number: int = 40, max_steps: int = 3
) -> list[dict[str, str]]:
    """`n` different word problems of one split, as GSM8K records, the same for the same arguments.

    Raises ValueError for an unknown split, bounds too small to tell a story in, or more problems than the
    bounds allow.
    """
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is not one of {', '.join(SPLITS)}")
    if max_number < 10 or not 1 <= max_steps <= 6:
        raise ValueError(
            f"max_number {max_number} and max_steps {max_steps} leave no room for a story; "
            "use max_number of at least 10 and max_steps from 1 to 6"
        )
    rng = random.Random(f"tinyworld problems {split} {seed}")
    found: dict[str, dict[str, str]] = {}
    attempts = 0
    while len(found) < n:
        attempts += 1
        if attempts > 1000 + 100 * n:
            raise ValueError(
                f"only {len(found)} of {n} different {split} problems exist with max_number {max_number} "
                f"and max_steps {max_steps}; raise one of the two or ask for fewer"
            )
        problem = _problem(rng, max_number, max_steps)
        if problem is not None and is_heldout(problem) == (split == "heldout"):
            found.setdefault(problem["question"], problem)
    return list(found.values())


def preferences(
    n: int, split: str = "train", seed: int = 0, max_number: int = 40, max_steps: int = 3, noise: float = 0.0,
    mistakes: Sequence[str] = MISTAKES,
) -> list[dict]:
    """`n` pairs of replies to the problems of one split: {"prompt": messages, "chosen", "rejected", "mistake"}.

    The chosen reply is right and reasoned. What is wrong with the rejected one is drawn from `mistakes`:

    blurted      no reasoning, and a wrong number
    unformatted  the right reasoning and answer without any marks
    miscopied    the right reasoning, then another number in the answer
    miscounted   one line of the reasoning is wrong, and whatever follows from it; not drawn by default, so that a
                 reward model has something that nobody has shown it

    A share `noise` of the pairs has the two swapped; which pairs are made does not depend on it. Raises ValueError as
    `problems`, and for a noise outside 0 to 1 or an unknown mistake.
    """
    known = ("blurted", "unformatted", "miscopied", "miscounted")
    unknown = [kind for kind in mistakes if kind not in known]
    if unknown or not mistakes:
        raise ValueError(f"mistakes {list(mistakes)} must be among {', '.join(known)}")
    if not 0 <= noise <= 1:
        raise ValueError(f"noise is {noise}; it is a share, from 0 to 1")
    rng, swap = (random.Random(f"tinyworld {what} {split} {seed}") for what in ("preferences", "noise"))
    pairs = []
    for problem in problems(n, split, seed, max_number, max_steps):
        lines, gold = problem["answer"].split("\n#### ")
        kind = rng.choice(mistakes)
        pair = {"prompt": [{"role": "user", "content": problem["question"]}], "chosen": reply(lines, gold),
                "rejected": _worse_reply(rng, kind, lines, int(gold)), "mistake": kind}
        if swap.random() < noise:
            pair["chosen"], pair["rejected"] = pair["rejected"], pair["chosen"]
        pairs.append(pair)
    return pairs


def is_heldout(problem: dict[str, str]) -> bool:
    """Whether a problem belongs to the held-out split: decided by its solution lines alone."""
    return zlib.crc32(problem["answer"].encode()) % HELD_OUT_ONE_IN == 0


def story(rng: random.Random, animal: str | None = None) -> str:
    """A story of a few sentences, about `animal` where one is named."""
    name, friend = rng.sample(NAMES, 2)
    animal, place, mood, gift = animal or rng.choice(ANIMALS), *map(rng.choice, (PLACES, MOODS, GIFTS))
    opening = rng.choice(("One day", "One morning", "Once", "Last week"))
    company = rng.choice((f" with {friend}", "", f" to look for {friend}"))
    ending = rng.choice(
        (
            f"From then on the {animal} was never {mood} again.",
            f"The {animal} was happy, and so was {name}.",
            f"In the evening {name} told {friend} about the {animal}.",
            f"Then {name} and the {animal} went home.",
        )
    )
    return (
        f"{opening} {name} went to the {place}{company}. There {name} met a {animal}. "
        f"The {animal} was {mood}. {name} gave it {gift}. {ending}"
    )


def stories(n: int, seed: int = 0) -> Iterator[str]:
    """`n` stories."""
    rng = random.Random(f"tinyworld stories {seed}")
    return (story(rng) for _ in range(n))


def small_talk(n: int, seed: int = 0) -> Iterator[list[dict[str, str]]]:
    """`n` conversations without numbers, as lists of messages: greetings, questions, stories on request."""
    rng = random.Random(f"tinyworld small talk {seed}")
    for _ in range(n):
        name, animal, place = rng.choice(NAMES), rng.choice(ANIMALS), rng.choice(PLACES)
        question, reply = rng.choice(
            (
                (f"Tell me a story about a {animal}.", story(rng, animal)),
                (f"Hello, I am {name}.", f"Hello {name}. How can I help you?"),
                ("Who are you?", "I am a small language model. I can solve problems and tell stories."),
                ("What can you do?", "I can tell a story or solve a word problem."),
                (f"Where did {name} meet the {animal}?", f"I do not know where {name} met the {animal}."),
                (f"Is the {animal} at the {place}?", f"I cannot see the {place} from here."),
                ("Thank you.", "You are welcome."),
            )
        )
        yield [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]


def _problem(rng: random.Random, max_number: int, max_steps: int) -> dict[str, str] | None:
    """One problem, or None where a draw led to numbers out of bounds."""
    steps = rng.randint(1, max_steps)
    a, b = rng.sample(NAMES, 2)
    things = rng.choice(THINGS)
    told, lines = [], []
    # 1. how many there are at the start: told outright, or so many boxes of so many
    boxes = rng.random() < 0.3
    if boxes:
        count, each = rng.randint(2, 9), rng.randint(2, 9)
        value = count * each
        told.append(f"{a} has {count} {rng.choice(BOXES)} with {each} {things} each.")
        lines.append(f"{count}*{each}={value}")
    else:
        value = rng.randint(2, max_number)
        told.append(f"{a} has {value} {things}.")
    # 2. how it ends: what one person has, or a comparison with another one, which takes one or two lines
    left = steps - len(lines)
    ending = rng.choice([kind for kind, cost in (("own", 0), ("friend", 1), ("both", 2)) if cost <= left])
    # 3. what happens in between
    for _ in range(left - {"own": 0, "friend": 1, "both": 2}[ending]):
        sentence, line, value = _event(rng, value, max_number)
        told.append(sentence.format(a=a, b=rng.choice([n for n in NAMES if n != a])))
        lines.append(line)
    if ending == "own":
        told.append(f"How many {things} does {a} have now?")
    else:
        sentence, line, other = _comparison(rng, value, max_number)
        told.append(sentence.format(a=a, b=b, things=things))
        lines.append(line)
        if ending == "both":
            lines.append(f"{value}+{other}={value + other}")
            told.append("How many do they have together?")
            value = value + other
        else:
            told.append(f"How many does {b} have?")
            value = other
    if not lines or any(int(n) > max_number for line in lines for n in _numbers(line)):
        return None
    return {"question": " ".join(told), "answer": "\n".join([*lines, f"#### {value}"])}


def _event(rng: random.Random, value: int, max_number: int) -> tuple[str, str, int]:
    """Something that changes how many there are: the sentence, its line of arithmetic, the new value."""
    kind = rng.choice(("gain", "gain", "loss", "loss", "times", "half", "share"))
    factor = rng.randint(2, 5)
    if kind == "times" and value * factor <= max_number:
        return f"Soon {{a}} has {WORDS[factor]} as many.", f"{value}*{factor}={value * factor}", value * factor
    if kind == "half" and value % 2 == 0 and value > 0:
        return rng.choice(HALVES), f"{value}/2={value // 2}", value // 2
    if kind == "share" and value % factor == 0 and value > 0:
        sentence = f"{{a}} makes {factor} equal heaps and keeps one."
        return sentence, f"{value}/{factor}={value // factor}", value // factor
    if (kind == "loss" or value >= max_number) and value > 1:
        n = rng.randint(1, value - 1)
        return rng.choice(LOSSES).replace("{n}", str(n)), f"{value}-{n}={value - n}", value - n
    n = rng.randint(1, max(1, max_number - value))
    return rng.choice(GAINS).replace("{n}", str(n)), f"{value}+{n}={value + n}", value + n


def _comparison(rng: random.Random, value: int, max_number: int) -> tuple[str, str, int]:
    """What the other person has, told relative to the first: the sentence, its line, the other's value."""
    kind = rng.choice(("more", "fewer", "times"))
    if kind == "times":
        factor = rng.randint(2, 4)
        sentence = f"{{b}} has {WORDS[factor]} as many {{things}} as {{a}}."
        return sentence, f"{value}*{factor}={value * factor}", value * factor
    if kind == "fewer" and value > 1:
        n = rng.randint(1, value - 1)
        return f"{{b}} has {n} {{things}} fewer than {{a}}.", f"{value}-{n}={value - n}", value - n
    n = rng.randint(1, max(1, max_number - value))
    return f"{{b}} has {n} {{things}} more than {{a}}.", f"{value}+{n}={value + n}", value + n


def _worse_reply(rng: random.Random, kind: str, lines: str, gold: int) -> str:
    """A reply with this kind of mistake to a problem with this solution."""
    if kind == "unformatted":
        return f"{lines}\n{gold}"
    if kind == "miscounted":
        return reply(*_miscounted(rng, lines.split("\n")))
    wrong = _near(rng, gold)
    return reply(lines if kind == "miscopied" else None, str(wrong))


def _near(rng: random.Random, value: int) -> int:
    """Another number, not far away, not below 0."""
    return rng.choice([n for n in (value + d for d in (-10, -5, -3, -2, -1, 1, 2, 3, 5, 10)) if n >= 0])


def _miscounted(rng: random.Random, lines: list[str]) -> tuple[str, str]:
    """The solution with a wrong result in one line, carried on; its lines and its answer, which is wrong too.

    Drawn again where a later line would need a fraction or a number below 0, which would be a second mistake. A slip
    in the last line never does, so this ends. Each line takes different numbers to different ones, so a slip reaches
    the answer.
    """
    while True:
        slip, told, known, before, whole = rng.randrange(len(lines)), [], {}, "", True
        for i, line in enumerate(lines):
            left, sign, right, result = re.fullmatch(r"(\d+)([-+*/])(\d+)=(\d+)", line).groups()
            a = known.get(left, int(left))
            b = int(right) if left == before else known.get(right, int(right))  # a result stands on the left, or two do
            value = {"+": a + b, "-": a - b, "*": a * b, "/": a // max(b, 1)}[sign]
            whole = whole and value >= 0 and (sign != "/" or value * b == a)
            known[result] = value = _near(rng, value) if i == slip else value
            told.append(f"{a}{sign}{b}={value}")
            before = result
        if whole:
            return "\n".join(told), str(value)


def _numbers(line: str) -> list[str]:
    """The numbers of a line of arithmetic such as `23+14=37`."""
    for sign in "+-*/=":
        line = line.replace(sign, " ")
    return line.split()
