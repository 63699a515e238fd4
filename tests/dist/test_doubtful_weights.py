"""Losses of batches whose number of samples nothing tells for sure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import phalanx
from phalanx.errors import DataError, UsageError
from tests.dist.harness import run_ranks

pytestmark = pytest.mark.slow


class Graphs(IterableDataset):
    def __init__(self, sizes: tuple[int, ...], kind: str) -> None:
        self.sizes, self.kind = sizes, kind

    def __iter__(self) -> Iterator[Any]:
        for n in self.sizes:
            y = torch.full((n, 1), float(n))
            if self.kind == "edges":
                yield {"edge_index": torch.zeros(2, 3 * n), "y": y}
            elif self.kind == "images":
                yield {"y": [row.reshape(1, 1) for row in y]}
            else:
                yield {"y": y}


def trained(kind: str, weighted: bool, accumulate: int) -> float | str:
    """The weight after one step from 0: minus the mean of n over all samples, n being each one's batch's size."""
    with phalanx.init(name="doubt", progress=False, accumulate=accumulate) as run:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        data = Graphs((4, 4, 4, 1), kind)
        model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, None))
        weight = run.unwrap(model).weight
        for batch in run.steps(loader):
            y = torch.cat(list(batch["y"])).reshape(-1, 1)
            with run.accumulate(model):
                loss = (model(torch.ones(len(y), 1)) * y).mean()
                try:
                    run.backward(loss, weight=len(y) if weighted else None)
                except UsageError as error:
                    return str(error)
                optimizer.step()
                optimizer.zero_grad()
        return weight.item()


def all_of(accumulate: int) -> dict[str, Any]:
    return {
        f"{kind}{' weighted' * weighted}": trained(kind, weighted, accumulate)
        for kind in ("edges", "images", "rows")
        for weighted in (False, True)
    }


@pytest.mark.parametrize(("world_size", "accumulate"), [(1, 4), (2, 2)])
def test_a_mean_over_all_samples_or_a_question(tmp_path: Path, world_size: int, accumulate: int) -> None:
    """Batches of 4, 4, 4 and 1 samples that are 4, 4, 4 and 1: (3·4·4 + 1·1)/13 = 49/13."""
    for found in run_ranks(all_of, world_size, accumulate, folder=tmp_path):
        for name in ("edges weighted", "images weighted", "rows", "rows weighted"):
            assert found[name] == pytest.approx(-49 / 13), name
        assert "first dimensions 2, 4" in found["edges"]
        assert "list of 4 tensors" in found["images"]
        assert all("weight=…" in found[name] for name in ("edges", "images"))


def one_at_a_time() -> float | str:
    return trained("edges", False, 1)


def test_one_batch_a_step_on_one_rank_needs_no_number(tmp_path: Path) -> None:
    """Steps of lr 1 with gradients 4, 4, 4 and 1."""
    (found,) = run_ranks(one_at_a_time, 1, folder=tmp_path)
    assert found == pytest.approx(-13.0)


def one_rank_knows() -> tuple[str, str]:
    """Batches of two samples look sure, those of four don't; and an evaluation in which rank 1 runs out."""
    said = []
    with phalanx.init(progress=False) as run:
        model = nn.Linear(1, 1)
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 1.0))
        training, uneven = (run.prepare(DataLoader(Graphs(sizes, "edges"), None)) for sizes in ((2, 4), (4, 4, 4)))
        for loop, error_type in ((run.steps(training), UsageError), (run.evaluate(uneven), DataError)):
            try:
                for batch in loop:
                    loss = model(batch["y"]).mean()
                    if loss.requires_grad:
                        run.backward(loss)
            except error_type as error:
                said.append(str(error))
                loop.close()
        optimizer.zero_grad()
    return tuple(said)


def test_all_ranks_hear_of_one_ranks_doubt(tmp_path: Path) -> None:
    for training, evaluation in run_ranks(one_rank_knows, 2, folder=tmp_path, timeout=60):
        assert "weight=…" in training
        assert "even=False" in evaluation
