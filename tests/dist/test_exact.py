"""A resumed run ends bit for bit as the unbroken one, where steps depend on more than weights and optimizer states."""

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
from tests.dist.test_orders import DATA, Net, loss_of

pytestmark = pytest.mark.slow


def fit(resumed: bool, settings: dict[str, Any]) -> dict[str, Tensor]:
    """Two epochs with explicit weights; `resumed` ends the first run after the first and goes on in another."""
    path = None
    for epochs in (1, 2) if resumed else (2,):
        with phalanx.init(progress=False, accumulate=2, seed=5, **settings) as run:
            model = Net(0.0)
            optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
            loader = DataLoader(DATA, 2, shuffle=True)
            model, optimizer, loader = run.prepare(model, optimizer, loader)
            if path is not None:
                run.resume(path)
            for _ in run.epochs(epochs):
                for batch in run.steps(loader):
                    with run.accumulate(model):
                        loss = loss_of(model, *batch, weighted=True)
                        run.backward(loss, weight=1000 * batch[2].sum())
                        run.clip_grad_norm(model, 0.5)
                        optimizer.step()
                        optimizer.zero_grad()
            path = run.save()
            weights = run.state_dict(model)
    return weights


LINES = [
    ("single", 1, {"precision": "fp16"}),
    ("ddp", 2, {"precision": "fp16"}),
    ("ddp", 3, {"ddp": {"find_unused_parameters": True}}),
    ("fsdp", 2, {}),
    ("fsdp", 3, {}),
]


def both(settings: dict[str, Any]) -> list[dict[str, Tensor]]:
    return [fit(resumed, settings) for resumed in (False, True)]


@pytest.mark.parametrize(("strategy", "world_size", "settings"), LINES)
def test_a_resume_is_bit_for_bit(tmp_path: Path, strategy: str, world_size: int, settings: dict[str, Any]) -> None:
    ranks = run_ranks(both, world_size, {"strategy": strategy, **settings}, folder=tmp_path)
    unbroken, resumed = ranks[0]
    for name, value in unbroken.items():
        assert torch.equal(resumed[name], value), name


# fp16's skipped steps, and layers that some ranks' batches do not reach.


def skipped(built_on_the_prepared: bool) -> list[float]:
    """The learning rate after each of three steps, of which fp16 leaves out the second."""
    with phalanx.init(precision="fp16", progress=False) as run:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        if built_on_the_prepared:
            model, optimizer = run.prepare(model, optimizer)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        if built_on_the_prepared:
            scheduler = run.prepare(scheduler)
        else:
            model, optimizer, scheduler = run.prepare(model, optimizer, scheduler)
        rates = []
        factors = iter((1e-3, float("inf"), 1e-3))  # small enough for the scale that fp16 begins with
        for (x,) in run.steps(run.prepare(DataLoader(TensorDataset(torch.ones(3, 3)), 1))):
            with run.accumulate(model):
                run.backward(model(x).mean() * next(factors))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            rates.append(optimizer.param_groups[0]["lr"])
        return rates


def test_a_scheduler_waits_with_its_optimizer_wherever_it_was_built(tmp_path: Path) -> None:
    for prepared_first in (False, True):
        (rates,) = run_ranks(skipped, 1, prepared_first, folder=tmp_path)
        assert rates == [0.5, 0.5, 0.25]


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.extra = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.always(x)
        return y + self.extra(x) if x[0, 0] > 0 else y


def conditional(set_to_none: bool, settings: dict[str, Any]) -> dict[str, Tensor]:
    """Rank 0's batches reach the extra layer, rank 1's do not."""
    with phalanx.init(progress=False, **settings) as run:
        torch.manual_seed(0)
        model = Sometimes()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        model, optimizer = run.prepare(model, optimizer)
        for number in range(4):
            run.backward(model(torch.full((2, 3), 1.0 + number) * (1 - 2 * run.rank)).square().mean())
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        return run.state_dict(model)


def conditional_by_hand() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Sometimes()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for number in range(4):
        optimizer.zero_grad()
        for sign in (1, -1):
            (model(torch.full((2, 3), 1.0 + number) * sign).square().mean() / 2).backward()
        optimizer.step()
    return model.state_dict()


def both_clearings(settings: dict[str, Any]) -> list[dict[str, Tensor]]:
    return [conditional(set_to_none, settings) for set_to_none in (True, False)]


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        pytest.param("ddp", {"ddp": {"find_unused_parameters": True}}),
        pytest.param("horovod", {}, marks=needs("horovod")),
        pytest.param("deepspeed-1", {}, marks=needs("deepspeed")),
    ],
)
def test_parameters_that_one_rank_reaches_are_averaged(tmp_path: Path, strategy: str, settings: dict[str, Any]) -> None:
    env = environ_for(strategy, 2)
    for weights in run_ranks(both_clearings, 2, settings, folder=tmp_path, env=env)[0]:
        torch.testing.assert_close(weights, dict(conditional_by_hand()), rtol=1e-5, atol=1e-6)
