"""Numbers of all ranks, and what they come to: exact until the last rounding, and so the same on every rank.

A number travels as three integers of 64 bits, so that ranks need not agree whether theirs is an int or a float.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Literal

from ..errors import UsageError

Op = Literal["mean", "sum", "min", "max"]
OPS = ("mean", "sum", "min", "max")
Number = bool | int | float | complex
Weight = int | float
LARGE = 4  # the kind of an int that doesn't fit into 64 bits and travels by itself
_KINDS = (bool, int, float, complex)
_BOOL, _INT, _FLOAT, _COMPLEX = range(4)


def bits(value: float) -> int:
    """A float's own 64 bits as an integer."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def from_bits(word: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", word))[0])


def encode(value: Number) -> tuple[int, int, int]:
    """Its kind, and two words."""
    if isinstance(value, int):
        return (_KINDS.index(type(value)), value, 0) if -(2**63) <= value < 2**63 else (LARGE, 0, 0)
    return (_FLOAT, bits(value), 0) if isinstance(value, float) else (_COMPLEX, bits(value.real), bits(value.imag))


def decode(kind: int, first: int, second: int) -> Number:
    if kind == _COMPLEX:
        return complex(from_bits(first), from_bits(second))
    return from_bits(first) if kind == _FLOAT else _KINDS[kind](first)


def reduced(op: Op, values: Sequence[Number], weights: Sequence[Weight]) -> Number:
    """The values whose weight is above 0, reduced. Of none of them the mean is NaN and the sum 0.

    A float where one of them is a float; a sum of integers, weighted by integers, is an int.

    Raises:
        UsageError: there is none of them, and no integer is their minimum or maximum.
    """
    counted = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight > 0]
    kind = max(_KINDS.index(type(value)) for value, _ in counted or [(value, 0) for value in values])
    if kind == _COMPLEX:
        real, imag = ([complex(value).real for value in values], [complex(value).imag for value in values])
        return complex(reduced(op, real, weights), reduced(op, imag, weights))
    reals = [(value, weight) for value, weight in counted if not isinstance(value, complex)]
    if op in ("min", "max"):
        return _extreme(op, [value for value, _ in reals], kind)
    if not reals and op == "mean":
        return math.nan
    special = [value for value, _ in reals if isinstance(value, float) and not math.isfinite(value)]
    if special:
        return float(sum(special))
    top, bottom = _total(reals)
    if op == "mean":
        count, parts = _total([(1, weight) for _, weight in reals])
        return _ratio(top * parts, bottom * count)
    whole = kind < _FLOAT and all(isinstance(weight, int) for weight in weights)
    return top if whole else _ratio(top, bottom)


def _total(counted: Sequence[tuple[int | float, Weight]]) -> tuple[int, int]:
    """The weighted sum as a fraction: of floats and integers, whose denominators are powers of two."""
    terms = [(0, 1)]
    for value, weight in counted:
        (top, bottom), (share, parts) = value.as_integer_ratio(), weight.as_integer_ratio()
        terms.append((top * share, bottom * parts))
    common = max(bottom for _, bottom in terms)
    return sum(top * (common // bottom) for top, bottom in terms), common


def _ratio(top: int, bottom: int) -> float:
    """Rounded once."""
    try:
        return top / bottom
    except OverflowError:
        return math.inf if top > 0 else -math.inf


def _extreme(op: Op, values: list[int | float], kind: int) -> int | float:
    if not values:
        return no_extreme(op, kind == _FLOAT)
    if any(value != value for value in values):
        return math.nan
    best = max(values) if op == "max" else min(values)
    return _ratio(best, 1) if kind == _FLOAT and isinstance(best, int) else best


def no_extreme(op: Op, floating: bool) -> float:
    """NaN for floats, since all ranks have the weight 0; UsageError for integers, which have none."""
    if floating:
        return math.nan
    raise UsageError(f"reduce(op={op!r}) of integers, and the weight is 0 on all ranks: give one of them a weight")
