"""`phalanx status`: jobs, how far they are, and how they ended."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from ..rundir import is_dry
from ..schedulers.slurm import outcome
from ..schedulers.slurm.jobs import OurJob, newest
from ..schedulers.slurm.states import JobState, base_id
from .jobs import OPTIONS, Wanted, read, with_states

HELP = """\
usage: phalanx status [JOB]...

The newest jobs of this run root, or each JOB with more: its nodes, its files, why it waits and, if it
failed, which rank did, on which host and why. Of a series, also how many of its runs are in which state.

      --json             for programs: a list with an object a job

{options}"""

_NEWEST = 20
_TASKS = 8  # of an array that are listed one by one


def main(argv: Sequence[str]) -> int:
    """`argv` without `status`; the result is the exit code."""
    wanted = read(argv, flags=("json",))
    if "help" in wanted.scanned.flags:
        print(HELP.format(options=OPTIONS))
        return 0
    chosen = wanted.chosen() if wanted.targets else wanted.all()[-_NEWEST:]
    found = with_states(chosen, wanted.config.sacct)
    if "json" in wanted.scanned.flags:
        print(json.dumps([_as_dict(job) for job in found], indent=1))
    elif not found:
        print(f"no jobs in {wanted.root}: phalanx submit and run make them, the setting run_root says where they are")
    else:
        _table(found if wanted.targets else _summed_up(found))
        _details(found, wanted)
        for name in wanted.targets:
            _sum_up_series(name, [job for job in found if job.series == name], wanted.root_option)
    return 0


def _sum_up_series(name: str, found: list[OurJob], root_option: str) -> None:
    """Each run counts once, by its newest job."""
    runs = newest(found)
    if not runs:
        return
    counts = Counter(run.state.state for run in runs)
    said = ", ".join(f"{count} {state}" for state, count in counts.items())
    print(f"\nseries {name}: {len(runs)} run{'s' * (len(runs) > 1)}: {said}")
    again = [run for run in runs if run.failed]
    stopped = [run for run in again if run.state.state == "CANCELLED" or not run.began]
    for word, some in (("failed", [run for run in again if run not in stopped]), ("not run to the end", stopped)):
        if some:
            times = Counter(run.name for run in some)
            names = [f"{run}{f' ({count} times)' if count > 1 else ''}" for run, count in times.items()]
            print(f"  {word}: {', '.join(names)}")
    if again:
        print(f"  to run only these again: phalanx retry {name}{root_option}")


def _as_dict(job: OurJob) -> dict[str, Any]:
    state, progress, failure = job.state, outcome.progress(job.run_dir), outcome.failure(job)
    culprit = failure.culprit if failure else None
    return {
        "job_id": job.job_id,
        "name": job.name,
        "job_name": job.job_name,
        "series": job.series,
        "chain": job.chain,
        "cluster": job.cluster,
        "submitted": job.submitted,
        "state": state.state,
        "reason": state.reason,
        "ended": state.finished and state.state != "UNKNOWN",
        "exit_code": state.code,
        "nodes": state.nodes,
        "hosts": state.hosts,
        "partition": state.partition,
        "elapsed_seconds": state.elapsed,
        "limit_seconds": state.limit,
        "restarts": state.restarts,
        "progress": progress and {
            "epoch": progress.epoch,
            "step": progress.step,
            "metrics": progress.values,
            "time": progress.time,
        },
        "failure": failure and {
            "text": list(failure.lines),
            "rank": culprit and culprit.rank,
            "host": culprit and culprit.host,
            "what": culprit and culprit.what,
        },
        "dry_run": is_dry(job.run_dir),
        "run_dir": str(job.run_dir),
        "output": [str(path) for path in job.outputs()],
    }  # fmt: skip


def _summed_up(found: list[OurJob]) -> list[OurJob]:
    """A large array as one line, with how many of its tasks are in which state."""
    lines: list[OurJob] = []
    for _, group in groupby(found, key=lambda job: job.run_dir if job.local else base_id(job.job_id)):
        tasks = list(group)
        if len(tasks) <= _TASKS:
            lines += tasks
            continue
        counts = Counter(task.state.state for task in tasks)
        said = ", ".join(f"{count} {state}" for state, count in counts.items())
        lines.append(OurJob(base_id(tasks[0].job_id), tasks[0].run_dir.parent, tasks[0].name, tasks[0].submitted,
                            state=JobState("", "", said)))  # fmt: skip
    return lines


def _table(found: list[OurJob]) -> None:
    """Plain text: loading a library to draw it would take longer than all the rest."""
    now = time.time()
    rows: list[tuple[str, ...]] = [("JOB", "NAME", "STATE", "NODES", "TIME", "PROGRESS", "RUN DIRECTORY")]
    last = {job.run_dir: job.job_id for job in found if job.state.state != "PENDING"}
    for job in found:
        # The jobs of a chain share records: what these tell is of the last that began.
        progress = outcome.progress(job.run_dir) if last.get(job.run_dir) == job.job_id else None
        rows.append(
            (
                job.job_id,
                job.name,
                _state(job.state),
                str(job.state.nodes or ""),
                _time(job.state),
                ("dry run: " if is_dry(job.run_dir) else "") + (progress.text(now) if progress else ""),
                _short(job.run_dir),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def _state(state: JobState) -> str:
    """With Slurm's reason where it tells something: of a job that failed it only repeats that it did."""
    if state.reason and state.state in ("PENDING", "SUSPENDED", "REQUEUE_HOLD", "SPECIAL_EXIT", "GONE", "UNKNOWN"):
        return f"{state.state} ({state.reason})"
    return f"{state.state} ({state.code})" if state.code else state.state


