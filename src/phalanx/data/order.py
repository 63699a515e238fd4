"""The order of a pass and how it is dealt to ranks: arithmetic only, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from ..errors import DataError
from .listed import SharedOrder, listed, parts, seen_through
from .seeding import generator, mix

# A tensor for shuffles: a list of 10^8 Python numbers would take gigabytes and seconds.
Order: TypeAlias = "torch.Tensor | Sequence[Any]"


@dataclass(frozen=True, slots=True)
class Deal:
    """`size` units of an order, dealt in global batches of `world_size` times `width` units.

    A unit is a sample (`width` is the batch size per rank) or a whole batch (`width` is 1).
    """

    size: int
    width: int
    world_size: int
    drop_last: bool
    whole: int = 0  # units of a complete step, if that is more than one global batch

    @property
    def step(self) -> int:
        """Units in a complete global batch."""
        return self.width * self.world_size

    def batches(self, start: int = 0) -> int:
        """Number of global batches from unit `start` on."""
        left = max(0, self.size - start)
        if self.drop_last and self.whole:
            return left // self.whole * (self.whole // self.step)
        return left // self.step if self.drop_last else -(-left // self.step)

    def share(self, low: int, high: int, rank: int) -> tuple[int, int]:
        """Rank's part [a, b) of the units [low, high): contiguous, and even to within one unit."""
        each, more = divmod(high - low, self.world_size)
        first = low + rank * each + min(rank, more)
        return first, first + each + (rank < more)


def take(order: Order, low: int, high: int) -> list[Any]:
    """Units [low, high) of `order` as plain values."""
    part = order[low:high]
    return part.tolist() if isinstance(part, torch.Tensor) else list(part)


@dataclass(frozen=True, slots=True)
class EpochOrder:
    """`size()` is the number of units in a pass, `make(pass)` its order.

    `shared` is there for samplers whose order is rank 0's; `make` is its own then.
    """

    size: Callable[[], int]
    make: Callable[[int], Order]
    shared: SharedOrder | None = None

    def of(self, pass_index: int, train: bool, alone: bool) -> Order:
        """The order of a pass; see `SharedOrder.make`."""
        if self.shared is not None:
            return self.shared.make(pass_index, train, alone)
        return self.make(pass_index)


def epoch_order(sampler: Any, seed: int, peers: Any) -> EpochOrder:
    """The order in which `sampler` goes through its dataset, without any splitting of its own.

    A shuffle is a permutation seeded from (seed, pass). Any other sampler is listed once a pass, with all
    generators (its own too) seeded from (seed, pass): torch's own samplers on every rank, and those that may
    draw from what isn't seen here on rank 0, for all.

    Raises DataError for a sampler that splits over ranks in a way of its own, or that has no length.
    """
    if type(sampler) is SequentialSampler:
        return EpochOrder(lambda: len(sampler), lambda _: range(len(sampler)))
    if type(sampler) is RandomSampler and _is_permutation(sampler):
        return EpochOrder(lambda: len(sampler), lambda p: _permutation(len(sampler), seed, p))
    if type(sampler) is DistributedSampler:
        return _undistributed(sampler, seed, peers.world_size)
    _check(sampler)
    if seen_through(sampler):
        return EpochOrder(lambda: len(sampler), lambda p: listed(sampler, mix(seed, p), p))
    shared = SharedOrder(sampler, seed, peers)
    return EpochOrder(shared.size, lambda p: shared.make(p, train=False, alone=False), shared)


def _is_permutation(sampler: RandomSampler) -> bool:
    return not sampler.replacement and sampler.num_samples == len(sampler.data_source)


def _permutation(size: int, seed: int, pass_index: int) -> torch.Tensor:
    return torch.randperm(size, generator=generator(seed, pass_index))


def _undistributed(sampler: DistributedSampler[Any], seed: int, world_size: int) -> EpochOrder:
    data: Any = sampler.dataset
    own_seed = mix(seed, sampler.seed) if sampler.seed else seed

    def size() -> int:
        return len(data) - (len(data) % world_size if sampler.drop_last else 0)

    def make(pass_index: int) -> Order:
        if not sampler.shuffle:
            return range(size())
        return _permutation(len(data), own_seed, pass_index)[: size()]

    return EpochOrder(size, make)


def _check(sampler: Any) -> None:
    name = type(sampler).__name__
    for part in parts(sampler):
        ranks = getattr(part, "num_replicas", 1)
        if isinstance(ranks, int) and ranks > 1:
            raise DataError(
                f"{type(part).__name__} already splits its data over {ranks} ranks (num_replicas); "
                "give the loader a sampler of the whole dataset, or torch's own DistributedSampler: "
                "prepare() splits it"
            )
    if not isinstance(sampler, Sized):
        raise DataError(
            f"sampler {name} has no __len__: a pass over it must end; add __len__, "
            "or make the dataset an IterableDataset"
        )
