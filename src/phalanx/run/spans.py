"""Stretches of time, and what they cover together."""

from __future__ import annotations

from collections.abc import Iterable

Span = tuple[float, float]  # begin and end


def union(spans: Iterable[Span]) -> list[Span]:
    """The same time as stretches that don't overlap, in order."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif end > begin:
            found.append((begin, end))
    return found


def covered(spans: list[Span]) -> float:
    """How long stretches take that don't overlap."""
    return sum(end - begin for begin, end in spans)


def beside(spans: list[Span], others: list[Span]) -> float:
    """How long `spans` and `others` go on at once; each as `union` gives it."""
    total, at = 0.0, 0
    for begin, end in spans:
        while at < len(others) and others[at][1] <= begin:
            at += 1
        index = at
        while index < len(others) and others[index][0] < end:
            total += min(end, others[index][1]) - max(begin, others[index][0])
            index += 1
    return total
