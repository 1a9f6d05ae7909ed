"""Find the answer in a text and read it as an exact number.

A response looks like `<think>...</think><answer>42</answer>`, its think block optional; a document of the
base model ends in `#### 42`. Numbers are Fractions, so that 72. equals 72 and a 400-digit answer is compared
to its last digit. Any text is accepted, whoever wrote it: nothing is evaluated, nothing raises, and time
grows with the length of the text, no faster.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

MARK = "####"
CHAT_MARKS = ("<think>", "</think>", "<answer>", "</answer>")
MAX_DIGITS = 3000  # with the exponent, below the 4,300 digits that Python reads and prints
MAX_EXPONENT = 1000  # 1e999999999 would fill the memory

# One number, or what looks like one.
_RUN = re.compile(r"(?:[0-9.,/+\-\u2212]|(?<=[0-9.])[eE](?=[0-9+\-\u2212]))+")
_NUMBER = re.compile(
    r"([+-]?)"
    r"(?:([1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)(?:\.([0-9]*))?|\.([0-9]+))"  # 1,234  12  12.5  12.  .5
    r"(?:[eE]([+-]?[0-9]+)|/([0-9]+))?"  # e3, or /2
)
_CURRENCY = re.compile(r"(?<![0-9])[$\u20ac\u00a3](?=[-+\u2212.0-9])")  # the sign in $18, -$18 and $-18
_OPERATORS = "+-\u2212\u2013\u2014\u221a/^\u00d7\u00f7"  # before a number, these change it


def first_number(text: str) -> Fraction | None:
    """The first number in a text, or None: "5 or 6" -> 5, "1/0 and 7" -> 7, "1,2,3" -> None."""
    for run in _RUN.finditer(_CURRENCY.sub("", text)):
        value = _value(run.group())
        if value is not None:
            return value
    return None


def stated_number(text: str) -> Fraction | None:
    """The one number that an answer states, or None if it states none or several.

    Words and units around the number are ignored. After an equation only what follows the last = counts.
    "$1,234" -> 1234; "18%" -> 18; "12 + 30 = 42" -> 42; "1/2" -> 0.5; "5 or 6", "1,2,3", "12 + 30" -> None.
    """
    text = _CURRENCY.sub("", text.rpartition("=")[2])
    if not text.isascii() and any(unicodedata.category(c)[0] == "N" and not c.isascii() for c in text):
        return None  # digits of another script, superscripts, vulgar fractions
    found = None
    for run in _RUN.finditer(text):
        if any(c.isdigit() for c in run.group()):
            if found is not None:
                return None
            found = run
    if found is None or text[: found.start()].rstrip().endswith(tuple(_OPERATORS)):
        return None
    return _value(found.group())


def answer_blocks(text: str) -> list[str]:
    """What stands between each <answer> and the </answer> that closes it, in order."""
    return [text[start:end] for start, end in _answer_spans(text)]


def final_answer(text: str) -> Fraction | None:
    """The number a response settles on, or None.

    It stands in the only answer block; in a text without any of the marks of a chat reply, behind the first ####
    on the same line. Two answer blocks settle on nothing. Text after the block, or after the line, changes nothing:
    a base model that runs on into the next question is judged on the first.
    """
    blocks = answer_blocks(text)
    if blocks:
        return stated_number(blocks[0]) if len(blocks) == 1 else None
    if any(mark in text for mark in CHAT_MARKS):
        return None
    _, mark, rest = text.partition(MARK)
    return stated_number(rest.partition("\n")[0]) if mark else None


def gold_answer(field: str) -> Fraction | None:
    """The number in the answer field of a GSM8K record, behind its last ####; a bare number is read as is."""
    return stated_number(field.rpartition(MARK)[2])


def well_formed(text: str) -> bool:
    """Whether a response has the form <think>...</think><answer>...</answer>, its think block optional.

    There is one answer block, not blank; in front of it, at most one think block, opened and closed. Text
    after the closing tag changes nothing, unless it holds a second answer block. Where the prompt already
    opened the think block, the response has to be given with that <think> in front.
    """
    spans = _answer_spans(text)
    if len(spans) != 1:
        return False
    start, end = spans[0]
    before, answer = text[:start].removesuffix("<answer>"), text[start:end]
    if not answer.strip() or "<answer>" in answer or "</answer>" in before:
        return False
    if "<think>" in answer or "</think>" in answer:
        return False
    opened, closed = before.count("<think>"), before.count("</think>")
    return opened == closed <= 1 and before.find("<think>") <= before.find("</think>")


def _answer_spans(text: str) -> list[tuple[int, int]]:
    spans, position = [], 0
    while True:
        start = text.find("<answer>", position)
        end = text.find("</answer>", start) if start >= 0 else -1
        if end < 0:
            return spans
        spans.append((start + len("<answer>"), end))
        position = end + len("</answer>")


def _value(run: str) -> Fraction | None:
    """The exact value of a run of number characters, or None if it is not one number (1.2.3, 1/0, 5-3)."""
    run = run.replace("\u2212", "-").rstrip(".,+-/")  # the end of a sentence, or the hyphen of 12-year
    if len(run) > 2 * MAX_DIGITS:
        return None
    match = _NUMBER.fullmatch(run)
    if match is None:
        return None
    sign, whole, decimals, only_decimals, exponent, denominator = match.groups()
    whole = (whole or "").replace(",", "")
    decimals = decimals or only_decimals or ""
    if len(whole) + len(decimals) > MAX_DIGITS or len(denominator or "") > MAX_DIGITS:
        return None
    if exponent is not None and (len(exponent) > 5 or abs(int(exponent)) > MAX_EXPONENT):
        return None
    if denominator is not None and not denominator.strip("0"):
        return None
    value = Fraction(int(whole + decimals), 10 ** len(decimals) * int(denominator or 1))
    if exponent is not None:
        value *= Fraction(10) ** int(exponent)
    return -value if sign == "-" else value
