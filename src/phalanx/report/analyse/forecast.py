"""What a line's steps would take at sizes that were not run; or why that can't be said. See docs/forecast.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ..model import Forecast, Line, Point, RunData, Size
from ..text import percent
from .epoch_models import epoch_model
from .fit import Model, extent
from .step_models import Refusal, step_model
from .whole_epoch import WholeEpochs, epochs_of_steps

_FAR = 4  # times the largest measured size, beyond which it is a guess
_SHORTEST = 1e-9  # seconds that something can take
_EACH = 256  # nodes up to which every number is looked at
_APART = 0.05  # by which the efficiencies of epochs and of steps differ before that is said
_FARTHEST = 16  # times the largest measured size, beyond which nothing is said


def forecasts(
    line: Line, runs: Sequence[RunData], benchmarks: Sequence[RunData], efficiency: float
) -> tuple[Forecast, Forecast | None]:
    """That of what the line's speedup is of; and beside one of epochs that of their steps, if they are known."""
    try:
        model = _model(line, runs, benchmarks)
        whole = epochs_of_steps(model, line, runs) if (line.of, model.of) == ("epoch", "step") else None
        if whole is None:
            return _told(model, line, efficiency), None
        return _told(whole, line, efficiency), _told(model, line, efficiency)
    except Refusal as refusal:
        return Forecast(refused=f"{refusal}."), None


def forecast(line: Line, runs: Sequence[RunData], benchmarks: Sequence[RunData], efficiency: float) -> Forecast:
    """Of steps, or of epochs where steps aren't known. `runs` are the line's, `benchmarks` those with all-reduce times;
    `efficiency` is the least that is wanted."""
    try:
        return _told(_model(line, runs, benchmarks), line, efficiency)
    except Refusal as refusal:
        return Forecast(refused=f"{refusal}.")


def _model(line: Line, runs: Sequence[RunData], benchmarks: Sequence[RunData]) -> Model:
    line = replace(line, points=tuple(_usable(point) for point in line.points))
    steps = [point for point in line.points if point.step is not None and point.size.ranks]
    epochs = [point for point in line.points if point.epoch is not None]
    if max(len(steps), len(epochs)) < 2:
        raise Refusal("one size shows nothing of how times change with it: run at least one more, better two")
    return step_model(line, runs, benchmarks) if len(steps) >= min(2, len(epochs)) else epoch_model(line)


def _usable(point: Point) -> Point:
    """Without times that are none."""
    step, epoch, wait = (
        stat if stat is not None and math.isfinite(stat.value) and stat.value >= least else None
        for stat, least in ((point.step, _SHORTEST), (point.epoch, _SHORTEST), (point.wait, 0.0))
    )
    return replace(point, step=step, epoch=epoch, wait=wait)


def _told(model: Model, line: Line, wanted: float) -> Forecast:
    measured = [size for size, _ in model.measured]
    if any(size.ranks is None for size in measured):
        line = replace(line, base=Size(line.base.nodes, None))
    if not all(model.at(size) > 0 for size in (line.base, *measured)):
        raise Refusal("its times grow with the size by so much that a model has nothing left at the smallest")
    path = _path(measured)
    most = _most(model, line, path, wanted)
    shown = _shown(model, path, most)
    curve = []
    for size in shown:
        low, high = model.band(size)
        curve.append((size.nodes, size.ranks, model.at(size), low, high, model.efficiency(size, line.base)))
    return Forecast(
        of=model.of,
        terms=model.terms,
        curve=tuple(curve),
        error=model.error(),
        left_out_error=model.left_out(),
        most=most,
        warnings=(*model.warnings, *_warnings(model, line, shown, most, wanted)),
    )


def _path(sizes: Sequence[Size]) -> list[Size]:
    """Sizes that one could go to: more ranks on the node up to as many as one had, then more nodes like that."""
    largest = max(sizes, key=extent)
    if any(size.nodes == 0 for size in sizes):
        return [Size(0, count) for count in _counts(min(map(extent, sizes)), extent(largest) * _FARTHEST)]
    ranks = largest.ranks and -(-largest.ranks // largest.nodes)
    first = min(sizes, key=extent)
    found: set[Size] = set()
    if ranks and first.nodes == 1:
        found |= {Size(1, number) for number in range(first.ranks or 1, ranks + 1)}
    found |= {Size(nodes, ranks and nodes * ranks) for nodes in _counts(first.nodes, largest.nodes * _FARTHEST)}
    return sorted(
        (size for size in found if extent(size) >= extent(first)), key=lambda size: (extent(size), size.nodes)
    )


def _counts(first: int, last: int) -> list[int]:
    """Numbers of nodes: each, as long as they are few, then eight to a doubling."""
    few = range(first, min(last, _EACH) + 1)
    steps = math.ceil(8 * math.log2(last / _EACH)) if last > _EACH else 0
    more = {min(last, round(_EACH * 2 ** (step / 8))) for step in range(1, steps + 1)}
    return [*few, *sorted(count for count in more if count >= first)]


def _most(model: Model, line: Line, path: Sequence[Size], wanted: float) -> Size | None:
    """The last size before efficiency falls below what is wanted."""
    kept = None
    for size in path:
        if model.efficiency(size, line.base) < wanted and extent(size) > extent(line.base):
            break
        kept = size
    return kept


def _shown(model: Model, path: Sequence[Size], most: Size | None) -> list[Size]:
    """Measured sizes and doublings to where it gets interesting, but no further than can be said."""
    until = max(_FAR * model.largest, 2 * extent(most) if most else 0)
    doubled = {2**power for power in range(20)}
    measured = {size for size, _ in model.measured}
    return [
        size
        for size in sorted({*path, *measured}, key=lambda size: (extent(size), size.nodes))
        if size in measured
        or size == most
        or (extent(size) <= until and size.nodes in (*doubled, 0) and (size.nodes > 1 or extent(size) in doubled))
    ]


def _warnings(model: Model, line: Line, shown: Sequence[Size], most: Size | None, wanted: float) -> list[str]:
    found = []
    if model.error() is None:
        found.append("as many terms as sizes: none is left to check the forecast by")
    if not model.network and any(size.nodes > 1 for size in shown):
        found.append("all sizes are on one node, so that the network between nodes is taken to be as fast as within")
    apart = _apart(model, line)
    if apart and model.of == "step":
        return [*found, f"{apart}: what is outside of the steps isn't in this forecast"]
    if apart:
        found.append(f"{apart}: the forecast of epochs has what is outside of the steps in it")
    if most and extent(most) > _FAR * model.largest:
        found.append(
            f"{most.text} is {extent(most) / model.largest:.3g} times the largest that was run: measure on the way"
        )
    if most and extent(most) >= _FARTHEST * model.largest:
        found.append(f"{most.text} is the farthest that is looked at: {percent(wanted)} may be kept beyond it")
    return found


def _apart(model: Model, line: Line) -> str:
    """Whether whole epochs scale otherwise than their steps, in words."""
    steps = model.steps if isinstance(model, WholeEpochs) else model if model.of == "step" else None
    largest = max(line.points, key=lambda point: extent(point.size))
    if steps is None or line.of != "epoch" or not largest.efficiency:
        return ""
    if largest.size not in [size for size, _ in steps.measured]:
        return ""
    alone, whole = steps.efficiency(largest.size, line.base), largest.efficiency.value
    if abs(alone - whole) <= _APART:
        return ""
    return f"at {largest.size.text} whole epochs keep {percent(whole)}, steps alone {percent(alone)}"
