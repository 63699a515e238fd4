"""What the runs of one label and size took, warm-up left out."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..model import Numbers, Point, RunData, Size, Stat
from ..text import count, numbers
from . import stats
from .stats import Sample

_ENOUGH_STEPS = 20  # that must remain when whole epochs are left out of the steps


@dataclass(frozen=True)
class Options:
    """What a user chooses: epochs and steps left out at the beginning of each run, epochs that a cost is given for, and
    the efficiency that is worth it. `raw`: nothing is warm-up, which is what runs of a single epoch leave."""

    warmup_epochs: int = 1
    warmup_steps: int = 10
    epochs: int = 100
    efficiency: float = 0.7
    title: str = "Scalability report"


@dataclass
class Left:
    """What was left out of runs, by run."""

    reasons: dict[int, list[str]] = field(default_factory=dict)

    def add(self, run: RunData, reason: str) -> None:
        self.reasons.setdefault(id(run), []).append(reason)


class Measured:
    """Samples of each figure."""

    def __init__(self, runs: Sequence[RunData], options: Options, raw: bool, left: Left) -> None:
        self.runs = runs
        self.size: Size = runs[0].size
        seed = zlib.crc32(f"{runs[0].label} {self.size.text}".encode())
        epochs = [run.epochs if raw else _warm_epochs(run, options.warmup_epochs, left) for run in runs]
        steps = [_warm_steps(run, options, left) for run in runs]
        self.epoch = stats.of_means([table[:, 1] for table in epochs], seed)
        self.step = stats.of_medians([table[:, 2] for table in steps], seed + 1)
        timed = [table for table in steps if np.isfinite(table[:, 3]).all()]
        self.wait = stats.of_ratios([(table[:, 3], table[:, 2]) for table in timed], seed + 2)
        known = [table for table in steps if len(table) and table[:, 4].sum() > 0]
        self.throughput = stats.of_ratios([(table[:, 4], table[:, 2]) for table in known], seed + 3)
        self._of_steps = self.throughput
        if self.throughput is None and self.epoch is not None and (dataset := self.dataset):
            self.throughput = self.epoch.under(dataset)
        self._seed = seed + 4

    @property
    def dataset(self) -> int | None:
        """Samples of an epoch over all ranks."""
        return next((run.work.dataset for run in self.runs if run.work.dataset), None)

    @property
    def sampled(self) -> Sample | None:
        """Samples a second, where steps tell them."""
        return self._of_steps

    def nothing(self) -> bool:
        point = self.point(1, None, None)
        return all(
            getattr(point, name) is None for name in ("epoch", "step", "throughput", "energy", "gpu_utilisation")
        )

    def point(self, epochs: int, speedup: Sample | None, efficiency: Sample | None) -> Point:
        windows = [run.window for run in self.runs if run.window is not None and run.window.seconds > 0]
        whole = self._epoch_as_a_whole()
        to_epochs = whole.times(epochs) if whole is not None else None
        ranks = self.size.ranks
        return Point(
            size=self.size,
            runs=len(self.runs),
            epoch=_stat(self.epoch),
            step=_stat(self.step),
            throughput=_stat(self.throughput),
            speedup=_stat(speedup),
            efficiency=_stat(efficiency),
            wait=_stat(self.wait),
            compute=self._of_runs([window.compute / window.seconds for window in windows]),
            communication=self._of_runs([window.communication / window.seconds for window in windows]),
            exposed=self._of_runs([window.exposed / window.seconds for window in windows]),
            gpu_utilisation=self._of_runs([run.gpu_utilisation for run in self.runs]),
            energy=self._of_runs([run.energy for run in self.runs]),
            energy_per_sample=self._of_runs([_energy_per_sample(run) for run in self.runs]),
            peak_device=max((run.peak_device for run in self.runs if run.peak_device), default=None),
            peak_host=max((run.peak_host for run in self.runs if run.peak_host), default=None),
            seconds_to_epochs=_stat(to_epochs),
            device_hours=_stat(to_epochs.times(ranks / 3600)) if to_epochs is not None and ranks else None,
        )

    def _epoch_as_a_whole(self) -> Sample | None:
        """Of runs without a whole epoch: as long as its samples take in steps."""
        if self.epoch is not None:
            return self.epoch
        return self.throughput.under(self.dataset) if self.throughput is not None and self.dataset else None

    def _of_runs(self, values: Sequence[float | None]) -> Stat | None:
        return _stat(stats.of_runs(values, self._seed))


def _stat(found: Sample | None) -> Stat | None:
    return found.stat() if found is not None else None


def _energy_per_sample(run: RunData) -> float | None:
    return run.energy / run.samples if run.energy is not None and run.samples else None


def _warm_epochs(run: RunData, warmup: int, left: Left) -> Numbers:
    """By number, so that an epoch that is missing isn't made up for."""
    if not len(run.epochs) or not warmup:
        return run.epochs
    cold = run.epochs[:, 0] < run.epochs[0, 0] + warmup
    left.add(run, f"{numbers('epoch', run.epochs[cold, 0])}: warm-up")
    return np.asarray(run.epochs[~cold])


def _warm_steps(run: RunData, options: Options, left: Left) -> Numbers:
    """Without the first epochs, where enough steps remain; else without the first steps, or half of very few."""
    if not len(run.steps):
        return run.steps
    cold = _cold(run, options)
    if len(cold) - cold.sum() < _ENOUGH_STEPS:
        first = min(options.warmup_steps, len(cold) // 2)
        cold = np.arange(len(cold)) < first
        if first:
            left.add(run, f"the first {count(first, 'step')}: warm-up")
    for row in run.restarts:
        cold[row : row + options.warmup_steps] = True
    return run.steps if cold.all() else np.asarray(run.steps[~cold])


def in_first_epoch(runs: Sequence[RunData], options: Options) -> bool:
    """Whether some run's steps that count are of the epochs that are warm-up elsewhere: too few come after them."""
    return any(len(run.steps) and _cold(run, options).sum() > len(run.steps) - _ENOUGH_STEPS for run in runs)


def _cold(run: RunData, options: Options) -> np.ndarray[Any, np.dtype[np.bool_]]:
    return np.asarray(run.steps[:, 1] < run.steps[0, 1] + options.warmup_epochs)


def few_epochs(runs: Sequence[RunData], warmup: int) -> bool:
    """Whether no run has more epochs than warm-up takes."""
    return all(len(run.epochs) == 0 or run.epochs[-1, 0] < run.epochs[0, 0] + warmup for run in runs)
