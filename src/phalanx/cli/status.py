"""`phalanx status`: jobs, how far they are, and how they ended."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ..report_failure import attempt
from ..schedulers import verdict
from ..schedulers.slurm import client, jobs
from ..schedulers.slurm.jobs import OurJob
from .jobs import OPTIONS, Wanted, read

HELP = """\
usage: phalanx status [JOB]...

The newest jobs of this run root, or each JOB with more: its output, its progress and, if it failed,
which rank did and why.

      --json             for programs: a list with an object a job

{options}"""

_NEWEST = 20
_BY_SLURM = ("CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "DEADLINE", "REVOKED")


def main(argv: Sequence[str]) -> int:
    """`argv` without `status`; the result is the exit code."""
    wanted = read(argv, flags=("json",))
    if "help" in wanted.scanned.flags:
        print(HELP.format(options=OPTIONS))
        return 0
    client.require("squeue")
    chosen = wanted.chosen() if wanted.targets else wanted.all()[-_NEWEST:]
    found = jobs.with_states(chosen, wanted.config.sacct)
    if "json" in wanted.scanned.flags:
        print(json.dumps([_as_dict(job) for job in found], indent=1))
    elif not found:
        print(f"no jobs in {wanted.config.run_root}: phalanx submit makes them, run_root says where they are")
    else:
        _table(found)
        _details(found, wanted)
    return 0


def _as_dict(job: OurJob) -> dict[str, object]:
    return {
        "job_id": job.job_id,
        "name": job.name,
        "series": job.series,
        "state": job.state.state,
        "reason": job.state.reason,
        "nodes": job.state.nodes,
        "hosts": job.state.hosts,
        "elapsed": job.state.elapsed,
        "limit": job.state.limit,
        "exit_code": job.state.exit_code,
        "progress": jobs.progress(job.run_dir),
        "run_dir": str(job.run_dir),
        "failure": _failure(job),
    }


def _table(found: list[OurJob]) -> None:
    rows: list[tuple[str, ...]] = [("JOB", "NAME", "STATE", "NODES", "TIME", "LIMIT", "PROGRESS")]
    for job in found:
        state = job.state
        reason = f" ({state.reason})" if state.reason and state.state in ("PENDING", "GONE") else ""
        size = str(state.nodes or "")
        shown = jobs.progress(job.run_dir)
        rows.append((job.job_id, job.name, state.state + reason, size, state.elapsed, state.limit, shown))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def _details(found: list[OurJob], wanted: Wanted) -> None:
    for job in found if wanted.targets else ():
        print(f"\njob {job.job_id}: run directory {job.run_dir}")
        if job.state.hosts:
            print(f"  on {job.state.hosts}")
        for line in _failure(job):
            print(f"  {line}")


def _failure(job: OurJob) -> list[str]:
    """The verdict on a job that ended badly, as its output has it."""
    code, state = job.state.exit_code, job.state.state
    if not job.state.finished or state in ("COMPLETED", "UNKNOWN") or not job.run_dir.is_dir():
        return []
    if state in _BY_SLURM:
        return [f"ended by Slurm: {state}"]
    lines, _ = verdict.conclude(attempt(job.run_dir, code or 1, {"SLURM_JOB_ID": job.job_id.split("_")[0]}))
    return lines
