"""statistics.py by hand numbers and by counting."""

import itertools
import math

import pytest

from nanorl.statistics import mean_and_interval, pass_at_k, wilson


@pytest.mark.parametrize("k, n, low, high", [
    (8, 10, 0.4902, 0.9433),  # Wilson by the formula on paper
    (0, 10, 0.0, 0.2775),  # z^2 / (n + z^2)
    (10, 10, 0.7225, 1.0),
    (250, 500, 0.4564, 0.5436),
])
def test_wilson_by_hand(k, n, low, high):
    assert wilson(k, n) == pytest.approx((low, high), abs=1e-4)


def test_wilson_solves_its_equation():
    """The ends are the shares p that lie z standard errors, sqrt(p (1 - p) / n), from what was seen."""
    for k, n, z in [(1, 7, 1.96), (31, 40, 1.0), (499, 500, 2.58)]:
        for p in wilson(k, n, z):
            assert abs(k / n - p) == pytest.approx(z * math.sqrt(p * (1 - p) / n))


def test_wilson_at_the_ends():
    assert wilson(0, 0) == (0.0, 1.0)
    for n in (1, 3, 500, 10**6):
        assert wilson(0, n)[0] == 0.0 and wilson(n, n)[1] == 1.0
        assert 0 < wilson(0, n)[1] < 1 and 0 < wilson(n, n)[0] < 1


def test_pass_at_k_counts_subsets():
    for n in range(1, 7):
        for c in range(n + 1):
            for k in range(1, n + 1):
                subsets = list(itertools.combinations([1] * c + [0] * (n - c), k))
                assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    assert pass_at_k(4, 1, 2) == 0.5
    assert pass_at_k(10_000, 1, 100) == pytest.approx(0.01)  # no overflow


def test_mean_and_interval_by_hand():
    # mean 3, squares 4 + 0 + 4 = 8 over 2, deviation 2, standard error 2 / sqrt(3)
    mean, low, high = mean_and_interval([1, 3, 5])
    assert mean == 3 and (low, high) == pytest.approx((3 - 1.96 * 2 / 3**0.5, 3 + 1.96 * 2 / 3**0.5))
    assert mean_and_interval([2.5] * 4) == (2.5, 2.5, 2.5)
    mean, low, high = mean_and_interval([7])
    assert mean == 7 and math.isnan(low) and math.isnan(high)


@pytest.mark.parametrize("call", [
    lambda: wilson(3, 2), lambda: wilson(-1, 2), lambda: pass_at_k(4, 5, 1), lambda: pass_at_k(4, 1, 5),
    lambda: pass_at_k(4, 1, 0), lambda: pass_at_k(4, -1, 1), lambda: mean_and_interval([]),
])
def test_impossible_numbers_are_refused(call):
    with pytest.raises(ValueError, match="give"):
        call()
