"""Figures with what they vary by: a bootstrap over runs, and over stretches of each run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .model import Numbers, Stat

DRAWS = 200
_BLOCKS = 32  # stretches into which a run's steps are cut: neighbours aren't independent
_MIDDLE = (2.5, 97.5)  # percent


@dataclass(frozen=True)
class Sample:
    """A figure, and what it was in each of DRAWS resamples; ratios of two are taken draw by draw."""

    value: float
    draws: Numbers
    count: int

    def stat(self) -> Stat:
        low, high = np.percentile(self.draws, _MIDDLE)
        return Stat(self.value, float(min(low, self.value)), float(max(high, self.value)), self.count)

    def times(self, factor: float) -> Sample:
        return Sample(self.value * factor, self.draws * factor, self.count)

    def over(self, other: Sample) -> Sample:
        """The ratio of this to another, independent one."""
        return Sample(self.value / other.value, self.draws / other.draws, min(self.count, other.count))


def blocks(values: Numbers) -> Numbers:
    """Rows of `values` summed over at most _BLOCKS stretches of equal length (within one row), in order."""
    if len(values) <= _BLOCKS:
        return values
    edges = np.linspace(0, len(values), _BLOCKS + 1).astype(int)[:-1]
    return np.asarray(np.add.reduceat(values, edges, axis=0))


def block_medians(values: Numbers) -> Numbers:
    """Medians of at most _BLOCKS stretches of a run's `values`."""
    if len(values) <= _BLOCKS:
        return values
    return np.array([np.median(part) for part in np.array_split(values, _BLOCKS)])


def sample(runs: Sequence[Numbers], seed: int, middle: bool = True, count: int | None = None) -> Sample | None:
    """The median over runs of each run's median (mean, if not `middle`); None without any number.

    Runs are resampled first, where there are several, and then each run's values: steps of one run are no repeats of
    the run. The draws are the same for the same numbers and seed.
    """
    runs = [values for values in runs if len(values)]
    if not runs:
        return None
    take = np.median if middle else np.mean
    generator = np.random.default_rng(seed)
    of_runs = np.array([take(values) for values in runs])
    resampled = np.stack([take(values[_indices(generator, len(values))], axis=1) for values in runs])
    chosen = _indices(generator, len(runs))
    draws = np.median(resampled[chosen, np.arange(DRAWS)[:, None]], axis=1)
    return Sample(float(np.median(of_runs)), draws, count or sum(map(len, runs)))


def _indices(generator: np.random.Generator, size: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Which items each draw takes: DRAWS x size."""
    return generator.integers(0, size, (DRAWS, size))
