"""The page's tables: all points, comparisons, terms of the forecast, inputs."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..model import Analysis, Forecast, Group, Input, Line, Point, Size, Stat
from ..text import between, digits, percent, ratio, unit_of_energies, unit_of_times
from .chart_rows import near_one
from .html import Cell, Column, table, text
from .scale import amount

_FEW = 10  # reasons shown of one input


@dataclass(frozen=True)
class Figure:
    """A column of the table of points; "s" and "J" get the unit that the column reads best in."""

    title: str
    unit: str
    pick: Callable[[Point], Stat | float | None]


def _figures(analysis: Analysis) -> tuple[Figure, ...]:
    return (
        Figure("Epoch", "s", lambda point: point.epoch),
        Figure("Step", "s", lambda point: point.step),
        Figure("Throughput", "samples/s", lambda point: point.throughput),
        Figure("Speedup", "", lambda point: point.speedup),
        Figure("Efficiency", "%", lambda point: point.efficiency),
        Figure("Data wait", "%", lambda point: point.wait),
        Figure("Communication", "%", lambda point: point.communication),
        Figure("Exposed", "%", lambda point: point.exposed),
        Figure("GPU use", "% by NVML", lambda point: point.gpu_utilisation),
        Figure("Energy", "J", lambda point: point.energy),
        Figure("per sample", "J", lambda point: point.energy_per_sample),
        Figure("GPU memory", "MiB, peak", lambda point: point.peak_device),
        Figure("Host memory", "MiB, peak", lambda point: point.peak_host),
        Figure(f"{analysis.epochs_wanted} epochs", "s", lambda point: point.seconds_to_epochs),
        Figure(f"{analysis.epochs_wanted} epochs", "device-hours", lambda point: point.device_hours),
    )


def points(group: Group, analysis: Analysis) -> str:
    """Every number of a group's points; columns that nobody measured are left out."""
    rows = [(line, point) for line in group.lines for point in line.points]
    kept = [
        (figure, stats)
        for figure in _figures(analysis)
        if any(stats := [_stat(figure.pick(point)) for _, point in rows])
    ]
    scaled = [(figure, stats, *_scale(figure.unit, stats)) for figure, stats in kept]
    columns = [
        Column("Strategy", words=True),
        Column("Size"),
        Column("Runs"),
        *(Column(figure.title, unit) for figure, _, _, unit in scaled),
    ]
    cells = [
        [
            Cell(text(line.label, 60)),
            _size(point.size, group.axis),
            Cell(str(point.runs), point.runs),
            *(_figure(stats[index], factor, unit) for _, stats, factor, unit in scaled),
        ]
        for index, (line, point) in enumerate(rows)
    ]
    size = "nodes" if group.axis == "nodes" else "nodes x ranks per node"
    return table(f"Sizes are {size}; small figures the middle 95% of a bootstrap.", columns, cells, pin=True)


def _stat(found: Stat | float | None) -> Stat | None:
    return Stat(found, found, found, 1) if isinstance(found, float | int) else found


def _scale(unit: str, stats: Sequence[Stat | None]) -> tuple[float, str]:
    values = [stat.value for stat in stats if stat]
    if unit == "s":
        return unit_of_times(values)
    if unit == "J":
        return unit_of_energies(values)
    return 1.0, unit


def _size(size: Size, axis: str) -> Cell:
    return Cell(html.escape(size.text), amount(size, axis))


def _figure(stat: Stat | None, factor: float, unit: str) -> Cell:
    if stat is None:
        return Cell("–")
    if unit == "%":
        return _cell(stat, percent(stat.value).rstrip("%"), between(stat, percent).rstrip("%"))
    scaled = Stat(stat.value / factor, stat.low / factor, stat.high / factor, stat.count)
    show = digits if unit else ratio
    return _cell(stat, show(scaled.value), between(scaled, show))


def _cell(stat: Stat, shown: str, spread: str) -> Cell:
    return Cell(shown + (f'<span class="spread">{spread}</span>' if spread else ""), stat.value)


def comparisons(group: Group) -> str:
    """Time with the API relative to hand-written scripts."""
    columns = [
        Column("Strategy", words=True),
        Column("Against", words=True),
        Column("Size"),
        Column("Ratio", "1.01 is 1% slower"),
        Column("Observations"),
        Column("Of", words=True),
    ]
    rows = [
        [
            Cell(text(item.label, 60)),
            Cell(text(item.against, 60)),
            _size(item.size, group.axis),
            _cell(item.ratio, near_one(item.ratio.value), between(item.ratio, near_one)),
            Cell(str(item.ratio.count), item.ratio.count),
            Cell(f"{html.escape(item.of)} time"),
        ]
        for item in group.comparisons
    ]
    return table(
        "Time relative to the hand-written script's. Small figures: the middle 95% of a bootstrap.", columns, rows
    )


def terms(line: Line, forecast: Forecast) -> str:
    """What the forecast's time is made of."""
    columns = [
        Column("Term", words=True),
        Column("Value"),
        Column("Unit", words=True),
        Column("Standard error"),
        Column("Where it is from", words=True),
    ]
    rows = [
        [
            Cell(text(term.name)),
            Cell(digits(term.value), term.value),
            Cell(text(term.unit)),
            Cell("–") if term.high_error is None else Cell(f"± {digits(term.high_error)}", term.high_error),
            Cell(text(term.source)),
        ]
        for term in forecast.terms
    ]
    return table(f"Terms of the {forecast.of} time of {line.label[:60]}", columns, rows)


def inputs(found: Sequence[Input]) -> str:
    """What was read, and what of it was left out."""
    columns = [
        Column("Input", words=True, wide=True),
        Column("Kind", words=True),
        Column("Used", words=True),
        Column("Left out, and why", words=True, wide=True),
    ]
    rows = [
        [
            Cell(text(item.path)),
            Cell(text(item.kind)),
            Cell(text(item.used) if item.used else "nothing"),
            Cell(_reasons(item.left_out) or "–"),
        ]
        for item in found
    ]
    return table("Everything that was looked at", columns, rows)


def _reasons(left_out: Sequence[str]) -> str:
    more = [f"and {len(left_out) - _FEW} more"] if len(left_out) > _FEW else []
    return "<br>".join([*(text(reason, 200) for reason in left_out[:_FEW]), *more])
