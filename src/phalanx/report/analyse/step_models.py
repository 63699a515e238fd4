"""Models of a step: computing, waiting for data, and the part of the all-reduce that nothing hides.

    step = compute x work of a rank + input + exposed all-reduce
    exposed = latency x log2(ranks) + transfer x 2(ranks - 1)/ranks, each within a node and between nodes

The weights come from the sizes that were run. Where those are too few, a profiled window tells the exposed part, or an
all-reduce benchmark its shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ..model import Line, Numbers, Point, RunData, Size, Stat, Term
from ..text import count
from .allreduce import Links, doublings, links_of, traffic
from .fit import Fit, Model, Observation, Row
from .nonnegative import determined

_LEAST = 0.01  # relative error that any time is taken to have: a run isn't another
_SINGLE = 0.02  # of one observation, which shows no spread
_POOR = 0.05  # relative error at its points of a model that another may be better than
_EXCLUDED = 4.0  # by how much more a fit may miss, in standard errors squared, before the times exclude it
_PROFILED = 0.1  # relative error of what a profiled window tells
_COLUMNS = ("compute", "latency within", "latency between", "transfer within", "transfer between")
_UNITS = ("ms", "ms x log2(ranks of a node)", "ms x log2(nodes)", "ms x 2(ranks-1)/ranks", "ms x 2(ranks-1)/ranks")
_NAMES = (
    "compute",
    "latency of the all-reduce within a node, exposed",
    "latency of the all-reduce between nodes, exposed",
    "transfer of the all-reduce within a node, exposed",
    "transfer of the all-reduce between nodes, exposed",
)


class Refusal(Exception):
    """Why nothing can be said, and what would help."""


class Steps:
    """A line's points with step times, and all that is known of their steps."""

    def __init__(self, line: Line, runs: Sequence[RunData], benchmarks: Sequence[RunData]) -> None:
        self.points = [point for point in line.points if point.step is not None and point.size.ranks]
        self.sizes = [point.size for point in self.points]
        self.share = _share(runs, line.base)
        self.links = links_of(benchmarks, runs)
        waits = [_step(point).value * point.wait.value for point in self.points if point.wait is not None]
        self.waits = waits if len(waits) == len(self.points) else None
        self.profiled = [
            point for point in self.points if point.exposed is not None and np.isfinite(point.exposed.value)
        ]

    @property
    def on_one_node(self) -> bool:
        return all(size.nodes == 1 for size in self.sizes)

    def times(self) -> list[Observation]:
        """Each point's step without its wait for data."""
        waits = self.waits or [0.0] * len(self.points)
        found = []
        for point, wait in zip(self.points, waits, strict=True):
            stat = _step(point)
            found.append(Observation(self.row(point.size), stat.value - wait, sigma(stat), point.size))
        return found

    def row(self, size: Size) -> tuple[float, ...]:
        """One value a column of `_COLUMNS`. Between nodes, the transfer is as fast as the network."""
        within, between = doublings(size)
        moved = traffic(size)
        return (self.share(size), within, between, moved * (size.nodes == 1), moved * (size.nodes > 1))

    def windows(self) -> list[Observation]:
        """The exposed part of each profiled size's steps; as a share, since profiled steps are slower."""
        found = []
        for point in self.profiled:
            assert point.exposed is not None
            value = point.exposed.value * _step(point).value
            row = (0.0, *self.row(point.size)[1:])
            if any(row):
                found.append(Observation(row, value, max(_PROFILED * value, _LEAST * _step(point).value), None))
        return found

    def model(
        self, fits: Sequence[Fit], terms: Sequence[Term], hidden: Callable[[Size], float], network: bool = False
    ) -> Model:
        return Model(
            of="step",
            fits=tuple(fits),
            measured=tuple((point.size, _step(point).value) for point in self.points),
            terms=(*terms, self._input()),
            warnings=tuple(self._warnings()),
            input=self._waiting(),
            hidden=hidden,
            share=self.share,
            largest=max(size.ranks or 1 for size in self.sizes),
            network=network or not self.on_one_node,
        )

    def _waiting(self) -> tuple[float, float, float]:
        """Mean, least and most of a rank's whole share of work: a smaller batch is waited for less."""
        waits = [wait / self.share(point.size) for point, wait in zip(self.points, self.waits or (), strict=False)]
        return (sum(waits) / len(waits), min(waits), max(waits)) if waits else (0.0, 0.0, 0.0)

    def _input(self) -> Term:
        if self.waits is None:
            return Term("input", 0.0, "ms", "not there")
        mean, low, high = self._waiting()
        spread = high - low if high - low > 1e-9 * high else 0.0  # sums of the same numbers in another order
        return Term("input", mean * 1e3, "ms", "measured", spread / 2 * 1e3)

    def _warnings(self) -> list[str]:
        waits, last = self.waits or [0.0], _step(self.points[-1]).value
        if waits[-1] - waits[0] > 0.05 * last and waits[-1] == max(waits):
            return [
                f"the wait for data grows from {waits[0] * 1e3:.3g} to {waits[-1] * 1e3:.3g} ms a step: the forecast "
                "holds it at its mean"
            ]
        return []


