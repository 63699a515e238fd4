"""CSV files of other origin as `RunData`: epoch times, GPU samples and profiled computation, as itwinai writes them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..model import Input, RunData, Size, Window, Work
from ..text import count, numbers, shown
from .csvtable import DIFFERS, Table, few, number, whole
from .gpucsv import BASELINE, Energy, Key, experiment, plain
from .gpucsv import energies as energies_of

_FEW = 5
_SHORTEST, _LONGEST = 1e-6, 1e9  # seconds that an epoch can take
_MOST = 1_000_000  # nodes or ranks


def read_tables(
    tables: Sequence[Table], root: Path, others: Sequence[RunData] = (), ranks_a_node: int | None = None
) -> tuple[list[RunData], list[Input]]:
    """The runs of files that were found below `root`, and what of each file was used.

    Epochs that one of the `others` has too are left out: EpochTimer writes records and, if asked, such a file.

    `ranks_a_node` is that of files which tell ranks or nodes only, if one knows it.

    Epoch times make runs. GPU and computation files tell the number of GPUs, not of nodes: they are added to the runs
    of their experiment where that number is known (see `_gpus_a_node`), and are left out elsewhere.
    """
    runs, inputs = _epoch_runs([table for table in tables if table.kind == "epoch times"], root, others)
    gpu = [table for table in tables if table.kind == "GPU energy"]
    computation = [table for table in tables if table.kind == "computation"]
    notes: dict[Path, list[str]] = {}
    energies = energies_of(gpu, notes)
    windows = _windows(computation)
    a_node = ranks_a_node or _gpus_a_node(runs, energies, windows)
    if a_node is None and (a_node := _ranks_a_node(runs)):
        found_of = {run.path for run in runs if run.size.ranks is None or run.size.nodes == 0}
        note = f"{count(a_node, 'rank')} a node, as rows tell that have both"
        inputs = [replace(item, notes=(*item.notes, note)) if item.path in found_of else item for item in inputs]
    runs = [_with_both(run, a_node) for run in runs]
    runs = [_joined(run, energies, windows) for run in runs]
    runs += _energy_alone(runs, energies, root)
    joined = {(experiment(run.path), plain(run.label), run.size.ranks) for run in runs}
    for table in (*gpu, *computation):
        inputs.append(_input_of(table, joined, a_node, notes.get(table.path, ())))
    inputs += [Input(table.path, "?", "", (table.reason,)) for table in tables if table.kind == "?"]
    return runs, inputs


# --- epoch times


def _same(run: RunData) -> list[tuple[object, ...]]:
    """What a run shares with a copy of it, which may tell nodes or ranks only: the first is what to look for."""
    label, times = run.label.removesuffix(BASELINE), run.epochs.tobytes()
    sizes = (("nodes", run.size.nodes), ("ranks", run.size.ranks))
    return [(label, what, number, times) for what, number in sizes if number]


def _epoch_runs(tables: Sequence[Table], root: Path, others: Sequence[RunData]) -> tuple[list[RunData], list[Input]]:
    """A run for each name and number of nodes in a file, and each time its epochs begin anew."""
    runs: list[RunData] = []
    inputs: list[Input] = []
    seen = {key: run.path for run in others if len(run.epochs) for key in _same(run)}
    for table in tables:
        left_out = [table.reason] if table.reason else []
        found: list[RunData] = []
        for run in _runs_of(table, root, left_out):
            keys = _same(run)
            same = seen.get(keys[0], table.path)
            seen |= {key: same for key in keys if key not in seen}
            if same != table.path:
                left_out.append(f"{run.label} on {run.size.text}: the same times as in {same}")
            else:
                found.append(run)
        runs += found
        epochs = sum(len(run.epochs) for run in found)
        used = ", ".join(f"{run.label} on {run.size.text}" for run in found[:_FEW])
        more = f" and {len(found) - _FEW} more" if len(found) > _FEW else ""
        inputs.append(
            Input(table.path, "epoch times", f"{epochs} epochs: {used}{more}" if found else "", tuple(left_out))
        )
    return runs, inputs


def _runs_of(table: Table, root: Path, left_out: list[str]) -> list[RunData]:
    groups: dict[tuple[str, Size, str], list[tuple[int, float]]] = defaultdict(list)
    bad: dict[str, list[str]] = defaultdict(list)
    for line, row in enumerate(table.rows, 2):
        where = f"line {line}"
        name, size, epoch = shown(row.get("name", "")), _size(row), whole(row.get("epoch_id"))
        seconds = number(row.get("time"))
        if not name or size is None or epoch is None or row.get("time") is None:
            bad["not a whole row, or a number of nodes or ranks that isn't one"].append(where)
        elif DIFFERS in row:
            bad["columns of one meaning tell different numbers"].append(where)
        elif size.ranks is not None and size.nodes > size.ranks:
            bad["more nodes than ranks"].append(f"{where} ({size.nodes} and {size.ranks})")
        elif seconds is None or not math.isfinite(seconds):
            bad["its time is not a number"].append(f"{where} ({name}, {size.text}, epoch {epoch})")
        elif not _SHORTEST <= seconds <= _LONGEST and seconds > 0:
            bad[f"a time that can't be ({_SHORTEST:g} to {_LONGEST:g} s can)"].append(where)
        elif seconds <= 0:
            bad["a time that isn't above zero: a clock ran backwards"].append(where)
        else:
            groups[name, size, row.get("run", "")].append((epoch, seconds))
    left_out += [f"{few(places)}: {why}" for why, places in bad.items()]
    return [
        _run(table.path, root, name, size, run_id or f"{table.path.stem}-{index}", rows)
        for (name, size, run_id), rows_of in groups.items()
        for index, rows in enumerate(_passes(rows_of, name, size, left_out))
    ]


def _size(row: Mapping[str, str]) -> Size | None:
    """Of nodes and ranks what there is; None for a number that isn't one."""
    found = [_how_many(row.get(name)) for name in ("nodes", "ranks")]
    if None in found or not any(found):
        return None
    return Size(found[0] or 0, found[1] or None)


