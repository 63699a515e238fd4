"""What the first node's agent does, and what the others' do."""

from __future__ import annotations

import secrets
import selectors
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from ..errors import PlanError
from . import processes
from .connections import DONE, Followers, head_address, hosts
from .driver import Order
from .node import Node

_STARTED, _GAVE_UP = b"Ray runtime started", b"timed out during startup"  # in the words of `ray start`
_LOOK = 0.2  # seconds between looks at the raylet
_GRACE = 10.0  # seconds for Slurm to see what killed the first agent, lest we seem to have failed before it

if TYPE_CHECKING:
    from .agent import Agent


def lead(agent: Agent) -> int:
    """Start Ray's head, let the others join it, and run the driver; its exit code."""
    token = secrets.token_hex(32)
    node = agent.node(head_address(agent.topology, agent.environ))
    address = f"[{node.address}]" if ":" in node.address else node.address
    address = f"{address}:{node.ports['gcs']}"
    agent.serve_ranks(node, address, token)
    ray = _start_ray(agent, node, token)
    if agent.meeting is not None:
        agent.followers = Followers(agent.selector, agent.claim, token, address)
        agent.meeting.publish(node.ports["agent"], token)
    driver = _spawn_driver(agent, node, token, address)
    while driver.poll() is None:
        agent.watch(ray, "head")
    return driver.returncode if driver.returncode >= 0 else 128 - driver.returncode


def _start_ray(agent: Agent, node: Node, token: str, head: str | None = None) -> subprocess.Popen[bytes]:
    """This node's Ray, once it says that it is up. Where it gave up on its own slow processes, as `ray start` and the
    raylet each do after 30 seconds, it is started again, as long as our limit lets it.

    Raises PlanError at the limit, RayEnded if it can't start.
    """
    what = "head" if head is None else "node"
    while True:
        begin = agent.log.stat().st_size if agent.log.exists() else 0
        ray, raylet = agent.spawn_ray(node, token, head), _Raylet()
        while ray.poll() is None and not _says(agent, begin, _STARTED) and not raylet.gone():
            agent.turn()
            if time.monotonic() > agent.limit:
                raise PlanError(
                    f"the Ray {what} on {socket.gethostname()} did not come up within {agent.options.start_timeout} s; "
                    f"more time: ray.start_timeout. {agent.last_words()}"
                )
        if _says(agent, begin, _STARTED) or (ray.poll() is not None and not _says(agent, begin, _GAVE_UP)):
            agent.watch(ray, what)
            return ray
        processes.kill_all()


class _Raylet:
    """Ray's own daemon on this node: when it ends in the making, `ray start` goes on waiting for it."""

    def __init__(self) -> None:
        self._seen, self._next = False, 0.0

    def gone(self) -> bool:
        """Whether it was there, and isn't any more."""
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + _LOOK
        there = bool(processes.named("raylet"))
        self._seen = self._seen or there
        return self._seen and not there


def _says(agent: Agent, begin: int, text: bytes) -> bool:
    with agent.log.open("rb") as log:
        log.seek(begin)
        return text in log.read()


def _spawn_driver(agent: Agent, node: Node, token: str, address: str) -> subprocess.Popen[bytes]:
    order = Order(
        address=address,
        hosts=hosts(agent.environ) if agent.meeting else [socket.gethostname()],
        nproc=node.ranks,
        words=agent.options.words,
        log=str(agent.log),
        storage=str(node.temp / "train"),
        limit=max(1.0, agent.limit - time.monotonic()),
        start_timeout=agent.options.start_timeout,
    )
    words = [sys.executable, "-m", "phalanx.ray_launch.driver", order.to_json()]
    return agent.spawn(words, node.environment(agent.environ, token, agent.options.start_timeout))


def follow(agent: Agent) -> int:
    """Join the head once it is ready, and stay until its agent says that all is over."""
    assert agent.meeting is not None
    head, address, token = agent.meeting.join()
    node = agent.node(str(head.getsockname()[0]).removeprefix("::ffff:"))
    agent.serve_ranks(node, address, token)
    said: list[bytes] = []
    head.settimeout(None)
    agent.selector.register(head, selectors.EVENT_READ, lambda: said.append(_received(head)))
    ray = _start_ray(agent, node, token, address)
    while not said:
        agent.watch(ray, "node")
    if said[0] == DONE:
        return 0
    print(f"ray: the agent on {hosts(agent.environ)[0]}, the head's node, has gone", file=sys.stderr, flush=True)
    limit = time.monotonic() + _GRACE
    while time.monotonic() < limit:
        agent.turn()
    return 1


def _received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(64)
    except OSError:
        return b""
