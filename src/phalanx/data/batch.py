"""Batches of any structure: count their samples, empty them, move them to a device."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from ..errors import DataError

SCALARS = (str, bytes, int, float, complex, bool, type(None))


def count(batch: Any) -> int:
    """Samples in `batch`: the first dimension of the first tensor or array, else the first list's length.

    Raises DataError where there is nothing to count.
    """
    for leaf in _leaves(batch):
        shape = getattr(leaf, "shape", None)
        if shape is not None and len(shape) > 0:
            return int(shape[0])
    for part in _sequences(batch):
        return len(part)
    raise DataError(
        f"cannot count the samples of a batch of type {type(batch).__name__}: expected a tensor with a "
        "batch dimension, or a list, somewhere in it; return such a batch from collate_fn or from the dataset"
    )


def zero_rows(batch: Any) -> Any:
    """`batch` with no samples: each tensor or array sliced [:0], each list of plain values emptied.

    Raises DataError for an object that can be neither sliced nor taken apart.
    """
    if isinstance(batch, torch.Tensor):
        return batch[:0] if batch.dim() else batch
    if isinstance(batch, (list, tuple)) and not any(map(_has_structure, batch)):
        return batch if hasattr(batch, "_fields") else type(batch)()
    if is_container(batch):
        return rebuild(batch, zero_rows)
    if isinstance(batch, SCALARS):
        return batch
    try:
        return batch[:0] if getattr(batch, "shape", None) != () else batch
    except (TypeError, KeyError, IndexError):
        raise DataError(
            f"cannot make an empty batch of {type(batch).__name__}, which a rank needs when the dataset's "
            "size isn't a multiple of the number of ranks; return tensors, lists or dicts from collate_fn, or use "
            "run.evaluate(loader, even=False), where each rank has its own batches only"
        ) from None


def move(batch: Any, device: torch.device) -> Any:
    """`batch` on `device`; the same object where nothing has to move. Pinned memory moves asynchronously."""
    if isinstance(batch, torch.Tensor):
        if batch.device == device:
            return batch
        # A copy from pageable memory to CUDA is staged before the call returns, so it is safe as well.
        return batch.to(device, non_blocking=device.type == "cuda")
    if isinstance(batch, SCALARS):
        return batch
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    if is_container(batch):
        return rebuild(batch, lambda item: move(item, device))
    return batch


def is_container(batch: Any) -> bool:
    return isinstance(batch, (list, tuple, Mapping)) or (
        dataclasses.is_dataclass(batch) and not isinstance(batch, type)
    )


def children(batch: Any) -> list[Any]:
    if isinstance(batch, Mapping):
        return list(batch.values())
    if isinstance(batch, (list, tuple)):
        return list(batch)
    return [getattr(batch, field.name) for field in dataclasses.fields(batch)]


def rebuild(batch: Any, function: Callable[[Any], Any]) -> Any:
    """A container like `batch` with `function` applied to each child; `batch` itself if none changed."""
    old = children(batch)
    new = [function(child) for child in old]
    if all(a is b for a, b in zip(old, new, strict=True)):
        return batch
    if isinstance(batch, Mapping):
        return _like_mapping(batch, dict(zip(batch, new, strict=True)))
    if hasattr(batch, "_fields"):
        return type(batch)(*new)
    if isinstance(batch, (list, tuple)):
        return type(batch)(new)
    clone = copy.copy(batch)
    for field, child in zip(dataclasses.fields(batch), new, strict=True):
        object.__setattr__(clone, field.name, child)  # frozen ones too
    return clone


def _like_mapping(batch: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(batch) is dict or not isinstance(batch, MutableMapping):
        return items
    clone = copy.copy(batch)  # keeps the class and what else it carries: HF's BatchEncoding, OrderedDict
    clone.update(items)
    return clone


def _has_structure(item: Any) -> bool:
    return is_container(item) or hasattr(item, "shape")


def _leaves(batch: Any) -> Iterator[Any]:
    if not is_container(batch):
        yield batch
        return
    for child in children(batch):
        yield from _leaves(child)


def _sequences(batch: Any) -> Iterator[Any]:
    """Innermost lists and tuples of plain values, depth first."""
    if not is_container(batch):
        return
    parts = children(batch)
    if isinstance(batch, (list, tuple)) and not any(map(is_container, parts)):
        yield batch
    for child in parts:
        yield from _sequences(child)
