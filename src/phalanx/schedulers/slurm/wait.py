"""Waiting for jobs to end."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence

from . import client

_UNFINISHED = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "REQUEUED", "RESIZING")
_SHORTEST, _LONGEST = 1.0, 15.0  # seconds between looks


def wait_for(ids: Sequence[str]) -> int:
    """Wait until all jobs have ended; the exit code is the first failed job's own, or 0.

    128 + N for a job that was ended by signal N, 1 for one that Slurm ended (cancelled, out of time, node failed).
    """
    codes = []
    try:
        for job_id in ids:
            codes.append(_wait(job_id))
    except KeyboardInterrupt:
        print(f"\nno longer waiting; the jobs go on: {' '.join(ids)}", file=sys.stderr)
        raise
    return next((code for code in codes if code), 0)


def _wait(job_id: str) -> int:
    pause = _SHORTEST
    while True:
        said = client.show_job(job_id)
        if said is None:
            print(f"job {job_id}: Slurm has forgotten it; its output says how it ended", file=sys.stderr)
            return 1
        state = said.get("JobState", "")
        if state not in _UNFINISHED:
            return _code(job_id, state, said.get("ExitCode", "0:0"))
        time.sleep(pause)
        pause = min(_LONGEST, pause * 1.1)


def _code(job_id: str, state: str, exit_code: str) -> int:
    match = re.fullmatch(r"(\d+):(\d+)", exit_code)
    code, signal = (int(match[1]), int(match[2])) if match else (0, 0)
    if state == "COMPLETED":
        return 0
    print(f"job {job_id} ended as {state}", file=sys.stderr)
    return code or (128 + signal if signal and state == "FAILED" else 1)
