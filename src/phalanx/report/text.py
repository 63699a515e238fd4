"""Numbers as people read them: three digits, with units, a column in one unit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from .model import Stat

_TIMES = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_FEW = 5  # ranges of numbers that are listed
_ENERGIES = ((1e6, "MJ"), (1e3, "kJ"), (1.0, "J"), (1e-3, "mJ"))

WARM_UP_IS_IN = "warm-up is in its times"  # of an analysis, and looked for by who shows it


def digits(value: float) -> str:
    """Three significant digits, or all of a larger number, with commas: `0.0123`, `1.67`, `59`, `12,346`."""
    if not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    places = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{places}f}"


def unit_of_times(seconds: Iterable[float]) -> tuple[float, str]:
    """The unit in which a column of times is read best: seconds and what it is called."""
    return _unit(seconds, _TIMES)


def unit_of_energies(joules: Iterable[float]) -> tuple[float, str]:
    return _unit(joules, _ENERGIES)


def _unit(values: Iterable[float], units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """The largest unit of which the smallest value is at least one: minutes and more only from twice on."""
    least = min((abs(value) for value in values if math.isfinite(value) and value), default=1.0)
    for size, name in units:
        if least >= (2 * size if size > 1 else size):
            return size, name
    return units[-1]


def time(seconds: float) -> str:
    """One time with its unit: `59.0 s`, `12.3 ms`, `3.4 h`."""
    size, name = unit_of_times([seconds])
    return f"{digits(seconds / size)} {name}"


def percent(share: float) -> str:
    """`85%`; one digit more below ten."""
    if not math.isfinite(share):
        return "–"
    return f"{share * 100:.0f}%" if abs(share) >= 0.0995 or share == 0 else f"{share * 100:.1f}%"


def ratio(value: float) -> str:
    """`1.67`, `12.3`: a speedup, with as many places as tell two sizes apart."""
    return f"{value:.{2 if abs(value) < 10 else 1}f}" if math.isfinite(value) else "–"


def between(stat: Stat, show: Callable[[float], str] = ratio) -> str:
    """`1.80–1.91`; empty for a single observation, which has no spread."""
    if stat.count < 2 or stat.low == stat.high:
        return ""
    low, high = show(stat.low), show(stat.high)
    return f"{low.removesuffix('%')}–{high}" if low != high else ""


def shown(text: str) -> str:
    """Without what steers a terminal or breaks a line of a table: names are what files say."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def count(number: int, what: str) -> str:
    """`1 run`, `3 runs`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def numbers(what: str, found: Iterable[float]) -> str:
    """`step 3`, `ranks 1, 2, 5 to 9`, and how many if there are more ranges than one wants to read."""
    ordered = sorted({int(number) for number in found})
    ranges: list[list[int]] = []
    for number in ordered:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    words = [str(first) if first == last else f"{first} to {last}" for first, last in ranges]
    if len(words) > _FEW:
        words = [*words[: _FEW - 1], "…", f"{words[-1]} ({len(ordered):,} of them)"]
    return f"{what}{'s' * (len(ordered) > 1)} {', '.join(words)}"
