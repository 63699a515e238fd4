"""Medians with an interval, as plain arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import median


@dataclass(frozen=True)
class Estimate:
    """A median and its distribution-free interval of at least 95%, by order statistics."""

    median: float
    low: float
    high: float


def estimate(values: Sequence[float]) -> Estimate:
    """The median of `values`, which must be independent and at least six for a 95% interval."""
    ordered = sorted(values)
    cut = _outside(len(ordered))
    return Estimate(median(ordered), ordered[cut], ordered[-1 - cut])


def _outside(count: int) -> int:
    """How many values may be left out on each side: the chance that the median is among them is ≤ 2.5%."""
    cut, chance = -1, 0.0
    while cut < (count - 1) // 2:
        chance += comb(count, cut + 1) / 2**count
        if chance > 0.025:
            break
        cut += 1
    return max(0, cut)
