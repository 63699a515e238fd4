"""What Slurm says of jobs: squeue while it remembers them, sacct where there is accounting, scontrol for details."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...config.walltime import seconds
from ...errors import PhalanxError, TopologyError
from ...rank.hostlist import expand_hostlist
from . import client
from .identity import unix

_SEPARATOR = "\x1f"  # names and folders may hold | and commas
_SQUEUE = (
    "JobArrayID", "JobID", "State", "Reason", "NumNodes", "TimeUsed", "TimeLimit", "exit_code", "RestartCnt",
    "Partition", "NodeList", "Dependency", "Name", "WorkDir", "SubmitTime",
)  # fmt: skip
_SACCT = (
    "JobID", "JobIDRaw", "State", "Reason", "NNodes", "ElapsedRaw", "TimelimitRaw", "ExitCode", "Partition",
    "NodeList", "JobName", "WorkDir", "Submit",
)  # fmt: skip
SQUEUE_FORMAT = ",".join(f"{name}:{_SEPARATOR}" for name in _SQUEUE)
SACCT_FORMAT = ",".join(_SACCT)
_DATABASE_TIMEOUT = 20.0  # seconds for what can be done without

_ID = re.compile(r"(?P<base>\d+)(?:_(?P<task>\d+|\[[^\]]*\]?))?(?:\+(?P<part>\d+))?")
_ALIVE = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "REQUEUED", "REQUEUE_HOLD",
          "REQUEUE_FED", "RESIZING", "RESV_DEL_HOLD", "SIGNALING", "SPECIAL_EXIT", "STAGE_OUT")  # fmt: skip
_DOWN = re.compile(r"down|fail|unk|error")
_NOTHING = ("", "None", "(null)", "N/A", "Unknown", "None assigned")


@dataclass(frozen=True)
class JobState:
    """A job, a task of an array, the tasks of an array that still wait (`12_[4-9%2]`), or a part of a
    heterogeneous job (`12+1`). `number` is what Slurm itself counts by (%j, SLURM_JOB_ID); `hosts` is Slurm's
    compressed list; times in seconds, `submitted` in Unix time."""

    job_id: str
    number: str
    state: str
    reason: str = ""
    nodes: int | None = None
    elapsed: int | None = None
    limit: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    hosts: str = ""
    partition: str = ""
    name: str = ""
    work_dir: str = ""
    dependency: str = ""
    restarts: int | None = None
    stdout: str | None = None
    stderr: str | None = None
    command: str | None = None
    submitted: float | None = None

    @property
    def base(self) -> str:
        """The id that sbatch gave."""
        return base_id(self.job_id)

    @property
    def task(self) -> str | None:
        """The index in the array, or the indices that still wait in brackets."""
        match = _ID.fullmatch(self.job_id)
        return match["task"] if match else None

    @property
    def finished(self) -> bool:
        return self.state not in _ALIVE

    @property
    def code(self) -> int | None:
        """The exit code as a shell shows it: 128 + N for a signal."""
        return 128 + self.signal if self.signal and not self.exit_code else self.exit_code


def is_id(text: str) -> bool:
    """Whether `text` is an id of a job: `12`, `12_3`, `12_[4-9]` or `12+1`."""
    return _ID.fullmatch(text) is not None


def base_id(job_id: str) -> str:
    """`12` of `12`, `12_3` and `12+1`."""
    match = _ID.match(job_id)
    return match["base"] if match else job_id


def ask(ids: Sequence[str], sacct: str = "auto") -> dict[str, list[JobState]]:
    """States by the id that sbatch gave; the tasks of an array have each their own. Ids that Slurm doesn't know (any
    more) are missing.

    Two calls at most, however many jobs. `sacct` is the setting of that name: whether to ask it about those that
    squeue has forgotten. Raises SchedulerError if Slurm doesn't answer, or sacct doesn't though it must.
    """
    if not ids:
        return {}
    found = _by_base(_squeue(ids))
    # Of an array that is still there, squeue has forgotten the tasks that ended long ago.
    missing = [job_id for job_id in ids if all(state.task for state in found.get(base_id(job_id), []))]
    for state in _sacct(missing, must=sacct == "true") if missing and sacct != "false" else ():
        known = found.setdefault(state.base, [])
        # What an array's waiting part is now, squeue says better.
        if all(_part(state) != _part(other) for other in known):
            known.append(state)
    return found


def detail(job_id: str) -> JobState | None:
    """One job or one task of an array, with its files and command; None if scontrol has forgotten it."""
    fields = client.show_job(job_id)
    return from_scontrol(fields) if fields else None


def down_now(hosts: str) -> list[str]:
    """Those of the hosts that Slurm calls down, or failed; none where it doesn't answer."""
    if not hosts:
        return []
    try:
        done = client.run(["sinfo", "-h", "-N", "-n", hosts, "-o", "%N %T"], timeout=_DATABASE_TIMEOUT)
    except PhalanxError:
        return []
    words = (line.split() for line in done.stdout.splitlines())
    return sorted({name for name, state in (pair for pair in words if len(pair) == 2) if _DOWN.match(state)})


def _squeue(ids: Sequence[str]) -> list[JobState]:
    done = client.run(["squeue", "--noheader", "--states=all", "--jobs=" + ",".join(ids), "--Format=" + SQUEUE_FORMAT])
    if done.returncode != 0 and "Invalid job id specified" not in done.stderr:
        raise client.no_answer("squeue", done.stderr)
    return from_squeue(done.stdout)


