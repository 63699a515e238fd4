"""Waiting for jobs to end."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from . import states
from .states import JobState

_SHORTEST, _LONGEST = 1.0, 15.0  # seconds between looks


def wait_for(ids: Sequence[str], sacct: str = "auto") -> int:
    """Wait until all jobs, and all tasks of arrays, have ended; the exit code is the first failed one's own, or 0.

    128 + N for a job that was ended by signal N, 1 for one that Slurm ended (cancelled, out of time, node failed)
    or has forgotten. Ctrl-C leaves the jobs alone.
    """
    try:
        ended = _ended(ids, sacct)
    except KeyboardInterrupt:
        print(f"\nno longer waiting; the jobs go on: {' '.join(ids)}", file=sys.stderr)
        raise
    codes = [_code(state) for state in ended if state.state != "COMPLETED"]
    forgotten = [job_id for job_id in ids if job_id not in {state.base for state in ended}]
    for job_id in forgotten:
        print(f"job {job_id}: Slurm has forgotten it; its output says how it ended", file=sys.stderr)
    return next((code for code in codes if code), 1 if forgotten else 0)


def _ended(ids: Sequence[str], sacct: str) -> list[JobState]:
    """Looks at all in one call, at first often, then seldom. Slurm forgets a job some minutes after its end, while
    others may still run."""
    pause, seen = _SHORTEST, dict[str, JobState]()
    while True:
        found = {state.job_id: state for tasks in states.ask(ids, sacct).values() for state in tasks}
        seen = {name: state for name, state in seen.items() if state.finished} | found
        if all(state.finished for state in found.values()):
            return list(seen.values())
        time.sleep(pause)
        pause = min(_LONGEST, pause * 1.1)


def _code(state: JobState) -> int:
    print(f"job {state.job_id} ended as {state.state}", file=sys.stderr)
    return (state.code or 1) if state.state == "FAILED" else (state.exit_code or 1)
