"""Ending all ranks after the same step, when one of them asks.

Every n steps the ranks take the maximum of four integers: does anyone want to stop, what one such exchange
costs, the shortest step, and who is slowest. It runs beside the next step and is read at that step's end, so
all ranks read the same answer at the same step. n follows from the exchanged cost and step time, so that
the exchange takes under 0.1% of the time, and is the same everywhere because its inputs are.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from ..strategies.comm import Comm

_SHARE = 1000  # the exchange may take one part in so many of the step time
_LONGEST = 10_000  # steps between exchanges at most
_RANK_BITS = 20


class Stop:
    """The agreed stop. `asked` is this rank's wish, `agreed` everybody's decision."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self.asked = False
        self.agreed = False
        self.slowest = 0  # the rank whose steps took longest in the last window
        self._every = 1
        self._next = 1
        self._cost = 0.0
        self._pending: tuple[Any, torch.Tensor] | None = None

    def step_done(self, step_of_loop: int, seconds: float) -> bool:
        """Called by all ranks after each step of a loop, counted from 1; whether to end now."""
        if self._comm.world_size == 1:
            self.agreed = self.asked
        elif self._pending is not None:
            self._read()
            self._next = step_of_loop + self._every
        elif step_of_loop >= self._next:
            self._send(seconds)
        return self.agreed

    def loop_done(self) -> bool:
        """Called by all ranks at a loop's end: settles what was asked during its last steps."""
        if self._comm.world_size == 1:
            self.agreed = self.asked
        else:
            if self._pending is not None:
                self._read()
            asked = self._comm.all_reduce(torch.tensor([int(self.asked)]), "max")
            self.agreed = bool(asked.item())
        self._next = 1
        return self.agreed

    def now(self) -> None:
        """Called by all ranks at the same step: all loops end here, as after an agreed wish."""
        self.loop_done()
        self.agreed = True

    def _send(self, seconds: float) -> None:
        begin = time.perf_counter()
        microseconds = int(seconds * 1e6)
        slow = (microseconds << _RANK_BITS) | self._comm.rank
        words = torch.tensor([int(self.asked), int(self._cost * 1e9), -int(seconds * 1e9), slow])
        self._pending = (self._comm.start_max(words), words)
        self._cost = time.perf_counter() - begin

    def _read(self) -> None:
        assert self._pending is not None
        begin = time.perf_counter()
        work, words = self._pending
        self._pending = None
        if work is not None:
            work.wait()
        else:
            self._comm.all_reduce(words, "max")
        self._cost += time.perf_counter() - begin
        asked, cost, step, slow = words.tolist()
        self.agreed = bool(asked)
        self.slowest = slow & ((1 << _RANK_BITS) - 1)
        self._every = max(1, min(_LONGEST, cost * _SHARE // max(1, -step)))
