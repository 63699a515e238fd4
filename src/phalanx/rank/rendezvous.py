"""Where the ranks of a launch meet: rank 0 keeps a free port and says so in the run directory.

For ranks that srun or mpirun started directly: torchrun's meet through their agents. A port that is only
computed may be in use; so rank 0 binds one, leaves it bound for torch's store to listen on, and publishes
host and port in `rendezvous/<launch>.json`, for which the others wait.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from ..errors import TopologyError
from ..rundir import make_folder, write_atomic
from .launch_variables import Word, agreeing, meant
from .ports import claim, job_ports
from .topology import LOOPBACK, Topology, said_master, with_suffix

PATIENCE = 300.0  # seconds that a rank waits for rank 0's words
_LONGEST_PAUSE = 1.0  # seconds between two looks
ANY_HOST = ("192.0.2.1", 9)  # of the range for documentation: only its route is asked for, nothing is sent

# What mpirun gives to each process of one launch, and anew to the next: the first is random.
_OPEN_MPI = (
    "OMPI_MCA_orte_precondition_transports",
    "OMPI_MCA_ess_base_jobid",
    "OMPI_MCA_orte_hnp_uri",
    "PMIX_NAMESPACE",
)

_kept: list[socket.socket] = []  # bound for the life of this process


def meet(
    topology: Topology, environ: Mapping[str, str], run_dir: Path, patience: float = PATIENCE
) -> tuple[str, int] | None:
    """Address and port of this launch's rank 0, the same on all ranks.

    None if there is nothing to agree on: one process, torchrun's ranks, a port that the user gave, or a
    launch whose ranks share no word that another launch doesn't have.

    Raises TopologyError when no port is free, rank 0 has no address that others can reach, or it is silent.
    """
    environ = meant(environ)
    if topology.world_size == 1 or topology.source == "torchrun" or said_master(environ)[1] is not None:
        return None
    return agree(topology, environ, run_dir, "", lambda: _keep_port(environ), patience)


def agree(
    topology: Topology,
    environ: Mapping[str, str],
    run_dir: Path,
    what: str,
    open_port: Callable[[], int],
    patience: float = PATIENCE,
) -> tuple[str, int] | None:
    """Rank 0's address and the port that `open_port` opens there, on all ranks; None as for `meet`. A launch has one
    such place for each `what`."""
    key = launch_key(topology, environ)
    if key is None:
        return None
    place = run_dir / "rendezvous" / f"{key}{what}.json"
    if topology.rank != 0:
        return _wait(place, topology, patience)
    host, port = own_host(topology, environ), open_port()
    write_atomic(place, json.dumps({"v": 1, "host": host, "port": port, "time": time.time(), "pid": os.getpid()}))
    return host, port


def launch_key(topology: Topology, environ: Mapping[str, str]) -> str | None:
    """A file name that all ranks of this launch share, and no other launch in the same run directory; None if
    their environment holds nothing of that kind.

    For srun: job, step and restart. The ranks of an mpirun are no tasks of one step (only those on other nodes
    are below a step, that of mpirun's daemons), so Open MPI's own words stand for it.
    """
    launch = environ.get("PHALANX_LAUNCH_ID", "")
    if topology.source == "openmpi":
        step = _digest([environ.get(name, "") for name in _OPEN_MPI])
    else:
        ours = {"rank": Word(topology.rank, "rank"), "world_size": Word(topology.world_size, "world size")}
        stepped = any(source == "slurm" for source, _ in agreeing(ours, environ))
        step = (environ.get("SLURM_STEP_ID") or "0") if stepped else ""
    if not (step or launch):
        return None
    words = [_job(environ), step, environ.get("SLURM_RESTART_COUNT") or "0", launch]
    return re.sub(r"[^\w.-]", "_", ".".join(word for word in words if word), flags=re.ASCII)


def _job(environ: Mapping[str, str]) -> str:
    return environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID") or "0"


def _digest(words: list[str]) -> str:
    import hashlib

    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16] if any(words) else ""


def own_host(topology: Topology, environ: Mapping[str, str]) -> str:
    """The name or address at which the others find this process: the user's MASTER_ADDR, else (for several nodes)
    this node's name with the site's suffix, the address of its interface, Slurm's name for it, or its own."""
    said, _ = said_master(environ)
    if said:
        return said
    if topology.num_nodes == 1:
        return "127.0.0.1"
    names = [name for name in (environ.get("SLURMD_NODENAME"), socket.gethostname()) if name]
    suffix, interfaces = environ.get("PHALANX_HOST_SUFFIX"), environ.get("PHALANX_INTERFACE")
    if suffix:
        return _suffixed(names[0], suffix)
    if interfaces:
        return interface_address(interfaces)
    found = next((name for name in names if not LOOPBACK.fullmatch(name) and _resolves(name)), None)
    found = found or _routed_address()
    if found is None:
        raise TopologyError(
            f"host {socket.gethostname()} has no name that resolves ({', '.join(names)}) and no route to other hosts: "
            "set MASTER_ADDR, or interface to the network interface that connects the nodes"
        )
    return found


def _suffixed(name: str, suffix: str) -> str:
    if not _resolves(with_suffix(name, suffix)):
        raise TopologyError(
            f"host_suffix {suffix!r} makes {with_suffix(name, suffix)!r} of host {name}, and that name doesn't "
            "resolve there: correct host_suffix, or set it to an empty text"
        )
    return with_suffix(name, suffix)


def _resolves(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None))
    except OSError:
        return False


