"""Charts of curves over sizes: measured, against the smallest run, and forecast."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ..analyse.recommendation import like_its_points
from ..model import Analysis, Forecast, Group, Line, Size, Stat
from ..text import between, percent, ratio, unit_of_times
from .chart_values import Curve, Lines, Mark, Pick, Quantity, drawable, mark_of, runs_of, sizes_of, unit_of, words_of
from .scale import amount, counted, labels, log_ticks, order, positions


def over_sizes(group: Group, quantity: Quantity) -> Lines | None:
    stats = [drawable(quantity.pick(point)) for line in group.lines for point in line.points]
    scale, unit = unit_of(quantity.unit, [stat.value for stat in stats if stat])
    places = positions(sizes_of(group.lines), group.axis)
    curves = _curves(group, places, quantity.pick, scale, lambda stat: words_of(stat, scale, unit))
    limit = 100.0 if unit == "%" else None if quantity.proportional else 0.0
    return _lines(group, quantity.key, quantity.title, unit, places, curves, quantity.caption, full=limit)


def _curves(
    group: Group,
    places: dict[Size, float],
    pick: Pick,
    scale: float,
    words: Callable[[Stat], str],
    named: Callable[[Line], str] = lambda line: line.label,
) -> list[Curve]:
    """A line through the sizes; where several have the same ranks, through the one on fewest nodes."""
    found = []
    for line in group.lines:
        through: dict[int, Mark] = {}
        aside: list[Mark] = []
        for point in sorted(line.points, key=lambda point: order(group.axis)(point.size)):
            stat = drawable(pick(point))
            if stat is None:
                continue
            mark = mark_of(
                places[point.size], stat, scale, (f"{line.label} {point.size.text}", words(stat), runs_of(point))
            )
            if amount(point.size, group.axis) in through:
                aside.append(mark)
            else:
                through[amount(point.size, group.axis)] = mark
        found.append(Curve(named(line), "measured", tuple(through.values()), line.label))
        found.append(Curve(f"{named(line)}, same ranks on more nodes", "aside", tuple(aside), line.label))
    return [curve for curve in found if curve.marks]


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
    """The chart, if there is something measured or forecast in it. `full`: the highest that a value can be, for
    axes that begin at zero; None for logarithmic ones, if values are that far apart."""
    if not any(curve.label for curve in curves):
        return None
    ends = [end for curve in curves for mark in curve.marks for end in (mark.y, mark.low, mark.high) if end is not None]
    low, high = min(ends), max(ends)
    log = full is None and low > 0 and high >= 2 * low
    bounds = (low / 1.15, high * 1.15) if log else (0.0, max(high, full or 0.0) * 1.06)
    return Lines(
        key=key,
        title=title,
        x_title="nodes" if group.axis == "nodes" else counted(places),
        y_title=_y_title(title, unit, log),
        x_ticks=labels(places, sorted(sizes_of(group.lines), key=order(group.axis))),
        curves=tuple(curves),
        caption=caption,
        log=log,
        y_ticks=log_ticks(*bounds, doubling) if log else (),
        y_range=bounds,
    )


def _y_title(title: str, unit: str, log: bool) -> str:
    words = [*([unit] if unit else []), *(["log scale"] if log else [])]
    return f"{title} ({', '.join(words)})" if words else title


# --- against the smallest run


def speedup(group: Group) -> Lines | None:
    lines = [line for line in group.lines if len(line.points) > 1]
    places = positions(sizes_of(lines), group.axis)
    sub = _only(group, lines)
    curves = _curves(
        sub, places, lambda point: point.speedup, 1, lambda stat: words_of(stat, 1, "times", ratio), _named(lines)
    )
    bases = sorted({line.base for line in lines}, key=order(group.axis))
    for base in bases if curves else ():
        sizes = [size for size in places if amount(size, group.axis) >= amount(base, group.axis)]
        marks = [_ideal(size, base, group.axis, places) for size in sizes]
        curves.append(Curve("ideal" if len(bases) == 1 else f"ideal from {base.text}", "ideal", tuple(marks)))
    against = bases[0].text if len(bases) == 1 else "each curve's smallest"
    what = "Scaled speedup" if any(line.scaling == "weak" for line in lines) else "Speedup"
    return _lines(sub, "speedup", what, f"against {against}", places, curves, _of(lines), doubling=True)


def _only(group: Group, lines: Sequence[Line]) -> Group:
    return replace(group, lines=tuple(lines))


def _ideal(size: Size, base: Size, axis: str, places: dict[Size, float]) -> Mark:
    times = amount(size, axis) / amount(base, axis)
    return Mark(places[size], times, None, None, (f"ideal {size.text}", f"{ratio(times)} times"))


_OF = {"epoch": "of epochs", "sample": "of a sample", "step": "of steps"}


def _of(lines: Sequence[Line]) -> str:
    """What the speedup is of."""
    return f"From the time {' and '.join(sorted({_OF.get(line.of, line.of) for line in lines}))}."


def _named(lines: Sequence[Line]) -> Callable[[Line], str]:
    """Curves of different quantities in one chart say which each is of."""
    if len({line.of for line in lines}) < 2:
        return lambda line: line.label
    return lambda line: f"{line.label}, {_OF.get(line.of, line.of)}"


def efficiency(group: Group, analysis: Analysis) -> Lines | None:
    lines = [line for line in group.lines if len(line.points) > 1]
    places = positions(sizes_of(lines), group.axis)
    sub = _only(group, lines)
    curves = _curves(sub, places, lambda point: point.efficiency, 0.01, _percents, _named(lines))
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


def forecast_time(group: Group, of: str) -> Lines | None:
    """Measured steps or epochs (`of`), and the line in its band of each forecast that is of these."""
    found = {line: rows for line in group.lines if (rows := _rows(_forecast_of(line, of)))}
    scale, unit = unit_of_times([stat.value for rows in found.values() for _, stat, _ in rows])
    places = _forecast_places(group, found)
    curves = []
    for line, rows in found.items():
        marks = [
            mark_of(places[size], stat, scale, (f"{line.label} {size.text}, forecast", words_of(stat, scale, unit)))
            for size, stat, _ in rows
        ]
        curves.append(Curve(f"{line.label}, forecast", "forecast", tuple(marks), line.label))
    sub = _only(group, list(found))
    curves += _curves(sub, places, lambda point: getattr(point, of), scale, lambda stat: words_of(stat, scale, unit))
    title, key = f"{of.capitalize()} time: measured and forecast", "forecast" if of == "step" else f"forecast_{of}"
    caption = f"The line is the model of the {of}, its band the model's error; points are what was measured."
    chart = _lines(sub, key, title, unit, places, curves, caption)
    return chart and replace(chart, y_title=_y_title(f"{of.capitalize()} time", unit, chart.log))


_Rows = list[tuple[Size, Stat, float]]


def _forecast_of(line: Line, of: str) -> Forecast | None:
    return next((found for found in (line.forecast, line.step_forecast) if found and found.of == of), None)


def _forecast_places(group: Group, found: Mapping[Line, _Rows]) -> dict[Size, float]:
    return positions(sizes_of(found) | {size for rows in found.values() for size, _, _ in rows}, group.axis)


def _rows(forecast: Forecast | None) -> _Rows:
    """(size, seconds, efficiency) of a forecast that can be drawn."""
    return [
        (Size(nodes, ranks), Stat(seconds, low, high, 2), efficiency)
        for nodes, ranks, seconds, low, high, efficiency in (forecast.curve if forecast else ())
        if math.isfinite(seconds)
    ]


def forecast_efficiency(group: Group, analysis: Analysis) -> Lines | None:
    """Lines and points of one quantity: a forecast of another than its points are isn't drawn over them."""
    found = {line: rows for line in group.lines if like_its_points(line) and (rows := _rows(line.forecast))}
    places = _forecast_places(group, found)
    curves = [
        Curve(
            f"{line.label}, forecast",
            "forecast",
            tuple(
                Mark(places[size], share * 100, None, None, (f"{line.label} {size.text}, forecast", percent(share)))
                for size, _, share in rows
                if math.isfinite(share)
            ),
            line.label,
        )
        for line, rows in found.items()
    ]
    curves = [curve for curve in curves if curve.marks]
    lines = list(found)
    if curves:
        points = lambda point: point.efficiency  # noqa: E731
        curves += _curves(_only(group, lines), places, points, 0.01, _percents, _named(lines))
        curves += _levels(places, analysis.efficiency_wanted)
    title, caption = "Efficiency: measured and forecast", f"The line is the model, points were measured. {_of(lines)}"
    chart = _lines(_only(group, lines), "forecast_efficiency", title, "%", places, curves, caption, full=100.0)
    return chart and replace(chart, y_title="Efficiency (%)")
