"""`prepare_loader`: a user's DataLoader as one rank sees it, and the position in its passes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

from ..config import JobConfig
from ..config.global_batch import share_batch
from ..errors import CheckpointError, DataError
from .feed import Feed, IterableFeed, MapFeed, Position, make_feed
from .groups import Group, Peers
from .passes import Passes, Whereabouts
from .seeding import mix

_NAMES = {"dataset": "a dataset", "units": "an order"}


class PreparedLoader:
    """One rank's part of a DataLoader. Each iteration is a new pass over the dataset, in a new order.

    The loader it was made from is left as it was; attributes not found here are read from it.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        feed: Feed,
        world_size: int,
        train: bool,
        number: int,
        where: Whereabouts | None = None,
    ) -> None:
        self._user = loader
        self._feed = feed
        self._train = train
        self._number = number
        self._world_size = world_size
        self.only: int | None = None  # batches of a plain iteration, which then ends: a dry run's
        self._saved: dict[str, Any] = {}  # the state that was loaded
        self.evaluated = False  # whether evaluations have used it
        self.accumulate: int | None = None  # micro-batches per step, where `global_batch` decides
        where = where or Whereabouts()
        self._passes = Passes(where, numbered=True)
        # Of a loader that isn't for training, plain iteration is always the same pass.
        self._plain_passes = self._passes if train else Passes(where, numbered=False)

    @property
    def dataset(self) -> Any:
        """The user's own dataset."""
        return self._user.dataset

    @property
    def batch_size(self) -> int | None:
        """Samples per rank in a full micro-batch; None where batches are made elsewhere."""
        return self._feed.batch_size

    def share_steps(self, config: JobConfig) -> None:
        """Let each step have `config.global_batch` samples, if that is set. ConfigError if it can't."""
        if config.global_batch is None or self.accumulate is not None:
            return
        if self.batch_size is None:
            raise DataError(
                f"global_batch={config.global_batch} needs a loader with a batch_size: with a batch_sampler of your "
                "own, or batch_size=None, nobody knows a batch's samples beforehand"
            )
        size, self.accumulate = share_batch(config, self._world_size, self.batch_size)
        self._feed.resize(size, config.global_batch)

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
        self.evaluated = True
        batches = self._plain_passes.plain(self._feed, self._train)
        return batches if self.only is None else islice(batches, self.only)

    def groups(self, accumulate: int, train: bool) -> Iterator[Group]:
        """The groups of one pass: the next one in training, pass 0 in evaluation. Collective for iterables.

        The groups' micro-batches have to be taken in turn. In training, `commit` each group when its step
        is done.
        """
        if not train:
            return self._feed.groups(Position(), accumulate, train=False)
        if not self._train:  # prepared as if for evaluation
            check_enough(self._feed, self._world_size)
        return self._training(self._feed.groups(self._passes.next_of_steps(), accumulate, train=True))

    def evaluation(self, even: bool) -> Iterator[Any]:
        """The batches of pass 0; with `even` as many on each rank, else this rank's own ones only."""
        if not even:
            return (batch for batch, _ in self._feed.plain(Position(), train=False))
        return (micro.batch for group in self.groups(1, train=False) for micro in group.micros)

    def even(self) -> bool:
        """Whether it is known that all ranks have equally many batches of their own."""
        return isinstance(self._feed, MapFeed) and self._feed.even()

    def _training(self, groups: Iterator[Group]) -> Iterator[Group]:
        yield from groups
        self._passes.finish()

    @property
    def pass_over(self) -> bool:
        """Whether the last pass of `steps` came to its end."""
        return self._passes.position.finished

    def commit(self, group: Group) -> None:
        """Move the position past `group`."""
        position = self._passes.position
        position.consumed, position.batches = group.consumed, group.batches

    def finish(self) -> None:
        """The pass in hand is over, though data may be left: the next one follows."""
        self._passes.finish()

    def steps_left(self, accumulate: int) -> int | None:
        """Groups of the pass that comes next, all or the rest of a resumed one; None for iterable datasets."""
        left = self._feed.left(self._passes.position if self._passes.resumed else Position())
        return None if left is None else -(-left // accumulate)

    def state_dict(self) -> dict[str, Any]:
        """The position, for a checkpoint; the same on every rank."""
        return {
            **self._passes.state_dict(),
            "world_size": self._world_size,
            **self._feed.sizes(),
            **self._order_state(),
            **({"number": self._number} if self._number else {}),
            **({} if self._train else {"plain": self._plain_passes.state_dict()}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved position: exactly for map-style datasets, under any number of ranks."""
        before = int(state.get("world_size", self._world_size))
        self._passes.load_state_dict(dict(state))
        if not self._train and "plain" in state:
            self._plain_passes.load_state_dict(state["plain"])
        at = self._passes.position
        if self._number and not at.finished and at.batches and "number" not in state:
            warnings.warn(
                "the checkpoint is of a version that gave all training loaders one order: in what is left of the pass "
                "begun then, a loader other than the first repeats and leaves out samples",
                stacklevel=3,
            )
        for passes in {self._passes, self._plain_passes}:
            if before != self._world_size and passes.resumed:
                self._rescale(passes, before)
        self._saved = dict(state)
        if isinstance(self._feed, MapFeed) and self._feed.shared_order is not None and "sampler" in state:
            self._feed.shared_order.load_state_dict(state["sampler"])

    def epoch_over(self) -> None:
        """The epoch in which the run resumed has ended."""
        for passes in {self._passes, self._plain_passes}:
            passes.epoch_over()

    def _order_state(self) -> dict[str, Any]:
        shared = self._feed.shared_order if isinstance(self._feed, MapFeed) else None
        if shared is None:
            return {}
        at = self._passes.position
        return {"sampler": shared.state_dict(None if at.finished else at.index)}

    def go_on(self, epoch_ended: bool) -> None:
        """After `load_state_dict`: an epoch's end is that of plain iterations too; CheckpointError for a pass
        that can't go on because there are more or fewer samples now."""
        for passes in {self._passes, self._plain_passes}:
            if epoch_ended:
                passes.epoch_over()
            if passes.resumed:
                self._check_size(passes)

    def _check_size(self, passes: Passes) -> None:
        at, feed = passes.position, self._feed
        old, new = self._saved, feed.sizes()
        if not at.consumed or not isinstance(feed, MapFeed):
            return
        for what in ("dataset", "units"):
            if what not in old or what not in new or old[what] == new[what]:
                continue
            if "units" in old and not feed.deal(old["units"], old["world_size"]).batches(at.consumed):
                at.consumed = feed.size()  # nothing was left, and nothing is
                return
            raise CheckpointError(
                f"the checkpoint was saved in the middle of a pass over {_NAMES[what]} of {old[what]}, which has "
                f"{new[what]} now: what is left of that pass can't be told. Resume with {old[what]}, or from a "
                "checkpoint of an epoch's end, after which the data may grow or shrink"
            )

    def rewind(self) -> None:
        """As after the resume, since a loop has been repeated for form's sake."""
        for passes in {self._passes, self._plain_passes}:
            passes.rewind()

    def _rescale(self, passes: Passes, before: int) -> None:
        """Count micro-batches as if the pass had begun with today's ranks."""
        at = passes.position
        at.batches = at.batches * before // self._world_size
        if at.batches and isinstance(self._feed, IterableFeed):
            warnings.warn(
                f"an iterable dataset goes on under {self._world_size} ranks in a pass begun under {before}: "
                "about as many samples are skipped as were used, but not exactly the same ones",
                stacklevel=3,
            )


def prepare_loader(
    loader: DataLoader[Any],
    peers: Peers,
    seed: int,
    num_workers: int | None,
    train: bool,
    number: int = 0,
    where: Whereabouts | None = None,
    config: JobConfig | None = None,
) -> PreparedLoader:
    """This rank's part of `loader`, whose `batch_size` is per rank; `num_workers` overrides the loader's.

    `number` tells a run's training loaders apart: each has orders and random numbers of its own.

    Settings are kept, with one exception: with `in_order=False` the ranks exchange counts for each group, and
    a resumed pass repeats or leaves out what was out of order.

    Raises DataError (on every rank) for a loader that cannot be shared out, and in training for one that
    has fewer samples than there are ranks or leaves no complete batch.
    """
    feed = make_feed(loader, peers, mix(seed, number) if number else seed, num_workers)
    prepared = PreparedLoader(loader, feed, peers.world_size, train, number, where)
    if train:
        if config is not None:
            prepared.share_steps(config)
        check_enough(feed, peers.world_size)
    return prepared


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
            f"drop_last=True leaves nothing of {size} {what}: {feed.complete_step(world_size)}; lower batch_size or "
            "the number of processes, or set drop_last=False"
        )