def _routed_address() -> str | None:
    """The address from which this host talks to others."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(ANY_HOST)
        except OSError:
            return None
        address = str(probe.getsockname()[0])
    return None if LOOPBACK.fullmatch(address) else address


def interface_address(names: str) -> str:
    """The IPv4 address, else the IPv6 one, of the first of `names` (separated by commas) that others can reach."""
    for name in names.split(","):
        address = device_address(name.strip())
        if address and not LOOPBACK.fullmatch(address):
            return address
    there = ", ".join(name for _, name in socket.if_nameindex()) or "none"
    raise TopologyError(
        f"interface {names!r} has no address on host {socket.gethostname()} that other hosts can reach: there are "
        f"{there}; set interface to one that connects the nodes"
    )


def device_address(name: str) -> str | None:
    return _ipv4(name) or _ipv6(name)


def _ipv4(name: str) -> str | None:
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("256s", name.encode()[:15])
        try:
            answer = fcntl.ioctl(any_socket.fileno(), 0x8915, request)  # SIOCGIFADDR
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _ipv6(name: str, table: Path = Path("/proc/net/if_inet6")) -> str | None:
    """A global address: a link-local one means nothing on other hosts."""
    try:
        rows = [line.split() for line in table.read_text().splitlines()]
    except OSError:
        return None
    found = (row[0] for row in rows if row[5] == name and row[3] == "00")
    return next((socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)) for digits in found), None)


def _keep_port(environ: Mapping[str, str]) -> int:
    job, step = (int(text) if text.isdecimal() else 0 for text in (_job(environ), environ.get("SLURM_STEP_ID", "")))
    bound = claim(job_ports(job, step))
    if bound is None:
        first = next(job_ports(job, step))
        raise TopologyError(
            f"no port is free for rank 0 on host {socket.gethostname()} (the first tried was {first}): "
            "set MASTER_PORT to a port that is"
        )
    _kept.append(bound)
    return int(bound.getsockname()[1])


def _wait(place: Path, topology: Topology, patience: float) -> tuple[str, int]:
    """Rank 0's words, found by listing their folder: NFS remembers for a while that a file wasn't there. It keeps
    lists too, until the folder is seen to change; so one rank of each node touches it before each look."""
    make_folder(place.parent)
    start, pause = time.monotonic(), 0.02
    while place.name not in os.listdir(place.parent):  # noqa: PTH208 (a Path for each entry is of no use here)
        if time.monotonic() - start > patience:
            raise TopologyError(
                f"rank {topology.rank} on host {socket.gethostname()} waited {patience:.0f} s for rank 0's address in "
                f"{place}: rank 0 has not started, has failed, or its node doesn't share that folder; see its log, or "
                "set MASTER_ADDR and MASTER_PORT"
            )
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE)
        if topology.local_rank == 0:
            with suppress(OSError):
                os.utime(place.parent)
    said = json.loads(place.read_text(encoding="utf-8"))
    return said["host"], said["port"]
