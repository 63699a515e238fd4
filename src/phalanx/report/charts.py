"""What is drawn of an analysis, whoever draws it: the page and the plots for papers show the same charts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from .axis import amount, labels, log_ticks, positions
from .model import Analysis, Group, Line, Point, Size, Stat
from .text import between, count, digits, percent, unit_of_energies, unit_of_times

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


def charts_of(group: Group, analysis: Analysis) -> list[Chart]:
    """All charts that there is data for."""
    sizes = _sizes(group.lines)
    several: list[Chart | None] = []
    if len(sizes) > 1:
        several = [_over_sizes(group, quantity) for quantity in _quantities(analysis)]
    elif len(group.lines) > 1:
        several = [_side_by_side(group, quantity) for quantity in _quantities(analysis)]
    found = [_speedup(group), _efficiency(group, analysis), *several[:3], _breakdown(group)]
    found += [_forecast_time(group), _forecast_efficiency(group, analysis), _comparison(group), *several[3:]]
    return [chart for chart in found if chart is not None]


def _quantities(analysis: Analysis) -> tuple[Quantity, ...]:
    spread = "Bars span the middle 95% of a bootstrap."
    return (
        Quantity("epoch_time", "Epoch time", "s", lambda point: point.epoch, spread),
        Quantity("step_time", "Step time", "s", lambda point: point.step, "Slowest rank of each step. " + spread),
        Quantity("throughput", "Throughput", "samples/s", lambda point: point.throughput, "All ranks together."),
        Quantity(
            "device_hours",
            f"Cost of {analysis.epochs_wanted} epochs",
            "device-hours",
            lambda point: point.device_hours,
            "Time to that many epochs times devices.",
        ),
        Quantity("gpu_utilisation", "GPU utilisation", "%", lambda point: point.gpu_utilisation, "Mean, by NVML."),
        Quantity("energy", "Energy of a run", "J", lambda point: point.energy, "All GPUs, by NVML."),
        Quantity("energy_per_sample", "Energy per sample", "J", lambda point: point.energy_per_sample),
        Quantity("memory_device", "Peak GPU memory", "GiB", lambda point: _gib(point.peak_device), _FULLEST),
        Quantity("memory_host", "Peak host memory", "GiB", lambda point: _gib(point.peak_host), _FULLEST),
    )


_FULLEST = "Of the rank that has most."


def _gib(mib: float | None) -> float | None:
    return None if mib is None else mib / 1024


# --- curves over sizes


def _over_sizes(group: Group, quantity: Quantity) -> Lines | None:
    stats = [_stat(quantity.pick(point)) for line in group.lines for point in line.points]
    scale, unit = _unit(quantity.unit, [stat.value for stat in stats if stat])
    places = positions(_sizes(group.lines), group.axis)
    curves = _curves(group, places, quantity.pick, scale, lambda stat: _words(stat, scale, unit))
    limit = 100.0 if unit == "%" else None
    return _lines(group, quantity.key, quantity.title, unit, places, curves, quantity.caption, full=limit)


def _sizes(lines: Iterable[Line]) -> set[Size]:
    return {point.size for line in lines for point in line.points}


def _stat(found: Stat | float | None) -> Stat | None:
    """Only what can be drawn."""
    if isinstance(found, float | int):
        found = Stat(found, found, found, 1)
    return found if found is not None and math.isfinite(found.value) else None


def _unit(unit: str, values: Sequence[float]) -> tuple[float, str]:
    if unit == "s":
        return unit_of_times(values)
    return unit_of_energies(values) if unit == "J" else (1.0, unit)


def _words(stat: Stat, scale: float, unit: str) -> str:
    scaled = Stat(stat.value / scale, stat.low / scale, stat.high / scale, stat.count)
    spread = between(scaled) if unit == "times" else between(scaled, digits)
    return f"{digits(scaled.value)} {unit}" + (f" ({spread})" if spread else "")


def _curves(
    group: Group, places: dict[Size, float], pick: Pick, scale: float, words: Callable[[Stat], str]
) -> list[Curve]:
    """A line through the sizes; where several have the same ranks, through the one on fewest nodes."""
    found = []
    for line in group.lines:
        through: dict[int, Mark] = {}
        aside: list[Mark] = []
        for point in line.points:
            stat = _stat(pick(point))
            if stat is None:
                continue
            mark = _mark(
                places[point.size], stat, scale, (f"{line.label} {point.size.text}", words(stat), _runs(point))
            )
            if amount(point.size, group.axis) in through:
                aside.append(mark)
            else:
                through[amount(point.size, group.axis)] = mark
        found.append(Curve(line.label, "measured", tuple(through.values()), line.label))
        found.append(Curve(f"{line.label}, same ranks on more nodes", "aside", tuple(aside), line.label))
    return [curve for curve in found if curve.marks]


def _runs(point: Point) -> str:
    return count(point.runs, "run")


def _mark(x: float, stat: Stat, scale: float, text: tuple[str, ...]) -> Mark:
    spread = math.isfinite(stat.low) and math.isfinite(stat.high) and stat.low < stat.high
    return Mark(
        x,
        stat.value / scale,
        min(stat.low, stat.value) / scale if spread else None,
        max(stat.high, stat.value) / scale if spread else None,
        text,
    )


def _lines(
    group: Group,
    key: str,
    title: str,
    unit: str,
    places: dict[Size, float],
    curves: list[Curve],
    caption: str = "",
    doubling: bool = False,
    full: float | None = None,
) -> Lines | None:
    """The chart, if there is something measured or forecast in it. `full`: the highest that a value can be."""
    if not any(curve.label for curve in curves):
        return None
    ends = [end for curve in curves for mark in curve.marks for end in (mark.y, mark.low, mark.high) if end is not None]
    low, high = min(ends), max(ends)
    log = full is None and low > 0 and high >= 2 * low
    bounds = (low / 1.15, high * 1.15) if log else (0.0, max(high, full or 0.0) * 1.06)
    return Lines(
        key=key,
        title=title,
        x_title="nodes" if group.axis == "nodes" else "nodes x ranks per node",
        y_title=f"{title} ({unit})" if unit else title,
        x_ticks=labels(places, sorted(_sizes(group.lines))),
        curves=tuple(curves),
        caption=caption,
        log=log,
        y_ticks=log_ticks(*bounds, doubling) if log else (),
        y_range=bounds,
    )


# --- against the smallest run


def _speedup(group: Group) -> Lines | None:
    lines = [line for line in group.lines if len(line.points) > 1]
    places = positions(_sizes(lines), group.axis)
    sub = _only(group, lines)
    curves = _curves(sub, places, lambda point: point.speedup, 1, lambda stat: _words(stat, 1, "times"))
    bases = sorted({line.base for line in lines})
    for base in bases if curves else ():
        sizes = [size for size in places if amount(size, group.axis) >= amount(base, group.axis)]
        marks = [_ideal(size, base, group.axis, places) for size in sizes]
        curves.append(Curve("ideal" if len(bases) == 1 else f"ideal from {base.text}", "ideal", tuple(marks)))
    against = bases[0].text if len(bases) == 1 else "each curve's smallest"
    what = "Scaled speedup" if any(line.scaling == "weak" for line in lines) else "Speedup"
    return _lines(sub, "speedup", what, f"against {against}", places, curves, _of(lines), doubling=True)


def _only(group: Group, lines: list[Line]) -> Group:
    return Group(group.title, group.work, group.axis, tuple(lines))


def _ideal(size: Size, base: Size, axis: str, places: dict[Size, float]) -> Mark:
    times = amount(size, axis) / amount(base, axis)
    return Mark(places[size], times, None, None, (f"ideal {size.text}", f"{digits(times)} times"))


def _of(lines: list[Line]) -> str:
    """What the speedup is of."""
    words = {"epoch": "of epochs", "sample": "of a sample", "step": "of steps"}
    return f"From the time {' and '.join(sorted({words.get(line.of, line.of) for line in lines}))}."


def _efficiency(group: Group, analysis: Analysis) -> Lines | None:
    lines = [line for line in group.lines if len(line.points) > 1]
    places = positions(_sizes(lines), group.axis)
    sub = _only(group, lines)
    curves = _curves(sub, places, lambda point: point.efficiency, 0.01, _percents)
    curves += _levels(places, analysis.efficiency_wanted) if curves else []
    return _lines(sub, "efficiency", "Efficiency", "%", places, curves, _of(lines), full=100.0)


def _percents(stat: Stat) -> str:
    spread = between(stat, percent)
    return percent(stat.value) + (f" ({spread})" if spread else "")


def _levels(places: dict[Size, float], wanted: float) -> list[Curve]:
    ends = (min(places.values()), max(places.values()))
    return [
        Curve(name, kind, tuple(Mark(x, share * 100, None, None, (f"{name} {percent(share)}",)) for x in ends))
        for name, kind, share in (("ideal", "ideal", 1.0), ("wanted", "wanted", wanted))
    ]


# --- what would be


def _forecast_time(group: Group) -> Lines | None:
    """Measured steps, and the forecast's line in its band."""
    lines = [line for line in group.lines if line.forecast and line.forecast.curve]
    rows = [row for line in lines for row in line.forecast.curve if line.forecast]  # type: ignore[union-attr]
    if not rows:
        return None
    scale, unit = unit_of_times([row[2] for row in rows])
    sizes = _sizes(lines) | {Size(row[0], row[1]) for row in rows}
    places = positions(sizes, group.axis)
    curves = []
    for line in lines:
        marks = [
            _mark(places[size], stat, scale, (f"{line.label} {size.text}, forecast", _words(stat, scale, unit)))
            for size, stat, _ in _curve(line)
        ]
        curves.append(Curve(f"{line.label}, forecast", "forecast", tuple(marks), line.label))
    curves += _curves(_only(group, lines), places, lambda point: point.step, scale, lambda s: _words(s, scale, unit))
    title = "Step time: measured and forecast"
    chart = _lines(_only(group, lines), "forecast", title, unit, places, curves, _FORECAST)
    return chart and _titled(chart, f"Step time ({unit})")


