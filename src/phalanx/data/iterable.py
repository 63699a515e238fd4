"""Iterable datasets: each item goes to exactly one rank and worker.

Three ways, tried in this order. A dataset that splits itself (Hugging Face, WebDataset, or one with
`splits_itself = True`) is left to it. A dataset whose `__iter__` asks torch's `get_worker_info()` for its
number, or uses `shard`, is told a number over ranks and workers, and splits by it. Of any other dataset,
item i goes to split i mod n, n being ranks times workers.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice
from typing import Any, TypeVar

import torch
from torch.utils.data import IterableDataset, default_collate, default_convert, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from ..errors import DataError
from .firsts import ROWS, Trial, fingerprint, is_used_up
from .seeding import Forwarding, mix, seed_all, tell_pass, undisturbed

T = TypeVar("T")
_END = object()
BY_WORKER_INFO = "worker_info"  # `splits_itself` of a dataset that splits by what SplitInfo says, and nothing else


class SplitInfo:
    """What `get_worker_info()` gives inside the `__iter__` of a dataset that is being split.

    `id` and `num_workers` count over ranks and workers. Reading both marks the dataset as one that splits
    itself; from then on its random numbers differ between splits, until then they agree (a shuffle before
    the split must be the same everywhere).
    """

    def __init__(self, index: int, splits: int, own_seed: int, dataset: Any) -> None:
        self._index, self._splits = index, splits
        self._asked: set[str] = set()
        self.seed = own_seed
        self.dataset = dataset

    @property
    def id(self) -> int:
        """This split's number, from 0."""
        self._ask("id")
        return self._index

    @property
    def num_workers(self) -> int:
        """The number of splits."""
        self._ask("num_workers")
        return self._splits

    @property
    def used(self) -> bool:
        """Whether the dataset has asked for what it needs to split itself."""
        return len(self._asked) == 2

    def _ask(self, name: str) -> None:
        if name not in self._asked:
            self._asked.add(name)
            if self.used:
                seed_all(self.seed)


def shard(iterable: Iterable[T]) -> Iterator[T]:
    """This rank's and worker's items of `iterable`: every n-th, n being ranks times workers.

    For a dataset's own `__iter__`, so that what it doesn't need is never read:
    `for path in phalanx.shard(self.paths): yield load(path)`. All ranks must give the same items in the
    same order. A dataset that uses it isn't split again by `prepare`.
    """
    info: Any = get_worker_info()
    if isinstance(info, SplitInfo):
        return islice(iterable, info.id, None, info.num_workers)
    worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
    rank, ranks = int(os.environ.get("RANK") or 0), int(os.environ.get("WORLD_SIZE") or 1)
    return islice(iterable, worker * ranks + rank, None, ranks * workers)


class SplitDataset(Forwarding, IterableDataset[Any]):
    """An iterable dataset of which each rank and worker yields its own part, seeded from (seed, pass, …).

    In memory that workers share, `passes` holds the number of the pass to come, -1 for an evaluation, and `firsts`
    what each worker met first, in `firsts.ROWS`; `unchecked` is 0 once these were compared.
    """

    def __init__(self, dataset: Any, seed: int, rank: int, world_size: int, workers: int, alone: bool) -> None:
        declared = getattr(dataset, "splits_itself", None)
        used_up = declared is None and is_used_up(dataset)
        self.__dict__.update(
            dataset=dataset,
            passes=torch.zeros((), dtype=torch.int64),
            firsts=torch.zeros(len(ROWS), max(1, workers), dtype=torch.int64),
            unchecked=torch.ones((), dtype=torch.int64),
            collate_stream=random.Random(),
            _seed=seed,
            _place=(rank, world_size),
            _alone=alone,
            _ours=used_up or declared is False,
            _used_up=used_up,
            _declared=declared is not None,
        )

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        rank, ranks = self._place
        told = int(self.passes)
        seed = mix(self._seed, max(0, told))
        own_seed = mix(self._seed, max(0, told), rank, worker)
        self.collate_stream.seed(own_seed)
        if told >= 0:
            tell_pass(self.dataset, told)
        seed_all(own_seed if self._alone else seed)
        if self._alone or ranks * workers == 1:
            yield from self.dataset
            return
        # Worker first: where a few items are left over, they go to different ranks.
        yield from self._split(worker, worker * ranks + rank, ranks * workers, own_seed)

    def _split(self, worker: int, index: int, splits: int, own_seed: int) -> Iterator[Any]:
        info, trial = SplitInfo(index, splits, own_seed, self.dataset), None
        if self._used_up:  # it can't be tried, and whoever splits it reads all of it: here it is seen unsplit
            info = SplitInfo(0, 1, mix(self._seed, max(0, int(self.passes))), self.dataset)
        elif self._place[1] > 1 and not self._declared and self.unchecked:
            trial = Trial(self.dataset)
        items = _told(info, lambda: iter(self.dataset))
        for number in count():
            item = _told(info, lambda: next(items, _END))
            splits_itself = info.used and not self._ours
            if number == 0:
                self._note(worker, item, splits_itself, trial)
                trial = None
            if item is _END:
                return
            if splits_itself or number % splits == index:
                yield item

    def _note(self, worker: int, item: Any, splits_itself: bool, trial: Trial | None) -> None:
        """Keep what `check_firsts` will compare."""
        if item is not _END:
            self.firsts[int(splits_itself), worker] = fingerprint(item)
        if trial is None or not splits_itself:
            return
        seed = max(0, int(self.passes))
        alone = SplitInfo(0, 1, mix(self._seed, seed, 0, 0), trial.dataset)  # as of rank 0's worker 0
        with undisturbed():
            seed_all(mix(self._seed, seed))
            self.firsts[2:, worker] = torch.tensor(_told(alone, trial.beginning))


