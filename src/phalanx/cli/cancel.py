"""`phalanx cancel`: end jobs by id, run or series."""

from __future__ import annotations

import os
import platform
import signal
from collections.abc import Sequence

from ..errors import PlanError, UsageError
from ..schedulers import local_notes
from ..schedulers.slurm import client, jobs
from ..schedulers.slurm.jobs import OurJob
from ..schedulers.slurm.states import base_id
from .jobs import OPTIONS, Wanted, read

HELP = """\
usage: phalanx cancel JOB...

End all unfinished jobs of each JOB, and list them. What `phalanx run` has started is ended from any terminal
of the same host.

{options}"""


def _tell_of_the_rest(wanted: Wanted, ended: list[OurJob]) -> None:
    """Of a chain the next job starts where one is cancelled, which may not be meant."""
    ended = [job for job in ended if job.local is None]
    folders, ids = {job.run_dir for job in ended}, {base_id(job.job_id) for job in ended}
    others = [job for job in wanted.all() if job.run_dir in folders and base_id(job.job_id) not in ids]
    left = [job for job in jobs.with_states(others, wanted.config.sacct) if not job.state.finished]
    if left:
        numbers = " ".join(job.job_id for job in left)
        print(f"of the same run go on: {numbers}; phalanx cancel {left[0].run_dir.name} ends all of it")


def main(argv: Sequence[str]) -> int:
    """`argv` without `cancel`; the result is the exit code."""
    wanted = read(argv)
    if "help" in wanted.scanned.flags:
        print(HELP.format(options=OPTIONS))
        return 0
    if not wanted.targets:
        raise UsageError("no job given: expected phalanx cancel JOB...; phalanx status lists them")
    chosen = wanted.chosen()
    if any(job.local is None for job in chosen):
        client.require("scancel")
    found = jobs.with_states(chosen, wanted.config.sacct)
    unfinished = [job for job in found if not job.state.finished]
    bases = {base_id(job.job_id) for job in unfinished if job.local is None}
    if bases:
        client.cancel([job.job_id for job in chosen if base_id(job.job_id) in bases])
    _end_local([job for job in unfinished if job.local is not None])
    for job in unfinished:
        print(f"cancelled {_called(job, name=True)}, which was {job.state.state}")
    _tell_of_the_rest(wanted, unfinished)
    _refuse_foreign(found)
    elsewhere = [job for job in found if job.local is not None and job.state.state == "UNKNOWN"]
    if elsewhere:
        host = elsewhere[0].state.hosts
        raise PlanError(
            f"{', '.join(job.name for job in elsewhere)}: started on host {host}, and this is {platform.node()}, from "
            f"where it can't be ended: use phalanx cancel on {host}{_or_its_job(elsewhere[0])}"
        )
    if not unfinished:
        print("nothing to cancel: " + ", ".join(f"{_called(job)} is {job.state.state}" for job in found))
    return 0


def _refuse_foreign(found: list[OurJob]) -> None:
    """Raise PlanError for a job that may run on another cluster: its number means another one
    here."""
    foreign = [job for job in found if job.local is None and job.state.state == "UNKNOWN"]
    if foreign:
        said = ", ".join(f"job {job.job_id} of {job.name}: {job.state.reason}" for job in foreign)
        raise PlanError(f"{said}: not touched; use phalanx cancel on a login node of its cluster")


def _or_its_job(job: OurJob) -> str:
    allocation = job.local.allocation if job.local else None
    return f", or scancel {allocation}, in which it runs" if allocation else ""


def _called(job: OurJob, name: bool = False) -> str:
    if job.local is not None:
        return job.name
    return f"{job.job_id} ({job.name})" if name else job.job_id


def _end_local(unfinished: list[OurJob]) -> None:
    """Those that wait are passed over by the command that runs their series; it ends the one that runs, when told."""
    try:
        for job in unfinished:
            local_notes.cancel(job.run_dir)
        for job in unfinished:
            if job.local is not None and job.state.state == "RUNNING" and job.local.runner.alive:
                os.kill(job.local.runner.pid, signal.SIGTERM)
    except OSError as error:
        raise PlanError(f"cannot cancel a run of another user's ({error.strerror}): {unfinished[0].run_dir}") from None
