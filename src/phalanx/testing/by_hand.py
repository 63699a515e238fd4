"""Ranks that srun or mpirun started as `python -m pytest`, without `phalanx test`, and what they need for that.

Each computes it from what Slurm or MPI told it, since there is no run directory in which rank 0 could say where it is.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping

from ..rank.launch_variables import meant
from ..rank.ports import job_ports
from ..rank.rendezvous import launch_key
from ..rank.topology import Topology


def variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What `init_process_group()` reads and `environ` hasn't, on each rank of a launch; nothing in a single process.

    Raises TopologyError where the launch's words contradict each other.
    """
    topology = Topology.current()
    if topology.world_size == 1:
        return {}
    said = topology.environ()
    key = launch_key(topology, meant(environ)) if "MASTER_PORT" not in said else None
    if key is not None:
        said["MASTER_PORT"] = str(next(job_ports(zlib.crc32(key.encode()))))
    return {name: text for name, text in said.items() if not environ.get(name)}


def advice(markers: str, environ: Mapping[str, str] = os.environ) -> str:
    """What to do where tests for several ranks can't find each other, or are alone; empty if there is nothing to do."""
    if environ.get("PHALANX_RUN_DIR"):
        return ""
    ranks = environ.get("WORLD_SIZE", "1")
    use = f"`phalanx test -m {markers!r}` starts the ranks, here and in Slurm jobs"
    if ranks == "1":
        return f"These tests are for several ranks, and ran in one process: {use}"
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    return f"{ranks} ranks, but {' and '.join(missing)} unknown: {use}, or set them" if missing else ""
