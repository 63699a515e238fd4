"""Random numbers of the data: where each seed comes from, and how the run's own streams stay undisturbed.

A seed is splitmix64's finaliser applied over a tuple of words, such as (seed, pass, index): 1 µs a word,
and every bit of every word changes half of the result's bits.
"""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import index as as_int
from typing import Any

import torch
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

from .empty import Probed
from .numpy_state import NumpyAside

_MASK = (1 << 64) - 1


def extend(state: int, word: int) -> int:
    """`mix` of one more word: extend(mix(a), b) == mix(a, b)."""
    state = (state + (word & _MASK) + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def mix(*words: int) -> int:
    """A 64-bit seed from whole numbers; the order of the words matters."""
    state = 0
    for word in words:
        state = extend(state, word)
    return state


def word_of(key: Any) -> int:
    """A dataset's key as a word: itself if it is a whole number, else a checksum of its repr."""
    try:
        return as_int(key)
    except TypeError:
        return zlib.crc32(repr(key).encode())


def generator(*words: int) -> torch.Generator:
    """A new torch generator seeded from `words`."""
    return torch.Generator().manual_seed(mix(*words))


def seed_all(seed: int) -> None:
    """Seed `random`, NumPy (where it is imported) and torch's CPU generator.

    torch and NumPy start the same Mersenne Twister from 32 bits, so each gets its own half of `seed`.
    """
    _seed_own(seed)
    _seed_numpy(seed)


def _seed_own(seed: int) -> None:
    # torch.manual_seed also visits every accelerator, which costs a hundred times more.
    torch.default_generator.manual_seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def _seed_numpy(seed: int) -> None:
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed >> 32)


def _capture() -> tuple[Any, Any]:
    return torch.default_generator.get_state(), random.getstate()


def _restore(states: tuple[Any, Any]) -> None:
    torch.default_generator.set_state(states[0])
    random.setstate(states[1])


_spares: list[NumpyAside] = []


@contextmanager
def undisturbed() -> Iterator[None]:
    """Whatever is drawn inside leaves the three generators as they were. Seed inside before drawing."""
    spare = _spares.pop() if _spares else NumpyAside()
    with _apart(spare):
        yield
    _spares.append(spare)


@contextmanager
def _apart(numpy: NumpyAside) -> Iterator[None]:
    states = _capture()
    try:
        with numpy:
            yield
    finally:
        _restore(states)


class Stream:
    """A stream of the three generators of its own, which goes on where its last `use` stopped."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._states: tuple[Any, Any] | None = None
        self._numpy = NumpyAside()

    @contextmanager
    def use(self) -> Iterator[None]:
        """Draw from this stream inside, from the run's own again afterwards."""
        with _apart(self._numpy):
            if self._numpy.fresh:
                _seed_numpy(self._seed)
            if self._states is None:
                _seed_own(self._seed)
            else:
                _restore(self._states)
            try:
                yield
            finally:
                self._states = _capture()


def draws_nothing(dataset: Any) -> bool:
    """Whether fetching from `dataset` is known to draw no random number."""
    kind = type(dataset)
    if kind is Subset:
        return draws_nothing(dataset.dataset)
    if kind is ConcatDataset:
        return all(map(draws_nothing, dataset.datasets))
    if kind is StackDataset:
        parts = dataset.datasets
        return all(map(draws_nothing, parts.values() if isinstance(parts, dict) else parts))
    return kind in (TensorDataset, list, tuple, range, torch.Tensor)


def fetches_batches(dataset: Any) -> bool:
    """Whether `dataset` really fetches many samples at once; torch's Subset only passes that on."""
    kind = type(dataset)
    if isinstance(dataset, Subset) and kind.__getitems__ is Subset.__getitems__:
        return fetches_batches(dataset.dataset)
    if kind is StackDataset:
        parts = dataset.datasets
        return any(map(fetches_batches, parts.values() if isinstance(parts, dict) else parts))
    return callable(getattr(dataset, "__getitems__", None))


def _batched_fetch(dataset: Any, keys: list[Any]) -> Any:
    return dataset.__getitems__(keys)


def _plain_fetch(dataset: Any, keys: list[Any]) -> Any:
    return [dataset[key] for key in keys]


def _fetcher(dataset: Any) -> Callable[[Any, list[Any]], Any] | None:
    """How to fetch a whole batch under one seed; None where each sample has its own."""
    if fetches_batches(dataset):
        return _batched_fetch
    return _plain_fetch if draws_nothing(dataset) else None


class Forwarding:
    """Reads and writes of unknown attributes go to `dataset`, so that worker_init_fn meets the user's own."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # unpickling asks before `dataset` is there
            raise AttributeError(name)
        return getattr(self.__dict__["dataset"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            self.__dict__[name] = value
        else:
            setattr(self.__dict__["dataset"], name, value)


class SeededDataset(Forwarding, Dataset[Any]):
    """A map-style dataset whose augmentation of a sample depends on (seed, pass, index) alone.

    Keys are (pass, indices) for a batch and (pass, index) for one item, since the pass has to reach
    workers that live on and fetch ahead; the pass None is evaluation, seeded as pass 0. A dataset with
    `__getitems__` of its own keeps it and is seeded once per batch, from the first index; so is one that
    draws nothing (the seed is for collate_fn then).
    """

    dataset: Any
    _told: int | None

    def __init__(self, dataset: Any, seed: int) -> None:
        self.__dict__.update(dataset=dataset, _seed=seed, _told=None, _fetch=_fetcher(dataset))

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, keys: tuple[int | None, list[Any]]) -> list[Any]:
        samples = self._samples(keys)
        return Probed(samples) if type(keys[1]) is ProbeKeys else samples

    def _samples(self, keys: tuple[int | None, list[Any]]) -> list[Any]:
        index, keys_of_batch = keys
        base = self._enter(index)
        if self._fetch is not None:
            seed_all(extend(base, word_of(keys_of_batch[0])))
            fetched: list[Any] = self._fetch(self.dataset, keys_of_batch)
            return fetched
        samples = []
        for key in keys_of_batch:
            seed_all(extend(base, word_of(key)))
            samples.append(self.dataset[key])
        return samples

    def __getitem__(self, key: tuple[int | None, Any]) -> Any:
        index, inner = key
        seed_all(extend(self._enter(index), word_of(inner)))
        return self.dataset[inner]

    def _enter(self, index: int | None) -> int:
        if index is not None and index != self._told:
            tell_pass(self.dataset, index)
            self._told = index
        return mix(self._seed, index or 0)


class ProbeKeys(list[Any]):
    """The key of one sample, fetched to learn what a batch without samples would be."""


def tell_pass(target: Any, index: int) -> None:
    """Call `target.set_epoch(index)` if there is such a method."""
    set_epoch = getattr(target, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(index)
