"""A loader's passes: where the one in hand stands, and what of it a checkpoint counts as used."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from .feed import Feed, Position

_REMEMBERED = 256  # batches that a script may fetch before its `steps` loop begins


def _nothing() -> Any:
    return None


@dataclass
class Whereabouts:
    """Where the script is, as far as loaders that it iterates by itself have to know."""

    micro: Callable[[], Any] = _nothing  # the micro-batch that a `steps` loop gave out last
    stopped: Callable[[], Any] = _nothing  # whether the end of the training has been agreed on
    epoch: int | None = None  # None outside of `epochs`
    loop: int = 0  # how many `steps` loops have begun
    in_body: bool = False  # whether a checkpoint is taken in the body of a `steps` loop


class Passes:
    """The passes of one loader, by `steps` or by plain iteration.

    Plain iteration beside a `steps` loop has to go on in step with it after a resume. Its batches count
    as used when they are handed out, less those that it was ahead when the loop gave out its first:
    `zip(loader, run.steps(other))` fetches a batch before the step that it belongs to, and a resumed
    script does so again.
    """

    def __init__(self, where: Whereabouts, numbered: bool) -> None:
        self._where, self._numbered = where, numbered
        self.position = Position()
        self.resumed = True  # the position is where the next pass goes on, not where one ended
        self._loaded: dict[str, Any] | None = None
        self._live: object = None  # the plain iteration in hand
        self._made: int | None = None  # the epoch in which it was begun
        self._lasting = False  # whether the script keeps an iterator from epoch to epoch
        self._before: deque[Position] = deque(maxlen=_REMEMBERED)  # of each batch handed out
        self._lead, self._lead_loop = 0, -1  # batches handed out between two loops
        self._fetched_at: Any = None  # the loop's micro-batch when the last one was handed out

    def next(self) -> Position:
        """Where the pass begins that comes next."""
        if not self.resumed:
            self.position = Position(self.position.index + self._numbered)
        self.resumed = False
        self._live = None
        return replace(self.position)

    def next_of_steps(self) -> Position:
        """The same for a pass by `steps`, whose position is moved by `commit`."""
        self._forget()
        return self.next()

    def finish(self) -> None:
        """The pass in hand is over, though data may be left: the next one follows."""
        self.position = replace(self.position, finished=True)

    def plain(self, feed: Feed, train: bool) -> Iterator[Any]:
        """The batches of the next pass. It begins when the first of them is asked for."""
        where = self._where
        if where.micro() is not None and self._made != where.epoch:
            self._lasting = True  # begun inside a `steps` loop, where a script keeps it from epoch to epoch
        return self._plain(feed, train, where.epoch)

    def _plain(self, feed: Feed, train: bool, made: int | None) -> Iterator[Any]:
        begin = self.next()
        mine = self._live = object()
        self._made = made
        try:
            for batch, after in feed.plain(begin, train):
                if self._live is mine:
                    self._hand_out(after)
                yield batch
        except GeneratorExit:  # the script is done with it; where the run stops, it will go on
            if self._live is mine and not self._where.stopped():
                self._forget()
                self.finish()
            raise
        if self._live is mine:
            self.finish()
            if self._where.micro() is None:
                self._forget()

    def _hand_out(self, after: Position) -> None:
        where = self._where
        self._fetched_at = where.micro()
        if self._fetched_at is None:
            self._lead = self._lead + 1 if self._lead_loop == where.loop else 1
            self._lead_loop = where.loop
        if where.epoch != self._made:
            self._lasting = True
        self._before.append(self.position)
        self.position = after

    def _forget(self) -> None:
        self._before.clear()
        self._lead = 0

    def _used(self) -> Position:
        """The position from which a resumed script fetches what this one would fetch next."""
        where = self._where
        ahead = self._lead if self._lead_loop == where.loop - 1 else 0
        if ahead and where.in_body and self._fetched_at is not where.micro():
            ahead -= 1  # the next one will be fetched before the next step begins
        if self.position.finished or not ahead or not self._before:
            return self.position
        return self._before[-min(ahead, len(self._before))]

    def state_dict(self) -> dict[str, Any]:
        at = self._used()
        of_epoch = self._live is not None and not self._lasting and self._made is not None
        return {
            "pass": at.index,
            "consumed": at.consumed,
            "batches": at.batches,
            "finished": at.finished,
            **({"of_epoch": True} if of_epoch and self._made == self._where.epoch else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = state
        self.position = Position(
            index=int(state["pass"]),
            consumed=int(state["consumed"]),
            batches=int(state["batches"]),
            finished=bool(state["finished"]),
        )
        self.resumed = not self.position.finished
        self._live = None
        self._forget()

    def epoch_over(self) -> None:
        """The epoch of the checkpoint has ended: an iteration that was begun in it goes no further."""
        if self.resumed and self._loaded is not None and self._loaded.get("of_epoch"):
            self.load_state_dict({**self._loaded, "finished": True})

    def rewind(self) -> None:
        """As after the resume: what was fetched since belonged to a loop that had been over by then."""
        if self._loaded is not None:
            self.load_state_dict(self._loaded)
