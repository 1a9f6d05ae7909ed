"""Parsing and verifying answers: right values, and any text at all within linear time."""

import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanorl.rewards import parsing
from nanorl.rewards.parsing import answer_blocks, final_answer, first_number, gold_answer, well_formed
from nanorl.rewards.verifiers import correct, dense_token_reward, gsm8k_reward

MINUS = "\u2212"
NUMBERS = {  # what an answer says -> its value
    "42": 42, " 42\n": 42, "1,234": 1234, "1,234,567.50": Fraction("1234567.5"), "72.": 72, "3.0": 3,
    "007": 7, "$18": 18, "$ 18": 18, "18%": 18, "####18": 18, "#### 18": 18, "-5": -5, "+5": 5,
    f"{MINUS}5": -5,
    "-$5": -5, "$-5": -5, f"{MINUS}$1,234.5": Fraction("-1234.5"), "1/2": Fraction(1, 2),
    "-3/6": Fraction(-1, 2), ".5": Fraction(1, 2), "-.5": Fraction(-1, 2), "1e3": 1000, "1E+3": 1000,
    f"2.5e{MINUS}1": Fraction(1, 4), "1e1000": 10**1000,
    "12 + 30 = 42": 42, "x = 42": 42, "6 * 7 = 84 / 2 = 42": 42,
    "42 apples": 42, "42km": 42, "The answer is 42.": 42, "It is 42, I think.": 42, "**42**": 42, "(42)": 42,
    "$42$": 42, "\\boxed{42}": 42, "a 12-year wait": 12, "0": 0, "-0": 0, "0.0": 0, "0/5": 0,
}
NO_NUMBERS = [
    "", " ", "none", "forty-two", "1,2,3", "1, 2, 3", "5 or 6", "5-6", "5\u20136", "12 + 30", "42 = 12 + 30",
    "42 =", "1/0", "1/00", "1/2/3", "1 / 2", "1.2.3", "1,23", "1234,567", "0,123", ",5", "1 000", "1_000",
    "2^10", "10:30", "0x1F", "--5", "- 5", "\u20135", "\u221a16", "1e1001", "1e-1001", "1e999999999", "1e3e3",
    "1e3/2", "inf", "nan", "-", ".", "/", "$", "\u0664\u0662", "\uff14\uff12", "5\u00b2", "\u00bd", "3\u00bd",
    "5 \u0664", "__import__('os').getpid()", "9" * 3001, "1." + "0" * 3000, "1/" + "7" * 3001,
]


def tagged(answer):
    return f"<answer>{answer}</answer>"


@pytest.mark.parametrize("text, value", NUMBERS.items())
def test_number_in_an_answer(text, value):
    got = final_answer(tagged(text))
    assert got == value and isinstance(got, Fraction)
    assert final_answer(f"so\n#### {text.strip()}\nand 7") == value
    assert gold_answer(f"6 * 7 = <<6*7=42>>42\n#### {text}") == gold_answer(text) == value


@pytest.mark.parametrize("text", NO_NUMBERS)
def test_no_number_in_an_answer(text):
    assert final_answer(tagged(text)) is None
    assert final_answer(f"#### {text}\n42") is None
    assert gold_answer(text) is None
    assert not correct(tagged(text), text)  # nothing does not equal nothing


def test_first_number():
    cases = {"5 or 6": 5, "It costs $1,234.50, or 7": Fraction("1234.5"), "1,2,3": None, "1/0 and 7": 7,
             "": None, "a 12-year-old has 3": 12, "no number": None,
             f"at {MINUS}4 degrees": -4, "12 + 30 = 42": 12}
    assert {text: first_number(text) for text in cases} == cases


def test_long_answers_are_compared_exactly():
    digits = "7" * 400
    assert correct(tagged(digits), digits)
    assert correct(tagged("-" + digits + ".0"), "-" + digits)
    assert not correct(tagged(digits), digits[:-1] + "8")
    assert not correct(tagged("0." + "3" * 300), "1/3")
    assert correct(tagged("9" * 3000), "#### " + "9" * 3000)
    assert not correct(tagged("0.1"), "0.1000000000000000055511151231257827")  # equal as floats


