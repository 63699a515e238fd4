"""State of the script's own in checkpoints, under any strategy and world size."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import phalanx
from phalanx.errors import PhalanxError
from tests.dist.harness import run_ranks

pytestmark = pytest.mark.slow


class Meter:
    """As metrics of other libraries are."""

    def __init__(self) -> None:
        self.total = torch.zeros(3, dtype=torch.int64)
        self.note: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "note": self.note}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total, self.note = state["total"], state["note"]


def things(run: phalanx.Run) -> dict[str, Any]:
    """New ones, with nothing in them yet. The teacher is sharded where the run is."""
    teacher = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    if run.config.strategy == "fsdp":
        fully_shard(teacher)
    best = {"loss": 9.0, "history": [], "weights": torch.zeros(2), 3: None}
    found = {"teacher": teacher, "best": best, "words": [], "meter": Meter(), "last": deque(maxlen=2), "ids": set()}
    for name, thing in found.items():
        assert run.register(name, thing) is thing
    return found


def saved(strategy: str) -> str:
    """What differs between ranks is rank 0's."""
    with phalanx.init(name="mine", strategy=strategy, progress=False) as run:
        run.prepare(nn.Linear(1, 1))
        found = things(run)
        with torch.no_grad():
            for at, tensor in enumerate([*found["teacher"].parameters()]):
                tensor.copy_(torch.full_like(tensor, float(at + 1)))
        best = found["best"]
        best["loss"], best["new"] = 0.25 + run.rank, {"a/b": torch.ones(1), "a": {"b": torch.zeros(0)}}
        best["history"] += [1, (2, torch.tensor(3.0))]
        best["weights"] += 7
        found["words"] += ["ein", "zwei"]
        found["meter"].total += 5 + run.rank
        found["meter"].note = torch.float16
        found["last"].extend([1, 2, 3])
        found["ids"].add("x")
        return str(run.save())


def loaded(strategy: str, path: str) -> dict[str, Any]:
    with phalanx.init(name="mine", strategy=strategy, progress=False) as run:
        run.prepare(nn.Linear(1, 1))
        found = things(run)
        history, weights = found["best"]["history"], found["best"]["weights"]
        run.resume(path)
        assert found["best"]["history"] is history
        assert found["best"]["weights"] is weights
        teacher = found.pop("teacher").state_dict()
        whole = {
            name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in teacher.items()
        }
        meter = found.pop("meter")
        return {**found, "teacher": whole, "total": meter.total.tolist(), "note": meter.note}


@pytest.mark.parametrize(("source", "target"), [(("fsdp", 2), ("single", 1)), (("ddp", 2), ("fsdp", 3))])
def test_it_moves_between_strategies_and_world_sizes(tmp_path: Path, source: Any, target: Any) -> None:
    path = run_ranks(saved, source[1], source[0], folder=tmp_path)[0]
    for found in run_ranks(loaded, target[1], target[0], path, folder=tmp_path):
        torch.testing.assert_close(found["teacher"]["0.weight"], torch.ones(5, 3))
        torch.testing.assert_close(found["teacher"]["1.bias"], torch.full((5,), 4.0))
        assert int(found["teacher"]["1.num_batches_tracked"]) == 0
        best = found["best"]
        assert (best["loss"], best["history"][0], best[3]) == (0.25, 1, None)
        assert float(best["history"][1][1]) == 3
        assert best["weights"].tolist() == [7, 7]
        assert best["new"]["a/b"].tolist() == [1]
        assert best["new"]["a"]["b"].shape == (0,)
        assert found["words"] == ["ein", "zwei"]
        assert found["total"] == [5, 5, 5]
        assert found["note"] is torch.float16
        assert found["last"] == deque([2, 3], maxlen=2)
        assert found["ids"] == {"x"}


class Stubborn(Meter):
    def state_dict(self) -> dict[str, Any]:
        raise ValueError("not now")


def attempt(names: dict[str, Any], path: str | None = None, late: bool = False, optional: bool = False) -> Any:
    """A checkpoint with, or a resume into, what is registered by these names; or what is said to it."""
    try:
        with phalanx.init(name="mine", progress=False) as run:
            model = run.prepare(nn.Linear(1, 1))
            things = {"model": model}
            if late:
                run.resume()
            for name, thing in names.items():
                run.register(name, things.get(thing, thing) if isinstance(thing, str) else thing, optional=optional)
            if path is None:
                return str(run.save())
            run.resume(path)
            return dict(names)
    except PhalanxError as error:
        return str(error)


def attempts() -> list[Any]:
    none, one = attempt({}), attempt({"a": {"x": 1}})
    return [
        attempt({"b": {}}, none),
        attempt({"b": {"y": 2}}, none, optional=True),
        attempt({}, one),
        attempt({"a": {}}, one),
        attempt({"a": {}}, late=True),
        attempt({"a": 3}),
        attempt({"": {}}),
        attempt({"a": "model"}),
        attempt({"a": Stubborn()}),
        attempt({"a": nn.Linear(1, 1)}, one),
    ]


def test_names_are_checked_on_both_sides(tmp_path: Path) -> None:
    (said,) = run_ranks(attempts, 1, folder=tmp_path)
    lacking, optional, unknown, fine, late, number, nameless, model, stubborn, other = said
    assert "no state of 'b'" in lacking
    assert "optional=True" in lacking
    assert optional == {"b": {"y": 2}}
    assert "state of 'a', which this run has not registered" in unknown
    assert fine == {"a": {"x": 1}}
    assert "before run.resume()" in late
    assert "'int'" in number
    assert "expected a name" in nameless
    assert "run.prepare() has returned" in model
    assert "ValueError on rank 0: not now (registered as 'a')" in stubborn
    assert "registered as 'a' (Linear) did not take" in other


def differing() -> str:
    try:
        with phalanx.init(name="mine", progress=False) as run:
            run.register("a" if run.is_main else "b", {})
    except PhalanxError as error:
        return str(error)
    return ""


def test_ranks_register_alike(tmp_path: Path) -> None:
    for said in run_ranks(differing, 2, folder=tmp_path):
        assert "run.register('a', dict)" in said
        assert "run.register('b', dict)" in said
