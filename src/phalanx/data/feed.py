"""Where batches come from: torch's own DataLoader behind, told what this rank's share is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, default_collate, default_convert

from ..errors import DataError
from .batch import zero_rows
from .empty import ADVICE, Empty, Learning, weigh
from .firsts import check_firsts
from .groups import Fetched, Group, Peers, Shares, agreed_groups, known_groups
from .iterable import Counted, SplitDataset, split_over_ranks
from .listed import SharedOrder
from .order import Deal, Order, epoch_order, take
from .seeding import ProbeKeys, SeededDataset, Stream, draws_nothing, generator, mix, undisturbed

_STRETCH = 4096  # units of an order that become plain values at once


@dataclass(slots=True)
class Position:
    """Where a training pass stands: what was consumed, never what was prefetched.

    `consumed` counts units of the epoch order (samples; batches under a custom batch_sampler or
    batch_size=None), for iterable datasets samples; `batches` counts micro-batches of one rank.
    """

    index: int = 0
    consumed: int = 0
    batches: int = 0
    finished: bool = False


class Feed(Protocol):
    """A source of batches for one rank; `train` is False for an evaluation, which is always pass 0."""

    batch_size: int | None

    def resize(self, batch_size: int, step: int) -> None:
        """Make batches of another size from the next pass on, with `step` samples in a complete step."""

    def left(self, position: Position) -> int | None:
        """Micro-batches from `position` to the end of the pass; None where unknown."""

    def groups(self, position: Position, accumulate: int, train: bool) -> Iterator[Group]:
        """The groups from `position` on."""

    def plain(self, position: Position, train: bool) -> Iterator[tuple[Any, Position]]:
        """This rank's own batches from `position` on, each with the position after it."""

    def sizes(self) -> dict[str, int]:
        """What must not change in the middle of a pass."""


def loader_settings(loader: DataLoader[Any], num_workers: int | None) -> dict[str, Any]:
    """Keyword arguments for a DataLoader like `loader`, apart from dataset, sampler and collate_fn."""
    workers = loader.num_workers if num_workers is None else num_workers
    settings: dict[str, Any] = {
        "num_workers": workers,
        "pin_memory": loader.pin_memory,
        "worker_init_fn": loader.worker_init_fn,
    }
    if workers:
        settings |= {
            "timeout": loader.timeout,
            "multiprocessing_context": loader.multiprocessing_context,
            "persistent_workers": loader.persistent_workers,
            "prefetch_factor": loader.prefetch_factor,
            "in_order": loader.in_order,
        }
    return settings


class _Keys:
    """The sampler of the DataLoader behind: each iteration takes what was put into `keys` just before."""

    def __init__(self) -> None:
        self.keys: Iterable[Any] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.keys)


