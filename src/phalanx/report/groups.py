"""Which runs may stand on one curve: those of one workload, label by label."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from .model import RunData, Work

_FIELDS = ("parameters", "batch_size", "dataset", "precision")


@dataclass
class Workload:
    """Runs of one workload, with all that any of them tells of it."""

    work: Work
    weak: bool
    runs: list[RunData] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        return sorted({run.work.name for run in self.runs})


def by_workload(runs: Sequence[RunData]) -> list[Workload]:
    """Runs whose known facts agree; one that tells nothing of its workload joins where there is only one.

    The global batch is no such fact: per-rank batches are what is kept when a run grows. Under weak scaling the size
    of the dataset isn't either.
    """
    groups: list[Workload] = []
    for run in sorted(runs, key=lambda run: -_known(run.work)):
        fitting = [group for group in groups if _agree(group, run)]
        if _known(run.work) == 0 and len(fitting) > 1:  # any of them, or none
            fitting = [group for group in groups if _known(group.work) == 0]
        if not fitting:
            groups.append(Workload(run.work, run.scaling == "weak"))
        group = fitting[0] if fitting else groups[-1]
        group.work = _joined(group.work, run.work)
        group.runs.append(run)
    order = {id(run): index for index, run in enumerate(runs)}
    for group in groups:
        group.runs.sort(key=lambda run: order[id(run)])
    return sorted(groups, key=lambda group: order[id(group.runs[0])])


def _known(work: Work) -> int:
    return sum(getattr(work, name) is not None for name in _FIELDS)


def _agree(group: Workload, run: RunData) -> bool:
    weak = run.scaling == "weak"
    if weak != group.weak:
        return False
    pairs = [
        (getattr(group.work, name), getattr(run.work, name)) for name in _FIELDS if not (weak and name == "dataset")
    ]
    if _known(run.work) and _known(group.work) and group.work.accumulate != run.work.accumulate:
        return False
    return all(mine is None or theirs is None or mine == theirs for mine, theirs in pairs)


def _joined(one: Work, other: Work) -> Work:
    """`one`, with what only the other tells."""
    missing = {name: getattr(other, name) for name in (*_FIELDS, "gradient_bytes") if getattr(one, name) is None}
    return replace(one, **missing)


def difference(one: Work, other: Work) -> str:
    """What two workloads differ in, in words."""
    words = {
        "parameters": "parameters",
        "batch_size": "batch size",
        "dataset": "samples an epoch",
        "precision": "precision",
    }
    found = [
        f"{words[name]} {getattr(one, name)} and {getattr(other, name)}"
        for name in _FIELDS
        if getattr(one, name) is not None
        and getattr(other, name) is not None
        and getattr(one, name) != getattr(other, name)
    ]
    if one.accumulate != other.accumulate:
        found.append(f"accumulate {one.accumulate} and {other.accumulate}")
    return ", ".join(found) or "scaling strong and weak, or nothing is recorded of one"
