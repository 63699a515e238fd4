"""Who am I: this process's rank among all, as its launcher says it in the environment.

The believed launcher's missing words are taken from another one that gives the same rank and world
size (Slurm under an MPI, say), and only then derived.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import TopologyError
from .hostlist import expand_hostlist
from .launch_variables import (
    FIELDS,
    LAUNCHERS,
    Word,
    Words,
    agreeing,
    believed,
    check_below,
    first_set,
    in_slurm_step,
    integer,
    meant,
    without_slurm_step,
    words,
)
from .ports import job_ports

LOOPBACK = re.compile(r"localhost(\..*)?|ip6-localhost|127\.[0-9.]+|::1", re.IGNORECASE)
_SIZE_OF = {source: names["local_world_size"][0] for source, names in LAUNCHERS.items() if "local_world_size" in names}
_BRACKETED = re.compile(r"\[([^\[\]]+)\](?::(.*))?")


@dataclass(frozen=True)
class Topology:
    """One rank's place. Ranks count from 0; the master is where rank 0 listens, if that is known.

    A node is what the launcher calls so: for torchrun it is one agent, even if a host runs several.
    `source` is the launcher that was believed, `environment` for RANK and WORLD_SIZE that no known
    launcher explains, or `single`.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    master_addr: str | None
    master_port: int | None
    source: str

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Topology:
        """The topology that the variables describe; TopologyError if they contradict each other."""
        environ = meant(environ)
        source, said = believed(environ)
        place = _complete(source, said, environ)
        addr, port = _master(place, environ)
        if source == "torchrun" and "TORCHELASTIC_RUN_ID" not in environ:
            others = (other for other, _ in agreeing(said, environ) if other != source)
            source = next(others, "environment")
        return cls(
            **{field: place[field].value for field in FIELDS},
            master_addr=addr,
            master_port=port,
            source=source,
        )

    @classmethod
    def current(cls) -> Topology:
        """The topology of this very process.

        It differs from `from_environ(os.environ)` in one place: a command typed in the shell of
        `srun --ntasks 4 --pty bash` has all variables of that step's rank 0, but is a single process.
        """
        environ = meant(os.environ)
        typed = in_slurm_step(environ) and _typed_in_task_shell(environ)
        return cls.from_environ(without_slurm_step(environ) if typed else environ)

    def environ(self) -> dict[str, str]:
        """The variables that torch.distributed and its like read, as far as they are known."""
        values = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": self.master_port,
        }
        if "OMPI_COMM_WORLD_LOCAL_RANK" in os.environ:  # an agent's own, if MPI started agents; DeepSpeed compares it
            values["OMPI_COMM_WORLD_LOCAL_RANK"] = self.local_rank
        return {name: str(value) for name, value in values.items() if value is not None}


def _typed_in_task_shell(environ: Mapping[str, str]) -> bool:
    """Whether a shell with job control, itself the Slurm task, started this process.

    Such a shell gives each command a process group of its own within its session; a batch script
    or srun itself does not. An inner srun inherits SLURM_PTY_PORT, so that alone tells nothing.
    """
    task = environ.get("SLURM_TASK_PID", "")
    if "SLURM_PTY_PORT" not in environ or not task.isdecimal():
        return False
    try:
        return os.getsid(0) == os.getsid(int(task)) and os.getpgrp() != os.getpgid(int(task))
    except OSError:
        return False


def _complete(source: str, said: Words, environ: Mapping[str, str]) -> Words:
    """All six fields: what was said, by this launcher or another that agrees, and what follows."""
    check_below(said["rank"], said["world_size"])
    place = dict(said)
    for _, other in agreeing(said, environ):
        place = {**other, **place}
    place = {**_one_of_a_kind(place), **place}
    if "local_rank" not in place:
        raise _unknown("local_rank", place, f"set {LAUNCHERS[source]['local_rank'][0]} in each task")
    if "local_world_size" not in place:
        place = {**_agents_share(place, environ), **place}
    if "local_world_size" not in place:
        size = _local_size(place, environ)
        if size is None:
            raise _unknown("local_world_size", place, f"set {_SIZE_OF.get(source, 'SLURM_STEP_NUM_NODES')}")
        place.update(_derived(local_world_size=size))
    check_below(place["local_rank"], place["local_world_size"])
    if place["local_world_size"].value > place["world_size"].value:
        raise TopologyError(
            f"{place['local_world_size']} but {place['world_size']}: one node cannot hold more ranks than "
            f"there are. Correct or unset {place['local_world_size'].name}"
        )
    if "num_nodes" not in place:
        place.update(_derived(num_nodes=_node_count(place, environ)))
    if "node_rank" not in place:
        place.update(_derived(node_rank=_node_index(place, environ)))
    check_below(place["node_rank"], place["num_nodes"])
    return place


