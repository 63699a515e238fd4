"""`Run.reduce`: means, sums, minima and maxima over all ranks of whatever holds numbers and tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError
from ..strategies.comm import Comm
from . import exact, wide
from .exact import Number, Op, Weight
from .values import described, plain

_WHOLE = 8  # in a message: the weight is an int


@dataclass
class _Contents:
    """What this rank gives: its parts in words, and the numbers and tensors, in an order that all ranks share."""

    op: Op
    parts: list[str]
    leaves: list[Number | Tensor] = field(default_factory=list)

    def take(self, value: Any, path: str = "") -> None:
        if isinstance(value, Mapping):
            self.parts.append(f"{path} a dict".lstrip())
            for key in _keys(value):
                self.take(value[key], f"{path}[{key!r}]")
        elif isinstance(value, list | tuple):
            self.parts.append(f"{path} a {type(value).__name__}".lstrip())
            for place, item in enumerate(value):
                self.take(item, f"{path}[{place}]")
        else:
            self._leaf(value, path)

    def _leaf(self, value: Any, path: str) -> None:
        if isinstance(value, Tensor):
            value = plain(value.detach(), "reduce", path)
            number, words = value.is_complex(), described(value)
            if not (value.is_floating_point() or value.is_complex() or value.dtype in wide.INTEGERS):
                raise UsageError(f"reduce() got a {value.dtype} tensor{_at(path)}: expected numbers that can be added")
        else:
            value, words = _number(value, path), "a number"
            number = isinstance(value, complex)
        if number and self.op in ("min", "max"):
            raise UsageError(f"reduce(op={self.op!r}) got a complex number{_at(path)}, and these have no order")
        self.parts.append(f"{path} {words}".lstrip())
        self.leaves.append(value)


def _keys(value: Mapping[Any, Any]) -> list[Any]:
    """In an order that doesn't depend on how the dict was filled."""
    return sorted(value, key=lambda key: (type(key).__name__, repr(key)))


def _at(path: str) -> str:
    return f" at {path}" if path else ""


def _number(value: Any, path: str) -> Number:
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # NumPy's
        value = value.item()
    if isinstance(value, bool | complex):  # their subclasses too: exact ones are what is coded
        return complex(value) if isinstance(value, complex) else value
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    raise UsageError(
        f"reduce() got {type(value).__name__!r}{_at(path)}: expected a tensor, a number, or a dict or list of them"
    )


def _weight(weight: Any) -> Weight:
    if weight is None:
        return 1
    try:
        number = weight.item() if isinstance(weight, Tensor) else _number(weight, "")
        if not isinstance(number, complex) and math.isfinite(number) and 0 <= number == float(number):
            return int(number) if isinstance(number, int) else number
    except (UsageError, RuntimeError, OverflowError):
        pass
    raise UsageError(f"reduce(weight={weight!r}): expected a finite number that isn't negative")


def reduce(comm: Comm, value: Any, op: Op, weight: Any) -> Any:
    """See `Run.reduce`."""
    contents, mine, problem = _Contents(op, [f"op={op!r}{'' if weight is None else ' and a weight'}"]), 0.0, ""
    try:
        if op not in exact.OPS:
            raise UsageError(f"reduce(op={op!r}): expected mean, sum, min or max")
        mine = _weight(weight)
        contents.take(value)
    except UsageError as error:  # every rank's, once they have met
        problem = str(error)
    return _rebuilt(value, iter(_reduced(comm, contents, mine, problem)))


def _rebuilt(value: Any, results: Iterator[Any]) -> Any:
    if isinstance(value, Mapping):
        found = {key: _rebuilt(value[key], results) for key in _keys(value)}
        return {key: found[key] for key in value}
    if isinstance(value, list | tuple):
        items = [_rebuilt(item, results) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return next(results)


def _reduced(comm: Comm, contents: _Contents, mine: Weight, problem: str) -> list[Any]:
    """Each leaf over all ranks. One number needs no other message than the one by which ranks meet."""
    op, leaves = contents.op, contents.leaves
    small = [] if problem else [place for place, leaf in enumerate(leaves) if _is_small(leaf)]
    numbers = [leaf.item() if isinstance(leaf, Tensor) else leaf for leaf in map(leaves.__getitem__, small)]
    coded = [exact.encode(number) for number in numbers]
    kind, first, second = coded[0] if len(coded) == 1 else (0, 0, 0)
    words = exact.bits(mine), kind | (_WHOLE if isinstance(mine, int) else 0), first, second
    rows = comm.meet("run.reduce()", what=contents.parts, words=words, problem=problem)
    weights = [_weight_of(row) for row in rows]
    found: dict[int, Any] = {}
    if numbers:
        ranks = _numbers_of_all(comm, numbers, coded, rows)
        for place, values in zip(small, zip(*ranks, strict=True), strict=True):
            found[place] = _like(leaves[place], exact.reduced(op, values, weights), op, weights)
    for on_cuda in (False, True):
        tensors = {
            place: leaf
            for place, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and place not in found and (leaf.device.type == "cuda") == on_cuda
        }
        if tensors:
            found |= zip(tensors, _tensors(comm, op, list(tensors.values()), weights), strict=True)
    return [found[place] for place in range(len(leaves))]


def _is_small(leaf: Number | Tensor) -> bool:
    return not isinstance(leaf, Tensor) or (leaf.numel() == 1 and leaf.device.type != "cuda")


def _weight_of(row: list[int]) -> Weight:
    weight = exact.from_bits(row[0])
    return int(weight) if row[1] & _WHOLE else weight


def _numbers_of_all(
    comm: Comm, numbers: list[Number], coded: list[tuple[int, int, int]], rows: list[list[int]]
) -> list[list[Number]]:
    """By rank."""
    if len(coded) == 1:
        tables = [[[row[1] & ~_WHOLE, *row[2:]]] for row in rows]
    else:
        tables = [part.tolist() for part in comm.all_gather(torch.tensor(coded, dtype=torch.int64))]
    if any(entry[0] == exact.LARGE for table in tables for entry in table):
        return comm.gather_objects(numbers)
    return [[exact.decode(*entry) for entry in table] for table in tables]


def _like(leaf: Number | Tensor, result: Number, op: Op, weights: list[Weight]) -> Number | Tensor:
    """A tensor where this rank gave one."""
    if not isinstance(leaf, Tensor):
        return result
    dtype = wide.result_type(leaf.dtype, op, weights)
    if dtype in wide.INTEGERS:
        try:
            return torch.tensor(result, dtype=dtype, device=leaf.device).reshape(leaf.shape)
        except (ValueError, RuntimeError):
            raise wide.beyond() from None
    made = torch.tensor(result, dtype=torch.complex128 if dtype.is_complex else torch.float64)
    return made.to(dtype).to(leaf.device).reshape(leaf.shape)


def _tensors(comm: Comm, op: Op, tensors: list[Tensor], weights: list[Weight]) -> list[Tensor]:
    home = tensors[0].device if tensors[0].device.type == "cuda" else torch.device("cpu")
    results = wide.reduced(comm, op, [tensor.to(home) for tensor in tensors], weights)
    return [result.to(tensor.device) for result, tensor in zip(results, tensors, strict=True)]