def sigma(stat: Stat) -> float:
    """The standard error of a time. `low` and `high` enclose 95%."""
    if stat.count < 2:
        return _SINGLE * stat.value
    return max((stat.high - stat.low) / 3.92, _LEAST * stat.value)


def _step(point: Point) -> Stat:
    assert point.step is not None
    return point.step


def _share(runs: Sequence[RunData], base: Size) -> Callable[[Size], float]:
    """A rank's samples in a step, relative to the base's: less at more ranks, if the batch over all is fixed."""
    batches = {
        run.size: run.work.batch_size * run.work.accumulate for run in runs if run.work.batch_size and run.size.ranks
    }
    if len(set(batches.values())) < 2 or base not in batches:
        return lambda size: 1.0
    first = base.ranks or 1
    return lambda size: first / (size.ranks or first)  # groups.py: the same batch a rank, or the same over all


def step_model(line: Line, runs: Sequence[RunData], benchmarks: Sequence[RunData]) -> Model:
    """The best model that the sizes, profiles and benchmarks allow. Raises Refusal."""
    steps = Steps(line, runs, benchmarks)
    ranks = {size.ranks for size in steps.sizes}
    if len(ranks) == 1 and len(steps.sizes) > 1:
        raise Refusal(f"all its sizes have {ranks.pop()} ranks: nothing shows how steps change with more; run others")
    by_links = _by_links(steps)
    if by_links is not None and (by_links.error() or 0.0) <= _POOR:
        return by_links
    try:
        return _by_points(steps)
    except Refusal:
        if by_links is None:
            raise
        return by_links


# --- with an all-reduce benchmark


def _by_links(steps: Steps) -> Model | None:
    """Two free terms: computing, and how much of the all-reduce a step takes longer by."""
    links = steps.links
    if links is None or (links.transfer[1] is None and not steps.on_one_node):
        return None
    row: Row = lambda size: (steps.share(size), links.seconds(size))  # noqa: E731
    times = [
        Observation(tuple(row(item.size)), item.value, item.sigma, item.size) for item in steps.times() if item.size
    ]
    if not determined(np.array([item.row for item in times])):
        return None
    fit = Fit(row, tuple(times))
    largest = max(steps.sizes, key=lambda size: size.ranks or 0)
    compute, share = fit.weights
    errors = fit.errors()
    terms = [
        Term("compute", float(compute * 1e3), "ms", "fitted", float(errors[0] * 1e3)),
        Term("share of the all-reduce that is exposed", float(share), "times its time", "fitted", float(errors[1])),
        *_link_terms(links),
    ]
    model = steps.model(
        [fit],
        terms,
        lambda size: max(0.0, (links.seconds(size) - links.seconds(largest)) * (1 - min(1.0, float(share)))),
        network=links.transfer[1] is not None,
    )
    if share > 1.5:
        return _warned(
            model,
            f"steps lose {share:.1f} times what the all-reduce takes alone: something else grows with the ranks, such "
            "as the slowest rank's wait, or cores and memory that ranks share",
        )
    return model


def _link_terms(links: Links) -> list[Term]:
    source, found = "all-reduce benchmark", []
    places = (("within a node", "µs x log2(ranks of a node)"), ("between nodes", "µs x log2(nodes)"))
    for (place, rounds), latency, transfer in zip(places, links.latency, links.transfer, strict=True):
        if transfer is not None:
            found.append(Term(f"latency {place}", latency / links.messages * 1e6, rounds, source))
            speed = links.bytes / transfer / 1e9 if transfer else float("inf")
            found.append(Term(f"bus bandwidth {place}", speed, "GB/s", source))
    return [*found, Term("gradients", links.bytes / 1e6, "MB", "measured")]


def _warned(model: Model, warning: str) -> Model:
    return replace(model, warnings=(*model.warnings, warning))


# --- with the sizes themselves, and profiled windows


