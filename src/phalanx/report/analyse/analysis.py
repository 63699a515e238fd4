"""From runs to the numbers of a report: pure, and the same for the same runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..model import Analysis, Comparison, Group, Input, Line, RunData, Size
from ..text import WARM_UP_IS_IN, percent, time
from .groups import Workload, by_workload, difference
from .measure import Left, Measured, Options, few_epochs, in_first_epoch
from .recommendation import growth, verdict
from .stats import Sample, exactly

__all__ = ["Options", "analyse"]
_FEW = 3  # epochs at a size, below which steps say more
_MANY = 20  # steps that are enough for that
_BASELINE = " (baseline)"


def analyse(
    runs: Sequence[RunData], inputs: Sequence[Input], options: Options, meta: Mapping[str, Any] | None = None
) -> Analysis:
    """Group, measure and compare. Runs of an all-reduce benchmark are for the forecast only: they train nothing, though
    they record what any run does, such as the GPUs' use."""
    benchmarks = [run for run in runs if len(run.allreduce)]
    trainings = [run for run in runs if not len(run.allreduce)]
    workloads = by_workload(trainings)
    left, warnings = Left(), _mixed(workloads)
    groups = [_group(workload, options, benchmarks, left, warnings) for workload in workloads]
    return Analysis(
        title=options.title,
        groups=tuple(group for group in groups if group.lines),
        inputs=tuple(_with_reasons(inputs, runs, left)),
        warnings=tuple(dict.fromkeys(warnings)),
        warmup_epochs=options.warmup_epochs,
        warmup_steps=options.warmup_steps,
        epochs_wanted=options.epochs,
        efficiency_wanted=options.efficiency,
        runs=tuple(trainings),
        meta=dict(meta or {}),
    )


def _mixed(workloads: Sequence[Workload]) -> list[str]:
    if len(workloads) < 2:
        return []
    first = workloads[0]
    return [
        f"{' and '.join(other.names)} is another workload than {' and '.join(first.names)} "
        f"({difference(first, other)}): curves of its own, and not compared"
        for other in workloads[1:]
    ]


def _with_reasons(inputs: Sequence[Input], runs: Sequence[RunData], left: Left) -> list[Input]:
    """Inputs with what the analysis left out of their runs."""
    reasons: dict[Path, list[str]] = {}
    for run in runs:
        for reason in left.reasons.get(id(run), ()):
            said = reason if run.run_id == run.path.name else f"{run.label} on {run.size.text}, {reason}"
            reasons.setdefault(run.path, []).append(said)
    return [
        replace(item, left_out=(*item.left_out, *dict.fromkeys(reasons.get(item.path, ())))) if item.used else item
        for item in inputs
    ]


def _group(
    workload: Workload, options: Options, benchmarks: Sequence[RunData], left: Left, warnings: list[str]
) -> Group:
    axis = "nodes" if any(run.size.ranks is None for run in workload.runs) else "ranks"
    lines: list[Line] = []
    measured: dict[str, dict[Size, Measured]] = {}
    notes = list(workload.notes)
    for label in sorted({run.label for run in workload.runs}):
        own = [run for run in workload.runs if run.label == label]
        sizes = _measured(own, axis, options, left, warnings)
        if sizes:
            measured[label] = sizes
            line = _line(label, sizes, options, workload.weak, notes)
            if label != "single":
                line = _with_forecast(line, own, benchmarks, options)
            lines.append(replace(line, verdict=_verdict(line, sizes, options)))
    ranking = _ranking([line for line in lines if not line.baseline])
    if ranking:
        alone = "One size was run: see how it compares with the others."
        lines = [replace(line, verdict=alone) if len(line.points) == 1 else line for line in lines]
    return Group(
        title=_title(workload),
        work=workload.work,
        axis=axis,
        lines=tuple(lines),
        comparisons=tuple(_comparisons(measured, [line.label for line in lines if line.baseline])),
        notes=tuple(dict.fromkeys([*([ranking] if ranking else []), *notes, *_notes(lines, workload, ranking)])),
    )


def _verdict(line: Line, sizes: Mapping[Size, Measured], options: Options) -> str:
    if line.label == "single" and len(line.points) == 1:
        return f"This strategy is one process: to see what more are worth, run another on {line.base.text} too."
    if line.of != "epoch" and len({in_first_epoch(own.runs, options) for own in sizes.values()}) > 1:
        return "Nothing can be said: the steps of some sizes are of their warm-up, those of others aren't (see above)."
    return verdict(line, options.efficiency)