class MapFeed:
    """Map-style datasets."""

    def __init__(self, loader: DataLoader[Any], peers: Peers, seed: int, num_workers: int | None) -> None:
        self._peers, self._seed = peers, seed
        self._dataset: Any = loader.dataset
        self._whole = 0
        sampler, self.unit = _unit(loader)
        plain_batches = type(loader.batch_sampler) is BatchSampler
        self.batch_size = loader.batch_sampler.batch_size if plain_batches else None  # type: ignore[union-attr]
        self._drop_last = bool(plain_batches and loader.batch_sampler.drop_last)  # type: ignore[union-attr]
        self._order = epoch_order(sampler, seed, peers)
        settings = loader_settings(loader, num_workers)
        self._counts_known = self.unit != "item" and settings.get("in_order", True)
        collate = loader.collate_fn
        self._own_collate = collate not in (default_collate, default_convert)
        self._seeded = not draws_nothing(loader.dataset) or self._own_collate
        self._keys = _Keys()
        self._generator = generator(seed)
        self._apart = self._seeded and not settings["num_workers"]
        self._here = self.unit != "item" and not settings["num_workers"] and not settings["pin_memory"]
        if self.unit != "item" and not self._counts_known:
            collate = Counted(collate, None)
        elif self.unit != "item" and self._own_collate:
            collate = Learning(collate)
        self._loader: DataLoader[Any] = DataLoader(
            SeededDataset(loader.dataset, seed) if self._seeded else loader.dataset,
            collate_fn=collate,
            generator=self._generator,
            **({"sampler": self._keys, "batch_size": None} if self.unit == "item" else {"batch_sampler": self._keys}),
            **settings,
        )

    def size(self) -> int:
        """Units in a pass."""
        return self._order.size()

    def resize(self, batch_size: int, step: int) -> None:
        self.batch_size, self._whole = batch_size, step

    def complete_step(self, world_size: int) -> str:
        """What one takes, in words."""
        if self._whole:
            return f"one step takes global_batch={self._whole}"
        return f"one global batch takes {world_size} ranks times {self.batch_size} samples"

    def left(self, position: Position) -> int | None:
        return self._deal(self.size()).batches(position.consumed)

    def groups(self, position: Position, accumulate: int, train: bool) -> Iterator[Group]:
        learns = not train and self._counts_known and self._own_collate
        shares, batches = self._pass(position, train, learns)
        done = position.batches
        if self._counts_known:
            idle: Callable[[Any], Any] = _same if train else zero_rows
            if learns and any(map(shares.runs_out, range(self._peers.world_size))):
                idle = self._learnt(shares, batches)
            return known_groups(shares, batches, accumulate, done, idle, not learns)

        def consumed(taken: int, _: int) -> int:
            return shares.end(taken)

        fetched = _counted(batches, not self._own_collate) if self.unit != "item" else _weighed(batches)
        low, high = shares.mine(0)
        if shares.batches and low == high:
            # This rank's only batch is a stand-in, of which no sample counts.
            fetched = (one._replace(samples=0) for one in fetched)
        return agreed_groups(fetched, self._peers, accumulate, train, done, None, consumed)

    def _learnt(self, shares: Shares, batches: Iterator[Any]) -> Callable[[Any], Any]:
        """What makes the batch of a rank that has run out. DataError on all ranks where there can't be one."""
        empty = next(batches) if shares.runs_out(self._peers.rank) else Empty(None)
        bad = [rank for rank, (bad,) in enumerate(self._peers.counts([int(bool(empty.problem))])) if bad]
        if bad:
            raise DataError(
                f"rank {bad[0]} runs out of data before the others in this evaluation, and no batch without samples "
                f"can be made for it{': ' if empty.problem else ''}{empty.problem}; {ADVICE}"
            )
        return lambda _: empty.batch

    def plain(self, position: Position, train: bool) -> Iterator[tuple[Any, Position]]:
        shares, batches = self._pass(position, train, alone=True)
        for number in range(shares.batches):
            low, high = shares.mine(number)
            if low == high:
                return
            batch = next(batches)
            yield (
                batch if self._counts_known or self.unit == "item" else batch[1],
                replace(position, consumed=shares.end(number + 1), batches=position.batches + number + 1),
            )

    def sizes(self) -> dict[str, int]:
        units = {} if self._order.shared else {"units": self.size()}
        try:
            return {"dataset": len(self._dataset), **units}
        except (TypeError, NotImplementedError):
            return units

    @property
    def shared_order(self) -> SharedOrder | None:
        """The order that is rank 0's, if it is."""
        return self._order.shared

    def deal(self, size: int, world_size: int) -> Deal:
        """How `size` units would be dealt to so many ranks."""
        return Deal(size, self.batch_size or 1, world_size, self._drop_last, self._whole)

    def _deal(self, size: int) -> Deal:
        return self.deal(size, self._peers.world_size)

    def even(self) -> bool:
        """Whether all ranks have equally many batches of their own in a pass."""
        size = self.size()
        rest = size % self._deal(size).step
        return self._drop_last or rest == 0 or rest >= self._peers.world_size

    def _pass(
        self, position: Position, train: bool, learns: bool = False, alone: bool = False
    ) -> tuple[Shares, Iterator[Any]]:
        order = self._order.of(position.index, train, alone)
        size_of = None if self.unit == "sample" else lambda low, high: sum(map(len, order[low:high]))
        shares = Shares(self._deal(len(order)), position.consumed, self._peers.rank, size_of)
        self._keys.keys = self._tagged(
            _keys(order, shares, self.unit if learns else ""), position.index if train else None
        )
        self._generator.manual_seed(mix(self._seed, position.index, self._peers.rank))
        batches = _fetched(self._loader, self._keys.keys) if self._here else iter(self._loader)
        return shares, _apart(batches, undisturbed) if self._apart else batches

    def _tagged(self, keys: Iterator[list[Any]], told: int | None) -> Iterator[Any]:
        units: Iterator[Any] = keys if self.unit == "sample" else (unit for (unit,) in keys)
        return ((told, unit) for unit in units) if self._seeded else units


