"""One agent: starts this node's Ray, on the first node the driver too, and ends all that it has started."""

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
from ..ports import claim_block, port_blocks
from ..topology import Topology
from . import processes
from .begin import words as begin
from .driver import Order
from .meeting import DONE, Meeting, head_address, hosts
from .node import PORTS, Node, access, cpus, gpus, named, temp_folder
from .ranks import Ranks

_PAUSE = 0.1  # seconds between looks at our children
_FAREWELL = 10.0  # seconds for the other nodes' agents to end


class Stopped(BaseException):
    """A signal asks for the end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def main(arguments: list[str]) -> int:
    """Until the launch is over; the exit code is the failed rank's on the first node, and 0 on the others."""
    options = parse(arguments)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    agent = None
    try:
        if find_spec("ray") is None:
            raise MissingExtraError("launcher ray needs ray, not installed here: pip install 'phalanx[ray]'")
        agent = Agent(options, os.environ)
        return agent.run()
    except Stopped as stopped:
        return 128 + stopped.number
    except PhalanxError as error:
        print(f"phalanx: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    finally:
        if agent is not None:
            agent.end()


def parse(arguments: list[str]) -> argparse.Namespace:
    """Options before `--`, the rank's module and words after it."""
    own, _, words = _split(arguments)
    parser = argparse.ArgumentParser(prog="phalanx.ray_launch", allow_abbrev=False)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--nproc-per-node", type=int, default=1)
    parser.add_argument("--num-cpus", type=int)
    parser.add_argument("--num-gpus", type=int)
    parser.add_argument("--object-store-memory", type=int, default=100)
    parser.add_argument("--start-timeout", type=int, default=120)
    parser.add_argument("--temp-dir")
    options = parser.parse_args(own)
    options.words = words
    return options


def _split(arguments: list[str]) -> tuple[list[str], str, list[str]]:
    at = arguments.index("--")
    return arguments[:at], "--", arguments[at + 1 :]


def _stop(number: int, _frame: FrameType | None) -> None:
    """The first signal counts: what comes while we end is the same wish."""
    for other in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(other, signal.SIG_IGN)
    raise Stopped(number)


class Agent:
    def __init__(self, options: argparse.Namespace, environ: Mapping[str, str]) -> None:
        self.options, self.environ = options, dict(environ)
        self.limit = time.monotonic() + options.start_timeout
        self.topology = _topology(options.nodes, environ)
        self.job = environ.get("SLURM_JOB_ID") or str(os.getpid())
        self.selector = selectors.DefaultSelector()
        self.followers: list[socket.socket] = []
        self.meeting = Meeting(self.topology, environ, options.start_timeout) if options.nodes > 1 else None
        self.ranks: Ranks | None = None
        self.temp: Path | None = None
        self.log = self._log()

    def run(self) -> int:
        processes.adopt_orphans()
        self.temp = temp_folder(self.options.temp_dir, self.job, self.environ)
        step = self.environ.get("SLURM_STEP_ID", "")
        found = claim_block(port_blocks(_number(self.job), _number(step), len(PORTS)))
        if found is None:
            raise PlanError(f"no {len(PORTS)} ports together are free on {socket.gethostname()}: end what uses them")
        self.ports, self.claim = named(found[0]), found[1]
        return self._lead() if self.topology.node_rank == 0 else self._follow()

    # --- the first node

    def _lead(self) -> int:
        import secrets

        token = secrets.token_hex(32)
        node = self._node(head_address(self.topology, self.environ))
        address = f"{_bracketed(node.address)}:{node.ports['gcs']}"
        self._serve_ranks(node, address, token)
        environment = node.environment(self.environ, token, self.options.start_timeout)
        ray = self._spawn(node.start(), environment)
        self._until_ready(ray, node)
        if self.meeting is not None:
            self._serve_followers(token, address)
            self.meeting.publish(node.ports["agent"], token)
        driver = self._spawn_driver(address, environment)
        while driver.poll() is None:
            self._watch(ray, "head")
        return _shell(driver.returncode)

    def _until_ready(self, ray: subprocess.Popen[bytes], node: Node) -> None:
        port = node.ports["gcs"]
        while not _listens(node.address, port):
            self._watch(ray, "head")
            if time.monotonic() > self.limit:
                raise PlanError(
                    f"the Ray head on {socket.gethostname()} did not come up within {self.options.start_timeout} s "
                    f"(nothing listened on its port {port}); more time: ray.start_timeout. {self._last_words()}"
                )

    def _spawn_driver(self, address: str, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        assert self.temp is not None
        order = Order(
            address=address,
            hosts=hosts(self.environ) if self.meeting else [socket.gethostname()],
            nproc=self.options.nproc_per_node,
            words=self.options.words,
            log=str(self.log),
            storage=str(self.temp / "train"),
            limit=max(1.0, self.limit - time.monotonic()),
            start_timeout=self.options.start_timeout,
        )
        words = [sys.executable, "-m", "phalanx.ray_launch.driver", order.to_json()]
        return subprocess.Popen(begin(signal.SIGKILL, words), env=environment, stdin=subprocess.DEVNULL)

    def _serve_followers(self, token: str, address: str) -> None:
        self.claim.listen(4096)

        def accept() -> None:
            follower, _ = self.claim.accept()
            self.selector.register(follower, selectors.EVENT_READ, lambda: hear(follower))

        def hear(follower: socket.socket) -> None:
            try:
                said = follower.recv(4096)
                if said.strip() == token.encode():
                    follower.sendall(address.encode() + b"\n")
                    self.followers.append(follower)
                    return
            except OSError:
                pass
            self.selector.unregister(follower)
            follower.close()
            if follower in self.followers:
                self.followers.remove(follower)

        self.selector.register(self.claim, selectors.EVENT_READ, accept)

    # --- the others

    def _follow(self) -> int:
        assert self.meeting is not None
        head, address, token = self.meeting.join()
        node = self._node(str(head.getsockname()[0]).removeprefix("::ffff:"))
        self._serve_ranks(node, address, token)
        ray = self._spawn(node.start(address), node.environment(self.environ, token, self.options.start_timeout))
        said: list[bytes] = []
        head.settimeout(None)
        self.selector.register(head, selectors.EVENT_READ, lambda: said.append(_received(head)))
        while not said:
            self._watch(ray, "node")
        if said[0] != DONE:
            print(f"ray: {hosts(self.environ)[0]}, the head's node, has gone", file=sys.stderr, flush=True)
            return 1
        return 0

    # --- both

    def _node(self, address: str) -> Node:
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

    def _serve_ranks(self, node: Node, address: str, token: str) -> None:
        environ = {**self.environ, **access(token), "RAY_ADDRESS": address}  # for scripts that use Ray themselves
        given: dict[str, object] = {
            "node": node.index,
            "nodes": self.topology.num_nodes,
            "nproc": node.ranks,
            "cwd": str(Path.cwd()),
            "environ": environ,
        }
        self.ranks = Ranks(self.selector, node.temp / "agent", given)

    def _spawn(self, words: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                begin(signal.SIGKILL, list(words)), env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _watch(self, ray: subprocess.Popen[bytes], what: str) -> None:
        """Wait a moment, answering whoever asks; PlanError if Ray has ended."""
        self._turn()
        if ray.poll() is not None:
            raise PlanError(
                f"the Ray {what} on {socket.gethostname()} ended with exit code {_shell(ray.returncode)}. "
                + self._last_words()
            )

    def _turn(self) -> None:
        for key, _ in self.selector.select(_PAUSE):
            answer: Callable[[], None] = key.data
            answer()
        if self.ranks is not None:
            self.ranks.look()

    def _log(self) -> Path:
        folder = Path(self.environ.get("PHALANX_RUN_DIR") or ".") / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        return folder.absolute() / f"ray-node{self.topology.node_rank}.log"

    def _last_words(self) -> str:
        return processes.last_words(self.log, self.temp)

    def end(self) -> None:
        """Ranks first, with time to end by themselves; then the other nodes, all of Ray, and its files."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        if self.ranks is not None:
            self.ranks.end()
            while self.ranks.busy:
                self._turn()
        for follower in self.followers:
            follower.sendall(DONE)
        limit = time.monotonic() + _FAREWELL
        while self.followers and time.monotonic() < limit:
            self._turn()
        processes.kill_all()
        if self.temp is not None:
            shutil.rmtree(self.temp, ignore_errors=True)
        if self.meeting is not None and self.topology.node_rank == 0:
            self.meeting.forget()


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


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _listens(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=1).close()
    except OSError:
        return False
    return True


def _received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(64)
    except OSError:
        return b""


def _shell(code: int) -> int:
    return code if code >= 0 else 128 - code
