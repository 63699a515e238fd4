"""`phalanx cancel`: end jobs by id, run or series."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import UsageError
from ..schedulers.slurm import client, jobs
from ..schedulers.slurm.jobs import OurJob
from ..schedulers.slurm.states import base_id
from .jobs import OPTIONS, Wanted, read

HELP = """\
usage: phalanx cancel JOB...

End all unfinished jobs of each JOB, and list them.

{options}"""


def _tell_of_the_rest(wanted: Wanted, ended: list[OurJob]) -> None:
    """Of a chain the next job starts where one is cancelled, which may not be meant."""
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
    client.require("scancel")
    chosen = wanted.chosen()
    found = jobs.with_states(chosen, wanted.config.sacct)
    unfinished = [job for job in found if not job.state.finished]
    if unfinished:
        bases = {base_id(job.job_id) for job in unfinished}
        client.cancel([job.job_id for job in chosen if base_id(job.job_id) in bases])
    for job in unfinished:
        print(f"cancelled {job.job_id} ({job.name}), which was {job.state.state}")
    _tell_of_the_rest(wanted, unfinished)
    if not unfinished:
        print("nothing to cancel: " + ", ".join(f"{job.job_id} is {job.state.state}" for job in found))
    return 0
