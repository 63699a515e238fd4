"""Whether a run directory is free for a job to come: nobody runs there, and no job waits to."""

from __future__ import annotations

import re
from pathlib import Path

from ... import claims
from ...errors import PhalanxError
from . import jobs


def check(run_dir: Path, dependency: str | None, sacct: str, take_over: bool) -> None:
    """Raise InUseError if an attempt runs there, or a job that will; not for jobs that `dependency`
    names, which the new one waits for. `take_over`: end the claim of an attempt that may still
    run."""
    after = set(re.findall(r"\d+", dependency or ""))
    unfinished = [job for job in _unfinished(run_dir, sacct) if job.job_id not in after]
    if unfinished:
        said = ", ".join(map(_said, unfinished))
        raise claims.InUseError(
            f"{run_dir} is in use: {said}; {claims.last_sign(run_dir)}. Two jobs would overwrite each "
            f"other's checkpoints. Wait for the end, or phalanx cancel {run_dir.name}; a job that is to go on "
            f"afterwards is submitted with --chain, or with dependency=afterany:{unfinished[-1].job_id}"
        )
    holder = claims.current(run_dir)
    if holder is None or holder.job is None or holder.job.number not in after:
        claims.check(run_dir, take_over)


def _said(job: jobs.OurJob) -> str:
    where = f" on {job.state.hosts}" if job.state.hosts else ""
    return f"job {job.job_id} is {job.state.state}{where}"


def _unfinished(run_dir: Path, sacct: str) -> list[jobs.OurJob]:
    """As far as Slurm answers: the claim is looked at in any case."""
    ours = [job for job in jobs.of_run(run_dir) if job.local is None]
    try:
        found = jobs.with_states(ours, sacct)
    except PhalanxError:
        return []
    return [job for job in found if not job.state.finished]
