"""A run directory as `RunData`: the records of all ranks and attempts put together, by the rules of records.py."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ...records import (
    AllReduce,
    Epoch,
    Exit,
    Metric,
    Peak,
    Profile,
    Record,
    Resume,
    Start,
    Workload,
)
from ...rundir import PER_RANK_LIMIT
from ..model import Input, Numbers, RunData, Size, Window, Work
from ..text import count, numbers, shown
from . import gpus
from .merging import merged_epochs, merged_steps
from .steplines import Lines, read_lines

_FILE = re.compile(r"\d+\.\d+\.jsonl")
_JUMP = 1.0  # seconds by which a clock may be set back unnoticed
_SPARE = 2  # epochs that must remain for one to be left out as profiled
_R = TypeVar("_R", bound=Record)


def is_run(folder: Path) -> bool:
    return (folder / "records").is_dir()


def read_run(folder: Path, scaling: str = "strong") -> tuple[RunData | None, Input]:
    """The run of a directory, None if it holds nothing to go by; and what was used of it.

    `scaling` is that of runs that don't record it.
    """
    return _Reader(folder, scaling).read()


class _Reader:
    """One directory's reading: what is left out and what is noted come together on the way."""

    def __init__(self, folder: Path, scaling: str) -> None:
        self.folder = folder
        self.scaling = scaling
        self.left_out: list[str] = []
        self.notes: list[str] = []

    def read(self) -> tuple[RunData | None, Input]:
        files = self._files()
        starts = [record for file in files for record in file.others if isinstance(record, Start) and record.world_size]
        if not starts:
            self.left_out.append("no rank's first record" if files else "no records: the run never began")
            return None, self._input("")
        if any(record.dry for record in starts):
            self.left_out.append("a dry run: one step of each loop")
            return None, self._input("")
        start = max(starts, key=lambda record: (record.attempt, -record.rank))
        files = self._of_one_size(files, start)
        records = [record for file in files for record in file.others]
        self._check(files, start, _of(records, Exit))
        run = self._run(files, records, start)
        if not len(run.epochs) and not len(run.steps) and not len(run.allreduce):
            self.left_out.append("no step and no epoch that can be used")
            return None, self._input("")
        return run, self._input(_used(run, files))

    def _input(self, used: str) -> Input:
        return Input(self.folder, "run", used, tuple(self.left_out), tuple(self.notes))

    def _files(self) -> list[Lines]:
        files, bad, folder = [], 0, self.folder / "records"
        for path in sorted(folder.iterdir() if folder.is_dir() else ()):
            if not _FILE.fullmatch(path.name):
                continue
            try:
                lines = read_lines(path)
            except OSError as error:
                self.left_out.append(f"{path.name}: {error.strerror}")
                continue
            bad += lines.bad
            if _went_back(lines):
                self.notes.append(f"{path.name}: the clock was set back; durations are of a clock that isn't")
            files.append(lines)
        if bad:
            self.left_out.append(f"{count(bad, 'line')} cut off, or no record")
        return files

    def _of_one_size(self, files: list[Lines], start: Start) -> list[Lines]:
        """Attempts of the newest one's size: a point is of one size."""
        sizes = {
            record.attempt: (record.world_size, record.num_nodes, record.strategy)
            for file in files
            for record in file.others
            if isinstance(record, Start)
        }
        other = sorted(number for number, size in sizes.items() if size != sizes[start.attempt])
        if other:
            ranks = ", ".join(dict.fromkeys(f"{sizes[number][0]} under {sizes[number][2]}" for number in other))
            self.left_out.append(f"{numbers('attempt', other)}: of another number of ranks or strategy ({ranks})")
        return [file for file in files if file.attempt not in other]

    def _check(self, files: Sequence[Lines], start: Start, exits: Sequence[Exit]) -> None:
        if start.api != "epoch-timer":  # there rank 0 speaks for all
            missing = sorted(set(range(start.world_size)) - {file.rank for file in files})
            if missing:
                self.notes.append(
                    f"{numbers('rank', missing)} of {start.world_size}: no records; times are those of the others"
                )
        newest = {file.rank for file in files if file.attempt == start.attempt}
        ended = {record.rank: record.exception for record in exits if record.attempt == start.attempt}
        failed = [f"rank {rank}: {text.splitlines()[0][:100]}" for rank, text in sorted(ended.items()) if text.strip()]
        if failed:
            self.notes.append(f"the run failed ({failed[0]})")
        elif newest - set(ended):
            self.notes.append(
                f"no end is recorded ({numbers('rank', newest - set(ended))}): it runs still, or was killed"
            )

    def _run(self, files: Sequence[Lines], records: Sequence[Record], start: Start) -> RunData:
        plan, settings = _json(self.folder / "plan.json"), _settings(self.folder / "config.yaml")
        baseline = start.api == "epoch-timer"
        limits = _limits(files)
        everywhere = start.world_size <= PER_RANK_LIMIT and settings.get("records", "auto") in ("auto", "rank")
        steps = merged_steps(files, limits, start.world_size, everywhere, self.left_out)
        profiles = _of(records, Profile)
        used, profiled = self._without_profiled(steps.rows, profiles)
        return RunData(
            path=self.folder,
            run_id=self.folder.name,
            origin=_origin(records),
            label=shown(start.strategy) + (" (baseline)" if baseline else ""),
            size=Size(start.num_nodes or _nodes(records), start.world_size),
            work=_work(records, shown(Path(str(plan.get("script") or self.folder.parent.name)).name)),
            baseline=baseline,
            scaling=settings.get("scaling", self.scaling),
            launcher=str(plan.get("launcher") or start.launched_by) or None,
            device=None if baseline and start.device == "cpu" else start.device,  # made before the GPU was used?
            epochs=self._epochs(merged_epochs(files, limits, self.left_out), profiled),
            steps=steps.rows[used],
            window=self._window(profiles),
            gpu_utilisation=gpus.utilisation(records),
            energy=gpus.energy(records),
            peak_device=_most([record.device for record in _of(records, Peak)]),
            peak_host=_most([record.host for record in _of(records, Peak)]),
            samples=float(steps.rows[:, 4].sum()) if len(steps.rows) else None,
            restarts=tuple(int(used[:row].sum()) for row in steps.restarts),
            allreduce=np.array([(row.bytes, row.seconds, row.repeats) for row in _of(records, AllReduce)
                                if row.rank == start.rank], dtype=float).reshape(-1, 3),
        )  # fmt: skip

    def _window(self, profiles: Sequence[Profile]) -> Window | None:
        if any(profile.communication != profile.communication for profile in profiles):  # NaN
            self.notes.append("the profiler doesn't see its collectives (Horovod's on a CPU): compute alone is known")
        return _window(profiles)

    def _without_profiled(self, rows: Numbers, profiles: Sequence[Profile]) -> tuple[Any, set[int]]:
        """Which steps count, and the epochs that have a profiled window in them: such steps are slower."""
        used = np.ones(len(rows), dtype=bool)
        for profile in profiles:
            used &= ~((rows[:, 0] >= profile.step) & (rows[:, 0] < profile.step + profile.steps))
        gone = rows[~used]
        if len(gone):
            self.left_out.append(f"{numbers('step', gone[:, 0])}: profiled")
        return used, {int(epoch) for epoch in gone[:, 1]}

    def _epochs(self, rows: Numbers, profiled: set[int]) -> Numbers:
        """Epochs with a profiled window are left out, where enough others remain. The first is warm-up anyhow."""
        among = np.isin(rows[:, 0], sorted(profiled)) & (rows[:, 0] > rows[:1, 0].sum())
        if not among.any():
            return rows
        if len(rows) - among.sum() < _SPARE + 1:
            self.notes.append(f"{numbers('epoch', rows[among, 0])}: with a profiled window in it, which takes longer")
            return rows
        self.left_out.append(f"{numbers('epoch', rows[among, 0])}: a profiled window in it")
        return np.asarray(rows[~among])


