"""GPU samples in CSV files, as itwinai writes them: a file a run or one a node, and more of runs that were repeated."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..text import count
from .csvtable import Table, number, whole

PARTS = ("epoch-time", "gpu-energy-data", "communication-data", "computation-data")  # itwinai's folders, below a run's
BASELINE = " (baseline)"
_FIGURES = ("utilization", "power", "probing_interval")


@dataclass(frozen=True)
class Key:
    """What a GPU or computation file is about."""

    path: Path
    label: str
    gpus: int

    @property
    def place(self) -> tuple[Path, str, int]:
        return experiment(self.path), self.label, self.gpus


@dataclass(frozen=True)
class Energy:
    nodes: int
    utilisation: float | None
    joules: float | None


class _Sample(NamedTuple):
    node: int
    local_rank: str | None
    use: float
    joules: float


def experiment(path: Path) -> Path:
    """The folder that files of one experiment share: the one above itwinai's folder for each kind."""
    return path.parent.parent if path.parent.name in PARTS else path.parent


def plain(label: str) -> str:
    """Strategies as the three kinds of files name them: `torch-ddp` and `ddp` are one."""
    return label.removesuffix(BASELINE).lower().removeprefix("torch-").replace("_", "-")


def energies(tables: Sequence[Table], notes: dict[Path, list[str]]) -> dict[Key, Energy]:
    """By experiment, strategy and number of GPUs. Files of other GPUs are parts of one run, files of the same are
    repeats, of which the mean is taken; what is odd comes into `notes`, by file."""
    places: dict[tuple[Path, str, int], dict[Path, list[_Sample]]] = defaultdict(dict)
    for table in tables:
        for (label, gpus), rows in _samples(table).items():
            places[experiment(table.path), label, gpus][table.path] = rows
    return {
        Key(next(iter(files)), label, gpus): _energy(files, label, gpus, notes)
        for (_, label, gpus), files in places.items()
    }


def _samples(table: Table) -> Mapping[tuple[str, int], list[_Sample]]:
    """Each sample stands for the `probing_interval` seconds before it. A cut row is none."""
    groups: dict[tuple[str, int], list[_Sample]] = defaultdict(list)
    for row in table.rows:
        gpus, node = whole(row.get("num_global_gpus")), whole(row.get("node_idx")) or 0
        if gpus and not any(row.get(name) is None for name in _FIGURES):
            use, power, interval = (_finite(number(row[name])) for name in _FIGURES)
            groups[plain(row.get("strategy", "")), gpus].append(
                _Sample(node, row.get("local_rank"), use, power * interval)
            )
    return groups


def _finite(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else math.nan


def _energy(files: Mapping[Path, list[_Sample]], label: str, gpus: int, notes: dict[Path, list[str]]) -> Energy:
    runs = _runs(files.values())
    what, noted = f"{label} on {count(gpus, 'GPU')}", notes.setdefault(next(iter(files)), [])
    samples = [sample for rows in runs for sample in rows]
    if unknown := sum(math.isnan(sample.joules) for sample in samples):
        noted.append(f"{what}: {count(unknown, 'sample')} without power, so that its energy isn't known")
    least = min(len(_devices(rows)) for rows in runs)
    if least < gpus and all(sample.local_rank for sample in samples):
        noted.append(f"{what}: samples of {least} of them only, and its energy is theirs")
    if len(runs) > 1:
        noted.append(f"{what}: {len(runs)} files of the same GPUs: the mean of their figures")
    uses = [float(np.mean(used)) for rows in runs if (used := [s.use for s in rows if not math.isnan(s.use)])]
    joules = float(np.mean([sum(sample.joules for sample in rows) for rows in runs]))
    return Energy(
        nodes=max(len({sample.node for sample in rows}) for rows in runs),
        utilisation=float(np.mean(uses)) if uses else None,
        joules=None if math.isnan(joules) else joules,
    )


def _runs(files: Iterable[list[_Sample]]) -> list[list[_Sample]]:
    """Files that have no GPU in common put together."""
    runs: list[list[_Sample]] = []
    for rows in files:
        fitting = next((run for run in runs if not _devices(run) & _devices(rows)), None)
        if fitting is None:
            runs.append(list(rows))
        else:
            fitting.extend(rows)
    return runs


def _devices(rows: Iterable[_Sample]) -> set[tuple[int, str | None]]:
    return {(sample.node, sample.local_rank) for sample in rows}
