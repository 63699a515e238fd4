"""Who holds a run directory: a process, a Slurm job, or a process within a job."""

from __future__ import annotations

import json
import math
import os
import platform
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from ..processes import Process, this_process

_SIGNS = ("records", "logs", "errors", "checkpoints", "claims")  # folders that an attempt writes to


@dataclass(frozen=True)
class Job:
    """A Slurm job: `number` is Slurm's own (SLURM_JOB_ID), `restart` how often it had been
    requeued."""

    cluster: str
    number: str
    restart: int = 0
    name: str = ""

    def same(self, other: Job | None) -> bool:
        return other is not None and (self.cluster, self.number) == (other.cluster, other.number)


@dataclass(frozen=True)
class Holder:
    """`process` None: the batch script of `job`, or (neither) one whose words can't be read.
    `launch` is what all processes of the launch have as PHALANX_LAUNCH_ID. `after` is the job that
    ended before this one could begin."""

    host: str
    since: float
    process: Process | None = None
    job: Job | None = None
    launch: str | None = None
    after: str | None = None
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    def encoded(self) -> str:
        return json.dumps({"v": 1, **asdict(self)})

    def who(self) -> str:
        """`pid 12 on host a (job 3 of cluster b) since …`."""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        job = f"job {self.job.number} of cluster {self.job.cluster or 'unknown'}" if self.job else ""
        if self.process is not None:
            within = f" in {job}" if job else ""
            return f"pid {self.process.pid} on host {self.process.host}{within} runs there since {since}"
        if job:
            return f"{job} ({self.host}) runs there since {since}"
        return "an attempt whose claim can't be read runs there"


def of_this_process(launch: str | None = None, job: Job | None = None) -> Holder:
    """For ranks that end with this process. `job` is the allocation that they run in, unless this
    process itself is in one."""
    process = this_process()
    return Holder(process.host, time.time(), process, job or job_around(os.environ), launch)


def of_batch_script(environ: Mapping[str, str], after: str | None) -> Holder:
    """For all that a job starts: its batch script may be killed before its steps, so its process
    says nothing."""
    return Holder(platform.node(), time.time(), None, job_around(environ), environ.get("PHALANX_LAUNCH_ID"), after)


def job_around(environ: Mapping[str, str]) -> Job | None:
    """The job that this process ends with. The shell of `salloc` on a login node outlives its
    allocation."""
    if "SLURM_JOB_ID" not in environ or "SLURMD_NODENAME" not in environ:
        return None
    restart = environ.get("SLURM_RESTART_COUNT", "")
    return Job(
        environ.get("SLURM_CLUSTER_NAME", ""),
        environ["SLURM_JOB_ID"],
        int(restart) if restart.isdecimal() else 0,
        environ.get("SLURM_JOB_NAME", ""),
    )


def decoded(read: Callable[[], str], tries: int, pause: float) -> Holder:
    """A claim's words; one of which they can't be had is held by somebody, whoever that is."""
    for _ in range(tries):
        with suppress(OSError, ValueError, KeyError, TypeError):
            return _of_text(read())
        time.sleep(pause)
    return Holder("", 0.0)


def _of_text(text: str) -> Holder:
    said = json.loads(text)
    known = {name: said[name] for name in Holder.__dataclass_fields__ if name in said}
    holder = Holder(**{**known, "process": None, "job": None})
    process = Process(**said["process"]) if said["process"] else None
    return replace(holder, process=process, job=Job(**said["job"]) if said["job"] else None)


def last_sign(run_dir: Path) -> str:
    """`last sign of life 4 s ago`."""
    seconds = silence(run_dir)
    return "no sign of life yet" if seconds == math.inf else f"last sign of life {max(0, round(seconds))} s ago"


def silence(run_dir: Path) -> float:
    """Seconds since anything was written that an attempt writes."""
    newest = -math.inf
    for folder in (run_dir / name for name in _SIGNS):
        with suppress(OSError), os.scandir(folder) as entries:
            newest = max([newest, *(entry.stat().st_mtime for entry in entries)])
    return time.time() - newest
