"""`reduce`, `gather` and `broadcast`: exact in every type, or an error on all ranks that names both sides."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import phalanx
from phalanx.errors import UsageError
from tests.dist.harness import run_ranks

pytestmark = pytest.mark.slow

NAN = float("nan")


class Pair(NamedTuple):
    first: Any
    second: Any


Case = Callable[[phalanx.Run, int], Any]  # a call, and this rank
BIG = 2**53

# Each with what it comes to on two ranks, computed by hand.
RIGHT: dict[str, tuple[Case, Any]] = {
    "a dict in another order": (
        lambda run, r: run.reduce({"acc": 1, "loss": 20} if r else {"loss": 10, "acc": 3}),
        {"acc": 2.0, "loss": 15.0},
    ),
    "an integer by the rank": (lambda run, r: run.reduce(torch.tensor(5), "sum", weight=r), torch.tensor(5)),
    "integers by the rank": (lambda run, r: run.reduce(torch.tensor([5, -7]), "sum", weight=r), torch.tensor([5, -7])),
    "integers by a float": (
        lambda run, r: run.reduce(torch.tensor([5, -7]), "sum", weight=0.5),
        torch.tensor([5.0, -7.0]).double(),
    ),
    "beyond float32": (
        lambda run, r: run.reduce(torch.tensor([2**24 + 1, 1])),
        torch.tensor([2.0**24 + 1, 1], dtype=torch.float64),
    ),
    "beyond float64": (lambda run, r: run.reduce(BIG + 1, "sum"), 2 * BIG + 2),
    "beyond float64 in a tensor": (
        lambda run, r: run.reduce(torch.tensor([BIG + 1, 1]), "sum"),
        torch.tensor([2 * BIG + 2, 2]),
    ),
    "beyond 64 bits": (lambda run, r: run.reduce({"a": 10**30 + r, "b": r}, "sum"), {"a": 2 * 10**30 + 1, "b": 1}),
    "the largest of large": (lambda run, r: run.reduce(10**30 + r, "max"), 10**30 + 1),
    "true values": (lambda run, r: run.reduce(True, "sum"), 2),
    "true tensors": (lambda run, r: run.reduce(torch.tensor([True, r == 0]), "sum"), torch.tensor([2, 1])),
    "all true": (lambda run, r: run.reduce(torch.tensor([True, r == 0]), "min"), torch.tensor([True, False])),
    "any true": (lambda run, r: run.reduce(r == 1, "max"), True),
    "int and float": (lambda run, r: run.reduce(0.5 if r else 0), 0.25),
    "complex": (lambda run, r: run.reduce(torch.tensor([1 + 2j * r, 1j])), torch.tensor([1 + 1j, 1j])),
    "complex numbers": (lambda run, r: run.reduce(1 + 4j * r), 1 + 2j),
    "half, weighted": (
        lambda run, r: run.reduce(torch.tensor([60000.0, r]).half(), weight=40000),
        torch.tensor([60000.0, 0.5]).half(),
    ),
    "bfloat16 sum": (
        lambda run, r: run.reduce(torch.tensor([256.0, 1.0]).bfloat16(), "sum"),
        torch.tensor([512.0, 2.0]).bfloat16(),
    ),
    "float8": (
        lambda run, r: run.reduce(torch.tensor([1.0, 3.0 * r]).to(torch.float8_e4m3fn), "max").float(),
        torch.tensor([1.0, 3.0]),
    ),
    "unsigned": (
        lambda run, r: run.reduce(torch.tensor([2**64 - 1 - r, r], dtype=torch.uint64), "min").tolist(),
        [2**64 - 2, 0],
    ),
    "the mean of the largest": (
        lambda run, r: run.reduce(torch.tensor([1.7e308, 5e-324], dtype=torch.float64)),
        torch.tensor([1.7e308, 5e-324], dtype=torch.float64),
    ),
    "NaN wins": (
        lambda run, r: run.reduce(torch.tensor([NAN if r else 1.0, -0.5 - r]), "max").tolist()[1:],
        [-0.5],
    ),
    "a rank without weight": (
        lambda run, r: run.reduce({"a": NAN if r else 2.0, "b": torch.tensor([NAN if r else 3.0, 1.0])}, weight=1 - r),
        {"a": 2.0, "b": torch.tensor([3.0, 1.0])},
    ),
    "the least of whom counts": (
        lambda run, r: run.reduce(torch.tensor([-9 if r else 4, 5]), "min", weight=1.5 - 1.5 * r),
        torch.tensor([4, 5]),
    ),
    "containers": (
        lambda run, r: run.reduce([{}, (), Pair(r, [torch.ones(0), np.float32(r)])], "sum"),
        [{}, (), Pair(1, [torch.ones(0), 1.0])],
    ),
    "an odd layout": (
        lambda run, r: run.reduce(torch.arange(6.0, requires_grad=True).reshape(2, 3).t() + r, "sum"),
        torch.tensor([[1.0, 7.0], [3.0, 9.0], [5.0, 11.0]]),
    ),
    "expanded": (lambda run, r: run.reduce(torch.tensor([1.0 + r]).expand(3), "sum"), torch.full((3,), 3.0)),
    "gathered, empty": (
        lambda run, r: run.gather(torch.ones(2 * r, 2, dtype=torch.bool)),
        torch.ones(2, 2, dtype=torch.bool),
    ),
    "gathered, all empty": (lambda run, r: run.gather(torch.ones(0, 3)), torch.ones(0, 3)),
    "gathered, no width": (lambda run, r: run.gather(torch.ones(r + 1, 0)), torch.ones(3, 0)),
    "gathered objects": (lambda run, r: run.gather({r: "x" * 1000 * r}), [{0: ""}, {1: "x" * 1000}]),
    "a tensor to all": (lambda run, r: run.broadcast(torch.tensor(3 - r).short(), 1), torch.tensor(2).short()),
    "an object to all": (lambda run, r: run.broadcast({"a": [1]} if r == 1 else None, np.int64(1)), {"a": [1]}),
    "an empty one to all": (lambda run, r: run.broadcast(torch.ones(0, 2)), torch.ones(0, 2)),
} | {
    f"gathered {dtype}": (
        lambda run, r, dtype=dtype: run.gather(torch.tensor([r, 1 - r]).to(dtype)).to(torch.complex128),
        torch.tensor([0, 1, 1, 0]).to(torch.complex128),
    )
    for dtype in (torch.bool, torch.complex64, torch.int16, torch.float8_e5m2, torch.bfloat16, torch.uint32)
}  # fmt: skip

# What both ranks must be told, by words of the error.
WRONG: dict[str, tuple[Case, list[str]]] = {
    "keys": (lambda run, r: run.reduce({"acc": 1} if r else {"loss": 1}), ["'acc'", "'loss'", "rank 0", "rank 1"]),
    "fewer keys": (lambda run, r: run.reduce({"a": 1} if r else {"a": 1, "b": 2}), ["'b'", "nothing more"]),
    "kinds": (lambda run, r: run.reduce([1] if r else (1,)), ["a list", "a tuple"]),
    "a number beside a tensor": (lambda run, r: run.reduce(1.0 if r else torch.tensor(1.0)), ["a number", "float32"]),
    "dtypes": (lambda run, r: run.reduce(torch.ones(2) if r else torch.ones(2).double()), ["float32", "float64"]),
    "shapes": (lambda run, r: run.reduce(torch.ones(2 + r)), ["shape (2)", "shape (3)"]),
    "ops": (lambda run, r: run.reduce(1.0, "sum" if r else "mean"), ["op='sum'", "op='mean'"]),
    "weights": (lambda run, r: run.reduce(1.0, weight=2 if r else None), ["a weight"]),
    "a negative weight": (lambda run, r: run.reduce(1.0, weight=-r), ["rank 1", "weight=-1", "negative"]),
    "weight NaN": (lambda run, r: run.reduce(1.0, weight=NAN if r else 1), ["weight=nan", "finite"]),
    "two weights": (lambda run, r: run.reduce(1.0, weight=torch.ones(1 + r)), ["rank 1", "weight=tensor([1., 1.])"]),
    "text": (lambda run, r: run.reduce({"a": "x" if r else 1}), ["rank 1", "'str'", "['a']"]),
    "the least complex": (lambda run, r: run.reduce(torch.tensor([1j]), "min"), ["complex", "order"]),
    "sparse": (lambda run, r: run.reduce(torch.eye(2).to_sparse() if r else torch.eye(2)), ["sparse", "rank 1"]),
    "too large a sum": (lambda run, r: run.reduce(torch.tensor([2**62, 2**62]), "sum"), ["64 bits", "float64"]),
    "too large a sum of one": (lambda run, r: run.reduce(torch.tensor(2**62), "sum"), ["64 bits"]),
    "the least of none": (lambda run, r: run.reduce(torch.tensor([1, 2]), "min", weight=0), ["weight is 0"]),
    "gather beside broadcast": (
        lambda run, r: run.broadcast(1) if r else run.gather(1),
        ["rank 0 is in run.gather()", "rank 1 in run.broadcast()", "run.is_main"],
    ),
    "save beside reduce": (
        lambda run, r: run.reduce(1.0) if r else run.save(),
        ["rank 0 is in run.save()", "rank 1 in run.reduce()"],
    ),
    "reduce beside resume": (
        lambda run, r: run.resume() if r else run.reduce(1.0),
        ["rank 0 is in run.reduce()", "rank 1 in run.resume()"],
    ),
    "shapes to gather": (lambda run, r: run.gather(torch.ones(3, 2) if r else torch.ones(0)), ["(*)", "(*, 2)"]),
    "dtypes to gather": (lambda run, r: run.gather(torch.ones(3).to([torch.half, torch.int][r])), ["float16", "int32"]),
    "kinds to gather": (lambda run, r: run.gather([1] if r else torch.ones(1)), ["an object", "float32"]),
    "nothing for pickle": (lambda run, r: run.gather(threading.Lock() if r else 1), ["rank 1", "pickle", "lock"]),
    "shapes to all": (lambda run, r: run.broadcast(torch.ones(2 - r)), ["(2)", "(1)"]),
    "kinds to all": (lambda run, r: run.broadcast(None if r else torch.ones(1)), ["an object", "float32"]),
    "sources": (lambda run, r: run.broadcast(r, src=r), ["src=0", "src=1"]),
    "a source that isn't": (lambda run, r: run.broadcast(r, src=1 + r), ["src=2", "0 to 1"]),
}


def answers() -> tuple[dict[str, Any], dict[str, tuple[str, float]]]:
    """Each right case's value and each wrong one's error, in one run: after an error, calls go on."""
    right, wrong = {}, {}
    with phalanx.init(strategy="ddp", progress=False) as run:
        for name, (case, _) in RIGHT.items():
            right[name] = case(run, run.rank)
        for name, (case, _) in WRONG.items():
            begin = time.monotonic()
            for _ in range(3):
                run.reduce({"loss": 1.0})  # alike: the next call differs
            try:
                wrong[name] = f"no error: {case(run, run.rank)}", 0.0
            except UsageError as error:
                wrong[name] = str(error), time.monotonic() - begin
    return right, wrong


def same(got: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        return isinstance(got, Tensor) and got.dtype == expected.dtype and torch.equal(got, expected)
    if isinstance(expected, dict):
        return set(got) == set(expected) and all(same(got[key], expected[key]) for key in expected)
    if isinstance(expected, list | tuple):
        return len(got) == len(expected) and all(map(same, got, expected)) and type(got) is type(expected)
    return type(got) is type(expected) and bool(got == expected)


def test_values_are_exact_or_refused_on_all_ranks(tmp_path: Path) -> None:
    for right, wrong in run_ranks(answers, 2, folder=tmp_path):
        assert {name: right[name] for name, (_, value) in RIGHT.items() if not same(right[name], value)} == {}
        assert {
            name: wrong[name] for name, (_, words) in WRONG.items() if any(w not in wrong[name][0] for w in words)
        } == {}
        assert {name: seconds for name, (_, seconds) in wrong.items() if seconds > 10} == {}
