"""What will be started, decided before anything is: a pure function of settings and facts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from . import cells
from .config import JobConfig
from .errors import PlanError
from .facts import Facts
from .registry import LAUNCHERS, load
from .shell import Sh, Word, render

RUN_DIR_UNKNOWN = "<run directory>"
LOCAL_LAUNCHERS = ("python", "torchrun")


@dataclass(frozen=True)
class LaunchPlan:
    """One launch. Nodes hold `nproc_per_node` ranks each, numbered node by node from 0.

    None means unknown until the job runs: CPUs and threads when `cpus_per_task` isn't set for other
    machines, `device` and `backend` when nothing says whether those have GPUs. `num_workers` is None
    when each loader keeps its own. A `local` plan is for this machine. `versions` are those of packages
    that `python` can import, as far as known.
    """

    name: str
    script: str
    args: tuple[str, ...]
    strategy: str
    launcher: str
    nodes: int
    nproc_per_node: int
    local: bool
    host: str | None
    device: str | None
    backend: str | None
    cpus_per_node: int | None
    cpus_per_rank: int | None
    omp_num_threads: str | None
    num_workers: int | None
    python: str
    versions: Mapping[str, str]
    master_addr: str | None
    master_port: int | None
    environment: Mapping[str, str]
    notes: tuple[str, ...] = ()
    command: tuple[Word, ...] = ()

    @property
    def world_size(self) -> int:
        return self.nodes * self.nproc_per_node

    def in_run_dir(self, run_dir: str) -> LaunchPlan:
        """The same plan once its run directory exists."""
        return replace(self, environment={**self.environment, "PHALANX_RUN_DIR": run_dir})

    def as_dict(self) -> dict[str, Any]:
        """The plan for programs; `nodes` has an entry a node, never one a rank."""
        first = range(0, self.world_size, self.nproc_per_node)
        nodes = [
            {"node_rank": node, "host": self.host, "first_rank": rank, "ranks": self.nproc_per_node}
            for node, rank in enumerate(first)
        ]
        return {
            "name": self.name,
            "script": self.script,
            "args": list(self.args),
            "strategy": self.strategy,
            "launcher": self.launcher,
            "device": self.device,
            "backend": self.backend,
            "world_size": self.world_size,
            "nproc_per_node": self.nproc_per_node,
            "cpus_per_node": self.cpus_per_node,
            "cpus_per_rank": self.cpus_per_rank,
            "omp_num_threads": self.omp_num_threads,
            "num_workers": self.num_workers,
            "python": self.python,
            "versions": dict(self.versions),
            "environment": dict(self.environment),
            "command": [{"shell": word.text} if isinstance(word, Sh) else word for word in self.command],
            "command_line": render(self.command),
            "notes": list(self.notes),
            "nodes": nodes,
        }

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=1)


def run_name(config: JobConfig, script: str) -> str:
    """The folder, under the run root, of this script's runs."""
    return config.name or PurePath(script).stem or "run"


