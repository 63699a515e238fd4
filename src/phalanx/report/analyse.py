"""From runs to the numbers of a report: pure, and the same for the same runs."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .groups import Workload, by_workload, difference
from .model import Analysis, Comparison, Forecast, Group, Input, Line, Numbers, Point, RunData, Size, Stat
from .stats import Sample, block_medians, blocks, sample

Forecaster = Callable[[Line, Sequence[RunData], float], Forecast]


@dataclass(frozen=True)
class Options:
    """What a user chooses: epochs and steps left out at the beginning of each run, epochs that a cost is given for, and
    the efficiency that is worth it."""

    warmup_epochs: int = 1
    warmup_steps: int = 10
    epochs: int = 100
    efficiency: float = 0.7
    title: str = "Scalability report"


def analyse(
    runs: Sequence[RunData], inputs: Sequence[Input], options: Options, forecaster: Forecaster | None = None
) -> Analysis:
    """Group, measure and compare. `runs` have at least an epoch or a step each."""
    workloads = by_workload(runs)
    warnings = _mixed(workloads)
    groups = tuple(_group(workload, options, forecaster, warnings) for workload in workloads)
    return Analysis(
        title=options.title,
        groups=groups,
        inputs=tuple(inputs),
        warnings=tuple(dict.fromkeys(warnings)),
        warmup_epochs=options.warmup_epochs,
        warmup_steps=options.warmup_steps,
        epochs_wanted=options.epochs,
        efficiency_wanted=options.efficiency,
        runs=tuple(runs),
    )


def _mixed(workloads: list[Workload]) -> list[str]:
    if len(workloads) < 2:
        return []
    first = workloads[0]
    return [
        f"{' and '.join(other.names)} is another workload than {' and '.join(first.names)} "
        f"({difference(first.work, other.work)}): a curve of its own, and not compared"
        for other in workloads[1:]
    ]


# --- one workload


def _group(workload: Workload, options: Options, forecaster: Forecaster | None, warnings: list[str]) -> Group:
    axis = "nodes" if any(run.size.ranks is None for run in workload.runs) else "ranks"
    measured: dict[str, dict[Size, Measured]] = {}
    for label in sorted({run.label for run in workload.runs}):
        own = [run for run in workload.runs if run.label == label]
        sizes = sorted({run.size for run in own}, key=lambda size: _order(size, axis))
        measured[label] = {
            size: Measured([run for run in own if run.size == size], options, warnings) for size in sizes
        }
    lines = []
    for label, points in measured.items():
        own = [run for run in workload.runs if run.label == label]
        line = _line(label, points, axis, options, workload.weak)
        if forecaster is not None:
            line = Line(**{**vars(line), "forecast": forecaster(line, own, options.efficiency)})
        lines.append(line)
    return Group(
        title=_title(workload),
        work=workload.work,
        axis=axis,
        lines=tuple(lines),
        comparisons=tuple(_comparisons(measured, {line.label for line in lines if line.baseline})),
        notes=tuple(_notes(lines, workload)),
    )


def _order(size: Size, axis: str) -> tuple[int, int]:
    return (size.nodes, size.ranks or 0) if axis == "nodes" else (size.ranks or 0, size.nodes)


def _title(workload: Workload) -> str:
    work, parts = workload.work, []
    if work.parameters:
        parts.append(f"{work.parameters:,} parameters")
    if work.batch_size:
        parts.append(f"{work.batch_size} samples a rank and batch")
    if work.dataset and not workload.weak:
        parts.append(f"{work.dataset:,} samples an epoch")
    if work.precision:
        parts.append(work.precision)
    return ", ".join(workload.names) + (f": {', '.join(parts)}" if parts else "")


def _notes(lines: list[Line], workload: Workload) -> list[str]:
    notes = [
        f"{line.label}: only {line.base.text} was run, so that there is no speedup to show"
        for line in lines
        if len(line.points) == 1
    ]
    if workload.weak:
        notes.append("weak scaling: the work grows with the size, so that ideal is a constant epoch time")
    devices = sorted({run.device.partition(" ")[2] or run.device for run in workload.runs if run.device})
    kinds = {device.strip("()").split(":")[0] for device in devices}
    if len(kinds) > 1:
        notes.append(f"the runs were on different devices: {', '.join(sorted(kinds))}")
    return notes


# --- one label at one size


class Measured:
    """Samples of what the runs of one label and size took, warm-up left out."""

    def __init__(self, runs: list[RunData], options: Options, warnings: list[str]) -> None:
        self.runs = runs
        self.seed = zlib.crc32(f"{runs[0].label} {runs[0].size.text}".encode())
        epochs = [_warm_epochs(run, options.warmup_epochs, warnings) for run in runs]
        steps = [_warm_steps(run, options) for run in runs]
        # Means: N epochs take N times as long. Of steps, the usual one.
        self.epoch = sample([table[:, 1] for table in epochs], self.seed, middle=False)
        count = sum(map(len, steps))
        self.step = sample([block_medians(table[:, 2]) for table in steps], self.seed + 1, count=count)
        self.throughput = self._of_blocks(steps, 4, 2, count) or self._from_epochs()
        self.wait = self._of_blocks(steps, 3, 2, count)

    def _of_blocks(self, steps: list[Numbers], above: int, below: int, count: int) -> Sample | None:
        """Sums of one column over sums of another, a stretch at a time."""
        sums = [blocks(table) for table in steps if len(table)]
        if not sums or not any(table[:, above].any() for table in sums):
            return None
        return sample([table[:, above] / table[:, below] for table in sums], self.seed + above, count=count)

    def _from_epochs(self) -> Sample | None:
        dataset = next((run.work.dataset for run in self.runs if run.work.dataset), None)
        if dataset is None or self.epoch is None:
            return None
        return Sample(dataset / self.epoch.value, dataset / self.epoch.draws, self.epoch.count)

    def of_runs(self, values: Sequence[float | None]) -> Sample | None:
        """Of a figure that each run has once."""
        return sample([np.array([value]) for value in values if value is not None], self.seed + 9)


def _warm_epochs(run: RunData, warmup: int, warnings: list[str]) -> Numbers:
    if warmup and len(run.epochs) and len(run.epochs) <= warmup:
        warnings.append(
            f"{run.label} {run.size.text}, run {run.run_id}: {len(run.epochs)} epoch{'s' * (len(run.epochs) > 1)} in "
            "all, so that warm-up could not be left out: run more epochs"
        )
        return run.epochs[-1:]
    return run.epochs[warmup:]


def _warm_steps(run: RunData, options: Options) -> Numbers:
    """Without the first epochs, if there are others, else without the first steps."""
    if not len(run.steps):
        return run.steps
    ids = np.unique(run.steps[:, 1])
    if len(ids) > options.warmup_epochs:
        first = ids[options.warmup_epochs]
        return np.asarray(run.steps[run.steps[:, 1] >= first])
    return run.steps[min(options.warmup_steps, len(run.steps) - 1) :]


# --- one line


def _line(label: str, measured: dict[Size, Measured], axis: str, options: Options, weak: bool) -> Line:
    base = next(iter(measured))
    basis = _basis(measured)
    points = [
        _point(size, own, measured[base], _ratio(size, base, axis), basis, options, weak)
        for size, own in measured.items()
    ]
    baseline = all(run.baseline for own in measured.values() for run in own.runs)
    return Line(label, "weak" if weak else "strong", base, tuple(points), baseline)


def _basis(measured: dict[Size, Measured]) -> str:
    """What speedup is computed from: epochs where all sizes have them, else samples a second."""
    if all(own.epoch is not None for own in measured.values()):
        return "epoch"
    return "throughput" if all(own.throughput is not None for own in measured.values()) else ""


def _ratio(size: Size, base: Size, axis: str) -> float:
    """How many times the base a size is."""
    if axis == "nodes" or size.ranks is None or base.ranks is None:
        return size.nodes / base.nodes
    return size.ranks / base.ranks


def _point(size: Size, own: Measured, base: Measured, ratio: float, basis: str, options: Options, weak: bool) -> Point:
    speedup, efficiency = _gain(own, base, ratio, basis, weak)
    windows = [run.window for run in own.runs if run.window is not None]
    to_epochs = own.epoch.times(options.epochs) if own.epoch else None
    return Point(
        size=size,
        runs=len(own.runs),
        epoch=_stat(own.epoch),
        step=_stat(own.step),
        throughput=_stat(own.throughput),
        speedup=_stat(speedup),
        efficiency=_stat(efficiency),
        wait=_stat(own.wait),
        communication=_stat(own.of_runs([window.communication / window.seconds for window in windows])),
        exposed=_stat(own.of_runs([window.exposed / window.seconds for window in windows])),
        gpu_utilisation=_stat(own.of_runs([run.gpu_utilisation for run in own.runs])),
        energy=_stat(own.of_runs([run.energy for run in own.runs])),
        energy_per_sample=_stat(own.of_runs([_energy_per_sample(run) for run in own.runs])),
        peak_device=max((run.peak_device for run in own.runs if run.peak_device), default=None),
        peak_host=max((run.peak_host for run in own.runs if run.peak_host), default=None),
        seconds_to_epochs=_stat(to_epochs),
        device_hours=_stat(to_epochs.times(size.ranks / 3600)) if to_epochs and size.ranks else None,
    )


def _stat(found: Sample | None) -> Stat | None:
    return found.stat() if found is not None else None


def _gain(own: Measured, base: Measured, ratio: float, basis: str, weak: bool) -> tuple[Sample | None, Sample | None]:
    """Speedup and efficiency. Under weak scaling an epoch has `ratio` times the work."""
    if own is base:
        one = Sample(1.0, np.ones_like((own.epoch or own.throughput or own.step or _NONE).draws), 1)
        return (one, one) if basis else (None, None)
    if basis == "epoch" and base.epoch and own.epoch:
        gain = base.epoch.over(own.epoch)
        return (gain.times(ratio), gain) if weak else (gain, gain.times(1 / ratio))
    if basis == "throughput" and base.throughput and own.throughput:
        gain = own.throughput.over(base.throughput)
        return gain, gain.times(1 / ratio)
    return None, None


_NONE = Sample(0.0, np.zeros(1), 0)


def _energy_per_sample(run: RunData) -> float | None:
    samples = float(run.steps[:, 4].sum())
    return run.energy / samples if run.energy is not None and samples > 0 else None


# --- with the API and without


def _comparisons(measured: dict[str, dict[Size, Measured]], baselines: set[str]) -> list[Comparison]:
    found = []
    for against in sorted(baselines):
        label = against.removesuffix(" (baseline)")
        for size, theirs in measured[against].items():
            ours = measured.get(label, {}).get(size)
            for of in ("epoch", "step"):
                one, other = (getattr(ours, of), getattr(theirs, of)) if ours else (None, None)
                if one and other:
                    found.append(Comparison(label, against, size, one.over(other).stat(), of))
                    break
    return found