def test_python_can_print_every_value():
    for text in ("9" * 3000 + "e1000", "0." + "9" * 2999 + "e-1000", "9" * 3000 + "/" + "7" * 3000):
        assert str(final_answer(tagged(text)))


def test_final_answer_needs_a_place():
    assert final_answer("42") is None
    assert final_answer("the answer is 42") is None
    assert final_answer("<answer>42") is None
    assert final_answer("42</answer>") is None
    assert final_answer("####") is None
    assert final_answer("####\n42") is None


def test_what_comes_after_changes_nothing():
    assert final_answer("<think>3 or 4</think><answer>42</answer> no, 43\n#### 44") == 42
    assert final_answer("6 * 7\n#### 42\n\nQuestion: ...\nAnswer: ...\n#### 7") == 42
    for tail in (" ", "\n", " 43", "!", "</answer>", "<think>", "</think>", "<answer>", "#### 7"):
        text = "<think>6 * 7 = 42</think><answer>42</answer>"
        assert gsm8k_reward(text + tail, "42") == gsm8k_reward(text, "42")


def test_two_answers_are_none():
    for text in ("<answer>42</answer><answer>42</answer>", "<answer>1</answer> or <answer>42</answer>"):
        assert len(answer_blocks(text)) == 2
        assert final_answer(text) is None and not well_formed(text)
    assert gsm8k_reward("".join(map(tagged, range(100))), "42")["reward"] == 0  # guessing them all


def test_answer_blocks():
    assert answer_blocks("<answer> 1 </answer>x<answer></answer><answer>3") == [" 1 ", ""]
    assert answer_blocks("</answer><answer>1</answer></answer>") == ["1"]
    assert answer_blocks("") == []


@pytest.mark.parametrize("text", [
    "<answer>42</answer>", "<think>a</think><answer>42</answer>", "<think></think>\n<answer>42</answer>\n",
    "<think>6 * 7\n= 42</think><answer>42 apples</answer>", "so <answer>wrong</answer>",
])
def test_well_formed(text):
    assert well_formed(text)


@pytest.mark.parametrize("text", [
    "", "42", "#### 42", "<answer></answer>", "<answer> \n</answer>", "<answer>42", "42</answer>",
    "<think>a</think>42", "<think>a<answer>42</answer>", "a</think><answer>42</answer>",
    "</think>a<think><answer>42</answer>", "<think>a</think><think>b</think><answer>42</answer>",
    "<think><think>a</think></think><answer>42</answer>", "<answer>42<think>a</think></answer>",
    "<think>a<answer>4</answer></think><answer>42</answer>", "<answer>4<answer>42</answer>",
    "</answer><answer>42</answer>", "<think>a<answer>42</think></answer>", "<Answer>42</Answer>",
    "<answer>42</answer><answer>42</answer>", "< answer>42</answer>",
])
def test_not_well_formed(text):
    assert not well_formed(text)


@pytest.mark.parametrize("text, reward, right, form", [
    ("<think>6 * 7</think><answer>42</answer>", 1.1, 1.0, 1.0),
    ("<answer>42.0</answer>", 1.1, 1.0, 1.0),
    ("6 * 7\n#### 42", 1.0, 1.0, 0.0),  # right, in the form of a document
    ("<think>6 * 7<answer>42</answer>", 1.0, 1.0, 0.0),
    ("<answer>43</answer>", 0.1, 0.0, 1.0),
    ("<answer>no idea</answer>", 0.1, 0.0, 1.0),
    ("<answer></answer>", 0.0, 0.0, 0.0),
    ("<think>42</think><answer> </answer>", 0.0, 0.0, 0.0),
    ("42", 0.0, 0.0, 0.0),
    ("", 0.0, 0.0, 0.0),
])
def test_gsm8k_reward(text, reward, right, form):
    got = gsm8k_reward(text, "6 * 7 = <<6*7=42>>42\n#### 42")
    assert got == {"reward": pytest.approx(reward), "correct": right, "format": form}
    assert gsm8k_reward(text, "42", format_bonus=0)["reward"] == right


