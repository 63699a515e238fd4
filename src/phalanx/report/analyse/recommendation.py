"""Is the next size worth it? One sentence or two a line, and how sure they are."""

from __future__ import annotations

from collections.abc import Sequence

from ..model import Line, Point, Size
from ..text import between, digits, percent, ratio

_FARTHEST = 16  # times the largest size that was run: forecasts go no further
_CREDIBLE = 1.25  # efficiencies somewhat above 100% there are: a smaller share may fit a cache


def verdict(line: Line, wanted: float) -> str:
    """What the measured sizes say of a line, and then its forecast; `wanted` is the efficiency that is worth it."""
    measured = [point for point in line.points if point.efficiency is not None]
    if len(measured) < 2:
        return f"Only {line.base.text} has times to compare: run another size to see whether more is worth it."
    strange = next((point for point in measured if point.efficiency and point.efficiency.low > _CREDIBLE), None)
    if strange is not None:
        return (
            f"Run {line.base.text} again: {strange.size.text} has {_gain(line, strange)}. That is far more than the "
            f"ideal: something slowed {line.base.text} (another job, too little memory), or its work is another."
        )
    kept, beyond = _walk(measured, wanted)
    if beyond is not None:
        return f"{_stop(line, kept, beyond, wanted)}{_beyond(line, kept, wanted)}"
    return f"{_worth(line, kept, wanted)}{_beyond(line, kept, wanted)}"


def recommended(line: Line, wanted: float) -> Point:
    """The largest size before one that isn't worth it."""
    return _walk(line.points, wanted)[0]


def _walk(points: Sequence[Point], wanted: float) -> tuple[Point, Point | None]:
    """The size to take, and the one at which to stop, if there is one.

    More ranks are worth it if they are efficient enough and faster than the size before. The same
    ranks on more nodes are no more: they are taken if they are faster, and passed over otherwise."""
    kept, passed = points[0], None
    for point in points[1:]:
        faster = _gained(point) > _gained(kept)
        if growth(kept.size, point.size)[0] <= 1:
            kept, passed = (point, passed) if faster else (kept, point)
        elif faster and _keeps(point, wanted):
            kept, passed = point, None
        else:
            return kept, point
    return kept, passed if kept is points[0] else None


def _gained(point: Point) -> float:
    return point.speedup.value if point.speedup else 0.0


def _keeps(point: Point, wanted: float) -> bool:
    return point.efficiency is not None and point.efficiency.value >= wanted


def _worth(line: Line, point: Point, wanted: float) -> str:
    largest = ", the largest that was run," if point is line.points[-1] else ""
    text = f"{point.size.text}{largest} is worth it: {_gain(line, point)}"
    return f"{text}{_doubt(point, wanted)}."


def _stop(line: Line, kept: Point, point: Point, wanted: float) -> str:
    text = f"Stay at {kept.size.text}: {point.size.text} is not worth it: {_gain(line, point)}"
    assert point.efficiency is not None
    share = point.efficiency.value
    if _gained(point) <= _gained(kept):
        faster = "faster" if kept is line.points[0] else f"faster than {kept.size.text}"
        return f"{text}, and no {faster}."
    exactly = f" ({share * 100:.2f}%)" if percent(share) == percent(wanted) else ""
    return f"{text}{exactly}, less than the {percent(wanted)} that are wanted{_doubt(point, wanted)}."


def _gain(line: Line, point: Point) -> str:
    """`1.67 times 1x4 with 2 times the ranks, an efficiency of 83%`."""
    assert point.speedup is not None
    assert point.efficiency is not None
    more, what = growth(line.base, point.size)
    work = "work done" if line.scaling == "weak" else "speed"
    times = f"as many {what}" if more == 1 else f"{digits(more).removesuffix('.00')} times the {what}"
    return (
        f"{ratio(point.speedup.value)} times the {work} of {line.base.text} with {times}, "
        f"an efficiency of {percent(point.efficiency.value)}{' in steps alone' if line.of != 'epoch' else ''}"
    )


def like_its_points(line: Line) -> bool:
    """Whether the forecast's efficiency is of the same quantity as the measured ones."""
    return line.forecast is not None and (line.forecast.of == "epoch") == (line.of == "epoch")


def growth(base: Size, size: Size) -> tuple[float, str]:
    """How many times the base a size is, and of what."""
    if base.ranks is None or size.ranks is None:
        return size.nodes / base.nodes, "nodes"
    return size.ranks / base.ranks, "ranks"


def _doubt(point: Point, wanted: float) -> str:
    """Where the spread has both answers in it."""
    stat = point.efficiency
    assert stat is not None
    if stat.count < 2 or not stat.low < wanted < stat.high:
        return ""
    return f"; its spread is {between(stat, percent)}, too near to be sure: repeat it"


def _beyond(line: Line, kept: Point, wanted: float) -> str:
    """What the forecast adds, if it is of what the line is of."""
    forecast = line.forecast
    if forecast is None or forecast.refused or kept is not line.points[-1]:
        return ""
    if not like_its_points(line):
        return " The forecast is of steps alone: what whole epochs keep beyond that isn't known."
    if forecast.most is None:
        return f" The forecast doesn't reach {percent(wanted)} anywhere: measure before you go on."
    more, _ = growth(kept.size, forecast.most)
    if more >= _FARTHEST:
        return f" The forecast keeps {percent(wanted)} up to {forecast.most.text} at least, the farthest that it looks."
    if more <= 1:
        return f" The forecast falls below {percent(wanted)} beyond that."
    return f" The forecast keeps {percent(wanted)} up to {forecast.most.text}."
