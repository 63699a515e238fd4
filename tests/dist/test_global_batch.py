"""`global_batch` gives the steps of one process, at any world size and after a change of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from tests.dist.engines import environ_for, needs
from tests.dist.harness import run_ranks

pytestmark = pytest.mark.slow

SAMPLES = 53


def data() -> tuple[Tensor, Tensor]:
    x = torch.sin(torch.arange(SAMPLES * 3.0)).reshape(SAMPLES, 3)
    return x, x.sum(1, keepdim=True) ** 2


def model() -> Any:
    linear = nn.Linear(3, 1)
    nn.init.constant_(linear.weight, 0.1)
    nn.init.zeros_(linear.bias)
    return linear, torch.optim.SGD(linear.parameters(), 0.05, momentum=0.9)


def by_hand(epochs: int) -> list[Tensor]:
    """Two epochs of steps over 12 samples in order, the last of each over 5."""
    linear, optimizer = model()
    x, y = data()
    for _ in range(epochs):
        for low in range(0, SAMPLES, 12):
            optimizer.zero_grad()
            nn.functional.mse_loss(linear(x[low : low + 12]), y[low : low + 12]).backward()
            optimizer.step()
    return [p.detach() for p in linear.parameters()]


def train(batch_size: int, stop_at: int = 0, path: Path | None = None) -> tuple[Any, Any, int]:
    saved = None
    with phalanx.init(name="global", progress=False, global_batch=12) as run:
        linear, optimizer = model()
        loader = DataLoader(TensorDataset(*data()), batch_size)
        linear, optimizer, loader = run.prepare(linear, optimizer, loader)
        if path is not None:
            run.resume(path)
        for _ in run.epochs(2):
            for x, y in run.steps(loader):
                with run.accumulate(linear):
                    run.backward(nn.functional.mse_loss(linear(x), y))
                    optimizer.step()
                    optimizer.zero_grad()
                if stop_at and run.step + 1 == stop_at:
                    saved = run.save() or saved
                    run.stop()
        weights = list(run.state_dict(linear).values())
        run.reduce(1.0)  # rank 0 keeps the store in which the others may still be in state_dict()
        return weights, saved, loader.batch_size * loader.accumulate


def assert_right(ranks: list[Any]) -> None:
    for found, right in zip(ranks[0][0], by_hand(2), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("world_size", "most"), [(1, 12), (1, 5), (2, 4), (3, 4), (4, 2)])
def test_any_world_size_takes_the_steps_of_one_process(tmp_path: Path, world_size: int, most: int) -> None:
    ranks = run_ranks(train, world_size, most, folder=tmp_path)
    assert_right(ranks)
    assert [samples for *_, samples in ranks] == [12 // world_size] * world_size


@pytest.mark.parametrize(
    "strategy", [pytest.param(name, marks=needs(name)) for name in ("fsdp", "deepspeed-2", "horovod")]
)
def test_other_strategies(tmp_path: Path, strategy: str) -> None:
    assert_right(run_ranks(train, 2, 4, folder=tmp_path, env=environ_for(strategy, 2)))


def test_a_run_of_four_ranks_goes_on_with_two(tmp_path: Path) -> None:
    """In the middle of the second pass."""
    (_, path, _), *_ = run_ranks(train, 4, 2, 7, folder=tmp_path)
    assert path is not None
    assert_right(run_ranks(train, 2, 4, 0, path, folder=tmp_path))
