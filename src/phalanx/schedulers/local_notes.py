"""What is written down of the runs that `phalanx run` starts: `jobs/local.json` in each run
directory, as a job of Slurm's has its own note there. The command that runs them is its one
writer."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..claims import cluster_name
from ..processes import Process as Runner
from ..processes import this_place, this_process
from ..rundir import shared, write_atomic
from .slurm.states import JobState

if TYPE_CHECKING:
    from ..planning.plan import LaunchPlan

NOTE, CANCEL = "jobs/local.json", "jobs/local.cancel"
JOB_ID = "local"  # what stands where others have Slurm's number
NEVER_STARTED = "never started"


@dataclass(frozen=True)
class Note:
    """One run, of a series or alone. Times are Unix times, None until then; `lines` say why it
    failed, and `culprit` is the rank to blame. `stopped`: by the user, who may have done so before
    it began. `allocation` is the Slurm job that it ran in, and `cluster` that job's."""

    name: str
    series: str | None
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
    cluster: str | None = None

    def write(self, run_dir: Path) -> None:
        with shared(run_dir):
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
            return replace(known, reason=self._where(), elapsed=None)
        if self.began is None and known.state in ("GONE", "CANCELLED"):
            return replace(known, reason=NEVER_STARTED)
        gone = "the command that ran it was killed"
        return replace(known, reason=gone, elapsed=None) if known.state == "GONE" else known

    def _where(self) -> str:
        if self.runner.host == this_place()[0]:
            return f"it began before host {self.runner.host} was restarted, in another container, or on another machine"
        return f"look on {self.runner.host}, where it was started"

    def _word(self) -> str:
        if self.ended is not None:
            return "CANCELLED" if self.stopped else "FAILED" if self.code else "COMPLETED"
        if not self.runner.here:
            return "UNKNOWN"
        if not self.runner.alive:
            return "GONE"
        return "PENDING" if self.began is None else "RUNNING"


def of_launch(plan: LaunchPlan, series: str | None) -> Note:
    """Of a launch to come."""
    job = plan.allocation.job_id if plan.allocation else None
    cluster = cluster_name(os.environ) if job else None
    return Note(plan.name, series, time.time(), plan.nodes, plan.cwd, this_process(), job, cluster=cluster)


class Noted:
    """The note of a launch from `begin` to `end`."""

    def __init__(self, note: Note) -> None:
        self._note = note
        self._run_dir: Path | None = None

    def begin(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        (run_dir / CANCEL).unlink(missing_ok=True)
        self._note = replace(self._note, began=time.time())
        self._note.write(run_dir)

    def end(self, code: int, stopped: bool, lines: tuple[str, ...], culprit: int | None) -> None:
        """Nothing is noted of a launch that never began, or that left no run directory. A full disk
        is no failure."""
        if self._run_dir is not None and self._run_dir.is_dir():
            ended = replace(
                self._note, ended=time.time(), code=code, stopped=stopped, lines=tuple(lines), culprit=culprit
            )
            with suppress(OSError):
                ended.write(self._run_dir)


def read(run_dir: Path) -> Note | None:
    """The note of a run; None if it has none, as most runs."""
    try:
        said: dict[str, Any] = json.loads((run_dir / NOTE).read_text(encoding="utf-8"))
        needed = {one.name for one in fields(Note) if one.default is MISSING}
        values = {name: said[name] for name in Note.__dataclass_fields__ if name in said or name in needed}
        return Note(**{**values, "runner": Runner(**said["runner"]), "lines": tuple(said.get("lines", ()))})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def cancel(run_dir: Path) -> None:
    """Ask for the end of a member, or that it doesn't begin; the runner looks when it has been told by a signal, and
    before each member."""
    (run_dir / CANCEL).touch()


def is_cancelled(run_dir: Path) -> bool:
    return (run_dir / CANCEL).exists()
