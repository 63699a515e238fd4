"""What launchers print when a launch ends badly: which ranks died how. `stops` has what else may
end it."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from ..errors import TopologyError
from ..rank.hostlist import expand_hostlist

_TORCHRUN = "ChildFailedError"
_TORCHRUN_RANK = re.compile(
    r"time +: (?P<time>\S+)\s+host +: (?P<host>\S+)\s+rank +: (?P<rank>\d+) \(local_rank: \d+\)\s+"
    r"exitcode +: (?P<code>-?\d+) \(pid: (?P<pid>\d+)\)"
)
_TORCHRUN_ENDS = re.compile(r"Sending process (\d+) closing signal")
_NO_WARNINGS = ("ERROR", "CRITICAL", "FATAL")  # values of LOGLEVEL under which it doesn't say that
_TASK = re.compile(r"srun: error: (?P<hosts>\S+): tasks? (?P<tasks>[\d,-]+): (?P<end>[^\n]+)")
_OOM_KILLS = re.compile(r"slurmstepd\S*: error: Detected \d+ oom[_-]kill event", re.IGNORECASE)
_EXITED = re.compile(r"Exited with exit code (\d+)")
_ENDING = re.compile(r"srun: .*(Terminating (StepId=|job step)|Job step aborted)")
_OPEN_MPI_SIGNAL = re.compile(
    r"noticed that process rank (?P<rank>\d+) with PID \d+ on node (?P<host>\S+)\s+exited on signal (?P<signal>\d+)"
)
_OPEN_MPI_EXIT = re.compile(r"Process name: \[.*,(?P<rank>\d+)\]\s+Exit code: +(?P<code>\d+)")
_MPI_ABORT = re.compile(
    r"MPI_ABORT was invoked on rank (?P<rank>\d+) [^\n]*\s+(?:Proc: [^\n]*\s+)?"
    r"(?:Errorcode:|with errorcode) (?P<code>-?\d+)"
    r"|application called MPI_Abort\([^,]*, (?P<code2>-?\d+)\) - process (?P<rank2>\d+)"
)
_MPICH = re.compile(
    r"BAD TERMINATION OF ONE.*\n= +PID (?P<pid>\d+) RUNNING AT (?P<host>\S+)\n= +EXIT CODE: (?P<status>\d+)"
)
_MPI_WORDS = re.compile(
    r"^(mpirun|mpiexec|prterun|\[mpiexec@|= +BAD TERMINATION|Primary job)|MPI_A(BORT|bort)", re.MULTILINE
)
_HOROVODRUN = re.compile(r"^Process name: (?P<rank>\d+)\nExit code: (?P<status>\d+)", re.MULTILINE)
_DEEPSPEED = re.compile(r"\[launch\.py:\d+:sigkill_handler\] .* exits with return code = (?P<code>-?\d+)")
_RAY = re.compile(  # the agents' words, see ray_launch/ranks.py
    r"^ray: rank (?P<rank>\d+) on (?P<host>\S+) "
    r"(?:ended with exit code (?P<code>\d+)|was killed by signal (?P<signal>\d+))",
    re.MULTILINE,
)

CANCELLED = re.compile(
    r"\*\*\* (?P<what>JOB|STEP) (?P<id>\S+) ON \S+ CANCELLED AT (?P<time>\S+)(?: DUE (?:TO|to) (?P<why>[^*]+?))? \*\*\*"
)
_STARTED = re.compile(r"=== phalanx: job (?P<job>\d+), start (?P<start>\d+) ===")  # batch/script.py writes it
_LAUNCH = re.compile(  # a step that could not start, see unlaunched.py
    r"srun: error: .*(?:StepId=|for job )(?P<job>\d+)|slurmstepd-(?P<node>[^:\s]+): error: execve\(\)"
)


@dataclass(frozen=True)
class Death:
    """How a rank ended (None: the launcher didn't say which), where it did; `code` is negative for a signal.

    `late` ones came when the launcher was ending all: they may be its own doing. `position` is in the text. `outside`
    says of a SIGTERM, with which launchers end the other ranks, that this one was not sent by the launcher.
    """

    rank: int | None
    host: str | None
    code: int
    position: int
    late: bool = False
    out_of_memory: bool = False
    outside: bool = False


def deaths(text: str, launcher: str | None) -> list[Death]:
    """The ranks that died, the one to blame first as far as the launcher knows. `launcher` None: by the text."""
    found = _reported(text, launcher)
    if _OOM_KILLS.search(text):
        killed = -int(signal.SIGKILL)
        found = [replace(death, out_of_memory=True) if death.code == killed else death for death in found]
    return found


def _reported(text: str, launcher: str | None) -> list[Death]:
    if launcher == "ray" or (launcher is None and _RAY.search(text)):
        return list(_by_ray(text))
    if launcher == "horovodrun" or (launcher is None and _HOROVODRUN.search(text)):
        return list(_by_horovodrun(text))
    if launcher == "deepspeed" or (launcher is None and _DEEPSPEED.search(text)):
        return [_first(None, None, int(hit["code"]), hit.start()) for hit in _DEEPSPEED.finditer(text)]
    if launcher not in ("python", "srun", "mpirun", None):
        return _by_torchrun(text)
    if launcher is None and _TORCHRUN in text:
        return _by_torchrun(text)
    if launcher == "mpirun" or (launcher is None and _MPI_WORDS.search(text)):
        return _by_mpi(text)
    return list(by_srun(text))


def agents(text: str) -> list[Death]:
    """The processes that started ranks, one a node, and died themselves: here `rank` is the node's."""
    return [death for death in by_srun(text) if not death.late]


def since(text: str, start: float, job: str = "") -> str:
    """The part of a log that several jobs or starts share which belongs to the start of `job` that began at `start`:
    what follows the job's own last mark. Older scripts left none, and what Slurm ended before is left out then."""
    marks = [found.end() for found in _STARTED.finditer(text) if found["job"] == job]
    if marks:
        return text[marks[-1] :]
    earlier = [found.end() for found in CANCELLED.finditer(text) if (unix(found["time"]) or start) < start - 1]
    return text[max(earlier, default=0) :]


def shared(text: str, job: str) -> bool:
    """Whether other jobs have begun in the same log: what launchers say there, may be of them. The
    first one leaves no mark, but its words stand before the others' marks."""
    marks = [*_STARTED.finditer(text)]
    others = any(found["job"] != job for found in marks)
    return others or any(found["start"] == "0" and text[: found.start()].strip() for found in marks)


def possible(found: list[Death], returncode: int, launcher: str | None) -> list[Death]:
    """Of deaths that may be another launch's, those that fit the exit code of this one: mpirun ends
    with the code of the rank that it tells of, srun with the highest of all; agents with their own."""
    if launcher == "mpirun":
        # MPICH names no rank, and ends with a code of its own.
        return [
            death
            for death in found
            if death.rank is None or _shell_code(death.code) == returncode
        ]  # fmt: skip
    return [death for death in found if launcher != "srun" or _shell_code(death.code) <= returncode]


def _shell_code(code: int) -> int:
    return code if code >= 0 else 128 - code


def of_job(text: str, job: str, hosts: Collection[str]) -> str:
    """Less the lines in which Slurm speaks of another job, or of tasks on nodes that aren't this job's: jobs that run
    at the same time may print into one file."""
    return "".join(line for line in text.splitlines(keepends=True) if _may_be_of(line, job, hosts))


def _may_be_of(line: str, job: str, hosts: Collection[str]) -> bool:
    step, task = CANCELLED.search(line), _TASK.search(line)
    if step:
        return re.split(r"[.+_]", step["id"])[0] == job
    if (launch := _LAUNCH.search(line)) is not None and launch["job"]:
        return launch["job"] == job
    if launch is not None and hosts:
        return launch["node"] in hosts
    return task is None or not hosts or _first_host(task["hosts"]) in hosts


def _by_torchrun(text: str) -> list[Death]:
    """Each node's agent reports its own ranks, its root cause last; the report with the earliest one comes first.
    An agent that restarted its ranks has said so before: its last report counts."""
    last: dict[str, tuple[str, list[Death]]] = {}
    ended = set(_TORCHRUN_ENDS.findall(text))
    for report in re.finditer(rf"{_TORCHRUN}((?:(?!{_TORCHRUN}).)*)", text, re.DOTALL):
        hits = list(_TORCHRUN_RANK.finditer(report[1]))[::-1]
        if hits:
            last[hits[0]["host"]] = (hits[0]["time"], list(_of_report(hits, report.start(), ended)))
    return [death for _, found in sorted(last.values(), key=lambda entry: entry[0]) for death in found]


def _of_report(hits: list[re.Match[str]], position: int, ended: set[str]) -> Iterator[Death]:
    """The root cause is none of those that the agent ended, and neither are others of which it
    doesn't say so: it may call a rank the root cause that had lost its connection to one that ended
    in the same tenth of a second."""
    says = bool(ended) or os.environ.get("LOGLEVEL", "").upper() not in _NO_WARNINGS
    for place, hit in enumerate(hits):
        own, code = place == 0 or (says and hit["pid"] not in ended), int(hit["code"])
        outside = own and code == -signal.SIGTERM
        yield Death(int(hit["rank"]), hit["host"], code, position, late=hit["pid"] in ended, outside=outside)


def _first(rank: int | None, host: str | None, code: int, position: int) -> Death:
    """A death of which the launcher tells because it was the first: a SIGTERM is none of its own."""
    return Death(rank, host, code, position, outside=code == -signal.SIGTERM)


def _by_horovodrun(text: str) -> Iterator[Death]:
    """It names the first that ended badly; a status above 128 is a signal's."""
    for hit in _HOROVODRUN.finditer(text):
        status = int(hit["status"])
        yield _first(int(hit["rank"]), "localhost", 128 - status if status > 128 else status, hit.start())


def _by_ray(text: str) -> Iterator[Death]:
    """In the order in which ranks ended; the agents don't report those that they end."""
    for found in _RAY.finditer(text):
        code = int(found["code"]) if found["code"] else -int(found["signal"])
        yield _first(int(found["rank"]), found["host"], code, found.start())


def by_srun(text: str) -> Iterator[Death]:
    """In the order in which tasks ended. Those after srun began to end the step are late; a SIGTERM was its own."""
    ending = _ENDING.search(text)
    for found in _TASK.finditer(text):
        code = _srun_code(found["end"])
        late = ending is not None and found.start() > ending.start()
        terminated = code == -signal.SIGTERM
        if code is None or (terminated and late):
            continue
        for task in _numbers(found["tasks"]):
            oom = found["end"].startswith("Out Of Memory")
            yield Death(task, _first_host(found["hosts"]), code, found.start(), late, oom, terminated)


def _srun_code(end: str) -> int | None:
    """A task's end as subprocess gives it; None for words that are no end."""
    exited = _EXITED.match(end)
    if exited:
        return int(exited[1])
    end = end.removesuffix(" (core dumped)").strip()
    if end.startswith("Out Of Memory"):
        return -int(signal.SIGKILL)
    return next((-number for number in signal.valid_signals() if signal.strsignal(number) == end), None)


def _numbers(tasks: str) -> list[int]:
    ranges = (item.partition("-") for item in tasks.split(",") if item)
    return [number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)]


def _first_host(hosts: str) -> str:
    try:
        return expand_hostlist(hosts)[0]
    except (TopologyError, IndexError):
        return hosts


def _by_mpi(text: str) -> list[Death]:
    found = [
        _first(int(hit["rank"]), hit["host"], -int(hit["signal"]), hit.start())
        for hit in _OPEN_MPI_SIGNAL.finditer(text)
    ]
    found += [Death(int(hit["rank"]), None, int(hit["code"]), hit.start()) for hit in _OPEN_MPI_EXIT.finditer(text)]
    for hit in _MPI_ABORT.finditer(text):
        found.append(
            Death(int(hit["rank"] or hit["rank2"]), None, int(hit["code"] or hit["code2"]) & 0xFF, hit.start())
        )
    found += [_first(None, hit["host"], _wait_code(int(hit["status"])), hit.start()) for hit in _MPICH.finditer(text)]
    return sorted(found, key=lambda death: death.position)


def _wait_code(status: int) -> int:
    """MPICH prints what wait(2) gave: the signal in the low bits, the exit code above."""
    return -(status & 0x7F) if status & 0x7F else status >> 8


def unix(stamp: str) -> float | None:
    """Slurm writes local time."""
    try:
        return time.mktime(time.strptime(stamp, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None
