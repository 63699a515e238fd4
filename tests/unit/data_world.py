"""Several ranks in one process, for tests of the data part."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any


def flat(lists: Iterable[Iterable[Any]]) -> list[Any]:
    """The items of all `lists`, in order."""
    return list(chain.from_iterable(lists))


class Alone:
    """Peers of a rank whose loader never needs to communicate; a test fails if it does."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size

    def counts(self, mine: list[int]) -> list[list[int]]:
        assert self.world_size == 1, "communicated"
        return [mine]

    def borrow(self, batch: Any, src: int) -> Any:
        raise AssertionError("borrowed")


class _Member:
    def __init__(self, rank: int, world_size: int, turn: threading.Lock, barrier: threading.Barrier, slots: list[Any]):
        self.rank, self.world_size = rank, world_size
        self._turn, self._barrier, self._slots = turn, barrier, slots
        self.borrowed = 0

    def counts(self, mine: list[int]) -> list[list[int]]:
        return self._exchange(list(mine))

    def borrow(self, batch: Any, src: int) -> Any:
        self.borrowed += 1
        return self._exchange(batch)[src]

    def _exchange(self, value: Any) -> list[Any]:
        self._slots[self.rank] = value
        self._wait()
        everyone = list(self._slots)
        self._wait()
        return everyone

    def _wait(self) -> None:
        self._turn.release()
        try:
            self._barrier.wait(timeout=120)
        finally:
            self._turn.acquire()


def in_ranks(world_size: int, function: Callable[[Any], Any]) -> list[Any]:
    """`function(peers)` for each rank; one runs at a time, until it waits for the others. Results by rank."""
    turn, barrier = threading.Lock(), threading.Barrier(world_size)
    slots: list[Any] = [None] * world_size
    results: list[Any] = [None] * world_size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        with turn:
            try:
                results[rank] = function(_Member(rank, world_size, turn, barrier, slots))
            except BaseException as error:
                errors.append(error)
                barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    broken = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if broken or errors:
        raise (broken or errors)[0]
    return results
