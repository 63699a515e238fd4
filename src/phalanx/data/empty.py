"""Batches of no samples, of any structure, and how surely a batch tells its number of samples.

What a collate_fn makes of no samples is learnt from what it makes of one and of two: a length that grows
with the samples is continued down to none, and what stays is kept.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch.nn.utils.rnn import PackedSequence

from ..errors import DataError
from .batch import SCALARS, children, count, is_container, rebuild, zero_rows

ADVICE = "use run.evaluate(loader, even=False), where each rank has its own batches only"


class Probed(list[Any]):
    """One sample, of which `Learning` shall make a batch without any."""


class Empty(NamedTuple):
    """A batch without samples, or why there can't be one."""

    batch: Any
    problem: str = ""


class Learning:
    """A collate_fn that also makes the empty batch, where it gets a `Probed`."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> Any:
        if type(samples) is not Probed:
            return self.collate(samples)
        try:
            one = self.collate(copy.deepcopy(list(samples)))
            two = self.collate([copy.deepcopy(sample) for sample in (*samples, *samples)])
            return Empty(learn(one, two))
        except Exception as error:
            return Empty(None, f"{type(error).__name__}: {error}")


def learn(one: Any, two: Any) -> Any:
    """The batch of no samples, from the batches of one sample and of the same one twice.

    Raises DataError where it can't be told.
    """
    empty, grew = _continued(one, two)
    if not grew:
        raise DataError("a batch of two samples looks like that of one, so nothing tells what one of none would be")
    return empty


def _continued(one: Any, two: Any) -> tuple[Any, bool]:
    """What comes before `one` and `two`, and whether they differ."""
    if type(one) is not type(two) or isinstance(one, PackedSequence):
        raise DataError(f"no batch of {type(one).__name__} without samples can be made")
    if hasattr(one, "shape"):
        return _continued_array(one, two)
    if one is None or isinstance(one, bool | str | bytes):
        return one, False
    if isinstance(one, int | float | complex):
        return (one, False) if one == two else (2 * one - two, True)
    if isinstance(one, list | tuple) and not hasattr(one, "_fields") and len(one) != len(two):
        return _continued_list(one, two), True
    if not is_container(one):
        raise DataError(f"no batch of {type(one).__name__} without samples can be made")
    if isinstance(one, Mapping) and list(one) != list(two):
        raise DataError(f"the keys of a {type(one).__name__} differ from batch to batch")
    pairs = [_continued(a, b) for a, b in zip(children(one), children(two), strict=True)]
    parts = iter([part for part, _ in pairs])
    return rebuild(one, lambda _: next(parts)), any(grew for _, grew in pairs)


def _continued_array(one: Any, two: Any) -> tuple[Any, bool]:
    if len(one.shape) != len(two.shape):
        raise DataError("a tensor of other dimensions for another number of samples")
    grew = False
    for dim, (a, b) in enumerate(zip(one.shape, two.shape, strict=True)):
        if a != b:
            if not 0 <= 2 * a - b <= a:
                raise DataError(f"a dimension is {a} for one sample and {b} for two")
            one, grew = one[(*[slice(None)] * dim, slice(0, 2 * a - b))], True
    if not len(one.shape) and not bool(one == two):
        return 2 * one - two, True  # a total
    return one, grew


def _continued_list(one: Any, two: Any) -> Any:
    length = 2 * len(one) - len(two)
    if not 0 <= length <= len(one):
        raise DataError(f"a list has {len(one)} items for one sample and {len(two)} for two")
    return type(one)(one[:length])


def weigh(batch: Any) -> tuple[int, str]:
    """The samples in `batch`, and what makes that doubtful; at least 1 if it is."""
    try:
        number = count(batch)
    except DataError:
        if isinstance(batch, SCALARS):
            raise
        return 1, f"a batch of {type(batch).__name__} has no tensor and no list to count"
    firsts = sorted({int(leaf.shape[0]) for leaf in _arrays(batch)})
    if len(firsts) > 1:
        return max(1, number), f"its tensors have first dimensions {', '.join(map(str, firsts))}"
    lengths = sorted({len(part) for part in _lists_of_alike(batch, top=True)} - {number})
    if lengths and firsts:
        said = f"a list of {lengths[0]} tensors whose first dimension is {number}"
        return max(1, number), said
    return number, ""


def emptied(batch: Any, samples: int | None) -> Any:
    """`batch` without its samples, whose number is `samples` if that is known.

    Raises DataError unless it is certain.
    """
    number, doubt = weigh(batch)
    if samples is None and doubt:
        raise DataError(f"no batch of none can be made where the number of samples isn't sure: {doubt}; {ADVICE}")
    sure = not doubt and samples in (None, number)
    if sure and not any(len(part) == number for part in _lists_of_alike(batch, top=True)):
        return zero_rows(batch)
    return _without(batch, number if samples is None else samples)


def _without(batch: Any, samples: int) -> Any:
    if hasattr(batch, "shape"):
        if len(batch.shape) and batch.shape[0] != samples:
            raise _uncertain(f"a tensor's first dimension is {batch.shape[0]}", samples)
        return batch[:0] if len(batch.shape) else batch
    if isinstance(batch, SCALARS):
        return batch
    if isinstance(batch, list | tuple) and not hasattr(batch, "_fields") and len(batch) == samples:
        if any(_may_hold(child, samples) for child in batch):
            raise _uncertain("lists and what is in them are of that length", samples)
        return type(batch)()
    if not is_container(batch):
        raise _uncertain(f"it has a {type(batch).__name__}", samples)
    return rebuild(batch, lambda child: _without(child, samples))


def _may_hold(part: Any, samples: int) -> bool:
    """Whether `part` may hold something of each sample, rather than being one of them."""
    if hasattr(part, "shape"):
        return len(part.shape) > 0 and part.shape[0] == samples
    return isinstance(part, list | tuple) and len(part) == samples


def _uncertain(what: str, samples: int) -> DataError:
    return DataError(f"cannot tell what a batch of {samples} samples would be without them: {what}; {ADVICE}")


def _arrays(batch: Any) -> Iterator[Any]:
    """Tensors and arrays with a first dimension."""
    if is_container(batch):
        for child in children(batch):
            yield from _arrays(child)
    elif len(getattr(batch, "shape", None) or ()):
        yield batch


def _lists_of_alike(batch: Any, top: bool = False) -> Iterator[Any]:
    """Lists that may have one item a sample; a tuple that is the whole batch has fields."""
    if not is_container(batch):
        return
    parts = children(batch)
    fields = isinstance(batch, tuple) and (top or hasattr(batch, "_fields"))
    if isinstance(batch, list | tuple) and parts and not fields and _alike(parts):
        yield batch
    for part in parts:
        yield from _lists_of_alike(part)


def _alike(parts: list[Any]) -> bool:
    kinds = {(type(part), part.dtype, len(part.shape)) if hasattr(part, "shape") else (type(part),) for part in parts}
    return len(kinds) == 1 and (hasattr(parts[0], "shape") or is_container(parts[0]))