def _unit(loader: DataLoader[Any]) -> tuple[Any, str]:
    """What orders the dataset, and what a unit of that order is: a sample, a list of samples or an item."""
    if loader.batch_sampler is None:
        return loader.sampler, "item"
    if type(loader.batch_sampler) is BatchSampler:
        return loader.batch_sampler.sampler, "sample"
    return loader.batch_sampler, "batch"


def _same(batch: Any) -> Any:
    return batch


def _counted(batches: Iterator[Any], plain: bool) -> Iterator[Fetched]:
    return (Fetched(samples, batch, plain=plain) for samples, batch in batches)


def _weighed(batches: Iterator[Any]) -> Iterator[Fetched]:
    for batch in batches:
        samples, doubt = weigh(batch)
        yield Fetched(samples, batch, known=False, doubt=doubt)


def _keys(order: Order, shares: Shares, learns: str) -> Iterator[list[Any]]:
    """The units of each batch that this rank fetches; before them a sample to learn from, if it will run out.

    `learns` says what a unit is then; nothing if there is nothing to learn.
    """
    if learns and shares.runs_out(shares.rank):
        (unit,) = take(order, 0, 1)
        yield [ProbeKeys(unit[:1])] if learns == "batch" else ProbeKeys([unit])
    begin = 0
    units: list[Any] = []  # from `begin` on
    for number in range(shares.batches):
        low, high = shares.mine(number)
        if low < high:
            if high > begin + len(units):
                begin, units = low, take(order, low, max(high, low + _STRETCH))
            yield units[low - begin : high - begin]
        elif number == 0 and not learns:
            yield take(order, *_stand_in(shares))


def _fetched(loader: DataLoader[Any], keys: Iterable[Any]) -> Iterator[Any]:
    """The batches that `loader` makes of `keys` in this process, at half the cost a batch."""
    dataset, collate = loader.dataset, loader.collate_fn
    fetch = getattr(dataset, "__getitems__", None) or (lambda batch: [dataset[key] for key in batch])
    for batch in keys:
        yield collate(fetch(batch))


def _stand_in(shares: Shares) -> tuple[int, int]:
    """Units for a rank that has none in its first batch: those of the batch before the start."""
    deal, start = shares.deal, shares.start
    low, high = deal.share(max(0, start - deal.step), start, shares.rank)
    return (low, high) if low < high else (0, min(deal.width, deal.size))


def _apart(batches: Iterator[Any], context: Callable[[], AbstractContextManager[None]]) -> Iterator[Any]:
    """`batches`, each fetched in this process inside a new `context()`."""
    while True:
        with context():
            try:
                batch = next(batches)
            except StopIteration:
                return
        yield batch