def _how_many(text: str | None) -> int | None:
    """0 where nothing is told."""
    if not text or text.lower() == "nan":
        return 0
    number = whole(text)
    return number if number is not None and 0 < number <= _MOST else None


def _passes(rows: list[tuple[int, float]], name: str, size: Size, left_out: list[str]) -> list[list[tuple[int, float]]]:
    """Rows as runs: an epoch that is there again is another run's. Rows that are all in an earlier run are there
    twice; what has no first epoch is no run, but another time of an epoch."""
    runs: list[dict[int, float]] = []
    for epoch, seconds in rows:
        run = next((run for run in runs if epoch not in run), None)
        if run is None:
            runs.append(run := {})
        run[epoch] = seconds
    found: list[dict[int, float]] = []
    twice, strays = 0, set[int]()
    for run in runs:
        if any(run.items() <= other.items() for other in found):
            twice += len(run)
        elif min(run) <= min(runs[0]):
            found.append(run)
        else:
            strays |= {epoch for epoch, seconds in run.items() if (epoch, seconds) not in runs[0].items()}
    if twice:
        left_out.append(f"{name} on {size.text}: {count(twice, 'row')} twice")
    if strays:
        left_out.append(f"{name} on {size.text}: another time of {numbers('epoch', strays)}")
    return [sorted(run.items()) for run in found]


def _run(path: Path, root: Path, name: str, size: Size, run_id: str, rows: list[tuple[int, float]]) -> RunData:
    baseline = name.endswith(BASELINE)
    return RunData(path, run_id, name, size, Work(root.name), baseline, epochs=np.array(rows, dtype=float))


# --- GPU samples


def _energy_alone(runs: Sequence[RunData], energies: Mapping[Key, Energy], root: Path) -> list[RunData]:
    """Experiments with GPU files only: points without times."""
    if any(len(run.epochs) for run in runs):
        return []
    return [
        RunData(key.path, key.path.stem, key.label, Size(found.nodes, key.gpus), Work(root.name),
                gpu_utilisation=found.utilisation, energy=found.joules)
        for key, found in energies.items()
    ]  # fmt: skip


# --- profiled computation


def _windows(tables: Sequence[Table]) -> dict[Key, Window]:
    """By strategy and number of GPUs, as means over ranks. Kernel times are microseconds; rows `aten::` are computation
    and `nccl:` communication. The whole, where a file has no `profiling_time`, is their sum."""
    shares: dict[tuple[Path, str, int], list[tuple[float, float, float]]] = defaultdict(list)
    paths: dict[tuple[Path, str, int], Path] = {}
    for table in tables:
        by_rank: dict[tuple[str, int, str], list[dict[str, str]]] = defaultdict(list)
        for row in table.rows:
            by_rank[plain(row.get("strategy", "")), whole(row.get("num_gpus")) or 0, row.get("global_rank", "")].append(
                row
            )
        for (label, gpus, _), rows in by_rank.items():
            place = experiment(table.path), label, gpus
            compute, communication = _kernels(rows, "aten::"), _kernels(rows, "nccl:")
            total = number(rows[0].get("profiling_time")) or compute + communication
            shares[place].append((total, compute, communication if communication or gpus == 1 else math.nan))
            paths.setdefault(place, table.path)
    return {
        Key(paths[place], place[1], place[2]): _window(rows)
        for place, rows in shares.items()
        if all(total > 0 for total, *_ in rows)
    }


