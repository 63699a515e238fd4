"""`prepare_loader`: a user's DataLoader as one rank sees it, and the position in its passes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

from ..errors import DataError
from .feed import Feed, IterableFeed, MapFeed, Position, make_feed
from .groups import Group, Peers
from .seeding import mix


class PreparedLoader:
    """One rank's part of a DataLoader. Each iteration is a new pass over the dataset, in a new order.

    The loader it was made from is left as it was; attributes not found here are read from it.
    """

    def __init__(self, loader: DataLoader[Any], feed: Feed, world_size: int, train: bool, number: int) -> None:
        self._user = loader
        self._feed = feed
        self._train = train
        self._number = number
        self._position = Position()
        self._world_size = world_size
        self._resumed = True  # the position is where the next pass goes on, not where one ended
        self.only: int | None = None  # batches of a plain iteration, which then ends: a dry run's

    @property
    def dataset(self) -> Any:
        """The user's own dataset."""
        return self._user.dataset

    @property
    def batch_size(self) -> int | None:
        """Samples per rank in a full micro-batch; None where batches are made elsewhere."""
        return self._feed.batch_size

    def samples(self) -> int | None:
        """Samples of a pass over all ranks; None where the loader's units aren't samples, or nobody knows."""
        feed = self._feed
        return feed.size() if isinstance(feed, MapFeed) and feed.unit == "sample" else None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_user" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._user, name)

    def __len__(self) -> int:
        """Micro-batches of one pass; TypeError for an iterable dataset that has no length."""
        if isinstance(self._feed, IterableFeed):
            return self._feed.length()
        left = self._feed.left(Position())
        assert left is not None
        return left

    def __iter__(self) -> Iterator[Any]:
        """A new pass: this rank's batches as the workers made them, and no repeated or empty ones."""
        if self._train:
            return islice(self._plain(self._next_pass()), self.only)
        return islice((batch for batch, _ in self._feed.plain(Position(), train=False)), self.only)

    def _plain(self, start: Position) -> Iterator[Any]:
        for batch, after in self._feed.plain(start, train=True):
            yield batch
            self._position = after
        self._position.finished = True

    def groups(self, accumulate: int, train: bool) -> Iterator[Group]:
        """The groups of one pass: the next one in training, pass 0 in evaluation. Collective for iterables.

        The groups' micro-batches have to be taken in turn. In training, `commit` each group when its step
        is done.
        """
        if not train:
            return self._feed.groups(Position(), accumulate, train=False)
        if not self._train:  # prepared as if for evaluation
            check_enough(self._feed, self._world_size)
        return self._training(self._feed.groups(self._next_pass(), accumulate, train=True))

    def _training(self, groups: Iterator[Group]) -> Iterator[Group]:
        yield from groups
        self._position.finished = True

    def _next_pass(self) -> Position:
        if not self._resumed:
            self._position = Position(self._position.index + 1)
        self._resumed = False
        return replace(self._position)

    def commit(self, group: Group) -> None:
        """Move the position past `group`."""
        self._position.consumed, self._position.batches = group.consumed, group.batches

    def finish(self) -> None:
        """The pass in hand is over, though data may be left: the next one follows."""
        self._position = replace(self._position, finished=True)

    def steps_left(self, accumulate: int) -> int | None:
        """Groups of the pass that comes next, all or the rest of a resumed one; None for iterable datasets."""
        left = self._feed.left(self._position if self._resumed else Position())
        return None if left is None else -(-left // accumulate)

    def state_dict(self) -> dict[str, Any]:
        """The position, for a checkpoint; the same on every rank."""
        at = self._position
        return {
            "pass": at.index,
            "consumed": at.consumed,
            "batches": at.batches,
            "finished": at.finished,
            "world_size": self._world_size,
            **({"number": self._number} if self._number else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved position: exactly for map-style datasets, under any number of ranks."""
        self._position = Position(
            index=int(state["pass"]),
            consumed=int(state["consumed"]),
            batches=int(state["batches"]),
            finished=bool(state["finished"]),
        )
        self._resumed = not self._position.finished
        if self._number and self._resumed and self._position.batches and "number" not in state:
            warnings.warn(
                "the checkpoint is of a version that gave all training loaders one order: in what is left of the pass "
                "begun then, a loader other than the first repeats and leaves out samples",
                stacklevel=3,
            )
        before = int(state.get("world_size", self._world_size))
        if self._resumed and before != self._world_size:
            self._rescale(before)

    def _rescale(self, before: int) -> None:
        """Count micro-batches as if the pass had begun with today's ranks."""
        at = self._position
        at.batches = at.batches * before // self._world_size
        if at.batches and isinstance(self._feed, IterableFeed):
            warnings.warn(
                f"an iterable dataset goes on under {self._world_size} ranks in a pass begun under {before}: "
                "about as many samples are skipped as were used, but not exactly the same ones",
                stacklevel=3,
            )


def prepare_loader(
    loader: DataLoader[Any], peers: Peers, seed: int, num_workers: int | None, train: bool, number: int = 0
) -> PreparedLoader:
    """This rank's part of `loader`, whose `batch_size` is per rank; `num_workers` overrides the loader's.

    `number` tells a run's training loaders apart: each has orders and random numbers of its own.

    Settings are kept, with one exception: with `in_order=False` the ranks exchange counts for each group, and
    a resumed pass repeats or leaves out what was out of order.

    Raises DataError (on every rank) for a loader that cannot be shared out, and in training for one that
    has fewer samples than there are ranks or leaves no complete batch.
    """
    feed = make_feed(loader, peers, mix(seed, number) if number else seed, num_workers)
    if train:
        check_enough(feed, peers.world_size)
    return PreparedLoader(loader, feed, peers.world_size, train, number)


def check_enough(feed: Feed, world_size: int) -> None:
    """Training needs a sample for each rank; of an iterable dataset nobody knows before."""
    if not isinstance(feed, MapFeed):
        return
    size, what = feed.size(), "samples" if feed.unit == "sample" else "batches"
    if size < world_size:
        raise DataError(
            f"the training data has {size} {what}, fewer than the {world_size} ranks that share them; "
            f"start at most {size} processes, or use more data"
        )
    if feed.left(Position()) == 0:
        raise DataError(
            f"drop_last=True leaves nothing of {size} {what}: one global batch takes {world_size} ranks times "
            f"{feed.batch_size} samples; lower batch_size or the number of processes, or set drop_last=False"
        )
