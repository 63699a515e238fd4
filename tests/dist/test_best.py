"""Keeping the best checkpoint by a logged value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from phalanx.checkpoint import store
from phalanx.errors import CheckpointError, UsageError
from tests.dist.harness import run_ranks

pytestmark = pytest.mark.slow
NAN = float("nan")


def epochs(values: list[float], settings: dict[str, Any], save_first: bool = False) -> dict[str, Any]:
    """Two steps an epoch, then what was measured, of which rank 0's counts."""
    checkpoint = {"monitor": "loss", "keep": 1, **settings.pop("checkpoint", {})}
    with phalanx.init(name="best", progress=False, checkpoint=checkpoint, **settings) as run:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        data = DataLoader(TensorDataset(torch.ones(4, 2)), 2 // run.world_size)
        model, optimizer, loader = run.prepare(model, optimizer, data)
        for epoch in run.epochs(len(values)):
            for (x,) in run.steps(loader):
                run.backward(model(x).mean())
                optimizer.step()
            if save_first:
                run.save()
            run.log({"loss": values[epoch] + 100 * run.rank, "other": 0})
            if not save_first and not checkpoint.get("every_steps"):
                run.save()
        run.reduce(1.0)
        best, kept = run.best_checkpoint, [path.name for path in store.steps(run.run_dir / "checkpoints")]
        try:
            step: Any = run.resume("best")
        except CheckpointError as error:
            step = str(error)
    log = (run.run_dir / "logs" / "0.log").read_text()
    return {"best": best and best.name, "kept": kept, "step": step, "warned": log.count("was never logged")}


def cases() -> list[dict[str, Any]]:
    low = [3.0, 1.0, NAN, 1.0, 2.0]
    return [
        epochs(low, {}),
        epochs(low, {}, save_first=True),
        epochs([-v for v in low], {"checkpoint": {"mode": "max", "keep_best": 2}}),
        epochs(low, {"checkpoint": {"keep_best": 0}}),
        epochs(low, {"checkpoint": {"every_steps": 2}}),  # at an epoch's end, before its value is logged
        epochs(low, {"checkpoint": {"every_steps": 3, "keep": 9}}),
        epochs([1.0], {"checkpoint": {"monitor": "lost"}}),
    ]


def test_the_best_is_kept_beside_the_newest(tmp_path: Path) -> None:
    for found in run_ranks(cases, 2, folder=tmp_path, timeout=200):
        plain, first, high, none, periodic, between, never = found
        for case in (plain, first, periodic):
            assert (case["best"], case["kept"], case["step"]) == ("4", ["10", "4"], 4)
        assert (high["best"], high["kept"]) == ("4", ["10", "8", "4"])
        assert none["kept"] == ["10"]
        assert (between["best"], between["step"]) == ("6", 6)  # has the value of step 4, which step 9's is not below
        assert never["best"] is None
        assert "'lost'" in never["step"]
        assert [case["warned"] for case in found] == [0, 0, 0, 0, 0, 0, 1]


def test_values_outlive_the_run(tmp_path: Path) -> None:
    run_ranks(epochs, 1, [1.0, 2.0], {}, folder=tmp_path)
    (found,) = run_ranks(epochs, 1, [1.0, 2.0, 1.5, 1.0], {"resume": "latest"}, folder=tmp_path)
    assert (found["best"], found["kept"]) == ("2", ["8", "2"])


def went_back() -> dict[str, Any]:
    """Three epochs of two steps that get worse; then on from the best, the first, with one step and a checkpoint."""
    found: dict[str, Any] = {}
    with phalanx.init(name="back", progress=False, checkpoint={"monitor": "loss", "keep": 1}) as run:
        model = nn.Linear(2, 1)
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        loader = run.prepare(DataLoader(TensorDataset(torch.ones(4, 2)), 2 // run.world_size))
        for epoch in run.epochs(3):
            for (x,) in run.steps(loader):
                run.backward(model(x).mean())
                optimizer.step()
            run.log({"loss": float(epoch)})
            run.save()
            if epoch == 1:
                with pytest.raises(UsageError, match=r"inside run\.epochs"):
                    run.resume("best")
        run.resume("best")
        found["epochs"] = []
        for epoch in run.epochs(2):
            found["epochs"].append(epoch)
            for (x,) in run.steps(loader):
                run.backward(model(x).mean())
                optimizer.step()
                break
        path = run.save()
        assert path is not None
        found["saved"] = (path.name, path.is_dir())
        found["newest"] = [path.name for path in store.steps(path.parent)]
        found["aside"] = sorted(path.name for path in path.parent.glob("*.left"))
        found["again"] = run.resume()
    return found


def test_a_run_that_went_back_keeps_what_it_saves_then(tmp_path: Path) -> None:
    for found in run_ranks(went_back, 2, folder=tmp_path):
        assert found["epochs"] == [1]
        assert found["saved"] == ("3", True)
        assert found["newest"] == ["3", "2"]  # the new one, and the best
        assert "6.left" in found["aside"]
        assert found["again"] == 3


def differing() -> list[str]:
    said = []
    with phalanx.init(progress=False) as run:
        model = nn.Linear(2, 1)
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        for call in (
            lambda: run.ema(model, 0.9 if run.rank else 0.5),
            lambda: run.main_first(local=bool(run.rank)).__enter__(),
            lambda: run.log({"a": torch.ones(2)}),
            lambda: run.log({"a": "text"}),
            lambda: run.ema(model, "0.9"),  # type: ignore[arg-type]
        ):
            with pytest.raises(UsageError) as caught:
                call()
            said.append(str(caught.value))
    return said


def test_arguments_that_differ_or_cannot_be_are_every_ranks_error(tmp_path: Path) -> None:
    for ema, first, vector, text, words in run_ranks(differing, 2, folder=tmp_path, timeout=60):
        assert "decay 0.5" in ema
        assert "decay 0.9" in ema
        assert "run.main_first(local=True)" in first
        assert "one element" in vector
        assert "'text'" in text
        assert "'0.9'" in words