def make_plan(config: JobConfig, facts: Facts, script: str, args: tuple[str, ...]) -> LaunchPlan:
    """Decide everything that can be known before a launch.

    Raises PlanError when what is asked for can't be started: a cell that doesn't exist, more ranks than
    GPUs, a device or backend that isn't there.
    """
    planner = _Planner(config, facts)
    launcher = planner.launcher
    strategy = planner.strategy
    cells.check(launcher, strategy, config.nodes, planner.world_size)
    device = planner.device()
    backend = planner.backend(device)
    planner.check_gpus(device)
    cpus = planner.cpus
    per_rank = max(1, cpus // planner.ranks) if cpus is not None else None
    threads = _threads(config, facts, per_rank)
    workers = max(1, per_rank - 1) if per_rank is not None and config.num_workers == "auto" else None
    if isinstance(config.num_workers, int):
        workers = config.num_workers
    plan = LaunchPlan(
        name=run_name(config, script),
        script=script,
        args=args,
        strategy=strategy,
        launcher=launcher,
        nodes=config.nodes,
        nproc_per_node=planner.ranks,
        local=planner.local,
        host=facts.hostname if planner.local else None,
        device=device,
        backend=backend,
        cpus_per_node=cpus,
        cpus_per_rank=per_rank,
        omp_num_threads=threads,
        num_workers=workers,
        python=str(PurePath(config.venv, "bin", "python")) if config.venv else facts.python,
        versions={} if config.venv else facts.versions,
        master_addr=config.master_addr,
        master_port=config.master_port,
        environment=_environment(config, device, per_rank, threads, workers),
        notes=tuple(planner.notes),
    )
    starter = load("launcher", LAUNCHERS, launcher)()
    plan = replace(plan, environment={**starter.environment(plan), **plan.environment})
    return replace(plan, command=tuple(starter.command(plan)), notes=(*plan.notes, *starter.notes(plan)))


class _Planner:
    """The choices one by one, in the order in which they depend on each other; `notes` says why."""

    def __init__(self, config: JobConfig, facts: Facts) -> None:
        self.config = config
        self.facts = facts
        self.notes: list[str] = []
        self.local = config.nodes == 1 and config.launcher in ("auto", *LOCAL_LAUNCHERS)
        self.cpus = self._cpus()
        self.ranks = self._ranks()
        self.world_size = config.nodes * self.ranks
        self.strategy = self._strategy()
        self.launcher = self._launcher()

    def note(self, text: str) -> None:
        self.notes.append(text)

    @property
    def gpus(self) -> int | None:
        """GPUs a node may use; None when only the node knows."""
        if self.config.device == "cpu":
            return 0
        if self.config.gpus_per_node is not None:
            return self.config.gpus_per_node
        return self.facts.gpus if self.local else None

    def _cpus(self) -> int | None:
        if self.local:
            return self.facts.cpus
        if self.config.cpus_per_task is None:
            self.note("CPUs per node are known on the nodes only; set cpus_per_task to plan threads")
            return None
        return self.config.ntasks_per_node * self.config.cpus_per_task

    def _ranks(self) -> int:
        asked = self.config.nproc_per_node
        if isinstance(asked, int):
            return asked
        if asked is not None:
            return self._counted(asked)
        if self.config.ntasks_per_node > 1:
            self.note(f"{self.config.ntasks_per_node} ranks per node: ntasks_per_node")
            return self.config.ntasks_per_node
        if self.config.gpus_per_node:
            self.note(f"{self.config.gpus_per_node} ranks per node: one per GPU of gpus_per_node")
            return self.config.gpus_per_node
        return 1

    def _counted(self, kind: str) -> int:
        """Ranks for `auto`, `gpu` or `cpu`, from what a node has."""
        if kind == "gpu" and self.gpus == 0:
            reason = "device is cpu" if self.config.device == "cpu" else self._no_gpus()
            raise PlanError(f"nproc_per_node gpu: {reason}; use --nproc cpu or a number")
        unknown = "cpus_per_task" if kind == "cpu" or self.gpus == 0 else "gpus_per_node"
        count = self.cpus if unknown == "cpus_per_task" else self.gpus
        if count is None:
            raise PlanError(f"nproc_per_node {kind} can't be counted for other machines: set {unknown}, or a number")
        what = "GPU" if unknown == "gpus_per_node" else "CPU"
        self.note(f"{count} ranks per node: nproc_per_node {kind}, one per {what}")
        return count

    def _strategy(self) -> str:
        if self.config.strategy != "auto":
            return self.config.strategy
        several = self.world_size > 1
        self.note("strategy ddp: more than one process" if several else "strategy single: one process")
        return "ddp" if several else "single"

    def _launcher(self) -> str:
        if self.config.launcher != "auto":
            return self.config.launcher
        several = self.world_size > 1
        self.note("launcher torchrun: more than one process" if several else "launcher python: one process")
        return "torchrun" if several else "python"

    def _no_gpus(self) -> str:
        if self.config.gpus_per_node == 0:
            return "gpus_per_node is 0"
        return f"no GPU is visible on {self.facts.hostname}"

    def device(self) -> str | None:
        """The device of the ranks; None when only the nodes know."""
        asked = self.config.device
        if asked == "mps" and self.world_size > 1:
            raise PlanError(f"device mps holds one process, and {self.world_size} were asked for: use --device cpu")
        if asked == "mps" and self.local and not self.facts.has_mps:
            raise PlanError(f"device mps: this is {self.facts.system} on {self.facts.machine}; use --device cpu")
        if asked == "cuda" and self.gpus == 0:
            raise PlanError(f"device cuda: {self._no_gpus()}; use --device cpu")
        return asked if asked != "auto" else self._best_device()

    def _best_device(self) -> str | None:
        if self.gpus is None:
            self.note("device: cuda where a node has GPUs, else cpu; set gpus_per_node to plan it")
            return None
        if self.gpus > 0:
            self.note(f"device cuda: {self.gpus} GPUs per node")
            return "cuda"
        mps = self.local and self.facts.has_mps and self.world_size == 1 and self.config.gpus_per_node != 0
        self.note("device mps: one process on a Mac" if mps else f"device cpu: {self._no_gpus()}")
        return "mps" if mps else "cpu"

    def backend(self, device: str | None) -> str | None:
        """torch.distributed's backend; None when the device isn't known yet."""
        asked = self.config.backend
        if asked is not None and asked.lower() == "nccl" and device in ("cpu", "mps"):
            reason = self._no_gpus() if self.config.device == "auto" else f"device is {device}"
            raise PlanError(f"backend nccl moves data between GPUs, and {reason}: use --backend gloo")
        if asked is not None or device is None:
            return asked
        return "nccl" if device == "cuda" else "gloo"

    def check_gpus(self, device: str | None) -> None:
        """Refuse more ranks, or more GPUs, than a node has GPUs."""
        if device != "cuda" or self.gpus is None:
            return
        if self.local and self.gpus > self.facts.gpus:
            raise PlanError(
                f"gpus_per_node is {self.gpus}, but {self.facts.hostname} has {self.facts.gpus} visible: "
                f"set gpus_per_node={self.facts.gpus} or --device cpu"
            )
        if self.ranks > self.gpus:
            raise PlanError(
                f"{self.ranks} ranks per node need a GPU each, and a node has {self.gpus}: "
                f"use --nproc {self.gpus} or --device cpu"
            )


def _threads(config: JobConfig, facts: Facts, per_rank: int | None) -> str | None:
    """OMP_NUM_THREADS of a rank: the user's own if set, else its share of the CPUs."""
    own = config.env.get("OMP_NUM_THREADS") or facts.omp_num_threads
    if own is not None:
        return own
    return str(per_rank) if per_rank is not None else None


def _environment(
    config: JobConfig, device: str | None, per_rank: int | None, threads: str | None, workers: int | None
) -> dict[str, str]:
    """What ranks get on top of the caller's environment."""
    # Without being told, an Accelerate script on the CPU takes each rank for a run of its own.
    accelerate = {"ACCELERATE_USE_CPU": "true"} if device == "cpu" else {}
    environment = {"PYTHONUNBUFFERED": "1", **accelerate, **config.env}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = threads
    if per_rank is not None:
        environment["PHALANX_CPUS_PER_RANK"] = str(per_rank)
    if config.num_workers == "auto" and workers is not None:
        environment["PHALANX_NUM_WORKERS_AUTO"] = str(workers)
    environment["PHALANX_RUN_DIR"] = RUN_DIR_UNKNOWN
    return environment
