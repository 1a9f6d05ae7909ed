"""Is the reward still worth something? Signs that a policy has found out how to be paid without being right.

A learned reward, or a bonus for form, is a stand-in for what is wanted. Optimised hard enough the two part
(Gao, Schulman and Hilton 2022, arXiv:2210.10760): the reward goes on rising and the truth falls. Plain Python.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

PIECE = re.compile(r"\w+|[^\w\s]")
DROP = 0.05  # how far the share of right answers must have fallen from its best before it counts


def repetition(text: str, n: int = 4) -> float:
    """Share of runs of `n` words or signs that stand earlier in the text already: 0 where nothing repeats.

    "go on and on and on" with n 2: go-on, on-and, and-on, on-and, and-on -> 2 of 5.
    """
    pieces = PIECE.findall(text)
    runs = [tuple(pieces[i : i + n]) for i in range(len(pieces) - n + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def hollow(correct: float, formed: float) -> float:
    """1 for a response that is well formed and wrong: form without content."""
    return float(bool(formed) and not correct)


class Monitor:
    """Compares the reward that is optimised with the share of right answers, a window of steps at a time.

    `history` holds the run so far and grows: plain lists under "reward", "correct" and "parted", so that a run can
    save it and go on with it.
    """

    def __init__(self, window: int, history: dict[str, list[float]]):
        self.window, self.history = window, history
        for name in ("reward", "correct", "parted"):
            history.setdefault(name, [])

    def add(self, record: Mapping[str, float]) -> str | None:
        """Take in a record's "reward" and "correct"; says what has parted, None while nothing has.

        Parted means: in the last window fewer answers are right, by more than 0.05, than in the window in which
        most were, and the reward is higher than it was there.
        """
        for name in ("reward", "correct"):
            self.history[name].append(float(record[name]))
        reward, truth = self._means("reward"), self._means("correct")
        reason = None
        if truth:
            best = max(range(len(truth)), key=truth.__getitem__)
            if truth[-1] < truth[best] - DROP and reward[-1] > reward[best]:
                reason = (f"reward and truth have parted: since step {best + self.window} the reward rose from "
                          f"{reward[best]:.3g} to {reward[-1]:.3g} while right answers fell from {truth[best]:.1%} to "
                          f"{truth[-1]:.1%}; raise kl_coef, or stop there")
        self.history["parted"].append(float(reason is not None))
        return reason

    def _means(self, name: str) -> list[float]:
        """The means of every window so far."""
        values, w = self.history[name], self.window
        return [sum(values[i : i + w]) / w for i in range(len(values) - w + 1)]
