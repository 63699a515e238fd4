"""This node's ranks as its agent sees them: Ray's workers start them, and report by a Unix socket."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..schedulers.failure import signal_name
from ..schedulers.process import PATIENCE


@dataclass
class _Rank:
    connection: socket.socket
    rank: int | None = None
    pid: int | None = None
    heard: bytes = b""


class Ranks:
    """Listens at `path` in the agent's own loop; `given` is told to each rank, with our terminal."""

    def __init__(self, selector: selectors.BaseSelector, path: Path, given: dict[str, object]) -> None:
        self._selector = selector
        self._given = json.dumps(given).encode() + b"\n"
        self._running: list[_Rank] = []
        self._left: dict[int, float] = {}  # process groups whose Ray worker has gone, and when they must have too
        self._ending = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(1024)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        with suppress(OSError):  # a worker that has just been ended
            socket.send_fds(connection, [self._given[:1]], [0, 1, 2])
            connection.sendall(self._given[1:])
        rank = _Rank(connection)
        self._running.append(rank)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._hear(rank))

    def _hear(self, rank: _Rank) -> None:
        try:
            heard = rank.connection.recv(4096)
        except OSError:
            heard = b""
        *lines, rank.heard = (rank.heard + heard).split(b"\n")
        for said in map(json.loads, lines):
            rank.rank, rank.pid = said.get("rank", rank.rank), said.get("pid", rank.pid)
            if "code" in said:
                self._report(rank, said["code"])
                rank.pid = None
        if not heard:
            self._gone(rank)

    def _report(self, rank: _Rank, code: int) -> None:
        """The words that tell a verdict who died; a rank that we end is not to blame."""
        if code and not self._ending:
            how = f"ended with exit code {code}" if code > 0 else f"was killed by signal {-code} ({signal_name(-code)})"
            print(f"ray: rank {rank.rank} on {socket.gethostname()} {how}", file=sys.stderr, flush=True)

    def _gone(self, rank: _Rank) -> None:
        """Ray has ended the worker, and the kernel has told its rank to end (`begin.py`)."""
        self._selector.unregister(rank.connection)
        rank.connection.close()
        self._running.remove(rank)
        if rank.pid is not None:
            self._left[rank.pid] = time.monotonic() + PATIENCE

    def look(self) -> None:
        """To be called now and then: end those that don't end by themselves."""
        for group, limit in list(self._left.items()):
            if not _exists(group):
                del self._left[group]
            elif time.monotonic() > limit:
                _signal(group, signal.SIGKILL)

    def end(self) -> None:
        """Tell all that run to end; whether they have is `busy`."""
        self._ending = True
        for rank in self._running:
            if rank.pid is not None:
                _signal(rank.pid, signal.SIGTERM)
                self._left[rank.pid] = time.monotonic() + PATIENCE

    @property
    def busy(self) -> bool:
        return bool(self._left)


def _exists(group: int) -> bool:
    """Whether any process of it runs; those whose parent has died are our children, and ours to reap."""
    with suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass
    try:
        os.killpg(group, 0)
    except OSError:
        return False
    return True


def _signal(group: int, number: int) -> None:
    with suppress(OSError):
        os.killpg(group, number)
