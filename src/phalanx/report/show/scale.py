"""Where sizes stand on an axis, and which ticks an axis has."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from ..model import Size
from ..text import digits

_MOST_LABELS = 12
_BOTH = "nodes x ranks per node"
_GAP = 0.4  # octaves between sizes that would stand on one another


def amount(size: Size, axis: str) -> int:
    """What makes a size large: its ranks, or its nodes where ranks aren't known."""
    return size.nodes if axis == "nodes" or size.ranks is None else size.ranks


def order(axis: str) -> Callable[[Size], tuple[int, int, int]]:
    """The key to sort sizes by: of the same ranks, first those on fewest nodes."""
    return lambda size: (amount(size, axis), size.nodes, size.ranks or 0)


def positions(sizes: Iterable[Size], axis: str) -> dict[Size, float]:
    """log2 of ranks; sizes with the same ranks on other nodes stand side by side, each with a place of its own."""
    ordered = sorted(set(sizes), key=order(axis))
    if not ordered:
        return {}
    exact = [math.log2(max(1, amount(size, axis))) for size in ordered]
    span = exact[-1] - exact[0]
    gap = min(_GAP, span / (2 * len(ordered))) if span else _GAP
    return dict(zip(ordered, spread(exact, gap), strict=True))


def spread(values: Sequence[float], gap: float) -> list[float]:
    """The places nearest to rising `values` that are `gap` or more apart: pools of equal ones keep their middle."""
    pools: list[tuple[float, int]] = []  # (mean of value - index * gap, how many)
    for index, value in enumerate(values):
        mean, count = value - index * gap, 1
        while pools and pools[-1][0] > mean:
            other, more = pools.pop()
            mean, count = (mean * count + other * more) / (count + more), count + more
        pools.append((mean, count))
    flat = [mean for mean, count in pools for _ in range(count)]
    return [mean + index * gap for index, mean in enumerate(flat)]


def labels(places: dict[Size, float], first: Iterable[Size] = ()) -> tuple[tuple[float, str], ...]:
    """Ticks (place, text) of sizes, those of `first` before others, as many as can be read."""
    if not places:
        return ()
    near = (max(places.values()) - min(places.values())) / _MOST_LABELS
    kept: dict[Size, float] = {}
    for size in [*first, *places]:
        place = places[size]
        if size not in kept and all(abs(place - other) >= near for other in kept.values()):
            kept[size] = place
    alone = counted(places) != _BOTH  # then the axis says what is counted
    ticks = sorted(kept.items(), key=lambda item: item[1])
    return tuple((place, str(size.ranks or size.nodes) if alone else size.text) for size, place in ticks)


def counted(sizes: Iterable[Size]) -> str:
    """What an axis of these sizes counts."""
    sizes = list(sizes)
    if sizes and all(size.nodes == 0 for size in sizes):
        return "ranks"
    return "nodes" if sizes and all(size.ranks is None for size in sizes) else _BOTH


def log_ticks(low: float, high: float, doubling: bool = False) -> tuple[tuple[float, str], ...]:
    """Ticks of a logarithmic axis: powers of two, or 1, 2 and 5 times powers of ten; fewer on a long axis."""
    if doubling:
        powers = range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)
        found = [2.0**power for power in powers][:: max(1, len(powers) // 10)]
    else:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        steps = (1, 1.5, 2, 3, 5, 7) if high < 10 * low else (1, 2, 5) if high < 1000 * low else (1,)
        found = [step * 10.0**decade for decade in decades for step in steps]
    return tuple((value, _short(value)) for value in found if low <= value <= high)


def _short(value: float) -> str:
    text = digits(value)
    return text.rstrip("0").rstrip(".") if "." in text else text
