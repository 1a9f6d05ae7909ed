"""How sure a measured number is: intervals for shares and means, and the unbiased pass@k."""

from __future__ import annotations

import math
from collections.abc import Sequence


def wilson(k: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson score interval of a share, k successes of n (E. B. Wilson, 1927): (low, high), 95% at z = 1.96.

    Unlike share +- z * error it stays within 0 and 1 and does not shrink to nothing at 0 of n. 0 of 0 gives
    (0, 1): nothing is known. 8 of 10 -> (0.490, 0.943). Raises ValueError unless 0 <= k <= n.
    """
    if not 0 <= k <= n:
        raise ValueError(f"{k} successes of {n}: give 0 <= k <= n")
    if n == 0:
        return 0.0, 1.0
    share = k / n
    middle = share + z * z / (2 * n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    low, high = (middle - half) / scale, (middle + half) / scale
    return (0.0 if k == 0 else low), (1.0 if k == n else high)  # exact at the ends, whatever the rounding


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that at least one of k samples is right, estimated without bias from n samples, c of them right.

    1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374). 1 - (1 - c/n)^k would be biased downwards.
    n 4, c 1, k 2 -> 0.5. Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} from {n} samples, {c} right: give 0 <= c <= n and 1 <= k <= n")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def mean_and_interval(values: Sequence[float], z: float = 1.96) -> tuple[float, float, float]:
    """(mean, low, high) of independent values, mean -+ z * standard error (sample form), 95% at z = 1.96.

    A normal approximation, too narrow for fewer than about 20 values: of three seeds, report all three. One
    value has no interval: low and high are NaN. Raises ValueError for no values.
    """
    values = [float(v) for v in values]
    if not values:
        raise ValueError("no values to average; give at least one")
    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return mean, math.nan, math.nan
    half = z * math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n)
    return mean, mean - half, mean + half
