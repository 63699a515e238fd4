"""In a Ray Train worker: start the script as a process of its own, in the terminal and environment of its node's
agent. So it finds what it finds under every launcher, whatever Ray has set or redirected."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from typing import Any

from .begin import words as begin
from .node import SOCKET


class RankFailed(Exception):
    """`code` is subprocess's: negative for a signal."""

    def __init__(self, rank: int, code: int) -> None:
        super().__init__(rank, code)
        self.rank, self.code = rank, code

    def __str__(self) -> str:
        return f"rank {self.rank} ended with {self.code}"


def run_rank(config: dict[str, Any]) -> None:
    """Ray Train calls this in each worker; raises RankFailed, which ends the others."""
    import ray.train

    local_rank = ray.train.get_context().get_local_rank()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as agent:
        agent.connect(os.environ[SOCKET])
        terminal, given = receive(agent)
        place = _place(given, local_rank)
        process = subprocess.Popen(
            begin(signal.SIGTERM, [sys.executable, "-m", *config["words"]]),
            env={**given["environ"], **place},
            cwd=given["cwd"],
            stdin=terminal[0],
            stdout=terminal[1],
            stderr=terminal[2],
            start_new_session=True,
        )
        for number in terminal:
            os.close(number)
        rank = int(place["PHALANX_RANK"])
        agent.sendall(json.dumps({"rank": rank, "pid": process.pid}).encode() + b"\n")
        code = process.wait()
        agent.sendall(json.dumps({"code": code}).encode() + b"\n")
    if code:
        raise RankFailed(rank, code)


def receive(agent: socket.socket) -> tuple[list[int], dict[str, Any]]:
    """What `ranks.Ranks` sends: its stdin, stdout and stderr, and a line of JSON."""
    first, terminal, _, _ = socket.recv_fds(agent, 1, 3)
    line = first + agent.makefile("rb").readline()
    given: dict[str, Any] = json.loads(line)
    return terminal, given


def _place(given: dict[str, Any], local_rank: int) -> dict[str, str]:
    """Who this rank is, node by node: Ray numbers nodes in an order of its own."""
    node, size = given["node"], given["nproc"]
    place = {
        "PHALANX_RANK": node * size + local_rank,
        "PHALANX_WORLD_SIZE": given["nodes"] * size,
        "PHALANX_LOCAL_RANK": local_rank,
        "PHALANX_LOCAL_WORLD_SIZE": size,
        "PHALANX_NODE_RANK": node,
        "PHALANX_NUM_NODES": given["nodes"],
        "GROUP_RANK": node,
    }
    return {name: str(value) for name, value in place.items()}
