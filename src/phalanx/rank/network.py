"""Which network interface ranks of several nodes talk by, where a node's own name doesn't tell.

Gloo listens at the address of the host's own name. Where that is a loopback address (Debian's default is 127.0.1.1),
other nodes reach themselves there instead, and every group of several nodes fails.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping

from .hostlist import expand_hostlist
from .launch_variables import first_set
from .rendezvous import ANY_HOST, device_address
from .topology import LOOPBACK, Topology

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def variables(topology: Topology, environ: Mapping[str, str]) -> dict[str, str]:
    """What gloo and NCCL are to be told; nothing on one node, where this host's name has an address that others can
    reach, or where somebody has chosen an interface."""
    if topology.num_nodes == 1 or any(environ.get(name) for name in VARIABLES) or name_tells():
        return {}
    name = first_set(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    peers = expand_hostlist(environ[name]) if name else []
    found = interface_towards([*filter(None, [topology.master_addr]), *peers, ANY_HOST[0]])
    return dict.fromkeys(VARIABLES, found) if found else {}


def interface_towards(hosts: Iterable[str]) -> str | None:
    """The interface by which this host reaches the first of `hosts` that isn't a name for its own loopback."""
    for host in hosts:
        address = _source(host)
        if address is not None:
            return _interface_of(address)
    return None


def name_tells() -> bool:
    """Whether this host's name is an address of its own, and not a loopback one: gloo takes the first that it has."""
    for family, kind, protocol, _, place in _addresses(socket.gethostname()):
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind((place[0], 0))
            except OSError:  # not this host's
                continue
        return not LOOPBACK.fullmatch(str(place[0]))
    return False


def _addresses(host: str) -> list[tuple[int, int, int, str, tuple[str, int]]]:
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return []
    return found  # type: ignore[return-value]


def _source(host: str) -> str | None:
    """The address from which this host talks to another. Nothing is sent."""
    for family, kind, protocol, _, place in _addresses(host):
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(place)
            except OSError:
                continue
            address = str(probe.getsockname()[0])
        if not LOOPBACK.fullmatch(address):
            return address
    return None


def _interface_of(address: str) -> str | None:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if device_address(name) == address), None)


def choose(topology: Topology) -> None:
    """Tell this very process's libraries, before they make a group."""
    os.environ.update(variables(topology, os.environ))
