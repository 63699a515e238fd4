"""A job's ports: a sequence that all its ranks can compute, and how the first free one is kept.

No port lies in the range from which the kernel hands out ports to whoever connects somewhere.
"""

from __future__ import annotations

import errno
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

_USUAL = range(20000, 32000)  # below the ephemeral ports (32768 and up), above those that services usually take
_OTHERS = (*range(5000, 20000), *range(32000, 65536))
_FEW = 1000
_STRIDE = 4001  # a prime, so that the second choices of neighbouring jobs are not each other's first ones
_TAKEN = (errno.EADDRINUSE, errno.EACCES)


def job_ports(job: int, step: int = 0, ephemeral: range | None = None) -> Iterator[int]:
    """The ports of a step of a job, best first; those of neighbouring jobs and steps begin elsewhere.

    `ephemeral` defaults to this host's net.ipv4.ip_local_port_range.
    """
    pool = _outside(ephemeral_ports() if ephemeral is None else ephemeral)
    first = 31 * job + step
    for index in range(len(pool)):
        yield pool[(first + index * _STRIDE) % len(pool)]


def port_blocks(job: int, step: int, size: int, ephemeral: range | None = None) -> Iterator[Sequence[int]]:
    """As `job_ports`, for those who need `size` ports together: neighbouring jobs' blocks have no port in common."""
    pool = _outside(ephemeral_ports() if ephemeral is None else ephemeral)
    count = len(pool) // size
    first = 31 * job + step
    for index in range(count):
        start = (first + index * _STRIDE) % count * size
        yield pool[start : start + size]


def ephemeral_ports(setting: Path = Path("/proc/sys/net/ipv4/ip_local_port_range")) -> range:
    """Ports that the kernel takes for outgoing connections; Linux's default where it does not say."""
    try:
        first, last = map(int, setting.read_text().split())
    except (OSError, ValueError):
        first, last = 32768, 60999
    return range(first, last + 1)


def _outside(ephemeral: range) -> range | list[int]:
    """The ports to choose from: the usual ones, else any others, else (nothing is left) the usual ones still."""
    if ephemeral.start >= _USUAL.stop or ephemeral.stop <= _USUAL.start:
        return _USUAL
    for pool in (_USUAL, _OTHERS):
        free = [port for port in pool if port not in ephemeral]
        if len(free) >= _FEW:
            return free
    return _USUAL


def claim(ports: Iterable[int]) -> socket.socket | None:
    """Bind the first free one of `ports` on all addresses; None if none is free. Its owner keeps the socket.

    The bind is exclusive, so that it fails where anybody else's socket is. Afterwards the socket allows others
    to bind beside it that ask for it (SO_REUSEADDR), as torch's store does in this process; another job's
    claim, which doesn't, is still refused.
    """
    for port in ports:
        try:
            bound = _bind(port)
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
            continue
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return bound
    return None


def claim_block(blocks: Iterable[Sequence[int]]) -> tuple[Sequence[int], socket.socket] | None:
    """The first block of which no port is in use, and a claim on its first port, whose owner keeps the block by it."""
    for block in blocks:
        held = claim(block[:1])
        if held is None:
            continue
        others = [claim([port]) for port in block[1:]]
        for other in filter(None, others):
            other.close()
        if all(others):
            return block, held
        held.close()
    return None


def _bind(port: int) -> socket.socket:
    """On IPv6 and IPv4 together as torch listens, or on IPv4 where the host has no IPv6."""
    try:
        return _bound(socket.AF_INET6, "::", port)
    except OSError as error:
        if error.errno in _TAKEN:
            raise
        return _bound(socket.AF_INET, "0.0.0.0", port)


def _bound(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind((address, port))
    except OSError:
        bound.close()
        raise
    return bound


def main(arguments: list[str]) -> int:
    """`python -m phalanx.ports JOB`: print the first free port of a job's sequence."""
    found = claim(job_ports(int(arguments[0])))
    if found is None:
        print(f"no port is free for job {arguments[0]}: set master_port", file=sys.stderr)
        return 1
    print(found.getsockname()[1])
    found.close()
    return 0
