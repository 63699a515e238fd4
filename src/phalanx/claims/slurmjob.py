"""Whether a job that holds a run directory has ended: one question to Slurm, and only about a claim
that stands."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Mapping

from .holder import Job

_PATIENCE = 30.0  # seconds for an answer
_QUIET = 60.0  # seconds without a sign of life, before a job that Slurm doesn't know counts as forgotten after its end
_SKEW = 60.0  # seconds that clocks may differ
_answered: dict[tuple[str, ...], str] = {}  # one question a process, however many jobs it looks at
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE",
          "OUT_OF_MEMORY", "REVOKED")  # fmt: skip


def why_unfinished(job: Job, since: float, silence: float) -> str | None:
    """Words on why the job may still run; None if its cluster says that it has ended. It held the
    directory `since` that time, and nothing was written there for `silence` seconds."""
    here = cluster_name(os.environ)
    if here is None:
        return f"Slurm can't be asked from here whether job {job.number} has ended"
    if job.cluster != here:
        return f"only cluster {job.cluster or 'unknown'} can tell whether it has ended, and this is cluster {here}"
    said = _scontrol("show", "job", "-o", job.number)
    if said is None:
        return f"Slurm doesn't answer whether job {job.number} has ended"
    fields = _fields(said)
    if not fields or _another(job, since, fields):
        forgotten = f"Slurm doesn't know the job, which wrote something within the last {_QUIET:g} s"
        return None if silence > _QUIET else forgotten
    return None if fields["JobState"] in _ENDED else f"Slurm says that the job is {fields['JobState']}"


def cluster_name(environ: Mapping[str, str]) -> str | None:
    """The cluster around this process, or else the one that Slurm's commands talk to; None without
    one."""
    if "SLURM_JOB_ID" in environ and environ.get("SLURM_CLUSTER_NAME"):
        return environ["SLURM_CLUSTER_NAME"]
    place = tuple(environ.get(name, "") for name in ("PATH", "SLURM_CONF", "SLURM_CLUSTERS"))
    if place not in _answered:
        said = _scontrol("show", "config") or ""
        found = re.search(r"^ClusterName\s*=\s*(\S+)", said, re.MULTILINE)
        if found is None:
            return None
        _answered[place] = found[1]
    return _answered[place]


def _scontrol(*words: str) -> str | None:
    """Its answer, empty for a job that it doesn't know; None if there is none."""
    environ = {**os.environ, "LC_ALL": "C", "SLURM_TIME_FORMAT": "standard"}
    try:
        done = subprocess.run(
            ["scontrol", *words], env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=_PATIENCE, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode == 0:
        return done.stdout
    return "" if "Invalid job id" in done.stderr else None


def _fields(line: str) -> dict[str, str]:
    found = {name: re.search(rf"(?:^| ){name}=(\S*)", line) for name in ("JobState", "SubmitTime", "Restarts")}
    name = re.search(r" JobName=(.*?) UserId=", line)
    return {key: match[1] for key, match in {**found, "JobName": name}.items() if match} if found["JobState"] else {}


def _another(job: Job, since: float, fields: Mapping[str, str]) -> bool:
    """Whether Slurm means another job by this number: its counter began anew. A requeue renews the
    submission time."""
    if job.name and fields.get("JobName", job.name) != job.name:
        return True
    requeued = fields.get("Restarts", "0") != "0"
    try:
        submitted = time.mktime(time.strptime(fields["SubmitTime"], "%Y-%m-%dT%H:%M:%S"))
    except (KeyError, ValueError):
        return False
    return submitted > since + _SKEW and not requeued
