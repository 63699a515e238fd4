"""A run directory as `RunData`: the records of all ranks and attempts put together."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .model import Input, Numbers, RunData, Size, Window, Work
from .steplines import read_lines

_FILE = re.compile(r"(\d+)\.(\d+)\.jsonl")
_FEW = 5  # numbers that are listed one by one
_JUMP = 1.0  # seconds by which a clock may be set back unnoticed: NTP does that all the time


@dataclass
class Rank:
    """One rank's records, attempts merged: `steps` rows are (step, epoch, seconds, wait, samples)."""

    steps: Numbers = field(default_factory=lambda: np.empty((0, 5)))
    epochs: dict[int, float] = field(default_factory=dict)
    others: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class _Attempt:
    """What one attempt's ranks left: `limit` is the step that it went on from."""

    files: dict[int, tuple[Numbers, list[dict[str, Any]]]] = field(default_factory=dict)
    limit: float = float("inf")


def is_run(folder: Path) -> bool:
    return (folder / "records").is_dir()


def read_run(folder: Path) -> tuple[RunData | None, Input, list[dict[str, Any]]]:
    """The run of a directory, None if it holds nothing to go by; what was used of it; rows of all-reduces."""
    left_out: list[str] = []
    attempts = _read_attempts(folder, left_out)
    ranks = _merge(attempts, left_out)
    starts = [record for rank in ranks.values() for record in rank.others if record["kind"] == "start"]
    start = _newest_start(starts)
    if start is None:
        reason = "no rank wrote a first record" if ranks else "no records"
        return None, Input(folder, "run", "", (*left_out, reason)), []
    _check_ranks(ranks, start, folder, left_out)
    everything = [record for rank in ranks.values() for record in rank.others]
    run = _run(folder, ranks, start, everything, left_out)
    rows = [record for record in everything if record["kind"] == "allreduce"]
    used = _used(run, ranks, rows)
    return run, Input(folder, "run", used, tuple(left_out)), [{**row, "start": start} for row in rows]


def _read_attempts(folder: Path, left_out: list[str]) -> dict[int, _Attempt]:
    attempts: dict[int, _Attempt] = defaultdict(_Attempt)
    cut = []
    for path in sorted((folder / "records").iterdir()):
        match = _FILE.fullmatch(path.name)
        if match is None:
            continue
        rank, number = int(match[1]), int(match[2])
        steps, others, bad = read_lines(path)
        if bad:
            cut.append(f"{bad} of {path.name}")
        if _backwards(others):
            left_out.append(f"{path.name}: the clock ran backwards between records; durations are of another clock")
        attempts[number].files[rank] = steps, others
        attempts[number].limit = min(attempts[number].limit, _resumed_at(steps, others))
    if cut:
        left_out.append(f"lines that were cut off or aren't records: {_few(cut)}")
    return dict(sorted(attempts.items()))


def _backwards(others: list[dict[str, Any]]) -> bool:
    times = np.array([record.get("time", np.nan) for record in others], dtype=float)
    return bool(np.any(np.diff(times) < -_JUMP))


def _resumed_at(steps: Numbers, others: list[dict[str, Any]]) -> float:
    """As in `records`: what older attempts did after this step is void."""
    resumed = [record["step"] for record in others if record["kind"] == "resume"]
    if resumed:
        return float(resumed[0])
    did = len(steps) or any(record["kind"] in ("epoch", "metric") for record in others)
    return 0.0 if did else float("inf")


def _merge(attempts: dict[int, _Attempt], left_out: list[str]) -> dict[int, Rank]:
    ranks: dict[int, Rank] = defaultdict(Rank)
    partial: set[int] = set()
    for attempt in attempts.values():
        for rank in ranks.values():
            rank.steps = rank.steps[rank.steps[:, 0] <= attempt.limit]
        for number, (steps, others) in attempt.files.items():
            rank = ranks[number]
            rank.steps = np.concatenate([rank.steps[~np.isin(rank.steps[:, 0], steps[:, 0])], steps])
            rank.others += others
            inside = {record["epoch"] for record in others if record["kind"] == "resume"}
            for record in others:
                if record["kind"] == "epoch":
                    rank.epochs[record["epoch"]] = record["seconds"]
                    (partial.add if record["epoch"] in inside else partial.discard)(record["epoch"])
    for rank in ranks.values():
        for epoch in partial & set(rank.epochs):
            del rank.epochs[epoch]
    if partial:
        left_out.append(f"{_numbers('epoch', partial)}: the run was resumed inside")
    return dict(sorted(ranks.items()))


