"""Figures with what they vary by: a bootstrap over runs, and over epochs or stretches of steps within each run.

Steps of one run aren't independent (the machine is slower for a while, or the data), so whole stretches are drawn.
With several runs, runs are drawn first: what differs from run to run is in the spread only then. Of two or three runs
that is still less than the truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..model import Numbers, Stat

DRAWS = 400
_BLOCKS, _FEWEST, _IN_ALL = 32, 8, 256  # stretches into which a run's steps are cut: fewer of many runs, for speed
_MIDDLE = (2.5, 97.5)  # percent
_STRIDE = 37  # a run that is drawn twice shows another resample of itself: has no divisor with DRAWS


@dataclass(frozen=True)
class Sample:
    """A figure, and what it was in each of DRAWS resamples; ratios of two are taken draw by draw."""

    value: float
    draws: Numbers
    count: int

    def stat(self) -> Stat:
        if self.count < 2:
            return Stat(self.value, self.value, self.value, self.count)
        low, high = np.percentile(self.draws, _MIDDLE)
        return Stat(self.value, float(min(low, self.value)), float(max(high, self.value)), self.count)

    def times(self, factor: float) -> Sample:
        return Sample(self.value * factor, self.draws * factor, self.count)

    def over(self, other: Sample) -> Sample:
        """The ratio of this to another, independent one."""
        return Sample(self.value / other.value, self.draws / other.draws, min(self.count, other.count))

    def under(self, total: float) -> Sample:
        """`total` over this."""
        return Sample(total / self.value, total / self.draws, self.count)


def exactly(value: float) -> Sample:
    """A figure that doesn't vary, such as the base's speedup."""
    return Sample(value, np.full(DRAWS, value), 1)


def of_means(runs: Sequence[Numbers], seed: int) -> Sample | None:
    """The median over runs of each run's mean, of a value an epoch; None without any."""
    runs = [values for values in runs if len(values)]
    generator = np.random.default_rng(seed)
    draws = [values[_chosen(generator, len(values))].mean(axis=1) for values in runs]
    return _over_runs([float(values.mean()) for values in runs], draws, sum(map(len, runs)), generator)


def of_medians(runs: Sequence[Numbers], seed: int) -> Sample | None:
    """The median over runs of each run's median, of a value a step."""
    runs = [values for values in runs if len(values)]
    generator = np.random.default_rng(seed)
    draws = []
    for values in runs:
        size = -(-len(values) // _stretches(len(runs)))
        stretches = np.median(values[: len(values) // size * size].reshape(-1, size), axis=1)
        draws.append(_middle(stretches[_chosen(generator, len(stretches))]))
    return _over_runs([float(np.median(values)) for values in runs], draws, sum(map(len, runs)), generator)


def _stretches(runs: int) -> int:
    return min(_BLOCKS, max(_FEWEST, _IN_ALL // runs))


def _middle(table: Numbers) -> Numbers:
    """np.median of each row, without what that spends on NaN."""
    low, high = (table.shape[1] - 1) // 2, table.shape[1] // 2
    parted = np.partition(table, (low, high), axis=1)
    return np.asarray((parted[:, low] + parted[:, high]) / 2)


def of_ratios(runs: Sequence[tuple[Numbers, Numbers]], seed: int) -> Sample | None:
    """The median over runs of each run's sum over sum, of two values a step: samples over seconds, say."""
    runs = [(above, below) for above, below in runs if len(above)]
    generator = np.random.default_rng(seed)
    draws = []
    for above, below in runs:
        edges = np.linspace(0, len(above), min(_stretches(len(runs)), len(above)) + 1).astype(int)[:-1]
        chosen = _chosen(generator, len(edges))
        sums = [np.add.reduceat(values, edges)[chosen].sum(axis=1) for values in (above, below)]
        draws.append(sums[0] / sums[1])
    values = [float(above.sum() / below.sum()) for above, below in runs]
    return _over_runs(values, draws, sum(len(above) for above, _ in runs), generator)


def of_runs(values: Sequence[float | None], seed: int) -> Sample | None:
    """The median of a figure that each run has once, or not."""
    return of_means([np.array([value]) for value in values if value is not None and np.isfinite(value)], seed)


def _over_runs(
    values: Sequence[float], draws: Sequence[Numbers], count: int, generator: np.random.Generator
) -> Sample | None:
    if not values:
        return None
    table = np.stack(draws)
    chosen = _chosen(generator, len(values))
    columns = (np.arange(DRAWS)[:, None] + _STRIDE * np.arange(len(values))) % DRAWS
    return Sample(float(np.median(values)), np.median(table[chosen, columns], axis=1), count)


def _chosen(generator: np.random.Generator, size: int) -> NDArray[np.int64]:
    """Which items each draw takes: DRAWS x size."""
    return generator.integers(0, size, (DRAWS, size))