def _of(records: Sequence[Record], kind: type[_R]) -> list[_R]:
    return [record for record in records if isinstance(record, kind)]


def _went_back(file: Lines) -> bool:
    """Whether the times at which records were written decrease."""
    steps, others = file.steps[:, 0], np.array([record.time for record in file.others], dtype=float)
    return any(bool(np.any(np.diff(times) < -_JUMP)) for times in (steps, others))


def _limits(files: Sequence[Lines]) -> dict[int, float]:
    """By attempt, the step that it went on from: what older ones did after it is void."""
    limits: dict[int, float] = defaultdict(lambda: float("inf"))
    for file in files:
        resumed = [record.step for record in file.others if isinstance(record, Resume)]
        did = len(file.steps) or any(isinstance(record, (Epoch, Metric)) for record in file.others)
        limit = resumed[0] if resumed else 0 if did else float("inf")
        limits[file.attempt] = min(limits[file.attempt], limit)
    return dict(sorted(limits.items()))


def _nodes(records: Sequence[Record]) -> int:
    """Of records that don't say: as many as there are hosts."""
    return len({record.host for record in _of(records, Start)}) or 1


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _settings(path: Path) -> dict[str, str]:
    """Two of a run's settings, without a YAML parser's cost for each run: the file is ours, a setting a line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return {}
    return dict(re.findall(r"^(scaling|records): *['\"]?(\w+)", text, re.MULTILINE))


def _work(records: Sequence[Record], name: str) -> Work:
    said = _of(records, Workload)
    if not said:
        return Work(name)
    last = said[-1]
    return Work(  # a timer that isn't told writes 0 and ""
        name,
        parameters=last.parameters or None,
        gradient_bytes=last.gradient_bytes or None,
        batch_size=last.batch_size or None,
        accumulate=last.accumulate or 1,
        dataset=last.dataset or None,
        precision=last.precision or None,
    )


def _window(profiles: Sequence[Profile]) -> Window | None:
    rows = [(p.seconds, p.compute, p.communication, p.exposed, p.steps) for p in profiles if p.steps and p.seconds > 0]
    if not rows:
        return None
    table = np.array(rows, dtype=float)
    return Window(*map(float, (table[:, :4] / table[:, 4:]).mean(axis=0)))


def _most(values: Sequence[float]) -> float | None:
    return max((float(value) for value in values if value > 0), default=None)


def _used(run: RunData, files: Sequence[Lines]) -> str:
    parts = [count(len({file.rank for file in files}), "rank")]
    parts += [count(len(run.epochs), "epoch")] * bool(len(run.epochs))
    parts += [count(len(run.steps), "step")] * bool(len(run.steps))
    parts += [f"{count(len(run.allreduce), 'size')} of an all-reduce"] * bool(len(run.allreduce))
    parts += ["a profiled window"] * (run.window is not None) + ["GPU samples"] * (run.gpu_utilisation is not None)
    return ", ".join(parts)


def _origin(records: Sequence[Record]) -> tuple[object, ...]:
    first = min(_of(records, Start), key=lambda start: (start.time, start.rank))
    return first.time, first.host, first.pid, first.world_size, first.num_nodes, first.strategy