def _newest_start(starts: list[dict[str, Any]]) -> dict[str, Any] | None:
    usable = [start for start in starts if isinstance(start.get("world_size"), int)]
    return max(usable, key=lambda start: (start["world_size"], start.get("time", 0)), default=None)


def _check_ranks(ranks: dict[int, Rank], start: dict[str, Any], folder: Path, left_out: list[str]) -> None:
    """Every rank writes its first record, whoever keeps step records."""
    if start.get("api") == "epoch-timer":
        return  # rank 0 speaks for all
    missing = sorted(set(range(start["world_size"])) - set(ranks))
    if missing:
        left_out.append(
            f"{_numbers('rank', missing)} of {start['world_size']}: no records, so that times are those of the others"
        )
    ends = {number for number, rank in ranks.items() if any(record["kind"] == "exit" for record in rank.others)}
    failed = [
        f"rank {number}: {record['exception'].splitlines()[0][:120]}"
        for number, rank in ranks.items()
        for record in rank.others[-1:]
        if record["kind"] == "exit" and record.get("exception")
    ]
    if failed:
        left_out.append(f"what comes after the failure of {failed[0]}")
    elif set(ranks) - ends:
        left_out.append(f"what comes after: the run goes on, or was killed ({_numbers('rank', set(ranks) - ends)})")


def _run(
    folder: Path,
    ranks: dict[int, Rank],
    start: dict[str, Any],
    everything: list[dict[str, Any]],
    left_out: list[str],
) -> RunData:
    plan, config = _json(folder / "plan.json"), _config(folder / "config.yaml")
    world_size, baseline = start["world_size"], start.get("api") == "epoch-timer"
    nodes = start.get("num_nodes") or _nodes(everything) or 1
    name = Path(plan.get("script") or folder.parent.name).name
    return RunData(
        path=folder,
        run_id=folder.name,
        label=start["strategy"] + (" (baseline)" if baseline else ""),
        size=Size(nodes, world_size),
        work=_work(everything, name),
        baseline=baseline,
        scaling=config.get("scaling", "strong"),
        launcher=plan.get("launcher") or start.get("launched_by"),
        device=start.get("device"),
        epochs=_epochs(ranks, left_out),
        steps=_steps(ranks, world_size, left_out),
        window=_window(everything),
        gpu_utilisation=_utilisation(everything),
        energy=_energy(everything),
        peak_device=_peak(everything, "device"),
        peak_host=_peak(everything, "host"),
    )


