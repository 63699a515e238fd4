"""One agent: starts this node's Ray, watches it, and ends all that it has started."""

from __future__ import annotations

import argparse
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

from ..errors import MissingExtraError, PhalanxError, PlanError
from ..rank.ports import claim_block, port_blocks
from ..rank.topology import Topology
from . import processes, roles
from .begin import words as begin
from .connections import Followers, Meeting
from .node import PORTS, Node, access, cpus, gpus, named, temp_folder
from .ranks import Ranks

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PAUSE = 0.1  # seconds between looks at our children
_FAREWELL = 10.0  # seconds for ranks, and then for the other nodes' agents, to end


class Stopped(BaseException):
    """A signal asks for the end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class RayEnded(PhalanxError):
    """Ray's own processes ended, as nobody had asked."""

    exit_code = 1


def main(arguments: list[str]) -> int:
    """Until the launch is over; the exit code is the failed rank's on the first node, and 0 on the others. Negative:
    the signal that ended us."""
    options = parse(arguments)
    for number in _SIGNALS:
        signal.signal(number, _stop)
    agent = None
    try:
        if not sys.platform.startswith("linux"):
            raise PlanError(f"launcher ray needs Linux, and this is {sys.platform}: use --launcher torchrun")
        if find_spec("ray") is None:
            raise MissingExtraError("launcher ray needs ray, not installed here: pip install 'phalanx[ray]'")
        agent = Agent(options, os.environ)
        return agent.run()
    except Stopped as stopped:
        return -stopped.number
    except PhalanxError as error:
        print(f"phalanx: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    finally:
        if agent is not None:
            agent.end()


def parse(arguments: list[str]) -> argparse.Namespace:
    """Options before `--`, the rank's module and words after it."""
    at = arguments.index("--")
    parser = argparse.ArgumentParser(prog="phalanx.ray_launch", allow_abbrev=False)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--nproc-per-node", type=int, default=1)
    parser.add_argument("--num-cpus", type=int)
    parser.add_argument("--num-gpus", type=int)
    parser.add_argument("--object-store-memory", type=int, default=100)
    parser.add_argument("--start-timeout", type=int, default=120)
    parser.add_argument("--temp-dir")
    return parser.parse_args(arguments[:at], argparse.Namespace(words=arguments[at + 1 :]))


def _stop(number: int, _frame: FrameType | None) -> None:
    """The first signal counts: what comes while we end is the same wish."""
    _ignore_signals()
    raise Stopped(number)


def _ignore_signals() -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class Agent:
    """What the first node's agent and the others have in common; `roles.py` is what differs."""

    def __init__(self, options: argparse.Namespace, environ: Mapping[str, str]) -> None:
        self.options, self.environ = options, dict(environ)
        self.limit = time.monotonic() + options.start_timeout
        self.topology = _topology(options.nodes, environ)
        self.meeting = Meeting(self.topology, environ, options.start_timeout) if options.nodes > 1 else None
        self.selector = selectors.DefaultSelector()
        self.ranks: Ranks | None = None
        self.followers: Followers | None = None
        self.temp: Path | None = None
        folder = Path(environ.get("PHALANX_RUN_DIR") or ".").absolute() / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / f"ray-node{self.topology.node_rank}.log"

    def run(self) -> int:
        processes.adopt_orphans()
        job, step = self.environ.get("SLURM_JOB_ID") or str(os.getpid()), self.environ.get("SLURM_STEP_ID", "")
        self.temp = temp_folder(self.options.temp_dir, job, self.environ)
        found = claim_block(port_blocks(_number(job), _number(step), len(PORTS)))
        if found is None:
            raise PlanError(f"no {len(PORTS)} ports together are free on {socket.gethostname()}: end what uses them")
        self.ports, self.claim = named(found[0]), found[1]
        return roles.lead(self) if self.topology.node_rank == 0 else roles.follow(self)

    def node(self, address: str) -> Node:
        """This node as Ray is to see it."""
        options = self.options
        assert self.temp is not None
        return Node(
            index=self.topology.node_rank,
            address=address,
            ports=self.ports,
            cpus=cpus(options.num_cpus, self.environ),
            gpus=gpus(options.num_gpus, self.environ),
            ranks=options.nproc_per_node,
            memory=options.object_store_memory,
            temp=self.temp,
        )

    def serve_ranks(self, node: Node, address: str, token: str) -> None:
        given: dict[str, object] = {
            "node": node.index,
            "nodes": self.topology.num_nodes,
            "nproc": node.ranks,
            "cwd": str(Path.cwd()),
            # A script that uses Ray itself finds this cluster.
            "environ": {**self.environ, **access(token), "RAY_ADDRESS": address},
        }
        self.ranks = Ranks(self.selector, node.temp / "agent", given)

    def spawn(
        self, words: Sequence[str], environment: Mapping[str, str], output: int | None = None
    ) -> subprocess.Popen[bytes]:
        """A child that does not outlive us; `output` is a file descriptor."""
        child, null = begin(signal.SIGKILL, list(words)), subprocess.DEVNULL
        return subprocess.Popen(child, env=dict(environment), stdin=null, stdout=output, stderr=output)

    def spawn_ray(self, node: Node, token: str, head: str | None = None) -> subprocess.Popen[bytes]:
        environment = node.environment(self.environ, token, self.options.start_timeout)
        with self.log.open("ab") as log:
            return self.spawn(node.start(head), environment, log.fileno())

    def watch(self, ray: subprocess.Popen[bytes], what: str) -> None:
        """Wait a moment, answering whoever asks; RayEnded if it has."""
        self.turn()
        if ray.poll() is not None:
            raise RayEnded(
                f"the Ray {what} on {socket.gethostname()} ended with exit code {shell_code(ray.returncode)}. "
                + self.last_words()
            )

    def turn(self) -> None:
        for key, _ in self.selector.select(_PAUSE):
            answer: Callable[[], None] = key.data
            answer()
        if self.ranks is not None:
            self.ranks.look()

    def last_words(self) -> str:
        return processes.last_words(self.log, self.temp)

    def end(self) -> None:
        """Ranks first, with time to end by themselves; then the other nodes, all of Ray, and its files."""
        _ignore_signals()
        if self.ranks is not None:
            self.ranks.end()
            self._turn_while(self.ranks)
        if self.followers is not None:
            self.followers.end()
            self._turn_while(self.followers)
        processes.kill_all()
        if self.temp is not None:
            shutil.rmtree(self.temp, ignore_errors=True)
        if self.meeting is not None and self.topology.node_rank == 0:
            self.meeting.forget()

    def _turn_while(self, what: Ranks | Followers) -> None:
        limit = time.monotonic() + _FAREWELL
        while what.busy and time.monotonic() < limit:
            self.turn()


def _topology(nodes: int, environ: Mapping[str, str]) -> Topology:
    """This node's place. Where there is one node, a job or step around it has nothing to say."""
    if nodes == 1:
        return Topology(0, 1, 0, 1, 0, 1, None, None, "single")
    topology = Topology.from_environ(environ)
    if topology.num_nodes != nodes or topology.world_size != nodes:
        raise PlanError(
            f"launcher ray was to run on {nodes} nodes, one process each, and this is one of {topology.world_size} on "
            f"{topology.num_nodes}: leave the number of tasks to nodes; no --ntasks or --nodes in srun_args"
        )
    return topology


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def shell_code(code: int) -> int:
    """subprocess's return code as a shell shows it."""
    return code if code >= 0 else 128 - code
