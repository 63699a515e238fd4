"""`run.main_first()`: what ranks that run one after another tell each other.

They wait by looking into the process group's store, now and then and without a limit: a download may take longer than
any timeout of torch's, whose collectives and whose `store.wait` would give up and fill the log with warnings.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from ..rank.entry import headline
from .comm import ADVICE

log = logging.getLogger("phalanx")

PATIENCE = 30.0  # seconds until a waiting rank says so
_SHORTEST, _LONGEST = 0.002, 1.0  # seconds between looks, which grow with the time waited
_REPORT = 1.0  # seconds in which the rank that failed reports it before the others do


class Turn:
    """One use of `main_first` by this rank. `left` tells whether a rank has ended its run."""

    def __init__(self, store: Store, rank: int, world_size: int, left: Callable[[], bool]) -> None:
        self._store, self._rank, self._world_size, self._left = store, rank, world_size, left

    def wait_for_first(self, group: str) -> None:
        """Return when the first rank of `group` is through; RuntimeError if a rank has failed."""
        self._wait(lambda: self._store.check([f"done/{group}"]), "the rank that goes first")

    def first_is_through(self, group: str) -> None:
        self._store.set(f"done/{group}", "1")

    def fail(self, call: str, error: BaseException) -> None:
        """Tell the others, of several failures the first."""
        try:
            if self._store.add("failures", 1) == 1:
                self._store.set("failed", f"rank {self._rank} failed in {call}: {headline(error)}")
        except RuntimeError:  # the store has gone with rank 0, and this rank's own error is the one to see
            log.warning("rank %d could not tell the others that it failed in %s", self._rank, call)

    def wait_for_all(self) -> None:
        """Return when all ranks are through; RuntimeError if one has failed."""
        self._store.add("through", 1)
        self._wait(lambda: self._store.add("through", 0) == self._world_size, "the others")

    def _wait(self, over: Callable[[], bool], whom: str) -> None:
        begin, said, left = time.monotonic(), False, False
        try:
            while not over():
                waited = time.monotonic() - begin
                if self._store.check(["failed"]):
                    time.sleep(_REPORT)
                    raise RuntimeError(self._store.get("failed").decode())
                if left:  # a look ago: what it had to tell is told
                    raise RuntimeError(f"rank {self._rank} waits in run.main_first(), but a rank has ended. {ADVICE}")
                left = self._left()
                if waited > PATIENCE and not said:
                    said = True
                    log.info("rank %d has waited %.0f s in run.main_first() for %s", self._rank, waited, whom)
                time.sleep(_REPORT if left else min(_LONGEST, max(_SHORTEST, waited / 10)))
        except dist.DistNetworkError as error:
            raise RuntimeError(f"rank {self._rank} lost rank 0 in run.main_first(): {error}") from error
