"""Values that ranks reduce, gather and broadcast, and what comes of them by exact arithmetic.

A probe's name says it all: "reduce KIND OP WEIGHT", "gather KIND" or "broadcast KIND".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch

KINDS: dict[str, Callable[[int], Any]] = {
    "float": lambda r: 0.25 * r + 0.1,
    "int": lambda r: 3 * r - 2,
    "big": lambda r: 2**53 + 1 + r,
    "bool": lambda r: r != 1,
    "floats": lambda r: torch.tensor([[0.5, r], [1.0, -r]]),
    "ints": lambda r: torch.tensor([2**24 + 1, r]),
    "bytes": lambda r: torch.tensor([100, r], dtype=torch.uint8),
    "bools": lambda r: torch.tensor([True, r == 1]),
    "halves": lambda r: torch.tensor([300.0, r], dtype=torch.float16),
    "complex": lambda r: torch.tensor([1 + 2j * r, -1j]),
    "scalar": lambda r: torch.tensor(r + 0.5, dtype=torch.float64),
    "none": lambda r: torch.zeros(0, 3),
    "keys": lambda r: dict([("acc", 1 + r), ("loss", 20.0 * r)][:: 1 if r % 2 else -1]),
    "nested": lambda r: {"a": [r, 2.0], "b": (True, torch.tensor([r, 1]))},
}
WEIGHTS: dict[str, Callable[[int], Any]] = {
    "": lambda r: None,
    "weight": lambda r: r + 1,
    "tensor": lambda r: torch.tensor(2 * r + 1),
    "zero": lambda r: 0 if r == 1 else 2.5,
    "large": lambda r: 40000,
}
GATHERED: dict[str, Callable[[int], Any]] = {
    "rows": lambda r: torch.arange(3.0 * (r + 1)).reshape(r + 1, 3),
    "nothing": lambda r: torch.zeros(0, 2) if r == 0 else torch.full((2, 2), float(r)),
    "flat": lambda r: torch.zeros(0) if r == 0 else torch.ones(2, 3),
    "dtypes": lambda r: torch.ones(2, dtype=(torch.float32, torch.float64)[r % 2]),
    "dims": lambda r: torch.ones(2) if r % 2 else torch.tensor(1.0),
    "widths": lambda r: torch.ones(2, 3 + r % 2),
    "bools": lambda r: torch.tensor([r == 0, True]),
    "halves": lambda r: torch.tensor([r + 0.5], dtype=torch.bfloat16),
    "objects": lambda r: {"rank": r, "name": "x" * r},
}
HALF = 65504.0  # float16's largest number
# Where an error on all ranks is right as well.
_LOSSY = {"big", "bytes", "complex", "flat", "dtypes", "dims", "widths"}
PROBES = (
    *(f"reduce {kind} {op} {weight}".strip() for kind in KINDS for op in ("mean", "sum", "max") for weight in WEIGHTS),
    *(f"reduce {kind} min" for kind in KINDS),
    *(f"gather {kind}" for kind in GATHERED),
    *(f"broadcast {kind}" for kind in ("float", "floats", "nested", "bools")),
)


def measured(run: Any, probe: str) -> Any:
    """What the API makes of it, in plain numbers and lists."""
    from phalanx.errors import PhalanxError

    call, kind, *rest = probe.split()
    try:
        if call == "gather":
            return plain(run.gather(GATHERED[kind](run.rank)))
        if call == "broadcast":
            return plain(run.broadcast(KINDS[kind](run.rank), src=run.world_size - 1))
        return plain(run.reduce(KINDS[kind](run.rank), rest[0], weight=WEIGHTS["".join(rest[1:])](run.rank)))
    except PhalanxError as error:
        return f"refused: {error}"


def expected(probe: str, size: int) -> Any:
    """The right result; `may_refuse` says whether an error is right too."""
    call, kind, *rest = probe.split()
    if call == "gather":
        parts = [plain(GATHERED[kind](rank)) for rank in range(size)]
        joined = [row for part in parts for row in (part if isinstance(part, list) else [part])]
        return parts if kind == "objects" else joined
    if call == "broadcast":
        return plain(KINDS[kind](size - 1))
    weights = [plain(WEIGHTS["".join(rest[1:])](rank)) for rank in range(size)]
    exact = _reduced([plain(KINDS[kind](rank)) for rank in range(size)], rest[0], weights)
    return [math.inf if value > HALF else value for value in exact] if kind == "halves" else exact


def may_refuse(probe: str) -> bool:
    return probe.split()[1] in _LOSSY


def plain(value: Any) -> Any:
    """Tensors as lists, tuples too."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def _reduced(values: list[Any], op: str, weights: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, dict):
        return {key: _reduced([value[key] for value in values], op, weights) for key in first}
    if isinstance(first, list):
        return [_reduced(list(items), op, weights) for items in zip(*values, strict=True)]
    if isinstance(first, complex):
        if op == "max":
            return "refused"
        parts = [[value.real for value in values], [value.imag for value in values]]
        return complex(*(_number(part, op, weights) for part in parts))
    return _number(values, op, weights)


def _number(values: list[Any], op: str, weights: list[Any]) -> Any:
    shares = [Fraction(1 if weight is None else weight) for weight in weights]
    if op in ("min", "max"):
        return (min if op == "min" else max)(v for v, share in zip(values, shares, strict=True) if share)
    total = sum(Fraction(value) * share for value, share in zip(values, shares, strict=True))
    exact = total / sum(shares) if op == "mean" else total
    whole = op == "sum" and not any(isinstance(one, float) for one in [*values, *weights])
    return int(exact) if whole else float(exact)


def agree(found: Any, right: Any, loose: bool) -> bool:
    """Integers to the last digit; the rest to float32's precision, or float16's."""
    if isinstance(right, dict):
        return isinstance(found, dict) and found.keys() == right.keys() and all(
            agree(found[key], item, loose) for key, item in right.items()
        )  # fmt: skip
    if isinstance(right, list):
        return isinstance(found, list) and len(found) == len(right) and all(
            agree(a, b, loose) for a, b in zip(found, right, strict=True)
        )  # fmt: skip
    if isinstance(right, str) or isinstance(found, str):
        return bool(found == right)
    if isinstance(right, complex):
        return abs(complex(found) - right) < 1e-5
    if isinstance(right, int) and not loose:
        return bool(found == right)
    return math.isclose(found, right, rel_tol=2e-3 if loose else 2e-6, abs_tol=1e-7)