class IterableFeed:
    """Iterable datasets, whose counts nobody knows."""

    def __init__(self, loader: DataLoader[Any], peers: Peers, seed: int, num_workers: int | None) -> None:
        self._peers, self._seed = peers, seed
        self.batch_size = loader.batch_size
        self._drop_last = loader.drop_last
        settings = loader_settings(loader, num_workers)
        self._workers: int = settings["num_workers"]
        dataset, alone = split_over_ranks(loader.dataset, peers.rank, peers.world_size, self._workers)
        self._split = SplitDataset(dataset, seed, peers.rank, peers.world_size, self._workers, alone)
        if self._workers:
            self._split.passes.share_memory_()
            self._split.firsts.share_memory_()
            self._split.unchecked.share_memory_()
        self._plain_collate = loader.collate_fn in (default_collate, default_convert)
        self._generator = generator(seed)
        self._collate, self._settings = loader.collate_fn, settings
        self._loader = self._made()

    def _made(self) -> DataLoader[Any]:
        batched = self.batch_size is not None
        return DataLoader(
            self._split,
            batch_size=self.batch_size,
            drop_last=self._drop_last,
            collate_fn=Counted(self._collate, self._split) if batched else self._collate,
            generator=self._generator,
            **self._settings,
        )

    def resize(self, batch_size: int, step: int) -> None:
        if batch_size != self.batch_size:
            self.batch_size = batch_size
            self._loader = self._made()

    def left(self, position: Position) -> int | None:
        return None

    def sizes(self) -> dict[str, int]:
        return {}

    def length(self) -> int:
        """Micro-batches in a pass, if the dataset has a length and splits evenly; else TypeError."""
        samples, splits = len(self._split.dataset), self._peers.world_size * max(1, self._workers)
        if self.batch_size is None:
            return -(-samples // self._peers.world_size)
        most = [-(-max(0, samples - first) // splits) for first in range(0, splits, self._peers.world_size)]
        size = self.batch_size
        return sum(items // size if self._drop_last else -(-items // size) for items in most)

    def groups(self, position: Position, accumulate: int, train: bool) -> Iterator[Group]:
        batches = self._pass(position, train)
        last = None
        for samples, batch in islice(batches, position.batches):
            last = Fetched(samples or 0, batch)

        def consumed(_: int, samples: int) -> int:
            return position.consumed + samples

        plain = self._plain_collate
        fetched = _counted(batches, plain) if self.batch_size is not None else _weighed(b for _, b in batches)
        groups = agreed_groups(fetched, self._peers, accumulate, train, position.batches, last, consumed)
        for number, group in enumerate(groups):
            if number == 0:
                self._check_split()
            yield group
        self._check_split()  # by now every worker has met an item

    def _check_split(self) -> None:
        dataset = self._split.dataset
        firsts = self._peers.counts(self._split.firsts.flatten().tolist())
        check_firsts(type(dataset).__name__, firsts, getattr(dataset, "splits_itself", None) is not None)
        self._split.firsts[2:] = 0  # compared once, and not tried again
        self._split.unchecked.zero_()

    def plain(self, position: Position, train: bool) -> Iterator[tuple[Any, Position]]:
        batches = self._pass(position, train)
        for _ in islice(batches, position.batches):
            pass
        for samples, batch in batches:
            used = 1 if samples is None else samples
            position = replace(position, consumed=position.consumed + used, batches=position.batches + 1)
            yield batch, position

    def _pass(self, position: Position, train: bool) -> Iterator[tuple[int | None, Any]]:
        index, rank = position.index, self._peers.rank
        self._split.passes.fill_(index if train else -1)
        self._split.firsts.zero_()
        self._generator.manual_seed(mix(self._seed, index, rank))
        batches: Iterator[Any] = iter(self._loader)
        if not self._workers:
            batches = _apart(batches, Stream(mix(self._seed, index)).use)
        # An unbatched item is counted only where ranks have to agree: plain iteration may yield anything.
        return batches if self.batch_size is not None else ((None, item) for item in batches)


def make_feed(loader: Any, peers: Peers, seed: int, num_workers: int | None) -> MapFeed | IterableFeed:
    """The feed for a user's loader. Raises DataError for what isn't a plain DataLoader."""
    if not isinstance(loader, DataLoader):
        raise DataError(
            f"prepare() shares out torch.utils.data.DataLoader objects, not {type(loader).__name__}; "
            "wrap the dataset in a DataLoader (batch_size=None if it makes batches itself)"
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise DataError(
            f"{type(loader).__name__} has an __iter__ of its own, which sharing it out over ranks would "
            "bypass; give prepare() a plain DataLoader with the same dataset and collate_fn"
        )
    kind = IterableFeed if isinstance(loader.dataset, IterableDataset) else MapFeed
    return kind(loader, peers, seed, num_workers)
