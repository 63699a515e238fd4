"""`phalanx logs`: the output of a job, or of one of its ranks."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ..errors import PlanError, SchedulerError, UsageError
from ..rundir import PER_RANK_LIMIT, log_path
from ..schedulers.slurm import jobs, outcome, states
from ..schedulers.slurm.identity import is_ours
from ..schedulers.slurm.jobs import OurJob
from ..schedulers.slurm.output import expand_pattern, of_batch_script
from .jobs import OPTIONS, Wanted, one, read

HELP = """\
usage: phalanx logs JOB [--rank N] [--follow] [--lines N]

What JOB printed: the batch script and rank 0, or with --rank one rank. Of several runs of a name, or jobs
of a chain, the last that began.

      --rank N           what rank N printed
      --lines N          the last N lines only
  -f, --follow           go on until the job has ended; a job that waits is waited for

{options}"""

_PAUSE = 0.3  # seconds between looks at the files
_ASK = 5.0  # seconds between questions to Slurm
_LATE = 1.0  # seconds that the last output may take over a shared file system
_CHUNK = 1 << 20


def main(argv: Sequence[str]) -> int:
    """`argv` without `logs`; the result is the exit code."""
    words = ["--follow" if word == "-f" else word for word in argv]
    wanted = read(words, flags=("follow",), valued=("rank", "lines"))
    if "help" in wanted.scanned.flags:
        print(HELP.format(options=OPTIONS))
        return 0
    rank, lines = _number(wanted, "rank"), _number(wanted, "lines")
    job = one(wanted, "logs")
    follow = "follow" in wanted.scanned.flags
    files = [_File(path) for path in (_paths(job, rank) if job.local is None or rank else _rank_0_here(job))]
    if not follow and not any(file.path.exists() for file in files):
        raise _nothing(job, files[0].path)
    titles = _Titles(len(files) > 1)
    for file in files:
        file.show(lines, titles)
    if follow:
        _follow(files, titles, _Watch(job, wanted.config.sacct))
    return 0


def _number(wanted: Wanted, name: str) -> int | None:
    text = wanted.scanned.values.get(name)
    if text is not None and not (text.isascii() and text.isdecimal()):
        raise UsageError(f"--{name} {text!r}: expected a whole number")
    return None if text is None else int(text)


def _nothing(job: OurJob, path: Path) -> PlanError:
    if not job.state.finished:
        return PlanError(f"job {job.job_id} is {job.state.state} and has no {path} yet: --follow waits for it")
    return PlanError(f"job {job.job_id} is {job.state.state} and left no {path}; phalanx status {job.job_id} says more")


def _paths(job: OurJob, rank: int | None) -> list[Path]:
    """Rank 0 prints into the job's output, the others into files of their own; above 64 ranks, one a node."""
    if rank is None:
        return _outputs(job)
    if rank == 0:
        print("rank 0 prints into the job's output", file=sys.stderr)
        stacks = job.run_dir / "logs" / "0.log"  # those of a crash, if any
        return [*_outputs(job), *([stacks] if stacks.exists() and stacks.stat().st_size else [])]
    plan = outcome.plan_of(job.run_dir)
    world = plan.get("world_size") or 0
    if world and rank >= world:
        raise PlanError(f"--rank {rank}: job {job.job_id} has {world} ranks, 0 to {world - 1}")
    path = log_path(job.run_dir, rank, rank // (plan.get("nproc_per_node") or 1), world or 1)
    if world > PER_RANK_LIMIT:
        print(f"rank {rank} is on node {path.stem.removeprefix('node')}: its ranks share a log", file=sys.stderr)
    return [path]


def _rank_0_here(job: OurJob) -> list[Path]:
    """Of a run of `phalanx run`; raises PlanError if it left no log, as that of a script without
    the API."""
    told = f"{job.name} ran here, and rank 0 printed on the terminal; --rank N shows another rank's output"
    log = log_path(job.run_dir, 0, 0, outcome.plan_of(job.run_dir).get("world_size") or 1)
    if not log.exists() or not log.stat().st_size:
        raise PlanError(told)
    print(f"{told}. This is rank 0's log:", file=sys.stderr)
    return [log]


def _outputs(job: OurJob) -> list[Path]:
    """As the script asked; if nothing is there, Slurm may know better (options of sbatch's own command line)."""
    paths = job.outputs()
    if any(path.exists() for path in paths):
        return paths
    try:
        said = states.detail(job.job_id)
    except (SchedulerError, PlanError):
        return paths
    if said is None or not said.stdout or not is_ours(job, said):
        return paths
    known = of_batch_script(job.job_id, said.number, said.name, states.first_host(said.hosts))
    names = (expand_pattern(name, known) for name in (said.stdout, said.stderr) if name)
    return list(dict.fromkeys(Path(said.work_dir, name) for name in names))


@dataclass
class _Titles:
    """`==> path <==` before what is from another file than the last, as tail has it."""

    wanted: bool
    last: Path | None = None

    def show(self, path: Path) -> None:
        if self.wanted and path != self.last:
            _write(f"{'' if self.last is None else chr(10)}==> {path} <==\n".encode())
        self.last = path


@dataclass
class _File:
    """A file that may come, grow, or be written anew."""

    path: Path
    position: int = 0

    def show(self, lines: int | None, titles: _Titles) -> None:
        """What is there, or its last lines."""
        if not self.path.exists():
            return
        titles.show(self.path)
        with self.path.open("rb") as file:
            if lines is None:
                self._copy(file)
            else:
                _write(b"".join(deque(file, maxlen=lines)))
                self.position = file.tell()

    def more(self, titles: _Titles) -> bool:
        """Print what has come since; whether there was anything."""
        try:
            size = self.path.stat().st_size
            if size == self.position:
                return False
            titles.show(self.path)
            with self.path.open("rb") as file:
                file.seek(self.position if size > self.position else 0)
                self._copy(file)
            return True
        except FileNotFoundError:
            return False

    def _copy(self, file: BinaryIO) -> None:
        while data := file.read(_CHUNK):
            _write(data)
        self.position = file.tell()


def _write(data: bytes) -> None:
    sys.stdout.flush()
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except BrokenPipeError:  # main() ends quietly, if what is buffered doesn't come up again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


class _Watch:
    """Whether a job has ended; asks Slurm every few seconds only, and says what a job waits for."""

    def __init__(self, job: OurJob, sacct: str) -> None:
        self._job, self._sacct = job, sacct
        self._next = 0.0
        self._said = ""

    def ended(self) -> bool:
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + _ASK
        try:
            tasks = jobs.with_states([self._job], self._sacct)
        except SchedulerError as error:  # it may come back
            self._say(f"warning: {error}")
            return False
        state = tasks[0].state
        if state.state == "PENDING":
            self._say(f"job {self._job.job_id} is PENDING{f' ({state.reason})' if state.reason else ''}; waiting")
        return all(task.state.finished for task in tasks)

    def _say(self, text: str) -> None:
        if text != self._said:
            print(text, file=sys.stderr, flush=True)
            self._said = text


def _follow(files: list[_File], titles: _Titles, watch: _Watch) -> None:
    """Print what comes, until the job has ended and nothing more did."""
    while not watch.ended():
        if not sum(file.more(titles) for file in files):
            time.sleep(_PAUSE)
    end = time.monotonic() + _LATE
    while time.monotonic() < end:
        if sum(file.more(titles) for file in files):
            end = time.monotonic() + _LATE
        time.sleep(_PAUSE)
