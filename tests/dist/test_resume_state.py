"""A resume in the middle is bit for bit the unbroken run: momentum, amsgrad, schedulers with state inside, averages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lr
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from tests.dist.engines import environ_for, needs
from tests.dist.harness import run_ranks

pytestmark = pytest.mark.slow


def sequential(optimizer: Any) -> Any:
    return lr.SequentialLR(optimizer, [lr.ConstantLR(optimizer, 0.5, 2), lr.CosineAnnealingLR(optimizer, 6)], [3])


def chained(optimizer: Any) -> Any:
    return lr.ChainedScheduler([lr.LinearLR(optimizer, 0.5, 1.0, 4), lr.ExponentialLR(optimizer, 0.9)], optimizer)


def made(case: str, model: nn.Module) -> tuple[Any, Any]:
    if case == "onecycle":
        optimizer: Any = torch.optim.AdamW(model.parameters(), 0.01, amsgrad=True)
        return optimizer, lr.OneCycleLR(optimizer, 0.05, total_steps=8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    kinds = {"sequential": sequential, "chained": chained}
    return optimizer, kinds[case](optimizer) if case in kinds else lr.ReduceLROnPlateau(optimizer, patience=0)


CASES = ("onecycle", "sequential", "chained", "plateau")


def trained(case: str, source: str | None = None) -> tuple[dict[str, Any], str]:
    saved = None
    with phalanx.init(name=case, progress=False) as run:
        model = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.Linear(5, 1))
        optimizer, scheduler = made(case, model)
        x = torch.sin(torch.arange(96.0)).reshape(32, 3)
        loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4 // run.world_size, shuffle=True)
        model, optimizer, loader, scheduler = run.prepare(model, optimizer, loader, scheduler)
        ema = run.ema(model, decay=0.9)
        if source:
            run.resume(source)
        for x, y in run.steps(loader):
            loss = nn.functional.mse_loss(model(x), y)
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step(*([run.reduce(loss.detach())] if case == "plateau" else []))
            if run.step == 3:
                saved = run.save()
        state = repr(scheduler.state_dict()), [group["lr"] for group in optimizer.param_groups], torch.rand(3).tolist()
        return {"weights": run.state_dict(model), "ema": ema.state_dict(), "state": state}, str(saved)


def both() -> list[tuple[Any, Any]]:
    found = []
    for case in CASES:
        whole, path = trained(case)
        found.append((whole, trained(case, path)[0]))
    return found


SIZES = {"single": 1, "ddp": 2, "fsdp": 2, "horovod": 2, "deepspeed-2": 2}


@pytest.mark.parametrize(
    ("strategy", "size"), [pytest.param(strategy, size, marks=needs(strategy)) for strategy, size in SIZES.items()]
)
def test_all_state_is_bit_for_bit(tmp_path: Path, strategy: str, size: int) -> None:
    for rank in run_ranks(both, size, folder=tmp_path, env=environ_for(strategy, size), timeout=280):
        for whole, resumed in rank:
            assert whole["state"] == resumed["state"]
            for part in ("weights", "ema"):
                same = {name: torch.equal(value, resumed[part][name]) for name, value in whole[part].items()}
                assert all(same.values()), (part, same)
