"""Which runs may stand on one curve: those of one workload on one kind of device."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

from ..model import RunData, Work

_FIELDS = ("parameters", "dataset", "precision")
_NAMES = {"parameters": "parameters", "dataset": "samples an epoch", "precision": "precision"}


@dataclass
class Workload:
    """Runs of one workload, with all that any of them tells of it."""

    runs: list[RunData] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def weak(self) -> bool:
        return self.runs[0].scaling == "weak"

    @property
    def names(self) -> list[str]:
        """Of scripts and files. A timer that was not started by us may know a script without its suffix."""
        found = {run.work.name for run in self.runs}
        return sorted(name for name in found if f"{name}.py" not in found)

    @property
    def device(self) -> str | None:
        return next((device for run in self.runs if (device := kind_of_device(run))), None)

    @property
    def work(self) -> Work:
        """The facts that are known and the same for all its runs: a batch may grow or shrink with the ranks."""
        work = Work(self.names[0])
        for name in (*_FIELDS, "gradient_bytes", "batch_size", "accumulate"):
            said = {getattr(run.work, name) for run in self.runs if run.work.parameters is not None} - {None}
            said = said or {getattr(run.work, name) for run in self.runs} - {None}
            if len(said) == 1:
                work = replace(work, **{name: said.pop()})
        return work


def by_workload(runs: Sequence[RunData]) -> list[Workload]:
    """Runs whose known facts agree. Those that tell nothing are put by their script's name, and hand-written baselines
    beside the one workload that they can only mean."""
    known = [run for run in runs if _is_known(run)]
    groups = [group for alike in _split(known, _facts) for group in _by_batch(alike)]
    for run in (run for run in runs if not _is_known(run)):
        fitting = [group for group in groups if _fits(run, group)]
        if len(fitting) == 1:
            told = _is_known(fitting[0].runs[0])
            fitting[0].runs.append(run)
            if told and not _says(run):
                fitting[0].notes.append(
                    f"{run.work.name} doesn't record what it trains: that it is the same is taken for granted"
                )
        else:
            groups.append(Workload([run]))
    order = {id(run): index for index, run in enumerate(runs)}
    for group in groups:
        group.runs.sort(key=lambda run: order[id(run)])
        group.notes = list(dict.fromkeys(group.notes))
    return sorted(groups, key=lambda group: order[id(group.runs[0])])


def _is_known(run: RunData) -> bool:
    return run.work.parameters is not None and run.device is not None


def kind_of_device(run: RunData) -> str | None:
    """`cpu`, or the GPU's name: `cuda:0 (NVIDIA H100)` on every rank's own index."""
    if run.device is None:
        return None
    index, _, name = run.device.partition(" ")
    return name.strip("()") or index.partition(":")[0]


def _split(runs: Sequence[RunData], key: Callable[[RunData], Hashable]) -> list[list[RunData]]:
    found: dict[Hashable, list[RunData]] = {}
    for run in runs:
        found.setdefault(key(run), []).append(run)
    return list(found.values())


def _facts(run: RunData) -> Hashable:
    """Under weak scaling the data grow with the size."""
    work = run.work
    dataset = None if run.scaling == "weak" else work.dataset
    return run.scaling, kind_of_device(run), work.parameters, dataset, work.precision


def _batch(run: RunData) -> int | None:
    """Samples of one rank in one optimizer step."""
    return None if run.work.batch_size is None else run.work.batch_size * run.work.accumulate


def _by_batch(runs: list[RunData]) -> list[Workload]:
    """One curve has the same batch a rank, or the same batch over all ranks; else each batch a rank is a curve."""
    batches = {_batch(run) for run in runs} - {None}
    totals = {(_batch(run) or 0) * (run.size.ranks or 1) for run in runs}
    if len(batches) <= 1 or len(totals) == 1:
        return [Workload(runs)]
    return [Workload(alike) for alike in _split(runs, _batch)]


def _says(run: RunData) -> bool:
    return any(getattr(run.work, name) is not None for name in (*_FIELDS, "batch_size"))


def _fits(run: RunData, group: Workload) -> bool:
    """Whether a run that tells less than all may be of this workload."""
    if (run.scaling == "weak") != group.weak or any(_no_axis(run, other) for other in group.runs):
        return False
    for mine, theirs in ((kind_of_device(run), group.device), *_pairs(run, group)):
        if mine is not None and theirs is not None and mine != theirs:
            return False
    told = group.runs[0].work.parameters is not None
    same = run.work.name.removesuffix(".py") in {name.removesuffix(".py") for name in group.names}
    return same or (run.baseline and told)


def _no_axis(run: RunData, other: RunData) -> bool:
    """Whether one tells nodes only and the other ranks only."""
    one, two = run.size, other.size
    return (one.ranks is None and two.nodes == 0) or (one.nodes == 0 and two.ranks is None)


def _pairs(run: RunData, group: Workload) -> list[tuple[object, object]]:
    work = group.work
    names = [name for name in _FIELDS if not (group.weak and name == "dataset")]
    pairs: list[tuple[object, object]] = [(getattr(run.work, name), getattr(work, name)) for name in names]
    same_size = [_batch(other) for other in group.runs if other.size == run.size]
    return [*pairs, (_batch(run), same_size[0] if same_size else None)]


def difference(one: Workload, other: Workload) -> str:
    """What two workloads differ in, in words."""
    found = [
        f"{word} {mine} and {theirs}"
        for name, word in _NAMES.items()
        if (mine := getattr(one.work, name)) != (theirs := getattr(other.work, name)) and None not in (mine, theirs)
    ]
    if one.weak != other.weak:
        found.append("strong and weak scaling")
    if one.device != other.device and None not in (one.device, other.device):
        found.append(f"on {one.device} and {other.device}")
    batches = [sorted({batch for run in group.runs if (batch := _batch(run))}) for group in (one, other)]
    if not found and batches[0] != batches[1] and all(batches):
        found.append(f"samples a rank and step {_list(batches[0])} and {_list(batches[1])}")
    if not found and any(_no_axis(run, theirs) for run in one.runs for theirs in other.runs):
        return "one tells nodes and the other ranks: --ranks-per-node N says how many were on each"
    return ", ".join(found) or "not recorded as the same"


def _list(values: Sequence[int]) -> str:
    return "/".join(map(str, values))