def _title(workload: Workload) -> str:
    work, parts = workload.work, []
    if work.parameters:
        parts.append(f"{work.parameters:,} parameters")
    if work.batch_size:
        steps = f" x {work.accumulate}" if work.accumulate > 1 else ""
        parts.append(f"{work.batch_size}{steps} samples a rank and step")
    if work.dataset and not workload.weak:
        parts.append(f"{work.dataset:,} samples an epoch")
    parts += [part for part in (work.precision, workload.device) if part]
    return f"{', '.join(workload.names)}: {', '.join(parts) or 'workload not recorded'}"


def _notes(lines: Sequence[Line], workload: Workload, ranking: str) -> list[str]:
    notes = [
        f"{line.label}: only {line.base.text} was run, so that there is no speedup to show"
        for line in lines
        if len(line.points) == 1 and not ranking
    ]
    for line in lines:
        own = [run for run in workload.runs if run.label == line.label]
        notes += _unlike(line.label, "scripts", set(Workload(own).names))
        for point in line.points:
            started = {run.launcher for run in own if run.size == point.size and run.launcher}
            notes += _unlike(f"{line.label} on {point.size.text}", "launchers", started)
    if any(run.size.nodes == 0 for run in workload.runs):
        notes.append("how many nodes these ranks were on isn't told: --ranks-per-node N says how many were on each")
    if workload.weak:
        notes.append("weak scaling: the work grows with the size, so that the ideal is a constant time")
    return notes


def _ranking(lines: Sequence[Line]) -> str:
    """Strategies beside each other, at the largest size that all of them have."""
    common = set.intersection(*({point.size for point in line.points} for line in lines)) if len(lines) > 1 else set()
    if not common:
        return ""
    size = max(common, key=lambda size: (size.ranks or 0, size.nodes))
    points = {line.label: next(point for point in line.points if point.size == size) for line in lines}
    for of in ("epoch", "step"):
        times = {label: stat.value for label, point in points.items() if (stat := getattr(point, of))}
        if len(times) == len(lines):
            (first, least), *others = sorted(times.items(), key=lambda item: item[1])
            alike = [first, *(label for label, value in others if time(value) == time(least))]
            others = others[len(alike) - 1 :]
            first = f"{', '.join(alike[:-1])} and {alike[-1]} are" if len(alike) > 1 else f"{first} is"
            rest = "".join(f", {label} {time(value)} (+{percent(value / least - 1)})" for label, value in others)
            article = "an" if of == "epoch" else "a"
            return f"at {size.text} {first} fastest: {time(least)} {article} {of}{rest}"
    return ""


def _unlike(what: str, kind: str, names: set[str]) -> list[str]:
    """Runs that count as repeats or as one curve, though they differ in what isn't the workload."""
    return [f"{what}: runs of several {kind} together: {', '.join(sorted(names))}"] if len(names) > 1 else []


def _measured(
    runs: Sequence[RunData], axis: str, options: Options, left: Left, warnings: list[str]
) -> dict[Size, Measured]:
    """One label's sizes in their order, smallest first, that have anything to show."""
    raw = options.warmup_epochs > 0 and few_epochs(runs, options.warmup_epochs) and not any(len(r.steps) for r in runs)
    if raw and any(len(run.epochs) for run in runs):
        warnings.append(
            f"{runs[0].label}: its runs have no epoch after warm-up, so that {WARM_UP_IS_IN}: run more epochs"
        )
    sizes = sorted({run.size for run in runs}, key=lambda size: _order(size, axis))
    found = {size: Measured([run for run in runs if run.size == size], options, raw, left) for size in sizes}
    early = [size for size, own in found.items() if in_first_epoch(own.runs, options)]
    if early and len(early) < len(found):
        warnings.append(
            f"{runs[0].label} on {', '.join(size.text for size in early)}: too few steps come after the warm-up, so "
            "that its steps are of that, and the other sizes' aren't: run as many epochs everywhere"
        )
    gone = [size for size, measured in found.items() if measured.nothing()]
    if gone:
        warnings.append(
            f"{runs[0].label} on {', '.join(size.text for size in gone)}: nothing remains without the warm-up; "
            "run more epochs, or see --warmup-epochs"
        )
    return {size: measured for size, measured in found.items() if size not in gone}


def _order(size: Size, axis: str) -> tuple[int, int]:
    return (size.nodes, size.ranks or 0) if axis == "nodes" else (size.ranks or 0, size.nodes)


