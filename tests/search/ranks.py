"""Ranks that stay alive between cases: a set of them for each engine and world size, forked once.

A start costs up to a second of CPU, a case in living ranks a few hundredths. A set in which a case
did not end well is killed, and a new one starts with the next case, so that none harms another.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.dist.engines import engine_of, environ_for
from tests.dist.harness import _context, free_ports, rank_environ

PATIENCE = 60.0  # seconds until a case is said to hang
GRACE = 10.0  # and once a rank has failed, until the others, which may wait for it, are


@dataclass(frozen=True)
class Place:
    """Where a case is run: a strategy (`deepspeed-3` is ZeRO's stage 3) and a world size."""

    strategy: str
    size: int

    def __str__(self) -> str:
        return f"{self.strategy} x {self.size}"


@dataclass(frozen=True)
class Answer:
    """What a rank says of a case: its value, the product's refusal, or another failure."""

    value: Any = None
    refusal: str = ""
    failure: str = ""
    cpu: float = 0.0  # seconds of this rank


class Ranks:
    """The living ranks of one engine and world size."""

    def __init__(self, engine: str, size: int, mutant: str) -> None:
        self._engine, self._size, self._mutant = engine, size, mutant
        self._children: list[tuple[Any, Connection]] = []

    def ask(self, function: Callable[..., Any], *args: Any) -> list[Answer]:
        """`function(*args, folder)` in every rank; the answers by rank."""
        if not self._children:
            self._start()
        folder, answers = tempfile.mkdtemp(prefix="phalanx-search-"), []
        try:
            for _, pipe in self._children:
                pipe.send((function, args, folder))
            answers = self._collect(time.monotonic() + PATIENCE)
        finally:
            if not answers or not (self._go_on(answers) or all(answer.value is not None for answer in answers)):
                self.stop()
            shutil.rmtree(folder, ignore_errors=True)
        return answers

    def _go_on(self, answers: list[Answer]) -> bool:
        """After a refusal. Horovod's ranks, once shut down, may abort when they begin anew."""
        return all(answer.refusal for answer in answers) and (self._engine != "horovod" or self._size == 1)

    def _start(self) -> None:
        (port,) = free_ports(1)
        extra = environ_for("horovod", self._size) if self._engine == "horovod" else lambda rank: {}
        for rank in range(self._size):
            environ = {
                "CUDA_VISIBLE_DEVICES": "",
                "DS_ACCELERATOR": "cpu",
                **rank_environ(rank, self._size, port),
                **extra(rank),
            }
            environ.pop("PHALANX_STRATEGY", None)  # each case names its own
            ours, theirs = _context.Pipe()
            child = _context.Process(target=_live, args=(theirs, environ, self._mutant), daemon=True)
            child.start()
            theirs.close()
            self._children.append((child, ours))

    def _collect(self, deadline: float) -> list[Answer]:
        pipes = [pipe for _, pipe in self._children]
        answers: dict[Any, Answer] = {}
        while len(answers) < len(pipes) and (left := deadline - time.monotonic()) > 0:
            for pipe in wait([pipe for pipe in pipes if pipe not in answers], left):
                try:
                    answers[pipe] = pipe.recv()
                except (EOFError, ConnectionError):
                    answers[pipe] = Answer(failure="the process died")
                if answers[pipe].value is None:
                    deadline = min(deadline, time.monotonic() + GRACE)
        hangs = Answer(failure="hangs")
        return [answers.get(pipe, hangs) for pipe in pipes]

    def stop(self) -> None:
        """End the ranks, also those that hang."""
        for child, pipe in self._children:
            child.kill()
            child.join()
            pipe.close()
        self._children = []


def _live(pipe: Connection, environ: dict[str, str], mutant: str) -> None:
    """A rank's life: case after case until the search ends."""
    os.environ.update(environ)
    import torch

    from tests.search import mutants

    torch.set_num_threads(1)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    if not os.environ.get("SEARCH_LOUD"):
        os.dup2(silence, 2)
    mutants.apply(mutant)
    while True:
        try:
            function, args, folder = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        os.chdir(folder)
        begin = time.process_time()
        answer = _answer(function, args)
        pipe.send(replace(answer, cpu=time.process_time() - begin))
        os.chdir("/")


def _answer(function: Callable[..., Any], args: Any) -> Answer:
    from phalanx.errors import PhalanxError

    try:
        return Answer(value=function(*args))
    except PhalanxError as error:
        _tidy()
        return Answer(refusal=f"{type(error).__name__}: {error}")
    except BaseException:
        return Answer(failure=traceback.format_exc(limit=-6))


def _tidy() -> None:
    """What a run leaves to the end of its process when it fails."""
    import torch.distributed as dist

    if "horovod.torch" in sys.modules and sys.modules["horovod.torch"].is_initialized():
        sys.modules["horovod.torch"].shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()
    if "deepspeed" in sys.modules:
        from phalanx.strategies import deepspeed

        deepspeed._forget_groups()


class Pool:
    """The sets of ranks that a search has used, each busy with one case at a time."""

    def __init__(self, mutant: str = "") -> None:
        self._mutant = mutant
        self._sets: dict[tuple[str, int], Ranks] = {}
        self._threads = ThreadPoolExecutor(3)

    def run(self, function: Callable[..., Any], case: Any, places: Iterable[Place]) -> dict[Place, list[Answer]]:
        """`function(case, place)` at each place."""
        sets: dict[tuple[str, int], list[Place]] = {}
        for place in places:
            sets.setdefault((engine_of(place.strategy), place.size), []).append(place)

        def work(key: tuple[str, int]) -> list[tuple[Place, list[Answer]]]:
            ranks = self._sets.setdefault(key, Ranks(*key, self._mutant))
            return [(place, ranks.ask(function, case, place)) for place in sets[key]]

        largest_first = sorted(sets, key=lambda key: -key[1])
        return dict(pair for part in self._threads.map(work, largest_first) for pair in part)

    def close(self) -> None:
        self._threads.shutdown()
        for ranks in self._sets.values():
            ranks.stop()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
