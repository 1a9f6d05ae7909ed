"""Rewards that a program can check: right or wrong, well formed or not."""

from __future__ import annotations

from collections.abc import Sequence

from nanorl.rewards.parsing import final_answer, gold_answer, well_formed


def correct(text: str, gold: str) -> bool:
    """Whether the final answer of a response is exactly the gold one (a GSM8K field or a bare number).

    False where either of them holds no number. Never raises.
    """
    answer = final_answer(text)
    return answer is not None and answer == gold_answer(gold)


def gsm8k_reward(text: str, gold: str, format_bonus: float = 0.1) -> dict[str, float]:
    """Reward of a response to a word problem, and its parts.

    {"reward": correct + format_bonus * format, "correct": 0.0 or 1.0, "format": 0.0 or 1.0}, where format is
    `well_formed(text)`. Being right comes first: the best wrong response earns the bonus, the worst right one
    earns 1, and the reward stays within 0 and 1 + format_bonus. An empty answer tag earns nothing.
    Raises ValueError for a bonus outside 0 <= bonus < 1, with which form could pay as much as a right answer.
    """
    if not 0 <= format_bonus < 1:
        raise ValueError(f"format_bonus {format_bonus} pays form like a right answer; use 0 <= bonus < 1")
    right, form = float(correct(text, gold)), float(well_formed(text))
    return {"reward": right + format_bonus * form, "correct": right, "format": form}


def dense_token_reward(tokens: Sequence[int], target: int) -> float:
    """Toy reward with a slope everywhere: the share of tokens that are `target`, 0 for no tokens.

    A policy that learns from it must drift to the target within a few steps: the quickest check of a loop.
    """
    return sum(token == target for token in tokens) / len(tokens) if len(tokens) else 0.0