def _by_points(steps: Steps) -> Model:
    times, windows = steps.times(), steps.windows()
    table = np.array([item.row for item in times])
    used = [column for column in range(len(_COLUMNS)) if table[:, column].any()]
    apart = _apart(table, used)
    if determined(table[:, apart]):
        return _made(steps, times, [apart], "fitted")
    both = [*times, *windows]
    rows = np.array([item.row for item in both])
    without = [column for column in used if column != 1]  # latency within a node: in that between nodes, if need be
    for columns in (used, without if 2 in used else used):
        if windows and determined(rows[:, columns]):
            return _made(steps, both, [columns], "profile")
    either = [[column for column in used if column in kept] for kept in ((0, 1, 2), (0, 3, 4))]
    if windows and all(determined(rows[:, columns]) for columns in either):
        return _warned(
            _made(steps, both, either, "profile"),
            "latency and transfer of the all-reduce can't be told apart at these sizes: the forecast lies between all "
            "of one and all of the other; another size would tell, or `phalanx allreduce`",
        )
    more = count(max(1, len(apart) - len(times)), "more size")
    raise Refusal(
        f"{count(len(times), 'size')} can't tell {count(len(apart), 'term')} of a step apart "
        f"({', '.join(_COLUMNS[column] for column in apart)}): run {more}, "
        "a profiled window (measure.profile_steps=10), or the all-reduce benchmark (phalanx allreduce) at the same "
        "nodes and ranks"
    )


def _apart(table: Numbers, used: Sequence[int]) -> list[int]:
    """Without columns that say nothing of their own, so that `compute` holds them: latency within a node where all
    sizes have the same ranks a node, and transfer within one that a single size has, larger than one rank."""
    kept = list(used)
    for column in (1, 3):
        if column not in kept:
            continue
        values = table[:, column]
        alone = column == 3 and np.count_nonzero(values) == 1 and not (table[:, 1:].any(axis=1) == 0).any()
        if np.ptp(values / table[:, 0]) < 1e-9 or (alone and table[:, [2, 4]].any()):
            kept.remove(column)
    return kept


def _made(steps: Steps, found: Sequence[Observation], choices: Sequence[Sequence[int]], source: str) -> Model:
    fits = []
    for columns in choices:
        own = tuple(
            Observation(tuple(item.row[column] for column in columns), item.value, item.sigma, item.size)
            for item in found
        )
        fits.append(Fit(_row(steps, columns), own))
    model = steps.model(fits, _terms(fits, choices, source), _hidden(steps))
    return _with_hops(model, steps, choices[0]) if source == "fitted" else model


def _with_hops(model: Model, steps: Steps, columns: Sequence[int]) -> Model:
    """Messages may also go from rank to rank all around, so that latency grows with their number: unless the times
    exclude it, the forecast may be as high as that."""

    def row(size: Size) -> list[float]:
        whole = list(steps.row(size))
        ranks = size.ranks or 1
        whole[1:3] = (ranks - 1, 0) if steps.on_one_node else (ranks / size.nodes - 1, size.nodes - 1)
        if steps.on_one_node:
            whole[3] += whole[4]
        return [whole[column] for column in columns]

    own = model.fits[0]
    around = Fit(row, tuple(replace(item, row=tuple(row(item.size))) for item in own.observations if item.size))
    if around.missed > own.missed + _EXCLUDED:
        return model
    model = replace(model, others=(around,))
    if own.missed > around.missed + _EXCLUDED:
        return _warned(
            model,
            "times grow faster with the size than with its doublings: the band's upper end, where they grow with the "
            "number of ranks, fits the sizes better",
        )
    return model


def _row(steps: Steps, columns: Sequence[int]) -> Row:
    """Between nodes, if all sizes are on one, links are taken to be like those within it."""
    swap = {1: 2, 3: 4} if steps.on_one_node else {}

    def row(size: Size) -> list[float]:
        whole = steps.row(size)
        return [whole[column] + (whole[swap[column]] if column in swap else 0.0) for column in columns]

    return row


def _terms(fits: Sequence[Fit], choices: Sequence[Sequence[int]], source: str) -> list[Term]:
    """Each column's weight; of columns that only one of two fits has, what it would be without the other."""
    found: dict[int, Term] = {}
    for fit, columns in zip(fits, choices, strict=True):
        for column, weight, error in zip(columns, fit.weights, fit.errors(), strict=True):
            name = _NAMES[column]
            if column == 0 and 1 not in columns and 3 not in columns and 4 in columns:
                name += ", with the all-reduce within a node"
            if len(fits) > 1 and column > 0:
                name += ", if it is all"
            own = "fitted" if column == 0 else source
            found.setdefault(column, Term(name, float(weight * 1e3), _UNITS[column], own, float(error * 1e3)))
    return [found[column] for column in sorted(found)]


def _hidden(steps: Steps) -> Callable[[Size], float]:
    """What a profiled window shows of communication behind computing: were there more of it, it might not be hidden."""
    known = [
        point
        for point in steps.profiled
        if point.communication is not None and np.isfinite(point.communication.value) and (point.size.ranks or 0) > 1
    ]
    if not known:
        return lambda size: 0.0
    point = known[-1]
    assert point.communication is not None
    assert point.exposed is not None
    seconds = max(0.0, point.communication.value - point.exposed.value) * _step(point).value
    rounds = sum(doublings(point.size))
    return lambda size: seconds * max(0.0, sum(doublings(size)) / rounds - 1)