def _time(state: JobState) -> str:
    if state.elapsed is None or (state.elapsed == 0 and state.state == "PENDING"):
        return f"of {_clock(state.limit)}" if state.limit else ""
    return _clock(state.elapsed) + (f" of {_clock(state.limit)}" if state.limit else "")


def _clock(seconds: int) -> str:
    """`1:02:03`, `2-03:04:05`: as Slurm writes it."""
    days, rest = divmod(seconds, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    if days:
        return f"{days}-{hours:02}:{minutes:02}:{rest:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _short(path: Path) -> str:
    """Relative to where the user is, if it lies below."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else os.fspath(path)


def _details(found: list[OurJob], wanted: Wanted) -> None:
    """Of many jobs, only of those that failed or wait in vain."""
    for job in found if wanted.targets else ():
        brief = len(found) > _TASKS or job.local is not None
        lines = _troubles(job) if brief else _about(job) + _troubles(job)
        lines = [(name, text) for name, text in lines if text]
        head = f"run {job.name}" if job.local else f"job {job.job_id}"
        print(f"\n{head}" if lines else "", end="\n" if lines else "")
        for name, text in lines:
            print(f"  {name:<10} {text}")


def _about(job: OurJob) -> list[tuple[str, str]]:
    state = job.state
    lines = [("series", job.series or "")]
    if job.chain:
        lines.append(("chain", f"job {job.chain[0]} of {job.chain[1]}, each goes on where the one before stopped"))
    if state.state == "COMPLETED":
        lines.append(("not run", outcome.not_run(job)))
    lines += [
        ("partition", state.partition),
        ("hosts", state.hosts),
        ("restarts", str(state.restarts or "")),
    ]
    existing = [path for path in job.outputs() if path.exists()]
    return lines + [("output", str(path)) for path in existing]


def _troubles(job: OurJob) -> list[tuple[str, str]]:
    failure = outcome.failure(job)
    lines = [("waits", outcome.waits_for(job.state))]
    for number, text in enumerate(failure.lines if failure else ()):
        lines.append(("" if number else "failure", text.strip()))
    return lines
