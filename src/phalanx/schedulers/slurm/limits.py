"""What a partition can't give is said before a job waits for it."""

from __future__ import annotations

from ...batch.directives import tasks_per_node
from ...config.walltime import seconds
from ...errors import PlanError
from ...planning.plan import LaunchPlan
from .client import Partition

_OVERRIDE = "--force submits all the same"


def check_limits(plan: LaunchPlan, partitions: list[Partition]) -> None:
    """Raise PlanError if no node of the partition could ever run the job. `partitions` are those that sinfo names."""
    asked = plan.config.partition
    names = asked.split(",") if asked else [known.name for known in partitions if known.default]
    known = [partition for partition in partitions if partition.name in names]
    missing = [name for name in names if name not in {partition.name for partition in known}]
    if missing and partitions:
        listed = ", ".join(partition.name for partition in partitions)
        raise PlanError(f"partition={missing[0]!r}: Slurm has {listed}; change partition, or {_OVERRIDE}")
    if not known:
        return  # no default partition, or nothing that sinfo would show: sbatch knows more
    problems = [_problem(plan, partition) for partition in known]
    if all(problems):
        raise PlanError(f"{problems[0]}; {_OVERRIDE}")


def _problem(plan: LaunchPlan, partition: Partition) -> str | None:
    """The first thing that is more than `partition` has."""
    config = plan.config
    where = f"partition {partition.name}"
    limit = seconds(config.time) if config.time else None
    cpus = _cpus(plan)
    memory = megabytes(config.mem)
    if not partition.up:
        return f"{where} is down: choose another partition"
    if plan.nodes > partition.nodes:
        return f"nodes={plan.nodes}, but {where} has {partition.nodes}"
    if cpus and cpus > partition.cpus_per_node:
        return f"{cpus} CPUs per node (cpus_per_task), but a node of {where} has {partition.cpus_per_node}"
    if plan.gpus_per_node and plan.gpus_per_node > partition.gpus_per_node:
        return f"gpus_per_node={plan.gpus_per_node}, but a node of {where} has {partition.gpus_per_node}"
    if memory and memory > partition.memory_mb:
        return f"mem={config.mem}, but a node of {where} has {partition.memory_mb} MB"
    if config.time and partition.seconds is not None and (limit is None or limit > partition.seconds):
        return f"time={config.time}, but {where} allows at most {partition.seconds // 60} minutes"
    return None


def _cpus(plan: LaunchPlan) -> int | None:
    if plan.cpus_per_node is None:
        return None
    tasks = tasks_per_node(plan)
    return max(1, plan.cpus_per_node // tasks) * tasks


def megabytes(text: str | None) -> int | None:
    """`64G` in MB, as Slurm counts them; None for what says nothing (0 is all memory)."""
    units = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}
    if not text:
        return None
    number, unit = (text[:-1], text[-1].upper()) if text[-1].isalpha() else (text, "M")
    return int(float(number) * units[unit]) or None if number.isdigit() and unit in units else None