def test_bonus_stays_below_a_right_answer():
    for bonus in (-0.1, 1.0, 2.0, float("nan")):
        with pytest.raises(ValueError, match="format_bonus"):
            gsm8k_reward("<answer>42</answer>", "42", format_bonus=bonus)


def test_dense_token_reward():
    assert dense_token_reward([7, 1, 7, 2], 7) == 0.5
    assert dense_token_reward([], 7) == 0.0


def read_everything(text):
    """Each function on this text, inside tags and behind the mark; true if every value is one it may have."""
    for form in (text, tagged(text), "#### " + text, "<think>" + text, text + tagged("42")):
        for value in (first_number(form), final_answer(form), gold_answer(form)):
            assert value is None or isinstance(value, Fraction)
        reward = gsm8k_reward(form, text)
        assert 0 <= reward["reward"] <= 1.1
        assert correct(form, "42") in (True, False)
        assert all(isinstance(block, str) for block in answer_blocks(form))


PIECES = st.sampled_from([
    "<answer>", "</answer>", "<think>", "</think>", "####", "=", "1", "42", "1,234", "1/0", ".", ",", "-",
    MINUS, "e", "$", "%", "1e999999999", "\u0664", "\u00bd", "\u2460", "\n", " ", "\x00", "\ud800", "_",
    "+", "/"])


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.one_of(st.text(), st.lists(PIECES, max_size=40).map("".join)))
def test_no_text_raises(text):
    read_everything(text)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.fractions(max_denominator=10**6) | st.integers(-(10**40), 10**40).map(Fraction))
def test_written_numbers_are_read_back(value):
    assert final_answer(tagged(value)) == value
    assert correct(f"#### {value}", str(value))
    if value.denominator == 1:
        assert correct(tagged(f"{int(value):,}"), str(value))
    assert not correct(tagged(value), str(value + 1))


@pytest.mark.parametrize("piece", [
    "9", "0", "1,", ",", "1,111,", "123,", ".", "1.", "-", "- ", "1-", "+", MINUS, "/", "1/", "1/0 ", "e",
    "1e", "e1", "1e9", "1e-", "5 or ", "1 ", "=", "1=", "$", "$1", "#", "####", "#### ", "#### 1\n",
    "<answer>", "</answer>", "<answer></answer>", "<answer>1", "<answer>1</answer>", "<think>", "</think>",
    "<think></think>", "<answ", "<", "\u0664", "\u00bd", "\u00b2", "\U0001d7d8", " ", "\n", "\x00", "a",
])
def test_long_texts_take_linear_time(piece):
    text = (piece * 100_000)[:100_000]
    start = time.process_time()
    read_everything(text)
    taken = time.process_time() - start
    assert taken < 3, f"{taken:.1f} s for 100 kB of {piece!r}: quadratic time would take minutes"


def test_huge_numbers_are_not_computed():
    start = time.process_time()
    for text in ("1e999999999", "1e-999999999", "9" * 100_000, "1e" + "9" * 90_000, "1/" + "9" * 90_000):
        assert final_answer(tagged(text)) is None
    assert time.process_time() - start < 1


def test_nothing_is_evaluated():
    with open(parsing.__file__, encoding="utf-8") as file:
        source = file.read()
    assert "eval(" not in source and "exec(" not in source and "float(" not in source


@pytest.mark.parametrize("text", ["<think>1+1=2\n#### 2</answer>",
                                  "<think>1+1=2\n#### 2", "#### 2</answer>", "<answer>#### 2"])
def test_a_chat_reply_without_an_answer_block_settles_on_nothing(text):
    """The base model's form of an answer does not count inside a reply: the policy would mix the two."""
    assert final_answer(text) is None
    assert gsm8k_reward(text, "2") == {"reward": 0.0, "correct": 0.0, "format": 0.0}
