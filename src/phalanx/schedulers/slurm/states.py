"""What Slurm says about jobs: squeue while it remembers them, sacct where there is accounting."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...errors import SchedulerError
from . import client

UNFINISHED = frozenset(
    [
        "PENDING",
        "CONFIGURING",
        "RUNNING",
        "COMPLETING",
        "SUSPENDED",
        "STOPPED",
        "REQUEUED",
        "REQUEUE_HOLD",
        "REQUEUE_FED",
        "RESIZING",
        "SIGNALING",
        "SPECIAL_EXIT",
        "STAGE_OUT",
        "RESV_DEL_HOLD",
    ]
)
_SQUEUE = "JobArrayID:|,State:|,Reason:|,NumNodes:|,TimeUsed:|,TimeLimit:|,exit_code:|,NodeList:|"
_SACCT = "JobID,State,Reason,NNodes,Elapsed,Timelimit,ExitCode,NodeList"


@dataclass(frozen=True)
class JobState:
    """One job, or one task of an array (`12_3`). `exit_code` is the batch script's; None where nobody knows."""

    job_id: str
    state: str
    reason: str = ""
    nodes: int = 0
    elapsed: str = ""
    limit: str = ""
    exit_code: int | None = None
    hosts: str = ""

    @property
    def finished(self) -> bool:
        return self.state not in UNFINISHED


def ask(ids: Sequence[str], sacct: str = "auto") -> dict[str, list[JobState]]:
    """States by job id, with a line for each task of an array; jobs that Slurm has forgotten are missing.

    Two calls at most, however many jobs. `sacct` is the setting of that name: whether to ask it.
    """
    found = _squeue(ids)
    missing = [job for job in ids if job not in found]
    if missing and sacct != "false" and shutil.which("sacct"):
        found |= _sacct(missing, must=sacct == "true")
    return found


def _squeue(ids: Sequence[str]) -> dict[str, list[JobState]]:
    done = client.run(["squeue", "--noheader", "--states=all", "--jobs=" + ",".join(ids), "--Format=" + _SQUEUE])
    if done.returncode != 0:
        if "Invalid job id" in done.stderr:
            return {}
        raise SchedulerError(f"squeue: {done.stderr.strip()}")
    return _by_job(_state(line.split("|")) for line in done.stdout.splitlines() if line.strip())


def _sacct(ids: Sequence[str], must: bool) -> dict[str, list[JobState]]:
    words = ["sacct", "--noheader", "--parsable2", "--allocations", "--format=" + _SACCT, "--jobs=" + ",".join(ids)]
    done = client.run(words)
    if done.returncode != 0 and must:
        raise SchedulerError(f"sacct: {done.stderr.strip()} (where it doesn't work, set sacct=false)")
    return {} if done.returncode != 0 else _by_job(_state(line.split("|")) for line in done.stdout.splitlines())


def _state(fields: list[str]) -> JobState:
    """One line of either program. `CANCELLED by 0` is CANCELLED; squeue's exit code is wait()'s number."""
    job, state, reason, nodes, elapsed, limit, code, hosts = (text.strip() for text in fields[:8])
    return JobState(
        job_id=job,
        state=state.split()[0] if state else "",
        reason="" if reason in ("None", "") else reason,
        nodes=int(nodes) if nodes.isdecimal() else 0,
        elapsed=elapsed,
        limit=limit,
        exit_code=_code(code),
        hosts=hosts,
    )


def _code(text: str) -> int | None:
    """`7:0` (code and signal) or wait()'s 1792."""
    first, colon, second = text.partition(":")
    if not first.isdecimal() or (colon and not second.isdecimal()):
        return None
    code, signal = (int(first), int(second)) if colon else (int(first) >> 8, int(first) & 0x7F)
    return 128 + signal if signal else code


def _by_job(states: Iterable[JobState]) -> dict[str, list[JobState]]:
    found: dict[str, list[JobState]] = {}
    for state in states:
        found.setdefault(state.job_id.split("_")[0].split("+")[0], []).append(state)
    return found
