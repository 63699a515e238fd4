"""Which accelerators a rank may use, read from the environment's text alone."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..errors import TopologyError
from .topology import Topology

_UUID_PREFIXES = ("GPU-", "MIG-")
_LEADING_DIGITS = re.compile(r"\+?([0-9]+)")


def visible_devices(environ: Mapping[str, str]) -> list[str] | None:
    """The devices that the environment leaves visible, by number or UUID; None if it has no say.

    CUDA_VISIBLE_DEVICES counts first, as ROCm reads it too. Without it, HIP_VISIBLE_DEVICES picks by
    number from what ROCR_VISIBLE_DEVICES leaves: ROCR `2,3` with HIP `1` is device 3.
    """
    if "CUDA_VISIBLE_DEVICES" in environ:
        return _entries(environ["CUDA_VISIBLE_DEVICES"])
    rocr, hip = environ.get("ROCR_VISIBLE_DEVICES"), environ.get("HIP_VISIBLE_DEVICES")
    if rocr is None or hip is None:
        alone = rocr if hip is None else hip
        return None if alone is None else _entries(alone)
    outer, picked = _entries(rocr), _entries(hip)
    return [outer[int(entry)] if entry.isdecimal() else entry for entry in _within(picked, outer)]


def device_index(topology: Topology, environ: Mapping[str, str], count: int | None = None) -> int:
    """This rank's device, as an index into the visible ones.

    One visible device is the rank's own (a launcher that binds devices shows each rank one), so its
    index is 0, as where Slurm shows each task several of its own; else it is the local rank. `count`
    is the real number of devices, where it is known.
    """
    visible = visible_devices(environ)
    seen = count if count is not None else None if visible is None else len(visible)
    if seen == 1 or (seen is not None and seen == _per_task(topology, environ)):
        return 0
    if seen is None or topology.local_rank < seen:
        return topology.local_rank
    raise TopologyError(
        f"local rank {topology.local_rank} (of {topology.local_world_size} on this node) has no device: "
        f"{seen} visible{_why(environ)}. Start at most {seen} ranks per node, or make more devices visible "
        "(gpus_per_node, CUDA_VISIBLE_DEVICES)"
    )


def _per_task(topology: Topology, environ: Mapping[str, str]) -> int | None:
    """How many devices Slurm binds to each task, where each task is a rank and that was asked for."""
    said = environ.get("SLURM_GPUS_PER_TASK") or environ.get("SLURM_TRES_PER_TASK", "").rpartition("gres/gpu")[2]
    found = re.search(r"(?:^|[:=])(\d+)$", said)  # `2` or `a100:2`, and of newer ones what is after the name
    return int(found[1]) if found and topology.source == "slurm" else None


def _entries(text: str) -> list[str]:
    """CUDA's own rules: the first invalid entry ends the list, and a repeated one empties it."""
    entries: list[str] = []
    prefix = next((known for known in _UUID_PREFIXES if text.strip().startswith(known)), None)
    for item in text.split(","):
        entry = _entry(item.strip(), prefix)
        if entry is None:
            break
        if entry in entries:
            return []
        entries.append(entry)
    return entries


def _entry(item: str, prefix: str | None) -> str | None:
    if prefix is not None:
        return item if item.startswith(prefix) else None
    number = _LEADING_DIGITS.match(item)
    return str(int(number[1])) if number else None


def _within(picked: list[str], outer: list[str]) -> list[str]:
    """The entries up to the first that is not in the outer list."""
    for place, entry in enumerate(picked):
        if not (int(entry) < len(outer) if entry.isdecimal() else entry in outer):
            return picked[:place]
    return picked


def _why(environ: Mapping[str, str]) -> str:
    names = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
    said = [f"{name}={environ[name]!r}" for name in names if name in environ]
    return f" ({', '.join(said)})" if said else ""
