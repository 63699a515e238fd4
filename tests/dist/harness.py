"""Several ranks on this machine for a test, forked from one process that has imported torch.

A launcher would import torch anew in each rank, which takes seconds; here a rank starts in milliseconds.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

# torch's optimizers import torch._dynamo, which takes more than a second in each rank.
_PRELOAD = [
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "phalanx.run",
    "pytest",
    __name__,
]
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(_PRELOAD)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, all different."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def rank_environ(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _child(pipe: Any, environ: Mapping[str, str], folder: str, function: Callable[..., Any], args: Any) -> None:
    os.environ.update(environ)
    os.chdir(folder)
    multiprocessing.set_start_method("fork", force=True)  # of loader workers: Linux's default, not this harness's
    import torch

    torch.set_num_threads(1)
    try:
        answer = (True, function(*args))
    except BaseException:
        answer = (False, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(answer))  # by value: multiprocessing would share tensors that end with the child
    pipe.close()


class RankFailed(AssertionError):
    """A rank raised; `traces` has every failed rank's traceback by rank."""

    def __init__(self, traces: dict[int, str]) -> None:
        super().__init__("\n".join(f"rank {rank}:\n{trace}" for rank, trace in traces.items()))
        self.traces = traces


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    folder: Any,
    env: Mapping[str, str] | Callable[[int], Mapping[str, str]] | None = None,
    timeout: float = 120,
    launched: bool = True,
    cuda: bool = False,
) -> list[Any]:
    """`function(*args)` in `world_size` processes, in `folder`; their results by rank.

    `launched=False` leaves out the rank variables, as for a script that nobody launched. Without `cuda` the ranks
    see no GPU: there may be fewer of them than ranks.
    """
    (port,) = free_ports(1)
    children = []
    for rank in range(world_size):
        extra = env(rank) if callable(env) else env or {}
        hidden = {} if cuda else {"CUDA_VISIBLE_DEVICES": ""}
        environ = {**hidden, **(rank_environ(rank, world_size, port) if launched else {}), **extra}
        ours, theirs = _context.Pipe()
        child = _context.Process(target=_child, args=(theirs, environ, str(folder), function, args))
        child.start()
        theirs.close()
        children.append((child, ours))
    return _collect(children, time.monotonic() + timeout)


def _collect(children: list[Any], deadline: float) -> list[Any]:
    results: list[Any] = []
    traces: dict[int, str] = {}
    for rank, (_, pipe) in enumerate(children):
        result: Any = None
        try:
            if not pipe.poll(max(0.1, deadline - time.monotonic())):
                traces[rank] = "no answer in time: it hangs"
            else:
                fine, result = pickle.loads(pipe.recv_bytes())
                if not fine:
                    traces[rank] = result
                    deadline = min(deadline, time.monotonic() + 15)  # the others may wait for it
        except EOFError:
            traces[rank] = "ended without an answer"
        results.append(result)
    for child, pipe in children:
        child.join(0.2 if traces else 20)
        if child.is_alive():
            child.kill()
            child.join()
        pipe.close()
    if traces:
        raise RankFailed(traces)
    return results
