"""`phalanx logs`: the output of a job, or of one of its ranks."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from ..errors import PlanError, UsageError
from ..schedulers.slurm import client, jobs
from ..schedulers.slurm.jobs import OurJob
from .jobs import OPTIONS, Wanted, one, read

HELP = """\
usage: phalanx logs JOB [--rank N] [--follow]

What JOB printed: rank 0 and the batch script, or with --rank one rank's own log.

      --rank N           that rank's log
      --lines N          the last N lines only
      --follow           go on until the job has ended

{options}"""

_PAUSE = 0.5  # seconds between looks at a file
_ASK = 5.0  # seconds between questions to Slurm


def main(argv: Sequence[str]) -> int:
    """`argv` without `logs`; the result is the exit code."""
    wanted = read(argv, flags=("follow",), valued=("rank", "lines"))
    if "help" in wanted.scanned.flags:
        print(HELP.format(options=OPTIONS))
        return 0
    rank = _number(wanted, "rank")
    lines = _number(wanted, "lines")
    job = one(wanted, "logs")
    path = _file(job, rank)
    follow = "follow" in wanted.scanned.flags
    if not path.exists() and not follow:
        raise PlanError(f"job {job.job_id} has no {path} (yet): phalanx status {job.job_id} says how far it is")
    position = _print(path, lines)
    if follow:
        _follow(path, position, _Ended(job, wanted.config.sacct))
    return 0


def _number(wanted: Wanted, name: str) -> int | None:
    text = wanted.scanned.values.get(name)
    if text is not None and not (text.isascii() and text.isdecimal()):
        raise UsageError(f"--{name} {text!r}: expected a whole number")
    return None if text is None else int(text)


def _file(job: OurJob, rank: int | None) -> Path:
    """Rank 0 prints into the job's output. Above 64 ranks logs are a file a node."""
    if rank is None:
        return job.output if job.output.exists() else _said_output(job) or job.output
    path = job.run_dir / "logs" / f"{rank}.log"
    nodes = sorted(job.run_dir.glob("logs/node*.log"))
    if not path.exists() and nodes:
        names = ", ".join(node.name for node in nodes[:4])
        raise PlanError(f"rank {rank} has no log of its own: above 64 ranks logs are one a node, in {names} …")
    return path


def _said_output(job: OurJob) -> Path | None:
    """Where Slurm writes it, if the user chose a file."""
    said = client.show_job(job.job_id)
    return Path(said["StdOut"]) if said and said.get("StdOut") else None


def _print(path: Path, lines: int | None) -> int:
    """Print what is there, or its last lines; returns how far that is."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        kept = list(file) if lines is None else deque(file, maxlen=lines)
        _write(b"".join(kept))
        return file.tell()


def _write(data: bytes) -> None:
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


class _Ended:
    """Whether a job has ended; asks Slurm every few seconds only."""

    def __init__(self, job: OurJob, sacct: str) -> None:
        self._job, self._sacct = job, sacct
        self._asked = 0.0

    def __call__(self) -> bool:
        if time.monotonic() - self._asked < _ASK:
            return False
        self._asked = time.monotonic()
        return all(task.state.finished for task in jobs.with_states([self._job], self._sacct))


def _follow(path: Path, position: int, ended: Callable[[], bool]) -> None:
    """Print what comes, until the job has ended and nothing more did. The file may not be there yet."""
    while True:
        last = ended()
        if path.exists():
            with path.open("rb") as file:
                if path.stat().st_size < position:  # written anew
                    position = 0
                file.seek(position)
                _write(file.read())
                position = file.tell()
        if last:
            return
        time.sleep(_PAUSE)