_FORECAST = "The line is the model of the step, its band the model's error; points are what was measured."


def _titled(chart: Lines, y_title: str) -> Lines:
    return Lines(**{**vars(chart), "y_title": y_title})


def _curve(line: Line) -> list[tuple[Size, Stat, float]]:
    """(size, seconds a step, efficiency) of a forecast that can be drawn."""
    rows = line.forecast.curve if line.forecast else ()
    return [
        (Size(nodes, ranks), Stat(seconds, low, high, 2), efficiency)
        for nodes, ranks, seconds, low, high, efficiency in rows
        if math.isfinite(seconds)
    ]


def _forecast_efficiency(group: Group, analysis: Analysis) -> Lines | None:
    lines = [line for line in group.lines if _curve(line)]
    places = positions(_sizes(lines) | {size for line in lines for size, _, _ in _curve(line)}, group.axis)
    curves = [
        Curve(
            f"{line.label}, forecast",
            "forecast",
            tuple(
                Mark(places[size], share * 100, None, None, (f"{line.label} {size.text}, forecast", percent(share)))
                for size, _, share in _curve(line)
                if math.isfinite(share)
            ),
            line.label,
        )
        for line in lines
    ]
    curves = [curve for curve in curves if curve.marks]
    if curves:
        curves += _curves(_only(group, lines), places, lambda point: point.efficiency, 0.01, _percents)
        curves += _levels(places, analysis.efficiency_wanted)
    title = "Efficiency: measured and forecast"
    sub = _only(group, lines)
    chart = _lines(sub, "forecast_efficiency", title, "%", places, curves, _FORECAST, full=100.0)
    return chart and _titled(chart, "Efficiency (%)")


