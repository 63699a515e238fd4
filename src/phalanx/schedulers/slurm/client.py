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
# Users' variables that change what the programs print.
_FORMATS = re.compile(r"(SQUEUE|SINFO|SACCT|SCONTROL|SLURM_TIME_FORMAT|SLURM_BITSTR_LEN)")
_JOB_ID = re.compile(r"^\s*(?:Submitted batch job )?(\d+)(?:;\S+)?(?: on cluster \S+)?\s*$", re.MULTILINE)
# What sbatch says, and the setting behind it.
_CAUSES = (
    ("invalid partition", "partition"),
    ("invalid account", "account"),
    ("time limit", "time"),
    ("qos", "qos"),
    ("node count", "nodes"),
    ("memory", "mem, mem_per_cpu or mem_per_gpu"),
    ("generic resource", "gpus_per_node, gres or gpu_request"),
    ("node configuration is not available", "nodes, cpus_per_task, gpus_per_node, mem or partition"),
    ("license", "licenses"),
    ("dependency", "dependency"),
    ("reservation", "reservation"),
)


@dataclass(frozen=True)
class Partition:
    """What the largest node of a partition has; `seconds` is the longest time limit, None if there is none."""

    name: str
    default: bool
    up: bool
    nodes: int
    cpus_per_node: int
    gpus_per_node: int
    memory_mb: int
    seconds: int | None


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
    """Hand a script to sbatch; returns the job's id. Raises SchedulerError with sbatch's words."""
    done = run(["sbatch", "--parsable", *words], environment)
    found = _JOB_ID.findall(done.stdout)
    if done.returncode == 0 and found:
        return str(found[-1])
    if done.returncode == 0:
        raise SchedulerError(f"sbatch named no job id: it said {(done.stdout + done.stderr).strip()!r}")
    raise SchedulerError(_refusal(done.stderr.strip() or done.stdout.strip()))


def _refusal(said: str) -> str:
    settings = [setting for words, setting in _CAUSES if words in said.lower()]
    hint = f"; to change: {settings[0]}" if settings else ""
    return f"sbatch refused the job: {said}{hint}"


def show_job(job_id: str) -> dict[str, str] | None:
    """The fields of `scontrol show job`; None if Slurm doesn't know the job (any more)."""
    done = run(["scontrol", "show", "job", "-o", job_id])
    if done.returncode != 0:
        if "Invalid job id" in done.stderr:
            return None
        raise SchedulerError(f"scontrol show job {job_id}: {done.stderr.strip()}")
    return job_fields(done.stdout.splitlines()[0])


def job_fields(line: str) -> dict[str, str]:
    """`Key=value Key=value` with values that may hold spaces: a key begins with a capital after a space."""
    parts = re.split(r"(?:^| +)([A-Z][A-Za-z/:]*)=", line.strip())
    return {key: value.strip() for key, value in zip(parts[1::2], parts[2::2], strict=True)}


def partitions() -> list[Partition]:
    """All partitions, each by its largest node."""
    done = run(["sinfo", "-h", "-N", "-o", "%P|%a|%c|%m|%l|%G"])
    if done.returncode != 0:
        raise SchedulerError(f"sinfo: {done.stderr.strip()}")
    found: dict[str, list[list[str]]] = {}
    for line in done.stdout.splitlines():
        name, *rest = line.strip().split("|")
        found.setdefault(name, []).append(rest)
    return [_partition(name, nodes) for name, nodes in found.items()]


def _partition(name: str, nodes: list[list[str]]) -> Partition:
    return Partition(
        name=name.rstrip("*"),
        default=name.endswith("*"),
        up=nodes[0][0] == "up",
        nodes=len(nodes),
        cpus_per_node=max(_number(node[1]) for node in nodes),
        gpus_per_node=max(_gpus(node[4]) for node in nodes),
        memory_mb=max(_number(node[2]) for node in nodes),
        seconds=_limit(nodes[0][3]),
    )


def _limit(text: str) -> int | None:
    try:
        return seconds(text)
    except ValueError:  # "infinite", "n/a"
        return None


def _number(text: str) -> int:
    digits = re.match(r"\d+", text)
    return int(digits[0]) if digits else 0


def _gpus(gres: str) -> int:
    """`gpu:a100:4(S:0-1),shard:8` has four; a name without a number is one."""
    total = 0
    for match in re.finditer(r"(?:^|,)gpu(?::[^:,(]*[^:,(\d][^:,(]*)?(?::(\d+))?", gres):
        total += int(match[1] or 1)
    return total


def cancel(ids: Sequence[str]) -> None:
    """End jobs; those that have ended already are no error."""
    done = run(["scancel", *ids])
    if done.returncode != 0 and "Invalid job id" not in done.stderr:
        raise SchedulerError(f"scancel: {done.stderr.strip()}")


def run(
    words: Iterable[str], environment: Mapping[str, str] | None = None, timeout: float = TIMEOUT
) -> subprocess.CompletedProcess[str]:
    words = list(words)
    require(words[0])
    environ = {name: text for name, text in (environment or os.environ).items() if not _FORMATS.match(name)}
    try:
        return subprocess.run(
            words,
            env={**environ, "LC_ALL": "C"} if environment is None else environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SchedulerError(f"{words[0]} gave no answer in {timeout:g} s: Slurm's controller may be down") from None
    except OSError as error:
        raise SchedulerError(f"{words[0]} can't be run: {error.strerror}") from None
