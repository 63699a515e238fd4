"""Reductions of numbers and tensors over imagined ranks, against fractions: exact up to the last rounding."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from phalanx.errors import UsageError
from phalanx.run import exact, wide
from phalanx.strategies.comm import Comm

WEIGHTS = st.one_of(st.integers(0, 100), st.floats(0, 1e30, allow_subnormal=False))
FLOATS = st.floats(allow_nan=False, allow_infinity=False)


class Imagined(Comm):
    """One of several ranks that are threads."""

    def __init__(self, rank: int, parts: list[Any], barrier: threading.Barrier) -> None:
        super().__init__(rank, len(parts))
        self._parts, self._barrier = parts, barrier

    def all_reduce(self, tensor: Tensor, op: str) -> Tensor:
        self._parts[self.rank] = tensor.clone()
        self._barrier.wait(20)
        stacked = torch.stack(self._parts)
        self._barrier.wait(20)
        reduced = {"sum": lambda: stacked.sum(0), "min": lambda: stacked.amin(0), "max": lambda: stacked.amax(0)}[op]()
        return tensor.copy_(reduced)


def over_ranks(op: Any, tensors: list[Tensor], weights: list[Any]) -> Tensor:
    """What each rank gets, which must be the same bits."""
    parts: list[Any] = [None] * len(tensors)
    barrier = threading.Barrier(len(tensors))
    with ThreadPoolExecutor(len(tensors)) as pool:
        jobs = [
            pool.submit(wide.reduced, Imagined(rank, parts, barrier), op, [tensor], weights)
            for rank, tensor in enumerate(tensors)
        ]
        first, *others = [job.result()[0] for job in jobs]
    for other in others:
        assert torch.equal(first.nan_to_num(7.5), other.nan_to_num(7.5))
    return first


def rounded(value: Fraction | float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


@settings(deadline=None)
@given(st.lists(st.tuples(FLOATS, WEIGHTS), min_size=1, max_size=4))
def test_means_and_sums_of_numbers_are_rounded_once(ranks: list[tuple[float, Any]]) -> None:
    values, weights = [value for value, _ in ranks], [weight for _, weight in ranks]
    total = sum((Fraction(v) * Fraction(w) for v, w in ranks), Fraction(0))
    count = sum((Fraction(w) for w in weights), Fraction(0))
    assert exact.reduced("sum", values, weights) == rounded(total)
    mean = exact.reduced("mean", values, weights)
    assert mean == rounded(total / count) if count else math.isnan(mean)  # type: ignore[arg-type]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(-(10**40), 10**40), st.integers(0, 9)), min_size=1, max_size=4))
def test_sums_of_integers_have_no_limit(ranks: list[tuple[int, int]]) -> None:
    values, weights = [value for value, _ in ranks], [weight for _, weight in ranks]
    found = exact.reduced("sum", values, weights)
    assert found == sum(value * weight for value, weight in ranks)
    assert type(found) is int
    counted = [value for value, weight in ranks if weight]
    if counted:
        assert exact.reduced("max", values, weights) == max(counted)


@settings(deadline=None)
@given(st.booleans() | st.integers(-(2**63), 2**63 - 1) | FLOATS | st.complex_numbers(allow_nan=False))
def test_numbers_travel_whole(value: Any) -> None:
    found = exact.decode(*exact.encode(value))
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@settings(deadline=None, max_examples=12)
@given(data=st.data())
def test_means_of_tensors_do_not_overflow_on_the_way(dtype: torch.dtype, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 3))
    limit = torch.finfo(dtype).max
    tensors = [
        torch.tensor(data.draw(st.lists(st.floats(-limit, limit), min_size=2, max_size=2)), dtype=torch.float64).to(
            dtype
        )
        for _ in range(size)
    ]
    weights = data.draw(st.lists(WEIGHTS, min_size=size, max_size=size))
    counted = [(t.double().tolist(), Fraction(w)) for t, w in zip(tensors, weights, strict=True) if w > 0]
    found = over_ranks("mean", tensors, weights)
    assert found.dtype == dtype
    if not counted:
        assert found.isnan().all()
        return
    for place in range(2):
        mean = sum(Fraction(v[place]) * w for v, w in counted) / sum(w for _, w in counted)
        largest = max(abs(v[place]) for v, _ in counted)  # what cancels leaves the error of its parts
        error = torch.finfo(dtype).eps * abs(float(mean)) + 2**-50 * largest + torch.finfo(dtype).smallest_normal
        assert abs(found[place].double().item() - float(mean)) <= error


@pytest.mark.parametrize("dtype", sorted(wide.INTEGERS, key=str), ids=str)
@settings(deadline=None, max_examples=6)
@given(data=st.data())
def test_integers_of_all_types(dtype: torch.dtype, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 3))
    low, high = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    lists = [data.draw(st.lists(st.integers(low, high), min_size=2, max_size=2)) for _ in range(size)]
    tensors = [torch.tensor(values, dtype=dtype) for values in lists]
    weights = data.draw(st.lists(st.integers(0, 5), min_size=size, max_size=size))
    totals = [sum(w * values[place] for values, w in zip(lists, weights, strict=True)) for place in range(2)]
    if all(-(2**63) <= total < 2**63 for total in totals):
        found = over_ranks("sum", tensors, weights)
        assert (found.tolist(), found.dtype) == (totals, torch.int64)
    else:
        with pytest.raises(UsageError, match="64 bits"):
            over_ranks("sum", tensors, weights)
    counted = [values for values, w in zip(lists, weights, strict=True) if w]
    if counted:
        largest = over_ranks("max", tensors, weights)
        assert (largest.tolist(), largest.dtype) == ([max(column) for column in zip(*counted, strict=True)], dtype)
        mean = over_ranks("mean", tensors, weights)
        assert mean.tolist() == pytest.approx([total / sum(weights) for total in totals], rel=1e-15)


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.tuples(st.floats(width=32), st.floats(width=32)), min_size=1, max_size=3),
    st.sampled_from(["min", "max"]),
)
def test_extremes_are_torchs(ranks: list[tuple[float, float]], op: str) -> None:
    tensors = [torch.tensor(values) for values in ranks]
    expected = getattr(torch.stack(tensors), f"a{op}")(0)
    found = over_ranks(op, tensors, [1] * len(tensors))
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