# --- one line


def _line(label: str, sizes: Mapping[Size, Measured], options: Options, weak: bool, notes: list[str]) -> Line:
    base = next(iter(sizes.values()))
    of, why = _basis(sizes, weak)
    if why and len(sizes) > 1:
        notes.append(f"{label}: {why}")
    points = []
    for measured in sizes.values():
        gain, efficiency = _gain(measured, base, of, weak) if len(sizes) > 1 else (None, None)
        points.append(measured.point(options.epochs, gain, efficiency))
    return Line(
        label,
        "weak" if weak else "strong",
        base.size,
        tuple(points),
        baseline=label.endswith(_BASELINE),
        of=of or "epoch",
    )


def _basis(sizes: Mapping[Size, Measured], weak: bool) -> tuple[str, str]:
    """Whose time speedup is of: "epoch", "sample", "step", or "" where nothing is comparable; and words on why."""
    all_of = list(sizes.values())
    epochs = all(own.epoch is not None for own in all_of)
    samples = all(own.sampled is not None for own in all_of)
    if weak and epochs and not _grows(all_of):
        same = len({own.dataset for own in all_of}) == 1
        samples_are = "the same samples at all sizes" if same else "samples that do not grow as sizes do"
        why = f"its epochs have {samples_are}"
        if samples:
            return "sample", f"{why}, so that times a sample are compared"
        return "", f"{why}{': that is strong scaling' if same else ''}; there is no speedup to show"
    least = min((own.epoch.count for own in all_of if own.epoch), default=0)
    if epochs and not (samples and least < _FEW and all(own.sampled and own.sampled.count >= _MANY for own in all_of)):
        return "epoch", ""
    if samples:
        few = f"fewer than {_FEW} epochs at some size" if epochs else "no epoch at some size"
        return "sample", f"{few}, so that speedup is of steps alone, without evaluation and checkpoints"
    if weak and all(own.step is not None for own in all_of):
        return "step", ""
    return "", "its sizes have no times of one kind, so that there is no speedup to show"


def _grows(all_of: Sequence[Measured]) -> bool:
    """Whether an epoch's samples grow with the size, as weak scaling means; True where nobody says."""
    base = all_of[0]
    for own in all_of[1:]:
        ratio = growth(base.size, own.size)[0]
        if base.dataset and own.dataset and abs(own.dataset / base.dataset / ratio - 1) > 0.05:
            return False
    return True


def _gain(own: Measured, base: Measured, of: str, weak: bool) -> tuple[Sample | None, Sample | None]:
    """Speedup and efficiency against the base. Under weak scaling an epoch, or a step, has `ratio` times the work."""
    if not of:
        return None, None
    if own is base:
        return exactly(1.0), exactly(1.0)
    ratio = growth(base.size, own.size)[0]
    if of == "sample" and own.sampled and base.sampled:
        gain = own.sampled.over(base.sampled)
        return gain, gain.times(1 / ratio)
    mine, theirs = (own.epoch, base.epoch) if of == "epoch" else (own.step, base.step)
    if mine is None or theirs is None:
        return None, None
    gain = theirs.over(mine)
    return (gain.times(ratio), gain) if weak else (gain, gain.times(1 / ratio))


def _with_forecast(line: Line, runs: Sequence[RunData], benchmarks: Sequence[RunData], options: Options) -> Line:
    if find_spec("phalanx.report.analyse.forecast") is None:
        return line
    forecasts = import_module("phalanx.report.analyse.forecast").forecasts
    found, of_steps = forecasts(line, runs, benchmarks, options.efficiency)
    return replace(line, forecast=found, step_forecast=of_steps)


# --- with the API and without


def _comparisons(measured: Mapping[str, Mapping[Size, Measured]], baselines: Sequence[str]) -> list[Comparison]:
    """At each size that both have: epochs, or steps where those are few."""
    found = []
    for against in baselines:
        label = against.removesuffix(_BASELINE)
        for size, theirs in measured[against].items():
            ours = measured.get(label, {}).get(size)
            if ours is None:
                continue
            pairs = [(of, getattr(ours, of), getattr(theirs, of)) for of in ("epoch", "step")]
            known = [(of, mine, other) for of, mine, other in pairs if mine is not None and other is not None]
            known.sort(key=lambda pair: min(pair[1].count, pair[2].count) < _FEW)
            if known:
                of, mine, other = known[0]
                found.append(Comparison(label, against, size, mine.over(other).stat(), of))
    return found
