"""Which jobs are ours: found by id, run or series in the run directories, with what those say of them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import PlanError, did_you_mean
from . import states
from .states import JobState

_TAIL = 64 * 1024  # bytes of a record file that are read for the progress


@dataclass(frozen=True)
class OurJob:
    """A job that was submitted for a run. `state` is Slurm's word, or what the run directory tells."""

    job_id: str
    run_dir: Path
    name: str
    submitted: float
    series: str | None = None
    state: JobState = field(default_factory=lambda: JobState("", "UNKNOWN"))

    @property
    def output(self) -> Path:
        return self.run_dir / f"slurm-{self.job_id}.out"


def known(root: Path) -> list[OurJob]:
    """All jobs that were submitted under a run root, oldest first."""
    found = [job for path in root.glob("*/*/jobs/*.json") if (job := _read(path))]
    found += [_by_hand(path) for path in root.glob("*/job-*") if path.is_dir()]
    return sorted(found, key=lambda job: (job.submitted, int(job.job_id) if job.job_id.isdecimal() else 0))


def _read(path: Path) -> OurJob | None:
    try:
        note: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return OurJob(note["job_id"], path.parents[1], note["name"], note["submitted"], note["series"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _by_hand(run_dir: Path) -> OurJob:
    """A saved script that was submitted by `sbatch FILE` makes its own run directory."""
    return OurJob(run_dir.name.removeprefix("job-"), run_dir, run_dir.parent.name, run_dir.stat().st_ctime)


def select(jobs: Sequence[OurJob], target: str) -> list[OurJob]:
    """The jobs that a user means by a job id, a run's name, id or directory, or a series.

    A run's name means its newest run. Raises PlanError if there are none.
    """
    for matches in (
        [job for job in jobs if job.job_id == target.split("_")[0]],
        [job for job in jobs if job.series == target],
        [job for job in jobs if target in (job.run_dir.name, str(job.run_dir), f"{job.name}/{job.run_dir.name}")],
        [job for job in jobs if job.run_dir == Path(target).expanduser().absolute()],
    ):
        if matches:
            return matches
    named = [job for job in jobs if job.name == target]
    if named:
        return [job for job in named if job.run_dir == named[-1].run_dir]
    names = list(dict.fromkeys(job.name for job in reversed(jobs)))
    listed = ", ".join(names[:5]) or "none"
    raise PlanError(
        f"no job, run or series {target!r} here: the newest runs are {listed}.{did_you_mean(target, names)} (run_root "
        "says where run directories are)"
    )


def with_states(jobs: Sequence[OurJob], sacct: str = "auto") -> list[OurJob]:
    """The jobs with their states; each task of an array becomes a job of its own."""
    said = states.ask([job.job_id for job in jobs], sacct) if jobs else {}
    return [one for job in jobs for one in _tasks(job, said.get(job.job_id, []))]


def _tasks(job: OurJob, said: list[JobState]) -> Iterator[OurJob]:
    if not said:
        yield _with(job, left_behind(job))
    for state in said:
        task = state.job_id.partition("_")[2]
        folder = job.run_dir / f"array-{task}"
        yield _with(job, state, folder if task.isdecimal() else job.run_dir)


def _with(job: OurJob, state: JobState, run_dir: Path | None = None) -> OurJob:
    return OurJob(state.job_id or job.job_id, run_dir or job.run_dir, job.name, job.submitted, job.series, state)


def left_behind(job: OurJob) -> JobState:
    """What the run directory tells of a job that Slurm has forgotten."""
    exits, starts = (job.run_dir / "jobs" / f"{job.job_id}.{kind}" for kind in ("exit", "start"))
    try:
        code = int(exits.read_text())
    except (OSError, ValueError):
        gone = "it started and left no exit code" if starts.exists() else "it never started"
        return JobState(job.job_id, "GONE", reason=gone)
    return JobState(job.job_id, "COMPLETED" if code == 0 else "FAILED", exit_code=code)


def progress(run_dir: Path) -> str:
    """`epoch 3, step 120, 4 s ago` from the end of rank 0's newest records; empty before the first step."""
    files = sorted(run_dir.glob("records/0.*.jsonl"), key=lambda path: int(path.name.split(".")[1]))
    for path in reversed(files):
        for record in _last_records(path):
            if "step" in record and "epoch" in record:
                age = max(0, round(time.time() - record["time"]))
                return f"epoch {record['epoch']}, step {record['step']}, {_age(age)} ago"
    return ""


def _last_records(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL))
        lines = file.read().splitlines()
    for line in reversed(lines):
        try:
            yield json.loads(line)
        except ValueError:  # cut off by a reader's window or a killed writer
            continue


def _age(seconds: int) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
