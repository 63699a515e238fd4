"""What is written down of a series' members on this machine: `jobs/local.json` in each run directory, as a job of
Slurm's has its own note there. The command that runs the series is its one writer."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..rundir import write_atomic
from .slurm.states import JobState

NOTE, CANCEL = "jobs/local.json", "jobs/local.cancel"
JOB_ID = "local"  # what stands where others have Slurm's number
NEVER_STARTED = "never started"


@dataclass(frozen=True)
class Runner:
    """The process that runs a series; `started` tells it from a later one with the same number."""

    host: str
    pid: int
    started: str

    @property
    def here(self) -> bool:
        return self.host == platform.node()

    @property
    def alive(self) -> bool:
        """Whether it is there, for one of this host."""
        return _started(self.pid) == self.started


def this_process() -> Runner:
    return Runner(platform.node(), os.getpid(), _started(os.getpid()) or "")


def _started(pid: int) -> str | None:
    """When a process began, as the system counts; None if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    except OSError:
        if Path("/proc/self").exists():
            return None
    answer = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return answer.stdout.strip() or None


@dataclass(frozen=True)
class Note:
    """One member. Times are Unix times, None until then; `lines` say why it failed, and `culprit` is the rank to blame.
    `stopped`: by the user, who may have done so before it began. `allocation` is the Slurm job that it ran in."""

    name: str
    series: str
    submitted: float
    nodes: int
    cwd: str
    runner: Runner
    allocation: str | None = None
    began: float | None = None
    ended: float | None = None
    code: int | None = None
    stopped: bool = False
    lines: tuple[str, ...] = ()
    culprit: int | None = None

    def write(self, run_dir: Path) -> None:
        write_atomic(run_dir / NOTE, json.dumps({"v": 1, "job_id": JOB_ID, **asdict(self)}, indent=1))

    @property
    def unseen(self) -> bool:
        """Whether only another host can tell how it is."""
        return self.ended is None and not self.runner.here

    def state(self, now: float) -> JobState:
        """In Slurm's words."""
        end = self.ended if self.ended is not None else now
        known = JobState(
            JOB_ID,
            JOB_ID,
            self._word(),
            nodes=self.nodes,
            elapsed=None if self.began is None else max(0, round(end - self.began)),
            exit_code=self.code,
            hosts=self.runner.host,
        )
        if known.state == "UNKNOWN":
            return replace(known, reason=f"look on {self.runner.host}, where it was started", elapsed=None)
        if self.began is None and known.state in ("GONE", "CANCELLED"):
            return replace(known, reason=NEVER_STARTED)
        gone = "the command that ran it was killed"
        return replace(known, reason=gone, elapsed=None) if known.state == "GONE" else known

    def _word(self) -> str:
        if self.ended is not None:
            return "CANCELLED" if self.stopped else "FAILED" if self.code else "COMPLETED"
        if not self.runner.here:
            return "UNKNOWN"
        if not self.runner.alive:
            return "GONE"
        return "PENDING" if self.began is None else "RUNNING"


def read(run_dir: Path) -> Note | None:
    """The note of a run; None if it has none, as most runs."""
    try:
        said: dict[str, Any] = json.loads((run_dir / NOTE).read_text(encoding="utf-8"))
        values = {name: said[name] for name in Note.__dataclass_fields__}
        return Note(**{**values, "runner": Runner(**said["runner"]), "lines": tuple(said["lines"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def cancel(run_dir: Path) -> None:
    """Ask for the end of a member, or that it doesn't begin; the runner looks when it has been told by a signal, and
    before each member."""
    (run_dir / CANCEL).touch()


def is_cancelled(run_dir: Path) -> bool:
    return (run_dir / CANCEL).exists()
