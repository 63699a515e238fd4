"""Collective calls of a script say what is wrong when ranks don't make them alike, before any data is exchanged.

A call that one rank makes alone would meet another rank's collective of another kind: gloo aborts, NCCL hangs.
So each call that must be everybody's (a checkpoint, an evaluation, the end of a loop, a reduce) begins with the same
exchange: one message of a fixed size from each rank, in a group that carries nothing else, which tells the call and
what it is given by a hash, and has room for a few numbers. Ranks compare all messages; where two differ, all ranks
exchange the words behind the hashes and raise. Nothing of this is in a step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from hashlib import blake2b
from itertools import zip_longest
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from ..errors import UsageError
from .comm import ADVICE, WORDS

log = logging.getLogger("phalanx")

PATIENCE = 30.0  # seconds until a waiting rank says so
LIMIT = 1800.0  # seconds until it gives up, as torch's own collectives do
GOODBYE = 10.0  # seconds that rank 0 waits for others at the end of the run
_LOOK = 1.0  # seconds between looks for ranks that have left
_SHORTEST = 0.0005  # seconds between looks for the others, which grow with the time waited


class Meeting:
    """One rank's side. Calls are numbered, as every rank makes each: the first that differs has one number on all.

    `gather(table, mine, limit)` begins an all-gather of `mine` into the rows of `table` that fails after `limit`
    seconds, and `tell` is an all-gather of an object.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        gather: Callable[[torch.Tensor, torch.Tensor, float], Any],
        tell: Callable[[Any], list[Any]],
    ) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._gather, self._tell = gather, tell
        self._number = 0

    def meet(
        self,
        call: str,
        limit: float = LIMIT,
        what: Sequence[str] = (),
        words: Sequence[int] = WORDS,
        problem: str = "",
    ) -> list[list[int]]:
        """Every rank's `words`, when all have come to `call` with the same `what`; else UsageError on all of them.

        `problem` is this rank's own reason to fail, which then is every rank's.
        """
        self._number += 1
        digest = blake2b("\0".join((call, *what)).encode(errors="surrogatepass"), digest_size=8).digest()
        mine = torch.tensor([int.from_bytes(digest, "little", signed=True), bool(problem), *words], dtype=torch.int64)
        table = torch.empty(self._world_size, len(mine), dtype=torch.int64)
        self._finish(self._gather(table, mine, limit), call, limit)
        rows = table.tolist()
        hashed = rows[0][0]
        if any(row[0] != hashed or row[1] for row in rows):
            self._fail(call, what, problem)
        return [row[2:] for row in rows]

    def leave(self) -> None:
        """This rank makes no more calls: whoever waits for it need not go on."""
        with suppress(RuntimeError):  # the store may have gone with rank 0
            self._store.set(f"left/{self._rank}", "1")
            self._store.add("left", 1)

    def see_off(self) -> None:
        """For the rank that keeps the store, after `leave`: wait until the others need it no more."""
        end = time.monotonic() + GOODBYE
        while self._store.add("left", 0) < self._world_size and time.monotonic() < end:
            time.sleep(0.01)

    def _fail(self, call: str, what: Sequence[str], problem: str) -> NoReturn:
        """Every rank is here, since all have seen the same messages."""
        told = self._tell((problem, [call, *what]))
        for rank, (trouble, _) in enumerate(told):
            if trouble:
                raise UsageError(f"rank {rank}: {trouble}")
        for rank, (_, parts) in enumerate(told):
            for place, (theirs, first) in enumerate(zip_longest(parts, told[0][1], fillvalue="nothing more")):
                if theirs != first:
                    raise UsageError(_difference(place, told[0][1][0], first, rank, theirs))
        raise AssertionError("messages differ, and what they are made of does not")

    def _finish(self, work: Any, call: str, limit: float) -> None:
        """Wait for the exchange, and look now and then whether it can still come to its end."""
        begin = time.monotonic()
        try:
            if not _done(work):
                self._wait(work, call, begin, limit)
        except dist.DistNetworkError as error:
            raise RuntimeError(self._lost(call, "rank 0")) from error
        except RuntimeError as error:
            gone = self._gone(call)
            if gone:
                self._give_up(call, gone, "before the end of its run")
            waited = time.monotonic() - begin
            if waited > 0.9 * limit:  # gloo has one of its own
                self._give_up(call, self._missing(), f"in {waited:.0f} s")
            raise RuntimeError(self._lost(call, "another rank")) from error

    def _wait(self, work: Any, call: str, begin: float, limit: float) -> None:
        self._store.set(f"{self._number}/{self._rank}", "1")
        said, gone = False, False
        while not _done(work):
            if gone:  # a look ago: a rank that failed has had time to report it first
                self._give_up(call, self._gone(call), "before the end of its run")
            gone = self._store.add("left", 0) > 0
            waited = time.monotonic() - begin
            if waited > limit:
                self._give_up(call, self._missing(), f"in {waited:.0f} s")
            if waited > PATIENCE and not said:
                said = True
                missing = _several(self._missing())
                log.warning("rank %d has waited %.0f s in %s for %s. %s", self._rank, waited, call, missing, ADVICE)

    def _missing(self) -> list[int]:
        return [rank for rank in range(self._world_size) if not self._store.check([f"{self._number}/{rank}"])]

    def _gone(self, call: str) -> list[int]:
        """The ranks that have left."""
        try:
            return [rank for rank in range(self._world_size) if self._store.check([f"left/{rank}"])]
        except RuntimeError as error:
            raise RuntimeError(self._lost(call, "rank 0")) from error

    def _lost(self, call: str, whom: str) -> str:
        return f"rank {self._rank} lost its connection to {whom} in {call}. {ADVICE}"

    def _give_up(self, call: str, missing: list[int], when: str) -> NoReturn:
        if self._rank == 0:  # the store may end with this process: let the others read it
            time.sleep(_LOOK)
        raise UsageError(f"rank {self._rank} is in {call}, to which {_several(missing)} did not come {when}. {ADVICE}")


def _done(work: Any) -> bool:
    """Whether it ends within a look; raises what it failed with."""
    with suppress(RuntimeError):  # not yet, or a failure
        work.wait(timedelta(seconds=_LOOK))
        return True
    if not work.is_completed():
        return False
    work.wait()
    return True


def _difference(place: int, call: str, first: str, rank: int, theirs: str) -> str:
    if place == 0:
        return f"rank 0 is in {first}, but rank {rank} in {theirs}. {ADVICE}"
    return (
        f"rank 0 is in {call} with {_short(first)}, but rank {rank} with {_short(theirs)}: give it the same keys, "
        "types and shapes on all ranks"
    )


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}…"


def _several(ranks: list[int]) -> str:
    names = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"
