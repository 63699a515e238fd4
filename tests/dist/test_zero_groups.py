"""Optimizers' groups as scripts have them, under each stage of ZeRO: empty, frozen, in any place; and scalars."""

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

KINDS = ("empty", "frozen")
STAGES = (0, 1, 2, 3)


class Net(nn.Module):
    def __init__(self, scalar: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b, self.c = nn.Linear(3, 5), nn.Linear(5, 4), nn.Linear(4, 1)
        if scalar:
            self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))
        return y * self.scale if hasattr(self, "scale") else y


def made(kind: str, scalar: bool = False) -> tuple[Net, Any, Any]:
    """A model, its optimizer, and a scheduler that counts the groups."""
    model = Net(scalar)
    a, b, c = (list(part.parameters()) for part in (model.a, model.b, model.c))
    c += [model.scale] if scalar else []
    if kind == "empty":
        groups = [{"params": [], "lr": 0.5}, {"params": a + b, "lr": 0.02}, {"params": []}, {"params": c}]
    else:
        model.b.requires_grad_(False)
        groups = [{"params": b, "lr": 0.5}, {"params": [*a, *c[1:]], "lr": 0.02}, {"params": []}, {"params": c[:1]}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, eps=1e-2, amsgrad=True)  # steady where a gradient is near 0
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def data() -> TensorDataset:
    x = torch.sin(torch.arange(48.0)).reshape(16, 3)
    return TensorDataset(x, x.sum(1, keepdim=True))


def by_hand(kind: str, scalar: bool) -> dict[str, Tensor]:
    """Plain torch in one process."""
    model, optimizer, scheduler = made(kind, scalar)
    for x, y in DataLoader(data(), 4):
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return model.state_dict()


def trained(kind: str, scalar: bool, stage: int = 0, source: str | None = None) -> tuple[dict[str, Tensor], str]:
    """The weights after four steps, two of them before `source`, and a checkpoint after two."""
    saved = None
    with phalanx.init(name="groups", progress=False, deepspeed={"zero_stage": stage}) as run:
        model, optimizer, scheduler = made(kind, scalar)
        loader = DataLoader(data(), 4 // run.world_size)
        model, optimizer, scheduler, loader = run.prepare(model, optimizer, scheduler, loader)
        if source is not None:
            assert run.resume(source) == 2
        for x, y in run.steps(loader):
            run.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if run.step == 1:
                saved = run.save()
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == pytest.approx([rate * 0.9**4 for rate in (0.5, 0.02, 0.01, 0.01)])
        return run.state_dict(model), str(saved)


def cases() -> list[tuple[str, bool, int]]:
    return [(kind, stage < 3, stage) for kind in KINDS for stage in STAGES]


def by_deepspeed(sources: dict[tuple[str, bool], str]) -> dict[Any, Any]:
    """Alone, resumed, and on from a checkpoint of another strategy."""
    found = {}
    for kind, scalar, stage in cases():
        alone, path = trained(kind, scalar, stage)
        resumed = trained(kind, scalar, stage, path)[0]
        moved = trained(kind, scalar, stage, sources[kind, scalar])[0]
        found[kind, scalar, stage] = alone, resumed, moved, path
    return found


def by_one(paths: dict[Any, str | None]) -> dict[Any, Any]:
    return {key: trained(*key[:2], source=path) for key, path in paths.items()}


@pytest.mark.parametrize("strategy", [pytest.param("deepspeed", marks=needs("deepspeed"))])
def test_empty_and_frozen_groups_and_scalars_train_resume_and_move(tmp_path: Path, strategy: str) -> None:
    keys = sorted({(kind, scalar) for kind, scalar, _ in cases()})
    (alone,) = run_ranks(by_one, 1, dict.fromkeys(keys), folder=tmp_path, env={"PHALANX_STRATEGY": "single"})
    sources = {key: path for key, (_, path) in alone.items()}
    found = run_ranks(by_deepspeed, 2, sources, folder=tmp_path, env=environ_for(strategy, 2), timeout=280)[0]
    back = {key: path for key, (*_, path) in found.items()}
    (after,) = run_ranks(by_one, 1, back, folder=tmp_path, env={"PHALANX_STRATEGY": "single"})
    for key, (whole, resumed, moved, _) in found.items():
        right = by_hand(*key[:2])
        for weights in (whole, moved, after[key][0]):
            torch.testing.assert_close(weights, right, rtol=1e-5, atol=1e-6)
        assert all(torch.equal(resumed[name], value) for name, value in whole.items()), key


def refused(stage: int, model: nn.Module) -> str:
    try:
        with phalanx.init(progress=False, deepspeed={"zero_stage": stage}) as run:
            run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    except UsageError as error:
        return str(error)
    return ""


def refusals() -> list[str]:
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
    frozen = nn.Linear(2, 2).requires_grad_(False)
    return [refused(3, Net(scalar=True)), refused(1, mixed), refused(2, frozen), refused(0, mixed)]


@pytest.mark.parametrize("strategy", [pytest.param("deepspeed", marks=needs("deepspeed"))])
def test_what_zero_would_change_is_refused(tmp_path: Path, strategy: str) -> None:
    (said,) = run_ranks(refusals, 1, folder=tmp_path, env=environ_for(strategy, 1))
    scalar, mixed, frozen, fine = said
    assert "scale, a parameter of no dimension" in scalar
    assert "torch.float32" in mixed
    assert "torch.bfloat16" in mixed
    assert "no trainable parameter" in frozen
    assert fine == ""