def _sacct(ids: Sequence[str], must: bool) -> list[JobState]:
    words = ["sacct", "--noheader", "--parsable2", "--allocations", f"--delimiter={_SEPARATOR}"]
    try:
        done = client.run(
            [*words, "--format=" + SACCT_FORMAT, "--jobs=" + ",".join(ids)],
            timeout=client.TIMEOUT if must else _DATABASE_TIMEOUT,
        )
    except PhalanxError:
        if must:
            raise
        return []
    if done.returncode != 0 and must:
        raise client.no_answer("sacct (where it doesn't work, set sacct=false)", done.stderr)
    return from_sacct(done.stdout) if done.returncode == 0 else []


def _part(state: JobState) -> str:
    return "waiting" if state.task and not state.task.isdecimal() else state.job_id


def _by_base(states: Iterable[JobState]) -> dict[str, list[JobState]]:
    found: dict[str, list[JobState]] = {}
    for state in states:
        found.setdefault(state.base, []).append(state)
    return found


def from_squeue(text: str) -> list[JobState]:
    """Lines of squeue in SQUEUE_FORMAT; what a site's wrapper prints between them is passed over."""
    return [_of_squeue(row) for row in _rows(text, tuple(_SQUEUE))]


def from_sacct(text: str) -> list[JobState]:
    """Lines of sacct in SACCT_FORMAT, with the same separator."""
    return [_of_sacct(row) for row in _rows(text, _SACCT)]


def _rows(text: str, names: tuple[str, ...]) -> Iterable[dict[str, str]]:
    for line in text.split("\n"):
        cells = [cell.strip() for cell in line.split(_SEPARATOR)][: len(names)]
        if len(cells) in (len(names), len(names) - 1) and is_id(cells[0]):  # the last may be missing
            yield dict(zip(names, ["" if cell in _NOTHING else cell for cell in cells] + [""], strict=False))


def _of_squeue(row: Mapping[str, str]) -> JobState:
    ended = row["State"] not in _ALIVE
    code, signal = _exit(row["exit_code"]) if ended else (None, None)
    return JobState(
        job_id=row["JobArrayID"],
        number=row["JobID"],
        state=row["State"],
        reason=row["Reason"],
        nodes=_number(row["NumNodes"]),
        elapsed=_time(row["TimeUsed"]),
        limit=_time(row["TimeLimit"]),
        exit_code=code,
        signal=signal,
        hosts=row["NodeList"],
        partition=row["Partition"],
        name=row["Name"],
        work_dir=row["WorkDir"],
        dependency=row["Dependency"],
        restarts=_number(row["RestartCnt"]),
        submitted=unix(row["SubmitTime"]),
    )


def _of_sacct(row: Mapping[str, str]) -> JobState:
    state, _, by = row["State"].partition(" by ")  # "CANCELLED by 1000"
    ended = state not in _ALIVE
    code, signal = _exit(row["ExitCode"]) if ended else (None, None)
    minutes = _number(row["TimelimitRaw"])
    return JobState(
        job_id=row["JobID"],
        number=row["JobIDRaw"],
        state=state,
        # sacct keeps why the job once waited, which tells nothing of one that has ended.
        reason=by if ended else row["Reason"],
        nodes=_number(row["NNodes"]),
        elapsed=_number(row["ElapsedRaw"]),
        limit=None if minutes is None else minutes * 60,
        exit_code=code,
        signal=signal,
        hosts=row["NodeList"],
        partition=row["Partition"],
        name=row["JobName"],
        work_dir=row["WorkDir"],
        submitted=unix(row["Submit"]),
    )


def from_scontrol(fields: Mapping[str, str]) -> JobState:
    """The fields of `scontrol show job`."""
    said = {key: "" if value in _NOTHING else value for key, value in fields.items()}
    ended = said["JobState"] not in _ALIVE
    code, signal = _exit(said.get("ExitCode", "")) if ended else (None, None)
    return JobState(
        job_id=_scontrol_id(said),
        number=said["JobId"],
        state=said["JobState"],
        reason=said.get("Reason", ""),
        nodes=_number(said.get("NumNodes", "")),
        elapsed=_time(said.get("RunTime", "")),
        limit=_time(said.get("TimeLimit", "")),
        exit_code=code,
        signal=signal,
        hosts=said.get("NodeList", ""),
        partition=said.get("Partition", ""),
        name=said.get("JobName", ""),
        work_dir=said.get("WorkDir", ""),
        dependency=said.get("Dependency", ""),
        restarts=_number(said.get("Restarts", "")),
        stdout=said.get("StdOut"),
        stderr=said.get("StdErr"),
        command=said.get("Command"),
        submitted=unix(said.get("SubmitTime", "")),
    )


def _scontrol_id(said: Mapping[str, str]) -> str:
    if said.get("ArrayJobId"):
        task = said.get("ArrayTaskId", "")
        return f"{said['ArrayJobId']}_{task if task.isdecimal() else f'[{task}]'}"
    if said.get("HetJobId"):
        return f"{said['HetJobId']}+{said.get('HetJobOffset', '0')}"
    return said["JobId"]


def _number(text: str) -> int | None:
    """`4`, and `4-4` as squeue writes a range of nodes."""
    match = re.match(r"\d+", text)
    return int(match[0]) if match else None


def _time(text: str) -> int | None:
    """`1-02:03:04`, `3:04`; None for UNLIMITED, INVALID and the like."""
    try:
        return seconds(text) if ":" in text or "-" in text else None
    except ValueError:
        return None


def _exit(text: str) -> tuple[int | None, int | None]:
    """`3:0` is code and signal; squeue gives both in one number, as wait(2) does."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    if match is None:
        return None, None
    if match[2] is not None:
        return int(match[1]), int(match[2])
    return int(match[1]) >> 8, int(match[1]) & 0x7F


def first_host(hosts: str) -> str:
    """The first of a compressed list: where the batch script runs. Empty if there is none."""
    try:
        return expand_hostlist(hosts)[0] if hosts else ""
    except TopologyError:
        return ""
