"""Collectives between ranks, as the rest of the worker half sees them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import UsageError

if TYPE_CHECKING:
    from .turns import Turn

WORDS = (0, 0, 0, 0)  # what else a rank's message may say at a meeting: integers of 64 bits
ADVICE = (
    "All ranks must make this call, none of them under `if run.is_main`, and leave a loop by `break` at the same step "
    "(run.stop() ends all). If a rank failed, its own error is the cause"
)
_LOST = re.compile(r"/gloo/|ProcessGroup|NCCL")  # in the errors of torch's backends


@contextmanager
def naming(call: str) -> Iterator[None]:
    """An exchange that fails inside, because a rank has left or does not come, says in which call it was."""
    try:
        yield
    except RuntimeError as error:
        if not _LOST.search(str(error)):
            raise
        raise RuntimeError(f"{call} did not hear from other ranks: {error}\n{ADVICE}") from error


class Comm:
    """Collectives between the ranks; this one serves a world of one, without torch.distributed.

    Tensors may be on the host or on the rank's device. Every rank must call.
    """

    apart = ""  # the call inside which ranks run one after another

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank = rank
        self.world_size = world_size

    @property
    def active(self) -> bool:
        """Whether torch.distributed serves these calls."""
        return False

    def all_reduce(self, tensor: Tensor, op: str) -> Tensor:
        """`tensor` reduced in place over all ranks; op is sum, min or max."""
        return tensor

    def start_max(self, tensor: Tensor) -> Any:
        """Begin an in-place maximum of a host tensor; `.wait()` on the result ends it."""
        return None

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's `tensor`; shapes must agree."""
        return [tensor]

    def broadcast(self, tensor: Tensor, src: int) -> Tensor:
        """Rank `src`'s `tensor`, in place."""
        return tensor

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's picklable `value`, on all ranks."""
        return [value]

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        """Rank `src`'s picklable `value`."""
        return value

    def barrier(self) -> None:
        """Return when every rank has come here."""

    def meet(
        self,
        call: str,
        limit: float | None = None,
        what: Sequence[str] = (),
        words: Sequence[int] = WORDS,
        problem: str = "",
    ) -> list[list[int]]:
        """Return every rank's `words` when all have come to `call`, given the same: `what` describes it part by part.

        `limit` is how many seconds the others are waited for, by default as long as by torch's collectives.
        UsageError on all ranks where one makes another call, is given something else, or has a `problem`.
        """
        self.check_together(call)
        if problem:
            raise UsageError(problem)
        return [list(words)]

    def check_together(self, call: str) -> None:
        """UsageError where ranks run one after another, as `call` would wait for ever."""
        if self.apart:
            raise UsageError(
                f"{call} inside {self.apart}, where ranks run one after another: all ranks make that call together, "
                "so let it come before or after"
            )

    def turn(self) -> Turn | None:
        """What ranks that run one after another tell each other; None in a world of one."""
        return None

    # What data loaders ask of each other (data.loader.Peers).

    def counts(self, mine: list[int]) -> list[list[int]]:
        """Every rank's list of equally many integers."""
        return [gathered.tolist() for gathered in self.all_gather(torch.tensor(mine, dtype=torch.int64))]

    def borrow(self, batch: Any, src: int) -> Any:
        """Rank `src`'s batch."""
        return self.broadcast_object(batch, src)
