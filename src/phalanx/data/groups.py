"""Accumulation groups: which micro-batches all ranks take together, and how many samples count.

Every rank takes the same number of micro-batches, whatever data it has. One without data repeats its
last batch at weight 0 in training (batch norm needs a full one) and takes zero rows in evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, Protocol

from ..errors import DataError
from .batch import zero_rows
from .empty import ADVICE, emptied
from .order import Deal


class Peers(Protocol):
    """What the ranks tell each other; both calls are collective."""

    rank: int
    world_size: int

    def counts(self, mine: list[int]) -> list[list[int]]:
        """Every rank's list, by rank; all lists are of one length."""

    def borrow(self, batch: Any, src: int) -> Any:
        """Rank `src`'s `batch`, on every rank."""


class Micro(NamedTuple):
    """One micro-batch: `local` samples of this rank count, `total` of all ranks.

    `doubt` says what speaks against `local`, where it had to be read off the batch.
    """

    batch: Any
    local: int
    total: int
    doubt: str = ""


def doubtful(doubt: str) -> str:
    """What to say where a loss would be weighted by a number of samples that isn't sure."""
    return (
        f"backward(loss) weights a loss by its batch's number of samples, which this batch doesn't tell: {doubt}. Say "
        "what the loss is a mean over, in every call of the step: backward(loss, weight=…), such as its graphs' number"
    )


class Fetched(NamedTuple):
    """A fetched batch and its number of samples; `known` is False where that was read off the batch."""

    samples: int
    batch: Any
    known: bool = True
    doubt: str = ""
    plain: bool = False  # made by torch's own collate_fn: samples lie along the first dimensions


@dataclass(slots=True)
class Group:
    """`size` micro-batches with `total` samples over all ranks.

    `consumed` and `batches` are the position after it, counted from the beginning of the pass.
    """

    total: int
    size: int
    micros: Iterator[Micro]
    consumed: int
    batches: int


class Shares:
    """One rank's shares of a pass whose sample counts are known beforehand, from unit `start` on.

    `size_of(a, b)` is the number of samples in the units [a, b); None where a unit is a sample.
    """

    def __init__(self, deal: Deal, start: int, rank: int, size_of: Callable[[int, int], int] | None = None) -> None:
        self.deal, self.start, self.rank = deal, start, rank
        self.batches = deal.batches(start)
        self._size_of = size_of
        # All global batches but the last are complete: no arithmetic in the training loop.
        self._complete = self.batches - 1 if size_of is None else 0
        self._complete_counts = (deal.width, deal.step)

    def mine(self, number: int) -> tuple[int, int]:
        """This rank's units [a, b) of global batch `number`; a == b where it has none."""
        if number < self._complete:
            width, step = self._complete_counts
            low = self.start + number * step + self.rank * width
            return low, low + width
        return self.deal.share(*self._span(number), self.rank)

    def runs_out(self, rank: int) -> bool:
        """Whether `rank` has nothing of the last global batch."""
        if not self.batches:
            return False
        low, high = self._span(self.batches - 1)
        return rank >= high - low

    def counts(self, number: int) -> tuple[int, int]:
        """Samples of this rank and of all ranks in global batch `number`."""
        if number < self._complete:
            return self._complete_counts
        mine, everyone = self.mine(number), self._span(number)
        if self._size_of is None:
            return mine[1] - mine[0], everyone[1] - everyone[0]
        return self._size_of(*mine), self._size_of(*everyone)

    def total(self, first: int, stop: int) -> int:
        """Samples of all ranks in the global batches [first, stop)."""
        if stop <= self._complete:
            return (stop - first) * self._complete_counts[1]
        return sum(self.counts(number)[1] for number in range(first, stop))

    def end(self, number: int) -> int:
        """The position after `number` global batches."""
        return min(self.deal.size, self.start + number * self._complete_counts[1])

    def _span(self, number: int) -> tuple[int, int]:
        return self.start + number * self.deal.step, self.end(number + 1)


def known_groups(
    shares: Shares, batches: Iterator[Any], accumulate: int, done: int, idle: Callable[[Any], Any], first: bool
) -> Iterator[Group]:
    """Groups of a map-style pass: arithmetic alone, and each batch is fetched when its turn comes.

    `batches` gives a batch for each share that isn't empty, and with `first` for the first in any case. `idle`
    makes what a rank gets for an empty share, of its last batch.
    """
    micros = _known_micros(shares, batches, idle, first)
    for begin in range(0, shares.batches, accumulate):
        stop = min(begin + accumulate, shares.batches)
        of_group = islice(micros, stop - begin)
        yield Group(shares.total(begin, stop), stop - begin, of_group, shares.end(stop), done + stop)


def _known_micros(shares: Shares, batches: Iterator[Any], idle: Callable[[Any], Any], first: bool) -> Iterator[Micro]:
    last: Any = None
    for number in range(shares.batches):
        local, total = shares.counts(number)
        if local or (first and number == 0):
            last = next(batches)
        yield Micro(last if local else idle(last), local, total)


def agreed_groups(
    batches: Iterator[Fetched],
    peers: Peers,
    accumulate: int,
    train: bool,
    done: int,
    last: Fetched | None,
    consumed: Callable[[int, int], int],
) -> Iterator[Group]:
    """Groups of a pass whose counts nobody knows: one exchange of counts for each group.

    `last` is what to repeat if there are none (None: nothing yet);
    `consumed(batches, samples)` is the position after so many micro-batches and samples of this call.
    """
    seen = taken = 0
    while True:
        fetched = list(islice(batches, accumulate))
        if fetched:
            last = fetched[-1]
        counts = [one.samples for one in fetched] + [0] * (accumulate - len(fetched))
        doubt = next((one.doubt for one in fetched if one.doubt), "")
        table = peers.counts([len(fetched), int(last is not None), bool(doubt), *counts])
        size = max(row[0] for row in table)
        if size == 0:
            return
        if not doubt and any(row[2] for row in table):
            doubt = "another rank's batch of this step doesn't"
        last = _borrowed(peers, [bool(row[1]) for row in table], last)
        totals = [sum(row[3 + number] for row in table) for number in range(size)]
        seen, taken = seen + size, taken + sum(totals)
        uneven = any(row[0] < size for row in table)
        rest = last.batch if train or not uneven else _nothing(peers, last, len(fetched) < size)
        micros = _agreed_micros(fetched, totals, rest, doubt)
        yield Group(sum(totals), size, micros, consumed(seen, taken), done + seen)
        if size < accumulate:
            return


def _nothing(peers: Peers, last: Fetched, wanted: bool) -> Any:
    """A batch of no samples, where one is wanted. All ranks call it, so that all hear of one that can't be made."""
    batch, problem = None, None
    if wanted:
        try:
            batch = zero_rows(last.batch) if last.plain else emptied(last.batch, last.samples if last.known else None)
        except DataError as error:
            problem = error
    if any(failed for (failed,) in peers.counts([int(problem is not None)])):
        raise problem or DataError(f"another rank has run out of data, and has no batch of none: {ADVICE}")
    return batch


def _borrowed(peers: Peers, have: list[bool], last: Any) -> Any:
    """`last`, or another rank's batch on a rank that never had any."""
    if all(have):
        return last
    lent = peers.borrow(last, src=have.index(True))
    return lent if last is None else last


def _agreed_micros(fetched: list[Fetched], totals: list[int], rest: Any, doubt: str) -> Iterator[Micro]:
    for number, total in enumerate(totals):
        if number < len(fetched):
            yield Micro(fetched[number].batch, fetched[number].samples, total, doubt)
        else:
            yield Micro(rest, 0, total, doubt)
