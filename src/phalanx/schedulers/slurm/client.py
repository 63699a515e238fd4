"""Calls of Slurm's own programs: typed answers, and its own words where it refuses."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...config.walltime import seconds
from ...errors import PlanError, SchedulerError

TIMEOUT = 60.0  # seconds for one call; slurmctld may be slow, but a command must not hang
# Users' variables that change what the programs print, or which jobs they mean.
_FORMATS = re.compile(r"(SQUEUE|SINFO|SACCT|SCONTROL|SCANCEL)_|SLURM_(TIME_FORMAT|BITSTR_LEN|DEBUG)")
_JOB_ID = re.compile(r"^\s*(?:Submitted batch job )?(\d+)(?:;(\S+))?(?: on cluster (\S+))?\s*$", re.MULTILINE)
# What sbatch says, and the setting behind it.
_CAUSES = (
    ("invalid partition", "partition"),
    ("not permitted to use this partition", "partition or account"),
    ("partition configuration", "nodes, time or partition"),
    ("invalid account", "account or partition"),
    ("accounting/qos policy", "nodes, time or account: it is more than your account or QOS may use"),
    ("time limit", "time"),
    ("qos", "qos"),
    ("memory", "mem, mem_per_cpu or mem_per_gpu"),
    ("cpu count per node", "cpus_per_task or ntasks_per_node"),
    ("more processors requested", "nodes, ntasks_per_node or cpus_per_task"),
    ("node count", "nodes"),
    ("node name", "nodelist or exclude"),
    ("generic resource", "gpus_per_node, gpu_type, gres or gpu_request"),
    ("trackable resource", "gpus_per_node, gpu_type, gres or gpu_request"),
    ("node configuration is not available", "nodes, cpus_per_task, gpus_per_node, mem or partition"),
    ("feature", "constraint"),
    ("license", "licenses"),
    ("dependency", "dependency"),
    ("reservation", "reservation"),
    ("unrecognized option", "sbatch_args, or an option that this version of Slurm has"),
)
_BAD_VALUE = re.compile(r"Invalid --([a-z-]+) specification")
_DOWN = re.compile(r"unable to contact|connection refused|connect failure|timed out|unable to accept", re.IGNORECASE)


@dataclass(frozen=True)
class Partition:
    """What the largest node of a partition has; `seconds` is the longest time limit, None if there is none;
    `gpu_types` are those of all its nodes, where the site names them."""

    name: str
    default: bool
    up: bool
    nodes: int
    cpus_per_node: int
    gpus_per_node: int
    memory_mb: int
    seconds: int | None
    gpu_types: tuple[str, ...] = ()


def require(program: str) -> None:
    """Raise PlanError if Slurm's `program` isn't here."""
    if shutil.which(program) is None:
        raise PlanError(
            f"{program} is not on PATH: Slurm isn't installed here. Submit from a login node of the cluster, or use "
            "`phalanx run` for this machine; --preview prints the script anywhere"
        )


def answers() -> bool:
    """Whether a Slurm cluster answers from here, within seconds."""
    try:
        return run(["sinfo", "-h", "-o", "%P"], timeout=5).returncode == 0
    except SchedulerError:
        return False


def submit(words: Sequence[str], environment: Mapping[str, str]) -> str:
    """Hand a script to sbatch; returns the job's id. Raises SchedulerError with sbatch's words.

    `environment` travels with the job as it is.
    """
    return submit_to(words, environment)[0]


def submit_to(words: Sequence[str], environment: Mapping[str, str]) -> tuple[str, str | None]:
    """The same, with the cluster's name where sbatch tells it."""
    done = run(["sbatch", "--parsable", *words], environment)
    found = _JOB_ID.findall(done.stdout)
    if done.returncode == 0 and found:
        return found[-1][0], found[-1][1] or found[-1][2] or None
    if done.returncode == 0:
        raise SchedulerError(f"sbatch named no job id: it said {(done.stdout + done.stderr).strip()!r}")
    raise SchedulerError(_refusal(done.stderr.strip() or done.stdout.strip()))


def _refusal(said: str) -> str:
    value = _BAD_VALUE.search(said)
    settings = [value[1].replace("-", "_")] if value else []
    settings += [setting for words, setting in _CAUSES if words in said.lower()]
    if _DOWN.search(said):
        hint = (
            "; Slurm's controller is down or busy. The job may be in the queue all the same: look with squeue --me "
            "before submitting again"
        )
    else:
        hint = f"; to change: {settings[0]}" if settings else ""
    return f"sbatch refused the job: {said}{hint}"


