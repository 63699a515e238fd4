"""An allocation that exists: found from the environment or by its id, and what it gives to a launch."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ... import processes
from ...config import Loaded
from ...config.loader import DEFAULT
from ...errors import PlanError
from ...planning.plan import Allocation
from ...planning.resources import gres_gpus
from ...rank.hostlist import expand_hostlist
from ...rank.ports import job_ports
from ...rank.topology import with_suffix
from . import client
from .states import JobState

_GPUS = re.compile(r"gres/gpu(?P<type>:[^=,]+)?=(?P<count>\d+)")


@dataclass(frozen=True)
class Share:
    """An allocation and its even share of each node."""

    allocation: Allocation
    cpus_per_node: int
    gpus_per_node: int | None
    tasks_per_node: int | None


def current(environ: Mapping[str, str]) -> str | None:
    """The id of the allocation around this process, if a launch from here goes over all of it."""
    job = environ.get("SLURM_JOB_ID")
    return job if job and one_of_several(environ) is None and shutil.which("srun") else None


def one_of_several(environ: Mapping[str, str]) -> str | None:
    """The variable that tells that a launcher started this process several times, if one did. Of a step with a
    terminal (`srun --pty bash`) only the first task lives."""
    if "SLURM_PTY_PORT" in environ and environ.get("SLURM_PROCID") == "0":
        return None
    by_torchrun = ("WORLD_SIZE",) if "TORCHELASTIC_RUN_ID" in environ and _below_torchrun() else ()
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "HOROVOD_SIZE", *by_torchrun):
        if (_number(environ.get(name)) or 1) > 1:
            return f"{name}={environ[name]}"
    return None


def _below_torchrun() -> bool:
    """Its variables alone may be what a shell was left with."""
    return any(re.search(r"\b(torchrun|torch\.distributed)\b", line) for line in processes.above())


def heterogeneous(job_id: str) -> str:
    """Why a launch can't go over such a job: nodes of one component hold other numbers of ranks than another's."""
    return (
        f"job {job_id} has several components (a heterogeneous job), and a launch gives all nodes equal shares: start "
        "the ranks yourself, srun --het-group=0,1 python -m phalanx.worker SCRIPT, which makes them one world; or "
        "allocate one component"
    )


def find(job_id: str, environ: Mapping[str, str]) -> Share:
    """Ask Slurm what the job holds. Raises PlanError if it isn't running."""
    said = client.show_job(job_id)
    if said is None:
        raise PlanError(f"--jobid {job_id}: Slurm knows no such job; expected a running one of yours (squeue --me)")
    state = said.get("JobState", "unknown")
    if state != "RUNNING":
        when = "has ended" if JobState(job_id, job_id, state).finished else "has no nodes yet"
        raise PlanError(f"job {job_id} is {state}: it {when}; expected a running one (squeue --me)")
    hosts = tuple(expand_hostlist(said["NodeList"]))
    if "HetJobOffset" in said:
        raise PlanError(heterogeneous(job_id))
    inside = environ.get("SLURM_JOB_ID") == job_id
    cpus = int(re.match(r"\d+", said.get("NumCPUs", "1"))[0])  # type: ignore[index]
    return Share(
        Allocation(job_id, hosts, inside),
        cpus_per_node=max(1, cpus // len(hosts)),
        gpus_per_node=_gpus(said, len(hosts)),
        tasks_per_node=_number(environ.get("SLURM_NTASKS_PER_NODE")) if inside else None,
    )


def _gpus(said: Mapping[str, str], nodes: int) -> int | None:
    """GPUs of a node: as Slurm counts them, if it was told to (AccountingStorageTRES), else as they were asked for."""
    counted = list(_GPUS.finditer(said.get("AllocTRES") or said.get("TRES", "")))
    if counted:  # of all types together where Slurm says it, else those of each type that is counted
        whole = [found for found in counted if not found["type"]] or counted
        return sum(int(found["count"]) for found in whole) // nodes
    shares = {"TresPerNode": nodes, "TresPerTask": _number(said.get("NumTasks")) or nodes, "TresPerJob": 1}
    asked = {name: gres_gpus(said.get(name, "").replace("gres:", "")) * times for name, times in shares.items()}
    return next((count // nodes for count in asked.values() if count), None)


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None


def fill(loaded: Loaded, share: Share) -> Loaded:
    """The settings with what the allocation gives, where the user says nothing.

    Raises PlanError if more nodes are asked for than it has.
    """
    config, hosts = loaded.config, share.allocation.hosts

    def unset(*names: str) -> bool:
        return all(loaded.origins.get(name, DEFAULT) == DEFAULT for name in names)

    update: dict[str, Any] = {}
    if unset("nodes"):
        update["nodes"] = len(hosts)
    elif config.nodes > len(hosts):
        raise PlanError(
            f"nodes={config.nodes} ({loaded.origins.get('nodes')}), but job {share.allocation.job_id} has "
            f"{len(hosts)}: {','.join(hosts[:4])}{',…' if len(hosts) > 4 else ''}; use at most so many"
        )
    if unset("ntasks", "ntasks_per_node") and share.tasks_per_node:
        update["ntasks_per_node"] = share.tasks_per_node
    if unset("gpus_per_node", "gpus_per_task", "gres") and share.gpus_per_node is not None:
        update["gpus_per_node"] = share.gpus_per_node
    if unset("cpus_per_task", "cpus_per_gpu"):
        tasks = update.get("ntasks_per_node") or (
            -(-config.ntasks // config.nodes) if config.ntasks else config.ntasks_per_node
        )
        update["cpus_per_task"] = max(1, share.cpus_per_node // tasks)
    return Loaded(config.model_copy(update=update), loaded.origins, loaded.overridden, loaded.notes)


def meeting_point(share: Share, suffix: str) -> dict[str, str]:
    """Where agents of one launch meet: the first node, and a port that other launches in the job don't take."""
    port = next(job_ports(int(share.allocation.job_id), os.getpid()))
    return {"PHALANX_RDZV_HOST": with_suffix(share.allocation.hosts[0], suffix), "PHALANX_RDZV_PORT": str(port)}