def _derived(**values: int) -> Words:
    return {field: Word(value, field.replace("_", " ")) for field, value in values.items()}


def _one_of_a_kind(place: Words) -> Words:
    """What is certain for the only rank, on the only node, or as the only rank of a node."""
    rank, world = place["rank"].value, place["world_size"].value
    if world == 1:
        return _derived(local_rank=0, local_world_size=1, node_rank=0, num_nodes=1)
    if "num_nodes" in place and place["num_nodes"].value == world:
        return _derived(local_rank=0, local_world_size=1, node_rank=rank)
    if "num_nodes" in place and place["num_nodes"].value == 1:
        return _derived(local_rank=rank, local_world_size=world, node_rank=0)
    if "local_world_size" in place and place["local_world_size"].value == 1:
        return _derived(local_rank=0)
    return {}


def _agents_share(place: Words, environ: Mapping[str, str]) -> Words:
    """Where each task of a Slurm step is an agent with equally many ranks, its place tells theirs."""
    if not in_slurm_step(environ):
        return {}
    try:
        step = words("slurm", environ)
    except TopologyError:
        return {}
    if "rank" not in step or "world_size" not in step:
        return {}
    agent, agents, world = step["rank"].value, step["world_size"].value, place["world_size"].value
    size = world // agents
    fits = not world % agents and agent * size + place["local_rank"].value == place["rank"].value
    if agents >= world or not fits or place["local_rank"].value >= size:
        return {}
    return _derived(local_world_size=size, num_nodes=agents, node_rank=agent)