# --- rows


def _side_by_side(group: Group, quantity: Quantity) -> Rows | None:
    """All labels at the one size that there is."""
    stats = [_stat(quantity.pick(line.points[0])) for line in group.lines]
    scale, unit = _unit(quantity.unit, [stat.value for stat in stats if stat])
    marks = tuple(
        _mark(0, stat, scale, (line.label, _words(stat, scale, unit), _runs(line.points[0]))) if stat else None
        for line, stat in zip(group.lines, stats, strict=True)
    )
    if not any(marks):
        return None
    rows = tuple((line.label, line.label) for line in group.lines)
    title = f"{quantity.title} at {group.lines[0].points[0].size.text}"
    part = Part(quantity.title, "", marks)
    return Rows(quantity.key, title, f"{quantity.title} ({unit})", "bars", rows, (part,), quantity.caption)


def _breakdown(group: Group) -> Rows | None:
    """What a step is spent on, as far as it is known."""
    points = [(line, point) for line in group.lines for point in line.points if _known(point)]
    if not points:
        return None
    shares = [_shares(point) for _, point in points]
    names = {
        "wait": "data wait",
        "exposed": "exposed communication",
        "rest": "compute and rest",
        "unknown": "not profiled",
    }
    parts = [
        Part(
            name,
            role,
            tuple(_share(line, point, name, shares[index].get(role)) for index, (line, point) in enumerate(points)),
        )
        for role, name in names.items()
        if any(own.get(role) for own in shares)
    ]
    rows = tuple((f"{line.label} {point.size.text}", line.label) for line, point in points)
    caption = "Waiting is measured in all steps, exposed communication in the profiled window."
    return Rows("breakdown", "What a step is spent on", "share of a step (%)", "stack", rows, tuple(parts), caption)


def _known(point: Point) -> bool:
    return _stat(point.wait) is not None or _stat(point.exposed) is not None


def _shares(point: Point) -> dict[str, float]:
    wait, exposed = _stat(point.wait), _stat(point.exposed)
    found = {"wait": wait.value if wait else 0.0, "exposed": exposed.value if exposed else 0.0}
    return {**found, "rest" if exposed else "unknown": max(0.0, 1 - sum(found.values()))}


def _share(line: Line, point: Point, name: str, share: float | None) -> Mark | None:
    if share is None:
        return None
    return Mark(share * 100, share * 100, None, None, (f"{line.label} {point.size.text}", f"{name} {percent(share)}"))


def _comparison(group: Group) -> Rows | None:
    """Time with the API relative to a hand-written script's."""
    found = [(item, stat) for item in group.comparisons if (stat := _stat(item.ratio))]
    if not found:
        return None
    rows = tuple((f"{item.label} {item.size.text}", item.label) for item, _ in found)
    marks = tuple(
        _mark(
            stat.value, stat, 1, (f"{item.label} {item.size.text}", f"against {item.against}", _words(stat, 1, "times"))
        )
        for item, stat in found
    )
    what = " and ".join(sorted({f"{item.of} time" for item, _ in found}))
    title = "Against hand-written baselines"
    caption = "Right of 1 is slower than the hand-written script."
    return Rows(
        "baselines", title, f"{what}, relative to the baseline", "dots", rows, (Part(what, "", marks),), caption, 1.0
    )
