"""A model of times at sizes: fitted, with its error, and evaluated at sizes that were not run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..model import Numbers, Size, Term
from .nonnegative import determined, solve

Row = Callable[[Size], Sequence[float]]
_DRAWS = 400
_MIDDLE = (2.5, 97.5)  # percent
_PER_DOUBLING = 0.5  # by how much of itself a band grows with each doubling beyond what was measured


@dataclass(frozen=True)
class Observation:
    """The columns' sum is `value`, give or take `sigma`. `size` is None for one that isn't a size's time."""

    row: tuple[float, ...]
    value: float
    sigma: float
    size: Size | None = None


@dataclass(frozen=True)
class Fit:
    """One choice of columns, whose weights are not negative."""

    columns: Row
    observations: tuple[Observation, ...]

    @cached_property
    def _table(self) -> tuple[Numbers, Numbers, Numbers]:
        rows = np.array([item.row for item in self.observations], dtype=float)
        values = np.array([item.value for item in self.observations])
        return rows, values, np.array([item.sigma for item in self.observations])

    @cached_property
    def missed(self) -> float:
        """The sum of squares of what the fit misses, in standard errors."""
        rows, values, sigmas = self._table
        return float((((rows @ self.weights - values) / sigmas) ** 2).sum())

    @property
    def spare(self) -> int:
        """Observations beyond those that the columns with a weight take up."""
        return len(self.observations) - int(np.count_nonzero(self.weights))

    @cached_property
    def weights(self) -> Numbers:
        rows, values, sigmas = self._table
        return np.asarray(solve(rows / sigmas[:, None], (values / sigmas)[:, None])[:, 0])

    @cached_property
    def draws(self) -> Numbers:
        """Weights for observations that are off as they may be: columns x draws.

        Observations that the fit misses by more than their spread are less sure than that.
        """
        rows, values, sigmas = self._table
        if self.spare > 0:
            sigmas = sigmas * max(1.0, math.sqrt(self.missed / self.spare))
        noise = np.random.default_rng(0).normal(size=(len(values), _DRAWS))
        shaken = values[:, None] + sigmas[:, None] * noise
        return solve(rows / sigmas[:, None], shaken / sigmas[:, None])

    def at(self, size: Size) -> float:
        return float(np.dot(self.columns(size), self.weights))

    def band(self, size: Size) -> tuple[float, float]:
        low, high = np.percentile(np.asarray(self.columns(size)) @ self.draws, _MIDDLE)
        return float(low), float(high)

    def errors(self) -> Numbers:
        """Standard errors of the weights."""
        return np.asarray(self.draws.std(axis=1))

    def without(self, size: Size) -> Fit | None:
        """The fit to the other sizes; None if they can't tell the columns apart."""
        others = tuple(item for item in self.observations if item.size != size)
        if not determined(np.array([item.row for item in others])):
            return None
        return Fit(self.columns, others)


@dataclass(frozen=True)
class Model:
    """Times at sizes. With several fits nothing tells which is right: the value is their mean, the band spans all.

    `input` times `share` is added at each size: (seconds, low, high). `hidden` is what may come to a size's time at
    most, beyond the fit. `share` is the work of a rank at a size, relative to the base's. `others` are fits of another
    shape that the times don't exclude: beyond the measured sizes the band reaches up to them.
    """

    of: str  # "step" or "epoch"
    fits: tuple[Fit, ...]
    measured: tuple[tuple[Size, float], ...]
    terms: tuple[Term, ...]
    warnings: tuple[str, ...] = ()
    input: tuple[float, float, float] = (0.0, 0.0, 0.0)
    hidden: Callable[[Size], float] = lambda size: 0.0
    share: Callable[[Size], float] = lambda size: 1.0
    largest: int = 1  # ranks (or nodes) that were measured
    others: tuple[Fit, ...] = ()
    network: bool = True  # whether anything was measured between nodes

    def at(self, size: Size) -> float:
        return self._input(size)[0] + sum(fit.at(size) for fit in self.fits) / len(self.fits)

    def _input(self, size: Size) -> tuple[float, float, float]:
        share = self.share(size)
        return self.input[0] * share, self.input[1] * share, self.input[2] * share

    def band(self, size: Size) -> tuple[float, float]:
        """Where 95 of 100 such sizes would be, if the columns are the right ones; wider beyond what was measured."""
        value, bands, waits = self.at(size), [fit.band(size) for fit in self.fits], self._input(size)
        beyond = max(0.0, math.log2(extent(size) / self.largest))
        wider = 1 + _PER_DOUBLING * beyond
        low = value - wider * max(0.0, value - waits[1] - min(low for low, _ in bands))
        high = value + wider * max(0.0, max(high for _, high in bands) + waits[2] - value)
        if beyond:
            high = max(high, *(waits[0] + fit.at(size) for fit in self.others), 0.0) + self.hidden(size)
        return max(low, 0.0), high

    def efficiency(self, size: Size, base: Size) -> float:
        """The work of a rank a second, relative to the base's."""
        return self.share(size) / self.at(size) / (self.share(base) / self.at(base))

    def error(self) -> float | None:
        """The largest relative error at the measured sizes; None where the fit goes through all of them anyhow."""
        if all(fit.spare <= 0 for fit in self.fits):
            return None
        return max(abs(self.at(size) / time - 1) for size, time in self.measured)

    def left_out(self) -> float | None:
        """The largest relative error at a size that was left out of the fit, of those that can be."""
        foretold = [(self.without(size), time) for size, time in self.measured]
        return max((abs(value / time - 1) for value, time in foretold if value is not None), default=None)

    def without(self, size: Size) -> float | None:
        """A size's time by the fit to the others; None if they can't tell the columns apart."""
        others = [fit.without(size) for fit in self.fits]
        if not all(others):
            return None
        return self._input(size)[0] + sum(fit.at(size) for fit in others if fit) / len(others)


def extent(size: Size) -> int:
    """How many ranks a size has; nodes, where ranks aren't known."""
    return size.nodes if size.ranks is None else size.ranks
