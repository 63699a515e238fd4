"""Orders of samplers that the library can't see into: rank 0 lists them, and what it got is everybody's.

Such a sampler may draw from a generator of its own, seeded or not, so that listing it again gives another
order. A checkpoint therefore holds the order of the pass in hand, and how often the sampler was listed
before: a fresh one is listed as often again, and so goes on in its own sequence.
"""

from __future__ import annotations

import random
import sys
from itertools import islice
from typing import Any

import torch
from torch.utils.data import Sampler

from .seeding import mix, seed_all, tell_pass, undisturbed

_MORE = 1000  # items beyond twice a sampler's length, after which it is taken for endless


def parts(sampler: Any) -> list[Any]:
    """The sampler, and the one that it batches."""
    inner = getattr(sampler, "sampler", None)
    return [sampler] if inner is None else [sampler, inner]


def seen_through(sampler: Any) -> bool:
    """Whether all that `sampler` draws from is known to be seeded by `listed`."""
    return all(_known(type(part)) for part in parts(sampler))


def _known(kind: type) -> bool:
    return kind in (list, tuple, range, torch.Tensor) or kind.__module__.startswith("torch.utils.data.")


def listed(sampler: Any, seed: int, pass_index: int) -> list[Any]:
    """What `sampler` yields in one pass; torch generators of its own are as before afterwards."""
    owned = [part.generator for part in parts(sampler) if isinstance(getattr(part, "generator", None), torch.Generator)]
    states = [own.get_state() for own in owned]
    with undisturbed():
        seed_all(seed)
        for own in owned:
            own.manual_seed(seed)
        for part in parts(sampler):
            tell_pass(part, pass_index)
        try:
            return [list(unit) if isinstance(unit, list) else unit for unit in _drawn(sampler)]
        finally:
            for own, state in zip(owned, states, strict=True):
                own.set_state(state)


def _drawn(sampler: Any) -> list[Any]:
    """All items of a sampler that ends, though it has more than its length says; of an endless one its length."""
    size, items = len(sampler), iter(sampler)
    drawn = list(islice(items, size))
    states = [(generator, _state(generator)) for generator in _generators(sampler)]
    more = list(islice(items, size + _MORE))
    if len(more) < size + _MORE:
        return drawn + more
    for generator, state in states:
        _set_state(generator, state)
    return drawn


def _generators(sampler: Any) -> list[Any]:
    """The random generators that a sampler has as attributes."""
    numpy = sys.modules.get("numpy")
    kinds = (random.Random, torch.Generator, *((numpy.random.RandomState, numpy.random.Generator) if numpy else ()))
    values = [value for part in parts(sampler) for value in getattr(part, "__dict__", {}).values()]
    return [value for value in values if isinstance(value, kinds)]


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


class SharedOrder:
    """The order of a foreign sampler, the same on all ranks and after a resume."""

    def __init__(self, sampler: Sampler[Any], seed: int, peers: Any) -> None:
        self._sampler, self._seed, self._peers = sampler, seed, peers
        self._history: list[int] = []  # the passes that were listed, rank 0 only
        self._replay: list[int] = []  # those of them that this process has yet to list
        self._training: tuple[int, list[Any]] | None = None  # the last training pass and its order
        self._restored = False  # whether that one is the checkpoint's

    def size(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]

    def make(self, pass_index: int, train: bool, alone: bool) -> list[Any]:
        """The order of a pass. All ranks call it; `alone` says that they have not met for it yet."""
        if train and self._restored and self._training is not None and self._training[0] == pass_index:
            return self._training[1]
        order = self._shared(pass_index, alone)
        if train:
            self._training, self._restored = (pass_index, order), False
        return order

    def _shared(self, pass_index: int, alone: bool) -> list[Any]:
        peers = self._peers
        if alone and hasattr(peers, "meet"):
            name = type(self._sampler).__name__
            peers.meet(f"the beginning of a pass over a loader with the sampler {name}, which rank 0 draws for all")
        answer: Any = None
        if peers.rank == 0:
            try:
                answer = self._next(pass_index)
            except Exception as error:  # every rank must hear of it, not wait
                answer = error
        if peers.world_size > 1:
            answer = peers.borrow(answer, 0)
        if isinstance(answer, Exception):
            raise answer
        order: list[Any] = answer
        return order

    def _next(self, pass_index: int) -> list[Any]:
        for earlier in self._replay:
            listed(self._sampler, mix(self._seed, earlier), earlier)
        self._replay = []
        self._history.append(pass_index)
        return listed(self._sampler, mix(self._seed, pass_index), pass_index)

    def state_dict(self, pass_index: int | None) -> dict[str, Any]:
        """For a checkpoint, with the order of the training pass in hand if there is one; rank 0's counts."""
        order = self._training[1] if self._training is not None and self._training[0] == pass_index else None
        return {"listed": list(self._history), "order": _packed(order), "pass": pass_index}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._history, self._replay = list(state["listed"]), list(state["listed"])
        order = state["order"]
        self._restored = order is not None
        self._training = (state["pass"], _unpacked(order)) if order is not None else None


def _packed(order: list[Any] | None) -> Any:
    """Indices as a tensor, which takes a quarter of the room."""
    if order and all(type(unit) is int for unit in order):
        return torch.tensor(order)
    return order


def _unpacked(order: Any) -> list[Any]:
    values: list[Any] = order.tolist() if isinstance(order, torch.Tensor) else order
    return values