def _window(rows: Sequence[tuple[float, float, float]]) -> Window:
    total, compute, communication = map(float, np.mean(rows, axis=0))
    return Window(total, compute, communication, exposed=math.nan)


def _kernels(rows: Sequence[Mapping[str, str]], prefix: str) -> float:
    times = [number(row.get("self_cuda_time_total")) or 0.0 for row in rows if row.get("name", "").startswith(prefix)]
    return sum(time for time in times if math.isfinite(time)) * 1e-6


# --- joining the three


def _gpus_a_node(runs: Sequence[RunData], energies: Mapping[Key, Energy], windows: Mapping[Key, Window]) -> int | None:
    """How many GPUs a node has: GPU files tell nodes too. Without those, one number must fit all files."""
    said = {key.gpus / found.nodes for key, found in energies.items()}
    if not said:
        nodes = {run.size.nodes for run in runs if run.size.ranks is None}
        gpus = {key.gpus for key in windows}
        said = {max(gpus) / max(nodes)} if nodes and gpus else set()
        if said and gpus - {int(node * next(iter(said))) for node in nodes}:
            return None
    ratio = said.pop() if len(said) == 1 else 0.0
    return int(ratio) if ratio >= 1 and ratio == int(ratio) else None


def _ranks_a_node(runs: Sequence[RunData]) -> int | None:
    """Of runs that tell nodes and ranks, if it is the same number."""
    said = {run.size.ranks / run.size.nodes for run in runs if run.size.ranks and run.size.nodes}
    ratio = said.pop() if len(said) == 1 else 0.0
    return int(ratio) if ratio >= 1 and ratio == int(ratio) else None


def _with_both(run: RunData, a_node: int | None) -> RunData:
    """Nodes and ranks, where one of them is told: a process a GPU, as is usual there."""
    nodes, ranks = run.size.nodes, run.size.ranks
    if a_node is not None and ranks is None:
        return replace(run, size=Size(nodes, nodes * a_node))
    if a_node is not None and ranks is not None and nodes == 0:
        return replace(run, size=Size(-(-ranks // a_node), ranks))
    return run


def _joined(run: RunData, energies: Mapping[Key, Energy], windows: Mapping[Key, Window]) -> RunData:
    place = experiment(run.path), plain(run.label), run.size.ranks
    energy = next((found for key, found in energies.items() if key.place == place), None)
    window = next((found for key, found in windows.items() if key.place == place), None)
    if energy is not None:
        run = replace(run, gpu_utilisation=energy.utilisation, energy=energy.joules)
    return replace(run, window=window) if window is not None else run


def _input_of(
    table: Table, joined: set[tuple[Path, str, int | None]], a_node: int | None, noted: Sequence[str]
) -> Input:
    column = "num_global_gpus" if table.kind == "GPU energy" else "num_gpus"
    found = {(plain(row.get("strategy", "")), whole(row.get(column))) for row in table.rows}
    used = sorted(f"{label} on {gpus} GPUs" for label, gpus in found if (experiment(table.path), label, gpus) in joined)
    lost = sorted(
        f"{label} on {gpus} GPUs" for label, gpus in found if (experiment(table.path), label, gpus) not in joined
    )
    why = "how many GPUs a node has isn't known" if a_node is None else "no epoch times of that size beside it"
    left_out = [f"{few(lost)}: {why}"] if lost else []
    shown = f"{len(table.rows)} rows: {few(used)}" if used else ""
    timed = table.kind != "computation" or all(number(row.get("profiling_time")) for row in table.rows)
    notes = [] if timed else ["no profiling_time: shares are of the time in aten:: and nccl: kernels"]
    notes += [f"{count(a_node, 'GPU')} a node"] if a_node and used else []
    reasons = [table.reason, *left_out] if table.reason else left_out
    return Input(table.path, table.kind, shown, tuple(reasons), (*notes, *noted))