def no_answer(program: str, said: str) -> SchedulerError:
    """The error for a program that failed and `said` why, with what a broken connection means."""
    hint = "; Slurm's controller is down or busy: try again later" if _DOWN.search(said) else ""
    return SchedulerError(f"{program}: {said.strip() or 'failed without a word'}{hint}")


def show_job(job_id: str) -> dict[str, str] | None:
    """The fields of `scontrol show job`; None if Slurm doesn't know the job (any more). Of an array, those of one."""
    done = run(["scontrol", "show", "job", "-o", job_id])
    if done.returncode != 0:
        if "Invalid job id" in done.stderr:
            return None
        raise no_answer(f"scontrol show job {job_id}", done.stderr)
    lines = [line for line in done.stdout.splitlines() if line.startswith("JobId=")]
    return job_fields(lines[0]) if lines else None


def job_fields(line: str) -> dict[str, str]:
    """`Key=value Key=value` with values that may hold spaces: a key begins with a capital after a space."""
    parts = re.split(r"(?:^| +)([A-Z][A-Za-z/:]*)=", line.strip())
    return {key: value.strip() for key, value in zip(parts[1::2], parts[2::2], strict=True)}


def partitions() -> list[Partition]:
    """All partitions, each by its largest node."""
    done = run(["sinfo", "-h", "-e", "-o", "%P|%a|%D|%c|%m|%l|%G"])
    if done.returncode != 0:
        raise no_answer("sinfo", done.stderr)
    found: dict[str, list[list[str]]] = {}
    for line in done.stdout.splitlines():
        name, *rest = line.strip().split("|")
        if len(rest) == 6:
            found.setdefault(name, []).append(rest)
    return [_partition(name, groups) for name, groups in found.items()]


def _partition(name: str, groups: list[list[str]]) -> Partition:
    """sinfo has a line for each group of equal nodes."""
    gpus = [_gpus(group[5]) for group in groups]
    return Partition(
        name=name.rstrip("*"),
        default=name.endswith("*"),
        up=groups[0][0] == "up",
        nodes=sum(_number(group[1]) for group in groups),
        cpus_per_node=max(_number(group[2]) for group in groups),
        gpus_per_node=max(sum(count for _, count in kinds) for kinds in gpus),
        memory_mb=max(_number(group[3]) for group in groups),
        seconds=_limit(groups[0][4]),
        gpu_types=tuple(dict.fromkeys(kind for kinds in gpus for kind, _ in kinds if kind)),
    )


def _limit(text: str) -> int | None:
    try:
        return seconds(text)
    except ValueError:  # "infinite", "n/a"
        return None


def _number(text: str) -> int:
    digits = re.match(r"\d+", text)
    return int(digits[0]) if digits else 0


def _gpus(gres: str) -> list[tuple[str, int]]:
    """Types and numbers: `gpu:a100:4(S:0-1),shard:8` has four of a100; one without a number is one."""
    found = re.finditer(r"(?:^|,)gpu(?::([^:,(]*[^:,(\d][^:,(]*))?(?::(\d+))?(?=$|[,(])", gres)
    return [(match[1] or "", int(match[2] or 1)) for match in found]


def cancel(ids: Sequence[str]) -> None:
    """End jobs; those that have ended already are no error. Raises SchedulerError with scancel's words."""
    done = run(["scancel", *ids])
    ended = re.compile(r"Invalid job id specified|already complet", re.IGNORECASE)
    refused = [line for line in done.stderr.splitlines() if line.strip() and not ended.search(line)]
    if done.returncode != 0 and refused:
        raise no_answer("scancel", "\n".join(refused))


def run(
    words: Iterable[str], environment: Mapping[str, str] | None = None, timeout: float = TIMEOUT
) -> subprocess.CompletedProcess[str]:
    """Call one of Slurm's programs; `environment` None: ours, less what would change its answer.

    Raises PlanError if it isn't here, SchedulerError if it gives no answer in `timeout` seconds.
    """
    words = list(words)
    require(words[0])
    if environment is None:
        plain = {name: text for name, text in os.environ.items() if not _FORMATS.match(name)}
        environment = {**plain, "LC_ALL": "C", "SLURM_TIME_FORMAT": "standard"}
    try:
        return subprocess.run(
            words,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        also = "; the job may be in the queue all the same: look with squeue --me" if words[0] == "sbatch" else ""
        raise SchedulerError(
            f"{words[0]} gave no answer in {timeout:g} s: Slurm's controller is down or busy{also}"
        ) from None
    except OSError as error:
        raise SchedulerError(f"{words[0]} can't be run: {error.strerror}") from None
