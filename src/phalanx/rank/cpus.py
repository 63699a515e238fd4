"""How many CPUs a process may use: by its affinity, its cgroup's quota, and Slurm."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from math import ceil
from pathlib import Path

_CGROUPS, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def usable_cpus(cgroups: Path = _CGROUPS, own: Path = _OWN, environ: Mapping[str, str] = os.environ) -> int:
    """CPUs in this process's affinity mask, or fewer if a quota or Slurm says so."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limits = [*_quotas(cgroups, own), *_slurms(environ)]
    return max(1, min([count, *limits]))


def cpus_of_rank(ranks: int, is_task: bool, environ: Mapping[str, str] = os.environ) -> int:
    """A rank's share on a node that holds so many. Where each rank is a Slurm task (`is_task`), what this process may
    use can be its own already."""
    usable = usable_cpus(environ=environ)
    per_task, on_node = (_number(environ, name) for name in ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE"))
    if is_task and per_task:
        return min(usable, per_task)
    if is_task and on_node and usable * ranks <= on_node:
        return usable
    return max(1, usable // ranks)


def _slurms(environ: Mapping[str, str]) -> Iterator[int]:
    """What the job has on this node: without a plugin for it, Slurm binds nobody to that. A shell of salloc on a login
    node isn't on one."""
    on_node = _number(environ, "SLURM_CPUS_ON_NODE")
    if on_node and environ.get("SLURMD_NODENAME"):
        yield on_node


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() and int(text) else None


def _quotas(cgroups: Path, own: Path) -> Iterator[int]:
    """The quotas of this process's cgroup and those above it in whole CPUs, from cgroup v2 or v1."""
    for folder in _folders(cgroups, own):
        with suppress(OSError, ValueError):
            if (folder / "cpu.max").exists():
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota = (folder / "cpu.cfs_quota_us").read_text()
                period = (folder / "cpu.cfs_period_us").read_text()
            if int(quota) > 0:
                yield ceil(int(quota) / int(period))


def _folders(cgroups: Path, own: Path) -> Iterator[Path]:
    """A container sees its own cgroup as the root of all, whatever /proc says; so both are looked at."""
    yield from (cgroups, cgroups / "cpu")
    with suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            root = cgroups / "cpu" if controllers else cgroups
            place = Path(path.lstrip("/"))
            yield from (root / part for part in (place, *place.parents))
