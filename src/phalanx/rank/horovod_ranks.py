"""What Horovod's ranks need where no launcher of Horovod's started them: by srun or mpirun.

A build with MPI finds the others by MPI. One with gloo asks a server for them, which horovodrun would start, and reads
its place from HOROVOD_* variables; here rank 0 starts that server and each rank sets its own variables. Without either,
every process would be a world of one and train alone.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import MissingExtraError, PlanError
from .hostlist import expand_counts
from .launch_variables import Word, agreeing
from .network import name_tells
from .rendezvous import agree
from .topology import Topology

_MARKS = {"mpi": b"libmpi", "gloo": b"HOROVOD_GLOO_RENDEZVOUS_ADDR"}  # in the library that was built


def provide(topology: Topology, environ: Mapping[str, str], run_dir: Path) -> dict[str, str]:
    """The variables with which this rank's Horovod finds the others of its launch; none if it needs none of ours.

    Raises PlanError or MissingExtraError if Horovod can't.
    """
    if controller(topology, environ, built_with()) != "gloo":
        return {}
    if topology.num_nodes > 1 and not name_tells():  # its process sets heed no interface
        raise PlanError(
            f"Horovod's gloo listens at the address of the host's own name, and that of {socket.gethostname()} is a "
            "loopback one that other nodes can't reach: give the name the node's own address in /etc/hosts, build "
            "Horovod with MPI, or use strategy ddp"
        )
    counts = ranks_per_node(topology, environ)
    place = agree(topology, environ, run_dir, ".horovod", lambda: serve(counts))
    return gloo_variables(topology, counts, *place) if place else {}


def built_with(package: Path | None = None) -> frozenset[str]:
    """`mpi`, `gloo` or both, by Horovod's library for torch, which is not loaded for it.

    Raises MissingExtraError if there is none.
    """
    if package is None:
        spec = find_spec("horovod")
        package = Path((spec.submodule_search_locations or [""])[0]) if spec else None
    libraries = sorted(package.glob("torch/mpi_lib*.so")) if package else []
    if not libraries:
        what = "has no library for torch" if package else "is not installed"
        raise MissingExtraError(
            f"horovod {what}; strategy horovod needs it, built beside the torch in use: see docs/engines.md"
        )
    content = libraries[0].read_bytes()
    return frozenset(name for name, mark in _MARKS.items() if mark in content)


def controller(topology: Topology, environ: Mapping[str, str], built: frozenset[str]) -> str:
    """How this rank's Horovod finds the others: `given` by variables that are set, by `mpi`, or by `gloo` with a
    server of ours.

    Raises PlanError if Horovod here can't do it under this launcher.
    """
    if "HOROVOD_RANK" in environ or topology.world_size == 1:
        return "given"
    ours = {"rank": Word(topology.rank, "rank"), "world_size": Word(topology.world_size, "world size")}
    step = topology.source == "slurm" or any(source == "slurm" for source, _ in agreeing(ours, environ))
    if topology.source in ("openmpi", "mpich") and not (step and "mpi" not in built):
        if "mpi" not in built:
            raise PlanError(
                f"Horovod here is built without MPI, so under mpirun each of {topology.world_size} processes would "
                "train alone: use --launcher srun or horovodrun, or build it with HOROVOD_WITH_MPI=1"
            )
        return "mpi"
    if not step:
        raise PlanError(
            f"{topology.source} cannot start Horovod's ranks: use horovodrun or mpirun on one machine, srun across "
            "nodes"
        )
    if "mpi" in built and "PMIX_RANK" in environ and environ.get("HOROVOD_CONTROLLER", "mpi").lower() == "mpi":
        return "mpi"
    if "gloo" not in built:
        raise PlanError(
            "Horovod here is built with MPI alone, and srun started this rank without an MPI plugin, so each process "
            "would train alone: set mpi to one that `srun --mpi=list` shows (pmix), or use --launcher mpirun"
        )
    return "gloo"


def ranks_per_node(topology: Topology, environ: Mapping[str, str]) -> list[int]:
    """How many ranks each node has, as far as one rank can tell: by Slurm's words, else equally many."""
    said = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    counts = expand_counts(said) if said else []
    if sum(counts) == topology.world_size and len(counts) == topology.num_nodes:
        return counts
    return [topology.local_world_size] * topology.num_nodes


def gloo_variables(topology: Topology, counts: Sequence[int], host: str, port: int) -> dict[str, str]:
    """A rank's own HOROVOD_* variables. The ranks of equal local rank on all nodes are one `cross` group."""
    sharing = [count > topology.local_rank for count in counts]
    interface = os.environ.get("PHALANX_INTERFACE", "").split(",")[0]
    values: dict[str, Any] = {
        "HOROVOD_HOSTNAME": f"node{topology.node_rank}",
        "HOROVOD_RANK": topology.rank,
        "HOROVOD_SIZE": topology.world_size,
        "HOROVOD_LOCAL_RANK": topology.local_rank,
        "HOROVOD_LOCAL_SIZE": topology.local_world_size,
        "HOROVOD_CROSS_RANK": sum(sharing[: topology.node_rank]),
        "HOROVOD_CROSS_SIZE": sum(sharing),
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": host,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": port,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }
    device = "lo" if topology.num_nodes == 1 else interface
    if device:
        values["HOROVOD_GLOO_IFACE"] = device
    return {name: str(value) for name, value in values.items()}


def serve(counts: Sequence[int]) -> int:
    """Start Horovod's server in this process, for its life; its port."""
    from horovod.runner.common.util.hosts import SlotInfo
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()
    port: int = server.start()
    rank, slots = 0, []
    for node, count in enumerate(counts):
        for local in range(count):
            sharing = [other > local for other in counts]
            slots.append(SlotInfo(f"node{node}", rank, local, sum(sharing[:node]), sum(counts), count, sum(sharing)))
            rank += 1
    server.init(slots)
    return port