def _nodes(everything: list[dict[str, Any]]) -> int:
    """Of records that don't say: as many as there are hosts."""
    return len({record["host"] for record in everything if record["kind"] == "start"})


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _config(path: Path) -> dict[str, str]:
    """`scaling` of a run's settings, without a YAML parser's cost a run: the file is ours, a setting a line."""
    try:
        match = re.search(r"^scaling: *['\"]?(strong|weak)\b", path.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return {}
    return {"scaling": match[1]} if match else {}


def _work(everything: list[dict[str, Any]], name: str) -> Work:
    said = next((record for record in everything if record["kind"] == "workload"), None)
    if said is None:
        return Work(name)
    known = ("parameters", "gradient_bytes", "batch_size", "dataset", "precision")
    return Work(name, accumulate=said.get("accumulate") or 1, **{key: said.get(key) for key in known})


def _epochs(ranks: dict[int, Rank], left_out: list[str]) -> Numbers:
    """An epoch takes as long as on its slowest rank."""
    longest: dict[int, float] = {}
    for rank in ranks.values():
        for epoch, seconds in rank.epochs.items():
            longest[epoch] = max(longest.get(epoch, seconds), seconds)
    rows: Numbers = np.array(sorted(longest.items()), dtype=float).reshape(-1, 2)
    return np.asarray(rows[_sound(rows[:, 1], rows[:, 0], "epoch", left_out)])


def _steps(ranks: dict[int, Rank], world_size: int, left_out: list[str]) -> Numbers:
    """A step takes as long as on its slowest rank; where some ranks keep no records, theirs are taken to be alike."""
    tables = [rank.steps for rank in ranks.values() if len(rank.steps)]
    if not tables:
        return np.empty((0, 5))
    rows = np.concatenate(tables)
    rows = rows[_sound(rows[:, 2], rows[:, 0], "step", left_out)]
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    numbers, first, counts = np.unique(rows[:, 0], return_index=True, return_counts=True)
    if not len(numbers):
        return np.empty((0, 5))
    seconds = np.maximum.reduceat(rows[:, 2], first)
    wait, samples = (np.add.reduceat(rows[:, column], first) / counts for column in (3, 4))
    return np.column_stack([numbers, rows[first, 1], seconds, wait, samples * world_size])


def _sound(seconds: Numbers, numbers: Numbers, what: str, left_out: list[str]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which times can be used; the others are named."""
    unknown, backwards = ~np.isfinite(seconds), seconds <= 0
    for bad, why in ((unknown, "not a number"), (backwards & ~unknown, "no time or less than none: a clock ran back")):
        if bad.any():
            left_out.append(f"{_numbers(what, set(numbers[bad].astype(int)))}: {why}")
    return ~(unknown | backwards)


def _window(everything: list[dict[str, Any]]) -> Window | None:
    found = [record for record in everything if record["kind"] == "profile" and record.get("steps")]
    if not found:
        return None
    columns = ("seconds", "compute", "communication", "exposed")
    means = [float(np.mean([record[column] / record["steps"] for record in found])) for column in columns]
    return Window(*means)


def _utilisation(everything: list[dict[str, Any]]) -> float | None:
    """Mean over time and GPUs."""
    pairs = np.array([(r["seconds"], r["utilisation"]) for r in everything if r["kind"] == "gpu"]).reshape(-1, 2)
    pairs = pairs[np.isfinite(pairs).all(axis=1)]
    total = pairs[:, 0].sum()
    return float((pairs[:, 0] * pairs[:, 1]).sum() / total) if total > 0 else None


def _energy(everything: list[dict[str, Any]]) -> float | None:
    found = [record["energy"] for record in everything if record["kind"] == "gpu"]
    return float(np.sum(found)) if found and np.isfinite(found).all() else None


def _peak(everything: list[dict[str, Any]], which: str) -> float | None:
    return max(
        (float(record[which]) for record in everything if record["kind"] == "peak" and record[which]), default=None
    )


def _used(run: RunData, ranks: dict[int, Rank], rows: list[dict[str, Any]]) -> str:
    parts = [f"{len(ranks)} rank{'s' * (len(ranks) > 1)}"]
    parts += [f"{len(run.epochs)} epochs"] * bool(len(run.epochs)) + [f"{len(run.steps)} steps"] * bool(len(run.steps))
    parts += [f"{len(rows)} sizes of all-reduce"] * bool(rows) + ["a profiled window"] * (run.window is not None)
    return ", ".join(parts) if len(run.epochs) or len(run.steps) or rows else ""


def _numbers(what: str, numbers: Iterable[int]) -> str:
    """`epoch 3`, `ranks 1, 2, 3, …, 9 (7 of them)`."""
    found = sorted(int(number) for number in numbers)
    words = [str(number) for number in found]
    if len(words) > _FEW:
        words = [*words[: _FEW - 1], "…", f"{words[-1]} ({len(found)} of them)"]
    return f"{what}{'s' * (len(found) > 1)} {', '.join(words)}"


def _few(words: list[str]) -> str:
    return ", ".join(words if len(words) <= _FEW else [*words[:_FEW], f"and {len(words) - _FEW} more"])
