"""How agents meet: the first node's says in the run directory where it is, and the others stay connected to it, so
that each knows at once when the launch is over or another has gone."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from selectors import EVENT_READ, BaseSelector

from ..errors import PlanError, TopologyError
from ..rank.hostlist import expand_hostlist
from ..rank.rendezvous import agree, launch_key, own_host
from ..rank.topology import LOOPBACK, Topology

DONE = b"done\n"


class Meeting:
    """The place of one launch over several nodes; `limit` is in seconds."""

    def __init__(self, topology: Topology, environ: Mapping[str, str], limit: float) -> None:
        key, folder = launch_key(topology, environ), environ.get("PHALANX_RUN_DIR")
        if folder is None or key is None:
            raise PlanError("launcher ray needs PHALANX_RUN_DIR and Slurm's variables: start it by phalanx")
        self.topology, self.environ, self.limit, self.run_dir = topology, environ, limit, Path(folder)
        self._place = self.run_dir / "rendezvous" / f"{key}.ray.json"
        self._secret = self._place.with_suffix(".token")

    def publish(self, port: int, token: str) -> None:
        """Where the first agent listens, and what lets a process into the cluster, for this user's eyes alone."""
        self._secret.parent.mkdir(exist_ok=True)
        self._secret.unlink(missing_ok=True)
        self._secret.touch(0o600, exist_ok=False)
        self._secret.write_text(token)
        agree(self.topology, self.environ, self.run_dir, ".ray", lambda: port)

    def forget(self) -> None:
        """Remove what was published."""
        for path in (self._place, self._secret):
            path.unlink(missing_ok=True)

    def join(self) -> tuple[socket.socket, str, str]:
        """The connection to the first agent once that is ready, Ray's address and the secret.

        Raises PlanError if it isn't there in time, or can't be reached.
        """
        try:
            place = agree(self.topology, self.environ, self.run_dir, ".ray", lambda: 0, self.limit)
        except TopologyError:
            raise PlanError(
                f"node {socket.gethostname()} waited {self.limit:.0f} s for the Ray head on {hosts(self.environ)[0]}: "
                "see the first node's words above; more time: ray.start_timeout"
            ) from None
        assert place is not None
        token = self._secret.read_text()
        try:
            head = socket.create_connection(place, timeout=self.limit)
            head.sendall(token.encode() + b"\n")
            said = head.makefile("r").readline().strip()
        except OSError as error:
            raise PlanError(
                f"node {socket.gethostname()} can't reach the Ray head at {place[0]}:{place[1]} "
                f"({error.strerror or error}): set interface or host_suffix to the network that connects the nodes"
            ) from None
        return head, said, token


class Followers:
    """The other nodes' agents at the first one: they learn Ray's address, and by the end of their connection or a
    word that all is over."""

    def __init__(self, selector: BaseSelector, listener: socket.socket, token: str, address: str) -> None:
        self._selector, self._listener = selector, listener
        self._token, self._address = token.encode(), address.encode() + b"\n"
        self._connected: list[socket.socket] = []
        listener.listen(4096)
        selector.register(listener, EVENT_READ, self._accept)

    def _accept(self) -> None:
        follower, _ = self._listener.accept()
        self._selector.register(follower, EVENT_READ, lambda: self._hear(follower))

    def _hear(self, follower: socket.socket) -> None:
        try:
            if secrets.compare_digest(follower.recv(4096).strip(), self._token):
                self._connected.append(follower)
                follower.sendall(self._address)
                return
        except OSError:
            pass
        self._drop(follower)

    def _drop(self, follower: socket.socket) -> None:
        self._selector.unregister(follower)
        follower.close()
        if follower in self._connected:
            self._connected.remove(follower)

    def end(self) -> None:
        """Say so; whether they have ended is `busy`."""
        for follower in list(self._connected):
            try:
                follower.sendall(DONE)
            except OSError:
                self._drop(follower)

    @property
    def busy(self) -> bool:
        return bool(self._connected)


def hosts(environ: Mapping[str, str]) -> list[str]:
    """The launch's nodes in order."""
    said = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    return expand_hostlist(said) if said else [socket.gethostname()]


def head_address(topology: Topology, environ: Mapping[str, str]) -> str:
    """This node's address for the others: of its name, or (where that is a loopback one here) of the way to them."""
    if topology.num_nodes == 1:
        return "127.0.0.1"
    name = own_host(topology, environ)
    found = [address for address in _resolved(name) if not LOOPBACK.fullmatch(address)]
    found += filter(None, (_towards(address) for host in hosts(environ)[1:2] for address in _resolved(host)))
    if not found:
        raise PlanError(f"{name} has no address that other nodes can reach: set interface to the network between them")
    return found[0]


def _resolved(host: str) -> list[str]:
    """IPv4 first, as Ray prefers it."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(entry[4][0]) for entry in sorted(found, key=lambda entry: entry[0] != socket.AF_INET)]


def _towards(address: str) -> str | None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # only the route is asked for, nothing is sent
        except OSError:
            return None
        own = str(probe.getsockname()[0])
    return None if LOOPBACK.fullmatch(own) else own
