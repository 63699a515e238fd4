"""What a node gives to a launch: ranks, CPUs and GPUs, from what was asked for and what is there."""

from __future__ import annotations

import re

from ..config import JobConfig
from ..errors import PlanError
from .facts import Facts

_GRES_GPU = re.compile(r"(?:gres/)?gpu(?::(?P<type>[^:,=()]+))?(?:[:=](?P<count>\d+))?(?:\(.*\))?")


class Resources:
    """`ranks` per node and their share; `uneven` is the total where nodes hold different numbers, else None.

    On other machines, CPUs and GPUs are known only as far as they are asked for: None where nothing says.
    """

    def __init__(self, config: JobConfig, facts: Facts, local: bool) -> None:
        self.config = config
        self.facts = facts
        self.local = local
        self.notes: list[str] = []
        self.uneven: int | None = None
        self.tasks = self._tasks()
        self.asked_gpus = self._asked_gpus()
        self.cpus = self._cpus()
        self.ranks = self._ranks()
        self.world_size = self.uneven or config.nodes * self.ranks

    @property
    def cpus_per_rank(self) -> int | None:
        if self.uneven and self.config.cpus_per_task:
            return self.config.cpus_per_task
        return max(1, self.cpus // self.ranks) if self.cpus is not None else None

    @property
    def no_gpus(self) -> str:
        """Why there are none."""
        if self.config.gpus_per_node == 0:
            return "gpus_per_node is 0"
        return f"no GPU is visible on {self.facts.hostname}" if self.local else "none was asked for"

    def _tasks(self) -> int:
        """Slurm tasks per node: ntasks over the nodes, else ntasks_per_node."""
        total, each, nodes = self.config.ntasks, self.config.ntasks_per_node, self.config.nodes
        if total is None:
            return each
        if total < nodes:
            raise PlanError(f"ntasks={total} on nodes={nodes}: expected a task for each node; use nodes={total}")
        if each > 1 and total > each * nodes:
            raise PlanError(
                f"ntasks={total} but ntasks_per_node={each} on nodes={nodes} is at most {each * nodes}: set one of them"
            )
        asked = self.config.nproc_per_node
        if isinstance(asked, int) and total not in (nodes, nodes * asked):
            raise PlanError(f"ntasks={total} but {asked} ranks on each of {nodes} nodes: unset one of them")
        if total % nodes and asked is None:
            self.uneven = total
        return -(-total // nodes)

    def _asked_gpus(self) -> int | None:
        """GPUs per node that the settings ask for, in whichever of Slurm's ways."""
        config = self.config
        others = {
            "gres": config.gres and gres_gpus(config.gres),
            "gpus": config.sbatch.gpus,
            "gpus_per_task": config.gpus_per_task,
        }
        if config.gpus_per_node == 0 and any(others.values()):
            name = next(name for name, asked in others.items() if asked)
            raise PlanError(f"gpus_per_node=0 but {name} asks for GPUs: unset one of them")
        if config.gpus_per_node is not None:
            return config.gpus_per_node
        if config.gpus_per_task is not None:
            return config.gpus_per_task * self.tasks
        if config.sbatch.gpus is not None:  # of all nodes together
            return _count(config.sbatch.gpus) // config.nodes or 1
        return gres_gpus(config.gres) if config.gres is not None else None

    def check_requests(self) -> None:
        """Refuse requests of a job that say different numbers: Slurm would get one of them, and the
        plan be made by another."""
        config, nodes = self.config, self.config.nodes
        asked = {
            "gpus_per_node": None if config.gpus_per_node is None else config.gpus_per_node * nodes,
            "gres": gres_gpus(config.gres) * nodes if config.gres else None,
            "gpus": _count(config.sbatch.gpus) if config.sbatch.gpus is not None else None,
            "gpus_per_task": config.gpus_per_task and config.gpus_per_task * self.tasks * nodes,
        }
        # With no number of tasks, a node has a rank for each of its GPUs.
        a_gpu_each = config.ntasks is None and self.tasks == 1 and config.gpus_per_task == 1
        by_gpus = a_gpu_each and bool(config.gpus_per_node)
        if self.uneven or config.nproc_per_node is not None or by_gpus:
            del asked["gpus_per_task"]  # tasks are counted otherwise
        totals = {name: count for name, count in asked.items() if count}
        if len(set(totals.values())) > 1:
            said = ", ".join(f"{name} asks for {count}" for name, count in totals.items())
            raise PlanError(f"on nodes={nodes}, {said} GPUs in all: keep one of them (null unsets a setting)")

    @property
    def gpus(self) -> int | None:
        """GPUs that a node's ranks may use; None when only the node knows."""
        if self.config.device == "cpu":
            return 0
        if self.asked_gpus is not None:
            return self.asked_gpus
        return self.facts.gpus if self.local else None

    def _cpus(self) -> int | None:
        config = self.config
        if self.local:
            return self.facts.cpus
        if config.cpus_per_task is not None:
            return self.tasks * config.cpus_per_task
        if config.cpus_per_gpu is not None and self.gpus:
            return config.cpus_per_gpu * self.gpus
        self.notes.append("CPUs per node are known on the nodes only; set cpus_per_task to plan threads")
        return None

    def _ranks(self) -> int:
        asked = self.config.nproc_per_node
        if isinstance(asked, int):
            return asked
        if asked is not None:
            return self._counted(asked)
        if self.tasks > 1:
            setting = "ntasks" if self.config.ntasks else "ntasks_per_node"
            self.notes.append(f"{'up to ' if self.uneven else ''}{self.tasks} ranks per node: {setting}")
            return self.tasks
        if self.asked_gpus:
            self.notes.append(f"{self.asked_gpus} ranks per node: one per GPU of gpus_per_node")
            return self.asked_gpus
        return 1

    def _counted(self, kind: str) -> int:
        """Ranks for `auto`, `gpu` or `cpu`, from what a node has."""
        if kind == "gpu" and self.gpus == 0:
            reason = "device is cpu" if self.config.device == "cpu" else self.no_gpus
            raise PlanError(f"nproc_per_node gpu: {reason}; use --nproc cpu or a number")
        unknown = "cpus_per_task" if kind == "cpu" or self.gpus == 0 else "gpus_per_node"
        count = self.cpus if unknown == "cpus_per_task" else self.gpus
        if count is None:
            raise PlanError(f"nproc_per_node {kind} can't be counted for other machines: set {unknown}, or a number")
        what = "GPU" if unknown == "gpus_per_node" else "CPU"
        self.notes.append(f"{count} ranks per node: nproc_per_node {kind}, one per {what}")
        return count

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


def _count(gpus: str) -> int:
    """GPUs of `--gpus`, such as `4` or `a100:2,h100:2`."""
    return gres_gpus(",".join(f"gpu:{kind}" for kind in gpus.split(",")))


def gres_gpus(gres: str) -> int:
    """GPUs per node in a `gres` text such as `gpu:a100:4,nvme:1`; a bare `gpu` is one, as for Slurm."""
    found = [match for part in gres.split(",") if (match := _GRES_GPU.fullmatch(part.strip()))]
    return sum(int(match["count"] or match["type"] or 1) if _counts(match) else 1 for match in found)


def _counts(match: re.Match[str]) -> bool:
    """`gpu:2` has its number where `gpu:a100:2` has the type."""
    return match["count"] is not None or (match["type"] or "").isdigit()