def _told(info: SplitInfo, function: Callable[[], T]) -> T:
    """The result of `function`, run while `get_worker_info()` gives `info`."""
    real = torch_worker._worker_info
    torch_worker._worker_info = info  # type: ignore[assignment]
    try:
        return function()
    finally:
        torch_worker._worker_info = real


class Counted:
    """A collate_fn that returns (number of samples, batch).

    With `split` given, the random numbers of a custom collate_fn are its own, so that it cannot shift
    those of the dataset, which have to be the same on all ranks.
    """

    def __init__(self, collate: Callable[[Any], Any], split: SplitDataset | None) -> None:
        self._collate = collate
        self._split = None if collate in (default_collate, default_convert) else split

    def __call__(self, samples: list[Any]) -> tuple[int, Any]:
        if self._split is None:
            return len(samples), self._collate(samples)
        with undisturbed():
            seed_all(self._split.collate_stream.getrandbits(64))
            return len(samples), self._collate(samples)


def split_over_ranks(dataset: Any, rank: int, world_size: int, workers: int) -> tuple[Any, bool]:
    """The dataset to iterate over on this rank, and whether it splits itself.

    Raises DataError for a dataset of which ranks or workers would see each other's items.
    """
    declared = getattr(dataset, "splits_itself", None)
    if declared is not None:
        return dataset, bool(declared) and declared != BY_WORKER_INFO
    packages = {base.__module__.partition(".")[0] for base in type(dataset).__mro__}
    if "datasets" in packages:
        return _split_hugging_face(dataset, rank, world_size), True
    if "webdataset" in packages:
        _check_webdataset(dataset, world_size, workers)
        return dataset, True
    _check_undeclared(dataset, world_size)
    return dataset, False


def _split_hugging_face(dataset: Any, rank: int, world_size: int) -> Any:
    if world_size == 1 or getattr(dataset, "_distributed", None) is not None:
        return dataset
    from datasets.distributed import split_dataset_by_node

    return split_dataset_by_node(dataset, rank=rank, world_size=world_size)


def _check_webdataset(dataset: Any, world_size: int, workers: int) -> None:
    stages = [getattr(stage, "func", stage) for stage in getattr(dataset, "pipeline", [])]
    names = {getattr(stage, "__name__", type(stage).__name__) for stage in stages}
    if "ResampledShards" in names:  # draws shards at random, differently on each rank and worker
        return
    if world_size > 1 and "split_by_node" not in names:
        raise DataError(
            f"a WebDataset pipeline without a node splitter: each of the {world_size} ranks would read every "
            "shard; add nodesplitter=webdataset.split_by_node (in a DataPipeline the stage "
            "webdataset.split_by_node), or set splits_itself = True on it if another stage splits over ranks"
        )
    if workers > 1 and "split_by_worker" not in names:
        raise DataError(
            f"a WebDataset pipeline without a worker splitter: each of the {workers} workers would read "
            "every shard; add workersplitter=webdataset.split_by_worker, or set splits_itself = True on it"
        )


def _check_undeclared(dataset: Any, world_size: int) -> None:
    for name in ("world_size", "num_replicas"):
        value = getattr(dataset, name, None)
        if world_size > 1 and isinstance(value, int) and value == world_size:
            raise DataError(
                f"{type(dataset).__name__} has {name} = {value}, so it may split its items over ranks "
                "itself, and items split twice would be lost; say which by an attribute: splits_itself = True "
                "(it does, over workers too) or splits_itself = False (prepare() shall)"
            )
