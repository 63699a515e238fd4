"""Rare collective calls that say what is wrong when ranks don't make them alike, before any data is exchanged.

A call that one rank makes alone would meet another rank's collective of another kind: gloo aborts, NCCL hangs.
So at the calls that must be everybody's (a checkpoint, an evaluation, the end of a loop), ranks first meet in the
process group's store, by the name of the call: three messages a rank, and nothing in a step.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from ..comm import ADVICE
from ..errors import UsageError

log = logging.getLogger("phalanx")

PATIENCE = 30.0  # seconds until a waiting rank says so
LIMIT = 1800.0  # seconds until it gives up, as torch's own collectives do
GOODBYE = 10.0  # seconds that rank 0 waits for others at the end of the run
_LOOK = 1.0  # seconds between looks for ranks that have left
_SHORTEST = 0.0005  # seconds between looks for the others, which grow with the time waited


class Meeting:
    """One rank's side. Meetings are numbered, as every rank comes to each."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._number = 0

    def meet(self, call: str, limit: float = LIMIT) -> None:
        """Return when every rank has come to `call`; UsageError on all of them if one makes another call here."""
        self._number += 1
        place = str(self._number)
        try:
            self._meet(place, call, limit)
        except dist.DistNetworkError as error:
            raise RuntimeError(
                f"rank {self._rank} lost its connection to rank 0 in {call}: {error}. {ADVICE}"
            ) from error

    def leave(self) -> None:
        """This rank makes no more calls: whoever waits for it need not go on."""
        with suppress(RuntimeError):  # the store may have gone with rank 0
            self._store.add("left", 1)

    def see_off(self) -> None:
        """For the rank that keeps the store, after `leave`: wait until the others need it no more."""
        end = time.monotonic() + GOODBYE
        while self._store.add("left", 0) < self._world_size and time.monotonic() < end:
            time.sleep(0.01)

    def _meet(self, place: str, call: str, limit: float) -> None:
        store = self._store
        if store.add(f"{place}/begun", 1) == 1:
            store.set(f"{place}/call", f"rank {self._rank} is in {call}")
        first = store.get(f"{place}/call").decode()
        if not first.endswith(f" is in {call}"):
            store.set(f"{place}/end", f"{first}, but rank {self._rank} in {call}. {ADVICE}")
        store.set(f"{place}/{self._rank}", "1")
        if store.add(f"{place}/come", 1) == self._world_size and not store.check([f"{place}/end"]):
            store.set(f"{place}/end", "")
        self._wait(place, call, limit)
        problem = store.get(f"{place}/end").decode()
        if problem:
            if self._rank == 0:  # the store may end with this process: let the others read it
                time.sleep(_LOOK)
            raise UsageError(problem)

    def _wait(self, place: str, call: str, limit: float) -> None:
        begin, said, left = time.monotonic(), False, 0
        while not self._ended(place):
            waited = time.monotonic() - begin
            if left:  # a look ago: a rank that failed has had time to report it first
                self._give_up(place, call, "before the end of its run")
            left = self._store.add("left", 0)
            if waited > limit:
                self._give_up(place, call, f"in {waited:.0f} s")
            if waited > PATIENCE and not said:
                said = True
                missing = _several(self._missing(place))
                log.warning("rank %d has waited %.0f s in %s for %s. %s", self._rank, waited, call, missing, ADVICE)

    def _ended(self, place: str) -> bool:
        """Whether the meeting is over within a look. `store.wait` would log a warning each time that it is not."""
        begin = time.monotonic()
        while not self._store.check([f"{place}/end"]):
            waited = time.monotonic() - begin
            if waited > _LOOK:
                return False
            time.sleep(max(_SHORTEST, waited / 10))
        return True

    def _missing(self, place: str) -> list[int]:
        return [rank for rank in range(self._world_size) if not self._store.check([f"{place}/{rank}"])]

    def _give_up(self, place: str, call: str, when: str) -> None:
        missing = _several(self._missing(place))
        raise UsageError(f"rank {self._rank} is in {call}, to which {missing} did not come {when}. {ADVICE}")


def _several(ranks: list[int]) -> str:
    names = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"
