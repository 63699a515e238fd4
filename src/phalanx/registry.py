"""The tables of what can be chosen by name; each entry is imported when it is first used.

To add a strategy, a launcher or a tracker: write its one file and add its one line here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from .errors import ConfigError, MissingExtraError, did_you_mean


@dataclass(frozen=True)
class Entry:
    """`target` is `module:Class`; `summary` is the line that help and docs show."""

    target: str
    summary: str


STRATEGIES: Mapping[str, Entry] = {
    "single": Entry("phalanx.strategies.single:Single", "one process, no communication"),
    "ddp": Entry("phalanx.strategies.ddp:Ddp", "a replica per rank, gradients averaged (PyTorch DDP)"),
    "fsdp": Entry("phalanx.strategies.fsdp:Fsdp", "parameters sharded over ranks (PyTorch FSDP2)"),
    "deepspeed": Entry("phalanx.strategies.deepspeed:Deepspeed", "DeepSpeed's engine, ZeRO stages 0 to 3"),
    "horovod": Entry("phalanx.strategies.horovod:Horovod", "a replica per rank, gradients averaged by Horovod"),
}

LAUNCHERS: Mapping[str, Entry] = {
    "python": Entry("phalanx.launchers.python:Python", "one process, started directly"),
    "torchrun": Entry("phalanx.launchers.torchrun:Torchrun", "PyTorch's agent, one per node"),
    "srun": Entry("phalanx.launchers.srun:Srun", "one Slurm task per rank"),
    "mpirun": Entry("phalanx.launchers.mpirun:Mpirun", "one MPI process per rank"),
    "horovodrun": Entry("phalanx.launchers.horovodrun:Horovodrun", "Horovod's own launcher, one node"),
    "deepspeed": Entry("phalanx.launchers.deepspeed:Deepspeed", "DeepSpeed's own launcher"),
    "ray": Entry("phalanx.launchers.ray:Ray", "Ray Train inside the allocation"),
}

TRACKERS: Mapping[str, Entry] = {
    "csv": Entry("phalanx.trackers.csv:Csv", "metrics.csv in the run directory"),
}


def check_name(kind: str, table: Mapping[str, Entry], name: str) -> str:
    """`name` if `table` has it; else an error with the list and the nearest one."""
    if name not in table:
        raise ConfigError(f"unknown {kind} {name!r}: expected one of {', '.join(table)}.{did_you_mean(name, table)}")
    return name


def load(kind: str, table: Mapping[str, Entry], name: str) -> Any:
    """The class behind `name`, imported now."""
    module, _, attribute = table[check_name(kind, table, name)].target.partition(":")
    return getattr(import_module(module), attribute)


def require(module: str, extra: str) -> ModuleType:
    """Import an optional package, or say which extra brings it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise
        raise MissingExtraError(
            f"{module!r} is not installed; this needs the extra {extra!r}: pip install 'phalanx[{extra}]'"
        ) from None
