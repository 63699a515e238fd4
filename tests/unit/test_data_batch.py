"""Batches of many structures."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from phalanx.data import count, move, zero_rows
from phalanx.errors import DataError

Pair = namedtuple("Pair", "x y")
META = torch.device("meta")


@dataclass(frozen=True)
class Boxes:
    image: torch.Tensor
    names: list


class Encoding(UserDict):
    """Like a tokenizer's output: a mapping with a `to`."""

    def to(self, device):
        self.data = {k: v.to(device) for k, v in self.data.items()}
        return self


def x(rows=3):
    return torch.ones(rows, 2)


@pytest.mark.parametrize(
    "batch",
    [
        x(),
        [x(), torch.ones(3)],
        (torch.tensor(1.0), x()),
        {"loss": torch.tensor(0.5), "text": ["a", "b"], "x": x()},
        Pair(x(), 1),
        Boxes(x(), ["a", "b", "c"]),
        Encoding(input_ids=x()),
        [("a", "b"), x()],
        np.zeros((3, 4)),
        ["a", "b", "c"],
        {"text": ("a", "b", "c")},
        [1, 2, 3],
    ],
    ids=lambda b: type(b).__name__,
)
def test_count_and_zero_rows(batch):
    assert count(batch) == 3
    empty = zero_rows(batch)
    assert type(empty) is type(batch)
    assert count(empty) == 0


@pytest.mark.parametrize("batch", [torch.tensor(1.0), "text", 3, None, {}, {"n": 3}])
def test_nothing_to_count(batch):
    with pytest.raises(DataError, match="cannot count the samples"):
        count(batch)


def test_zero_rows_keeps_structure():
    batch = {
        "x": x(),
        "pair": Pair(x(), ["a", "b", "c"]),
        "n": 7,
        "scale": torch.tensor(2.0),
        "strings": [("a",), ("b",)],
    }
    empty = zero_rows(batch)
    assert empty["x"].shape == (0, 2)
    assert type(empty["pair"]) is Pair
    assert empty["pair"].x.shape == (0, 2)
    assert empty["pair"].y == []
    assert (empty["n"], empty["scale"].item()) == (7, 2.0)
    assert empty["strings"] == [(), ()]
    assert batch["x"].shape == (3, 2)


def test_zero_rows_of_an_unknown_object_is_an_error():
    class Opaque:
        pass

    with pytest.raises(DataError, match="empty batch of Opaque"):
        zero_rows(Opaque())
    with pytest.raises(DataError, match="empty batch of Opaque"):
        zero_rows({"x": x(), "graph": Opaque()})


@pytest.mark.parametrize(
    ("batch", "leaf"),
    [
        (x(), lambda b: b),
        ([x(), 1], lambda b: b[0]),
        ({"a": {"b": (x(),)}}, lambda b: b["a"]["b"][0]),
        (OrderedDict(a=x()), lambda b: b["a"]),
        (Pair(x(), "y"), lambda b: b.x),
        (Boxes(x(), ["n"]), lambda b: b.image),
        (Encoding(a=x()), lambda b: b["a"]),
    ],
    ids=lambda b: type(b).__name__,
)
def test_move(batch, leaf):
    moved = move(batch, META)
    assert type(moved) is type(batch)
    assert leaf(moved).device == META


def test_what_needs_no_move_is_the_same_object():
    batch = {"x": [x(), (x(), "text", None)], "n": np.ones(3), "boxes": Boxes(x(), ["n"])}
    assert move(batch, torch.device("cpu")) is batch


def test_packed_sequences_move_by_their_own_to():
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])
    assert move(packed, torch.device("cpu")).data.tolist() == [1.0, 1.0, 1.0]
