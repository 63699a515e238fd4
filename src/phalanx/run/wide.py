"""Tensors of all ranks reduced in wide types, so that nothing overflows or is rounded on the way.

Floats and complex numbers are added in float64. Integers are added as two halves, which shows an overflow. For minima
and maxima all types are mapped to integers in the same order, which knows NaN and is the same in every backend.
However many tensors there are, each device needs one exchange, and two if floats and integers are added.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import UsageError
from ..strategies.comm import Comm
from .exact import Op, Weight, no_extreme

INTEGERS = {
    torch.bool, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64,
}  # fmt: skip
_LOW, _HIGH = -(2**63), 2**63 - 1
_HALF = 0xFFFFFFFF


def result_type(dtype: torch.dtype, op: Op, weights: Sequence[Weight]) -> torch.dtype:
    """As torch's own reductions have it."""
    if dtype not in INTEGERS or op in ("min", "max"):
        return dtype
    return torch.int64 if op == "sum" and _whole(weights) else torch.float64


def _whole(weights: Sequence[Weight]) -> bool:
    return all(isinstance(weight, int) for weight in weights)


def reduced(comm: Comm, op: Op, tensors: list[Tensor], weights: Sequence[Weight]) -> list[Tensor]:
    """Tensors of one device, of equal types and shapes on all ranks; the results have the same shapes."""
    if op in ("min", "max"):
        return _extremes(comm, op, tensors, weights)
    whole = [place for place, tensor in enumerate(tensors) if tensor.dtype in INTEGERS and _whole(weights)]
    rest = [place for place in range(len(tensors)) if place not in set(whole)]
    found: dict[int, Tensor] = {}
    for places, add in ((whole, _whole_sums), (rest, _sums)):
        if places:
            found |= zip(places, add(comm, op, [tensors[place] for place in places], weights), strict=True)
    return [found[place] for place in range(len(tensors))]


def _apart(flat: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    sizes = [tensor.numel() * (2 if tensor.is_complex() else 1) for tensor in tensors]
    return list(torch.split(flat, sizes))


# Floats.


def _sums(comm: Comm, op: Op, tensors: list[Tensor], weights: Sequence[Weight]) -> list[Tensor]:
    flat = torch.cat([_wide(tensor) for tensor in tensors])
    exponent = math.frexp(max(weights))[1] - 1  # the largest weight becomes 1 to 2, by a power of two
    result = _sum(comm, op, flat, weights, exponent)
    narrow = {torch.float16, torch.bfloat16, torch.float32}  # can't overflow here
    if not narrow.issuperset(tensor.dtype for tensor in tensors) and not result.isfinite().all():  # so on all ranks
        room = comm.world_size.bit_length() + 1
        again = _sum(comm, op, flat, weights, exponent + room)  # loses nothing but the smallest numbers
        result = torch.where(result.isfinite(), result, again)
    return [_narrow(part, tensor) for part, tensor in zip(_apart(result, tensors), tensors, strict=True)]


def _sum(comm: Comm, op: Op, flat: Tensor, weights: Sequence[Weight], exponent: int) -> Tensor:
    shares = [math.ldexp(weight, -exponent) for weight in weights]
    mine = shares[comm.rank]
    # A rank without weight may hold NaN (the mean of nothing): it must not count, so it is not multiplied.
    total = _added(comm, flat * mine if mine > 0 else torch.zeros_like(flat))
    if op == "mean":
        return total / math.fsum(shares)
    half = exponent // 2  # a power may be too large for one factor
    return total * 2.0**half * 2.0 ** (exponent - half)


def _added(comm: Comm, flat: Tensor) -> Tensor:
    return comm.all_reduce(flat, "sum") if flat.numel() else flat


def _wide(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return torch.view_as_real(tensor.to(torch.complex128).resolve_conj()).reshape(-1)
    return tensor.to(torch.float64).reshape(-1)


def _narrow(part: Tensor, tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return torch.view_as_complex(part.reshape(*tensor.shape, 2)).to(tensor.dtype)
    return part.reshape(tensor.shape).to(torch.float64 if tensor.dtype in INTEGERS else tensor.dtype)


# Integers.


def _whole_sums(comm: Comm, op: Op, tensors: list[Tensor], weights: Sequence[Weight]) -> list[Tensor]:
    count = sum(weights)
    if count >= 2**31:
        raise UsageError(
            f"reduce() of integers whose weights sum to {count}: expected less than 2**31, or float weights"
        )
    halves = torch.cat([_halves(tensor) for tensor in tensors], dim=1)
    high, low = _added(comm, halves * weights[comm.rank])
    if op == "mean":
        result = (high.double() * 2.0**32 + low.double()) / count
    else:
        high, low = high + (low >> 32), low & _HALF
        if ((high < -(2**31)) | (high >= 2**31)).any():
            raise beyond()
        result = (high << 32) + low
    return [part.reshape(tensor.shape) for part, tensor in zip(_apart(result, tensors), tensors, strict=True)]


def beyond() -> UsageError:
    return UsageError("reduce(op='sum') of integers comes to more than 64 bits hold: reduce them as float64")


def _halves(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1)
    words = flat.view(torch.int64) if flat.dtype == torch.uint64 else flat.to(torch.int64)
    high = words >> 32
    return torch.stack([high & _HALF if flat.dtype == torch.uint64 else high, words & _HALF])


# Minima and maxima.


def _extremes(comm: Comm, op: Op, tensors: list[Tensor], weights: Sequence[Weight]) -> list[Tensor]:
    flat = torch.cat([_ordered(tensor, op) for tensor in tensors])
    if not weights[comm.rank] > 0:
        flat.fill_(_LOW if op == "max" else _HIGH)
    if flat.numel():
        comm.all_reduce(flat, op)
    nobody = not any(weight > 0 for weight in weights)
    return [_from_order(part, tensor, op, nobody) for part, tensor in zip(_apart(flat, tensors), tensors, strict=True)]


def _ordered(tensor: Tensor, op: Op) -> Tensor:
    flat = tensor.reshape(-1)
    if not flat.is_floating_point():
        return flat.view(torch.int64) ^ _LOW if flat.dtype == torch.uint64 else flat.to(torch.int64)
    wide = flat.to(torch.float64)
    words = wide.view(torch.int64)
    ordered = torch.where(words < 0, words ^ _HIGH, words)
    return ordered.masked_fill(wide.isnan(), _HIGH if op == "max" else _LOW)  # NaN wins, as in torch.max


def _from_order(words: Tensor, tensor: Tensor, op: Op, nobody: bool) -> Tensor:
    if nobody:
        return torch.full_like(tensor, no_extreme(op, tensor.is_floating_point()))
    if tensor.dtype == torch.uint64:
        return (words ^ _LOW).view(torch.uint64).reshape(tensor.shape)
    if not tensor.is_floating_point():
        return words.to(tensor.dtype).reshape(tensor.shape)
    wide = torch.where(words < 0, words ^ _HIGH, words).view(torch.float64)
    wide = wide.masked_fill(words == (_HIGH if op == "max" else _LOW), math.nan)
    return wide.to(tensor.dtype).reshape(tensor.shape)
