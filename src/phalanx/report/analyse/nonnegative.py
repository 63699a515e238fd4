"""Least squares with no negative answer, for a handful of unknowns and many right-hand sides at once."""

from __future__ import annotations

from itertools import combinations

import numpy as np

from ..model import Numbers


def solve(rows: Numbers, values: Numbers) -> Numbers:
    """The `x >= 0` that makes `rows @ x` nearest to each column of `values`: unknowns x columns.

    `rows` is observations x unknowns. Every set of unknowns that may be above zero is tried: 2**unknowns of them.
    """
    unknowns, columns = rows.shape[1], values.shape[1]
    best = np.zeros((unknowns, columns))
    least = (values**2).sum(axis=0)
    for number in range(1, unknowns + 1):
        for chosen in map(list, combinations(range(unknowns), number)):
            found = np.linalg.pinv(rows[:, chosen]) @ values
            left = ((rows[:, chosen] @ found - values) ** 2).sum(axis=0)
            better = (found >= 0).all(axis=0) & (left < least * (1 - 1e-9))
            best[:, better] = 0.0
            best[np.ix_(chosen, better)] = found[:, better]
            least = np.where(better, left, least)
    return best


def determined(rows: Numbers) -> bool:
    """Whether the rows tell all their columns apart."""
    return bool(len(rows) >= rows.shape[1] and np.linalg.matrix_rank(rows, tol=1e-6) == rows.shape[1])
