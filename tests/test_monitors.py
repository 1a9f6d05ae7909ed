"""The signs of a hacked reward, by hand."""

import pytest

from nanorl.rewards.monitors import Monitor, hollow, repetition


@pytest.mark.parametrize(("text", "n", "share"), [
    ("", 4, 0.0), ("too short", 4, 0.0), ("a b c d e", 4, 0.0), ("go on and on and on", 2, 2 / 5),
    ("a a a a a", 1, 4 / 5), ("1+1=2\n1+1=2", 5, 1 / 6), ("x " * 1000, 4, 1 - 1 / 997),
])
def test_repetition_by_hand(text, n, share):
    assert repetition(text, n) == pytest.approx(share)


def test_hollow_is_form_without_content():
    assert [hollow(c, f) for c, f in ((0, 0), (0, 1), (1, 0), (1, 1))] == [0, 1, 0, 0]


def told(rewards, truths, window=2):
    monitor = Monitor(window, {})
    return [monitor.add({"reward": r, "correct": c}) for r, c in zip(rewards, truths, strict=True)]


def test_it_says_nothing_while_both_rise_or_both_fall():
    assert told([0, 1, 2, 3], [0.1, 0.2, 0.3, 0.4]) == [None] * 4
    assert told([3, 2, 1, 0], [0.4, 0.3, 0.2, 0.1]) == [None] * 4
    assert told([0, 1, 2, 3], [0.4, 0.4, 0.4, 0.37]) == [None] * 4  # a fall of 0.015 is noise


def test_it_says_where_they_parted():
    found = told([0, 1, 2, 3], [0.2, 0.4, 0.3, 0.1])
    assert found[:3] == [None] * 3
    assert "since step 3 the reward rose from 1.5 to 2.5" in found[3] and "35.0% to 20.0%" in found[3]


def test_its_history_is_all_that_it_needs_to_go_on():
    rewards, truths, history = [0, 1, 2, 3, 4], [0.2, 0.4, 0.3, 0.1, 0.0], {}
    whole = told(rewards, truths)
    parts = [Monitor(2, history).add({"reward": r, "correct": c}) for r, c in zip(rewards, truths, strict=True)]
    assert parts == whole and history["parted"] == [0.0, 0.0, 0.0, 1.0, 1.0]
