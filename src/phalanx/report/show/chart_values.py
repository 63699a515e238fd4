"""Charts as values, without a library's terms."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ..model import Line, Point, Size, Stat
from ..text import between, count, digits, unit_of_energies, unit_of_times

Ticks = tuple[tuple[float, str], ...]
Pick = Callable[[Point], "Stat | float | None"]


@dataclass(frozen=True)
class Mark:
    """A value at a size, in the chart's unit; `low` and `high` None where there was one observation."""

    x: float
    y: float
    low: float | None
    high: float | None
    text: tuple[str, ...]  # lines that tell all of it


@dataclass(frozen=True)
class Curve:
    """`kind`: "measured"; "aside", points that no line goes through, since others have the same ranks on fewer nodes;
    "forecast", a line in its band; "ideal" and "wanted", lines to compare with. `label`: whose look it has."""

    name: str
    kind: str
    marks: tuple[Mark, ...]
    label: str = ""


@dataclass(frozen=True)
class Lines:
    """Curves over sizes. `y_range` is set for logarithmic axes; others begin at zero."""

    key: str
    title: str
    x_title: str
    y_title: str
    x_ticks: Ticks
    curves: tuple[Curve, ...]
    caption: str = ""
    log: bool = False
    y_ticks: Ticks = ()
    y_range: tuple[float, float] | None = None


@dataclass(frozen=True)
class Part:
    """One value a row; `role` is a key of palette.PARTS, or empty: rows have their labels' looks."""

    name: str
    role: str
    marks: tuple[Mark | None, ...]


@dataclass(frozen=True)
class Rows:
    """Horizontal: "stack" of parts, "bars" from zero, or "dots" beside a `reference`. `rows`: (text, label)."""

    key: str
    title: str
    x_title: str
    kind: str
    rows: tuple[tuple[str, str], ...]
    parts: tuple[Part, ...]
    caption: str = ""
    reference: float | None = None

    @property
    def places(self) -> tuple[float, ...]:
        """Where rows stand, from the top: with a gap between labels."""
        steps = [0.0] + [1.0 if one == other else 1.5 for (_, one), (_, other) in pairwise(self.rows)]
        return tuple(accumulate(steps))


Chart = Lines | Rows


@dataclass(frozen=True)
class Quantity:
    """What a chart shows of points."""

    key: str
    title: str
    unit: str  # "s" and "J" are scaled to what reads best
    pick: Pick
    caption: str = ""
    proportional: bool = False  # to the size, in the ideal: a straight line where both axes are logarithmic


def sizes_of(lines: Iterable[Line]) -> set[Size]:
    return {point.size for line in lines for point in line.points}


def drawable(found: Stat | float | None) -> Stat | None:
    """Only what can be drawn."""
    if isinstance(found, float | int):
        found = Stat(found, found, found, 1)
    return found if found is not None and math.isfinite(found.value) else None


def unit_of(unit: str, values: Sequence[float]) -> tuple[float, str]:
    if unit == "s":
        return unit_of_times(values)
    return unit_of_energies(values) if unit == "J" else (1.0, unit)


def words_of(stat: Stat, scale: float, unit: str, show: Callable[[float], str] = digits) -> str:
    """`81.2 ms (80.1–83.0)`."""
    scaled = Stat(stat.value / scale, stat.low / scale, stat.high / scale, stat.count)
    spread = between(scaled, show)
    return f"{show(scaled.value)} {unit}" + (f" ({spread})" if spread else "")


def runs_of(point: Point) -> str:
    return count(point.runs, "run")


def mark_of(x: float, stat: Stat, scale: float, text: tuple[str, ...]) -> Mark:
    spread = math.isfinite(stat.low) and math.isfinite(stat.high) and stat.low < stat.high
    return Mark(
        x,
        stat.value / scale,
        min(stat.low, stat.value) / scale if spread else None,
        max(stat.high, stat.value) / scale if spread else None,
        text,
    )
