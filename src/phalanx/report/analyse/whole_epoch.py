"""A model of epochs from that of their steps: so many steps, and what an epoch spends outside of them.

    epoch = steps an epoch x step  +  what ranks share  +  what stays  +  what grows with each doubling

The last three are evaluation, checkpoints and the loader's start, and what single long steps take beyond the median.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from ..model import Line, RunData, Size, Stat, Term
from .epoch_models import STRONG, row_of
from .fit import Fit, Model, Observation, extent
from .nonnegative import determined
from .step_models import sigma

_Counts = Callable[[Size], float]


@dataclass(frozen=True)
class WholeEpochs(Model):
    """`measured` are epochs, `fits` those of `outside`."""

    steps: Model = field(kw_only=True)
    outside: Model = field(kw_only=True)  # what an epoch spends outside of its steps
    number: _Counts = field(kw_only=True)  # steps an epoch

    def at(self, size: Size) -> float:
        return self.number(size) * self.steps.at(size) + self.outside.at(size)

    def band(self, size: Size) -> tuple[float, float]:
        """As if both were at their end at once."""
        steps, outside, number = self.steps.band(size), self.outside.band(size), self.number(size)
        return number * steps[0] + outside[0], number * steps[1] + outside[1]

    def without(self, size: Size) -> float | None:
        steps, outside = self.steps.without(size), self.outside.without(size)
        return None if steps is None or outside is None else self.number(size) * steps + outside


def epochs_of_steps(steps: Model, line: Line, runs: Sequence[RunData]) -> WholeEpochs | None:
    """None where epochs or their numbers of steps aren't known at two sizes at least."""
    sizes = [size for size, _ in steps.measured]
    known = [(point.size, point.epoch) for point in line.points if point.epoch is not None and point.size in sizes]
    number = _steps_of_an_epoch(steps, line, runs)
    if number is None or len(known) < 2:
        return None
    fit = _outside(steps, line, number, known)
    names = STRONG if line.scaling == "strong" else STRONG[1:]
    terms = [
        Term(f"outside of the steps: {name}", float(weight), "s an epoch", "fitted", float(error))
        for name, weight, error in zip(names, fit.weights, fit.errors(), strict=False)
    ]
    measured = tuple((size, stat.value) for size, stat in known)
    return WholeEpochs(
        of="epoch",
        fits=(fit,),
        measured=measured,
        terms=(*steps.terms, *terms),
        warnings=steps.warnings,
        share=_share_of_data(line),
        largest=steps.largest,
        network=steps.network,
        steps=steps,
        outside=Model("epoch", (fit,), measured, (), largest=steps.largest),
        number=number,
    )


def _outside(steps: Model, line: Line, number: _Counts, known: Sequence[tuple[Size, Stat]]) -> Fit:
    """Without the term that grows where there are too few sizes to tell it."""
    weak, first = line.scaling == "weak", min(extent(size) for size, _ in known)

    def fit(columns: int) -> Fit:
        def row(size: Size) -> list[float]:
            return row_of(extent(size) / first, weak)[:columns]

        found = (
            Observation(tuple(row(size)), stat.value - number(size) * steps.at(size), sigma(stat), size)
            for size, stat in known
        )
        return Fit(row, tuple(found))

    most = 2 if weak else 3
    whole = fit(most)
    return whole if determined(np.array([item.row for item in whole.observations])) else fit(most - 1)


def _steps_of_an_epoch(steps: Model, line: Line, runs: Sequence[RunData]) -> _Counts | None:
    """As the runs recorded them: an epoch's samples are the same at all sizes, and under weak scaling a rank's are."""

    def of_rank(size: Size) -> float:
        return steps.share(size) * (1 if line.scaling == "weak" else extent(size))

    found = []
    for run in runs:
        whole = run.steps[np.isin(run.steps[:, 1], run.epochs[:, 0]), 1]
        if len(whole) and run.size.ranks:
            found.append(int(np.unique(whole, return_counts=True)[1].max()) * of_rank(run.size))
    return (lambda size: middle / of_rank(size)) if found and (middle := median(found)) else None


def _share_of_data(line: Line) -> Callable[[Size], float]:
    """A rank's samples of an epoch, relative to the base's."""
    if line.scaling == "weak":
        return lambda size: 1.0
    return lambda size: extent(line.base) / extent(size)
