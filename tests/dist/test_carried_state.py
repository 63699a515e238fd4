"""Optimizers that have state when they are prepared: at their making, from earlier steps, from a file on rank 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from phalanx.errors import UsageError
from tests.dist.engines import environ_for, needs
from tests.dist.harness import run_ranks

pytestmark = pytest.mark.slow

CASES = ("adagrad", "adam", "momentum")


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


def data() -> TensorDataset:
    x = torch.sin(torch.arange(48.0)).reshape(16, 3)
    return TensorDataset(x, x.sum(1, keepdim=True))


def steps(model: nn.Module, optimizer: Any, count: int) -> None:
    for x, y in list(DataLoader(data(), 4))[:count]:
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def made(case: str, here: bool) -> tuple[nn.Module, Any]:
    """A model and its optimizer with state; ranks that aren't `here` have weights and state of their own."""
    model = net()
    if case == "adagrad":
        return model, torch.optim.Adagrad(model.parameters(), 0.1, initial_accumulator_value=0.5 if here else 9.0)
    if case == "adam":
        optimizer: Any = torch.optim.AdamW(model.parameters(), 0.02, amsgrad=True)
        steps(model, optimizer, 3 if here else 1)
        return model, optimizer
    before = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    steps(model, before, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.1)
    if here:  # as a script that reads a file by `if run.is_main`
        optimizer.load_state_dict(before.state_dict())
    return model, optimizer


def by_hand(case: str) -> dict[str, Tensor]:
    model, optimizer = made(case, True)
    steps(model, optimizer, 4)
    return model.state_dict()


def trained(case: str) -> dict[str, Tensor]:
    with phalanx.init(progress=False, name=case) as run:
        model, optimizer = made(case, run.is_main)
        model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data(), 4 // run.world_size))
        for x, y in run.steps(loader):
            run.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        path = run.save()
        first = run.state_dict(model)
        run.resume(path)
        again = run.state_dict(model)
        assert all(torch.equal(again[name], value) for name, value in first.items())
        return first


def refused() -> str:
    """Adafactor's factored moments belong to rows and columns."""
    with phalanx.init(progress=False) as run:
        model = net()
        optimizer = torch.optim.Adafactor(model.parameters(), 0.1)
        steps(model, optimizer, 1)
        try:
            run.prepare(model, optimizer)
        except UsageError as error:
            return str(error)
    return ""


def all_cases(cases: tuple[str, ...]) -> tuple[dict[str, Any], str]:
    return {case: trained(case) for case in cases}, refused()


SIZES = {"single": 1, "ddp": 2, "fsdp": 2, "horovod": 2, "deepspeed-0": 2, "deepspeed-3": 2}
STRATEGIES = [pytest.param(strategy, size, marks=needs(strategy)) for strategy, size in SIZES.items()]


@pytest.mark.parametrize(("strategy", "size"), STRATEGIES)
def test_state_moves_with_the_parameters(tmp_path: Path, strategy: str, size: int) -> None:
    cases = CASES if strategy != "deepspeed-3" else CASES[1:]  # which refuses Adagrad
    ranks = run_ranks(all_cases, size, cases, folder=tmp_path, env=environ_for(strategy, size), timeout=280)
    found, said = ranks[0]
    for case in cases:
        torch.testing.assert_close(found[case], by_hand(case), rtol=1e-5, atol=1e-5)
    for _, words in ranks:
        assert words == said
    assert "Adafactor has stepped already, and its state 'row_var' of shape (5, 1) can't be moved" in said