def _local_size(place: Words, environ: Mapping[str, str]) -> int | None:
    """Ranks on this node: an even share of known nodes, else all if nothing speaks of other nodes."""
    rank, world, local = (place[field].value for field in ("rank", "world_size", "local_rank"))
    if "num_nodes" in place:
        return min(-(-world // place["num_nodes"].value), world - max(0, rank - local))  # the last node may have fewer
    node = place["node_rank"].value if "node_rank" in place else 0
    if node and not (rank - local) % node:  # nodes before this one, as full as it
        return (rank - local) // node
    addr, _ = said_master(environ)
    if addr and not LOOPBACK.fullmatch(addr):
        return None
    if rank == local:  # the first node, and the only one unless the job has others
        return world if addr or _job_nodes(environ) == 1 else None
    even = [size for size in range(local + 1, world + 1) if not world % size and not (rank - local) % size]
    return even[0] if len(even) == 1 else None


def _node_count(place: Words, environ: Mapping[str, str]) -> int:
    """All nodes of the job, if each other one can have a rank; else as many as it takes."""
    world, local = place["world_size"].value, place["local_world_size"].value
    hosts = len(_job_hosts(environ))
    return hosts if 1 < hosts <= 1 + world - local else -(-world // local)


def _job_nodes(environ: Mapping[str, str]) -> int:
    """Nodes of the Slurm job around this process; 1 outside one."""
    name = first_set(environ, "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    return integer(environ, name, least=1) if name else max(1, len(_job_hosts(environ)))


def _node_index(place: Words, environ: Mapping[str, str]) -> int:
    """Which node: by Slurm's name for it, else as when each node is filled before the next.

    The latter is every MPI's default placement; under another one some local rank does not fit.
    """
    hosts, here = _job_hosts(environ), environ.get("SLURMD_NODENAME")
    if here in hosts and len(hosts) == place["num_nodes"].value:
        return hosts.index(here)
    rank, local, nodes = (place[field].value for field in ("rank", "local_rank", "num_nodes"))
    for size in (place["local_world_size"].value, -(-place["world_size"].value // nodes)):  # the last may have fewer
        node, expected = divmod(rank, size)
        if expected == local and node < nodes:
            return node
    remedy = "set PHALANX_RANK, PHALANX_WORLD_SIZE and PHALANX_NODE_RANK in each task, or have nodes filled in turn"
    raise _unknown("node_rank", place, remedy)


def _unknown(field: str, place: Words, remedy: str) -> TopologyError:
    said = ", ".join(str(place[known]) for known in FIELDS if known in place)
    return TopologyError(f"cannot tell the {field.replace('_', ' ')} from {said}: {remedy}")


def _master(place: Words, environ: Mapping[str, str]) -> tuple[str | None, int | None]:
    """Where rank 0 listens: as said, else Slurm's first node, and a port that follows from the job."""
    addr, port = said_master(environ)
    several = place["num_nodes"].value > 1
    # torchrun's workers connect to their agents' store, whose address has served already.
    met = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if addr and several and LOOPBACK.fullmatch(addr) and not met:
        raise TopologyError(
            f"MASTER_ADDR={addr!r} but {place['num_nodes']}: a loopback address cannot be reached from other "
            "nodes. Set MASTER_ADDR to the first node's name or address"
        )
    if place["world_size"].value == 1:
        return addr, port
    stepped = any(source == "slurm" for source, _ in agreeing(place, environ))
    return addr or _default_addr(environ, stepped, several), port or _default_port(environ, stepped)


def _default_addr(environ: Mapping[str, str], stepped: bool, several: bool) -> str | None:
    if not (several or stepped):
        return "127.0.0.1"
    own = expand_hostlist(environ.get("SLURM_STEP_NODELIST", "")) if stepped else []
    host = next(iter(own or _job_hosts(environ)), None)
    return with_suffix(host, environ.get("PHALANX_HOST_SUFFIX", "")) if host and several else host


def with_suffix(host: str, suffix: str) -> str:
    """The host's name in another network, where the site calls `node7` there `node7i`, say."""
    name, dot, domain = host.partition(".")
    return f"{name}{suffix}{dot}{domain}"


def _default_port(environ: Mapping[str, str], stepped: bool) -> int | None:
    """The same for all ranks of a step, and another for neighbouring jobs and steps."""
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID") or ("0" if stepped else "")
    step = (environ.get("SLURM_STEP_ID") or "0") if stepped else "0"
    return next(job_ports(int(job), int(step))) if job.isdecimal() else None


def _job_hosts(environ: Mapping[str, str]) -> list[str]:
    name = first_set(environ, "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    return expand_hostlist(environ[name]) if name else []


def said_master(environ: Mapping[str, str]) -> tuple[str | None, int | None]:
    """MASTER_ADDR and MASTER_PORT, where `host:port` in the former is split."""
    addr_name = first_set(environ, "PHALANX_MASTER_ADDR", "MASTER_ADDR")
    port_name = first_set(environ, "PHALANX_MASTER_PORT", "MASTER_PORT")
    port = _port(integer(environ, port_name), f"{port_name}={environ[port_name]!r}") if port_name else None
    text = environ[addr_name].strip() if addr_name else ""
    if not text:
        return None, port
    addr, inner = _split(text, f"{addr_name}={environ[addr_name or '']!r}")
    if inner and port and inner != port:
        raise TopologyError(f"{addr_name}={text!r} but {port_name}={port}: two ports. Unset one of them")
    return addr, inner or port


def _split(text: str, said: str) -> tuple[str, int | None]:
    bracketed = _BRACKETED.fullmatch(text)
    if bracketed:
        addr, port = bracketed[1], bracketed[2]
    elif text.count(":") == 1:
        addr, port = text.split(":")
    else:
        addr, port = text, None
    if not addr or re.search(r"[\s\[\],/]", addr):
        raise TopologyError(f"{said}: expected one host name or address, or host:port")
    if port is None:
        return addr, None
    return addr, _port(int(port) if port.isascii() and port.isdecimal() else 0, said)


def _port(number: int, said: str) -> int:
    if not 1 <= number <= 65535:
        raise TopologyError(f"{said}: expected a port from 1 to 65535")
    return number
