"""`phalanx cancel`: end jobs by id, run or series."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import UsageError
from ..schedulers.slurm import client, jobs
from .jobs import OPTIONS, read

HELP = """\
usage: phalanx cancel JOB...

End all unfinished jobs of each JOB, and list them.

{options}"""


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
    running = [job for job in jobs.with_states(chosen, wanted.config.sacct) if not job.state.finished]
    if not running:
        print("nothing to cancel: " + ", ".join(job.job_id for job in chosen) + " ended before")
        return 0
    client.cancel(list(dict.fromkeys(job.job_id.split("_")[0] for job in running)))
    for job in running:
        print(f"cancelled {job.job_id} ({job.name}), which was {job.state.state}")
    return 0
