"""What will be started, as a value that can be printed, saved and turned into a command or a batch script."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .. import secret
from ..config import JobConfig, hidden
from ..shell import Sh, Word, render, word

RUN_DIR_UNKNOWN = "<run directory>"


@dataclass(frozen=True)
class Allocation:
    """A Slurm job that exists already: its id, its hosts in order, and whether we run in it or beside it."""

    job_id: str
    hosts: tuple[str, ...]
    inside: bool


@dataclass(frozen=True)
class LaunchPlan:
    """One launch. Nodes hold `nproc_per_node` ranks each, numbered node by node from 0; with `ntasks` they hold
    at most so many, `ntasks` in all, and Slurm places them.

    `script` is None where `args` are a whole command that is no Python script; or, with `late_script`, begin with a
    script whose path only the job's shell knows. None elsewhere means unknown until
    the job runs: CPUs and threads when `cpus_per_task` isn't set for other machines, `device` and `backend` when
    nothing says whether those have GPUs. `num_workers` is None when each loader keeps its own. A `local` plan is
    for this machine, one with an `allocation` for that; the others are for a job to come. `versions` are those
    of packages that `python` can import, as far as known. `runtime` is venv, apptainer or singularity; with a
    container `python` is the image's and `host_python` one outside that has Phalanx. `before` are lines of shell that
    come before `command`, on the first node.
    """

    name: str
    config: JobConfig
    script: str | None
    args: tuple[Word, ...]
    strategy: str
    launcher: str
    nodes: int
    nproc_per_node: int
    ntasks: int | None
    local: bool
    host: str | None
    cwd: str
    device: str | None
    backend: str | None
    gpus_per_node: int | None
    cpus_per_node: int | None
    cpus_per_rank: int | None
    omp_num_threads: str | None
    num_workers: int | None
    python: str
    host_python: str
    runtime: str
    mpi_flavor: str
    versions: Mapping[str, str]
    environment: Mapping[str, Word]
    allocation: Allocation | None = None
    notes: tuple[str, ...] = ()
    late_script: bool = False
    command: tuple[Word, ...] = ()
    before: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        return self.ntasks or self.nodes * self.nproc_per_node

    @property
    def secrets(self) -> dict[str, Word]:
        """The variables that a launch must find in its environment, a job in that of its submission."""
        job = not self.local and self.allocation is None  # proxies are those of jobs
        proxies = hidden.proxies(self.config) if job else {}
        return {**{name: word(text) for name, text in proxies.items()}, **secret.only(self.environment)}

    def in_run_dir(self, run_dir: str) -> LaunchPlan:
        """The same plan once its run directory exists."""
        return replace(self, environment={**self.environment, "PHALANX_RUN_DIR": run_dir})

    def as_dict(self) -> dict[str, Any]:
        """The plan for programs; `nodes` has an entry a node, never one a rank."""
        hosts = self.allocation.hosts if self.allocation else (self.host,) * self.nodes
        first = range(0, self.nodes * self.nproc_per_node, self.nproc_per_node)
        nodes = [
            {"node_rank": node, "host": hosts[node], "first_rank": rank, "ranks": self.nproc_per_node}
            for node, rank in enumerate(first)
        ]
        return {
            "name": self.name,
            "script": self.script,
            "args": [_plain(word) for word in self.args],
            "strategy": self.strategy,
            "launcher": self.launcher,
            "device": self.device,
            "backend": self.backend,
            "world_size": self.world_size,
            "nproc_per_node": self.nproc_per_node,
            "gpus_per_node": self.gpus_per_node,
            "cpus_per_node": self.cpus_per_node,
            "cpus_per_rank": self.cpus_per_rank,
            "omp_num_threads": self.omp_num_threads,
            "num_workers": self.num_workers,
            "python": self.python,
            "runtime": self.runtime,
            "versions": dict(self.versions),
            "environment": {name: secret.shown(name, _plain(value)) for name, value in self.environment.items()},
            "secrets": list(self.secrets),
            "command": [_plain(word) for word in self.command],
            "command_line": render(self.command),
            "notes": list(self.notes),
            "nodes": nodes if self.ntasks is None else [],
        }

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=1)


def _plain(word: Word) -> str | dict[str, str]:
    return {"shell": word.text} if isinstance(word, Sh) else word
