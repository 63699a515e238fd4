"""One step of an optimizer, without a run around it: fp16's scaler, fused optimizers, closures."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from phalanx.run.gradients import Gradients
from phalanx.run.proxies import OptimizerProxy
from phalanx.strategies.comm import Comm
from phalanx.strategies.single import Single


class Counting(Single):
    """A strategy that has something to do at each step."""

    def __init__(self) -> None:
        self.comm, self.device, self.asked = Comm(), torch.device("cpu"), 0

    def step(self, optimizer: Optimizer, take: Callable[[], Any] | None = None) -> Any:
        self.asked += 1
        return super().step(optimizer, take)


def made(scaler: Any = None, rule: str = "none", world_size: int = 1, **options: Any) -> Any:
    """A parameter 0, its optimizer at rate 1, and the gradients they belong to."""
    parameter = nn.Parameter(torch.zeros(1))
    gradients = Gradients(Counting(), scaler)
    gradients.world_size = world_size
    scaling: Any = SimpleNamespace(rule=rule, warmup_steps=4)
    optimizer = torch.optim.SGD([parameter], 1.0, **options)
    return parameter, OptimizerProxy(optimizer, gradients, scaling, []), gradients


@pytest.mark.parametrize("way", ["fp32", "fp16", "closure"])
def test_every_step_is_the_strategys(way: str) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if way == "fp16" else None
    parameter, optimizer, gradients = made(scaler)

    def closure() -> Any:
        loss = parameter.sum()
        gradients.backward(loss, None)
        return loss

    if way != "closure":
        closure()
    optimizer.step(closure if way == "closure" else None)
    assert (gradients.strategy.asked, parameter.item(), optimizer.steps) == (1, -1, 1)


@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_scaler_of_the_scripts_own(fused: bool) -> None:
    parameter, optimizer, _ = made(fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for factor in (1.0, float("inf"), 1.0):
        scaler.scale((parameter * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert (parameter.item(), optimizer.steps, scaler.get_scale()) == (-2, 2, 512)


BAD = (0, 3, 99, 100, 101, 229)


@pytest.mark.parametrize("asking", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_fp16_leaves_out(fused: bool, asking: bool) -> None:
    """Under a warm-up from 1 to 2 over four steps that were taken: 1, 1.25, 1.5, 1.75, 2, 2, …"""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    parameter, optimizer, gradients = made(scaler, "linear", 2, fused=fused)
    followed, seen = [], []
    if asking:
        optimizer.after_step.append(lambda: followed.append(gradients.number))
    for number in range(230):
        gradients.number = number + 1
        gradients.backward((parameter * (float("inf") if number in BAD else 1.0)).sum(), None)
        optimizer.step()
        optimizer.zero_grad()
        if asking:
            seen.append(optimizer.left_out)
    taken = 230 - len(BAD)
    assert parameter.item() == -(1 + 1.25 + 1.5 + 1.75 + 2 * (taken - 4))
    assert (optimizer.left_out, optimizer.steps) == (230, taken)
    if asking:
        assert seen == [number + 1 if number in BAD else 0 for number in range(230)]
        assert followed == [number + 1 for number in range(230) if number not in BAD]


def test_a_fused_optimizer_without_a_warm_up_counts_only_the_steps_taken() -> None:
    """Nobody asks for 230 steps."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    parameter, optimizer, gradients = made(scaler, fused=True)
    for number in range(230):
        gradients.number = number + 1
        gradients.backward((parameter * (float("inf") if number in BAD else 1.0)).sum(), None)
        optimizer.step()
        optimizer.zero_grad()
        assert len(optimizer._unread) < 100
    assert (parameter.item(), optimizer.left_out, optimizer.steps) == (-224, 230, 224)
    gradients.backward(parameter.sum(), None)
    optimizer.step()
    assert (optimizer.steps, optimizer.left_out) == (225, 0)
    optimizer.steps = 7  # as a resumed run sets it
    assert (optimizer.steps, optimizer.left_out) == (7, 0)


def test_the_scale_changes_between_two_passes_of_one_optimizers_step() -> None:
    """The other's overflow halves it: gradients of before must be counted at the new one."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    kept, optimizer, gradients = made(scaler)
    bad = nn.Parameter(torch.zeros(1))
    scaling: Any = SimpleNamespace(rule="none", warmup_steps=0)
    other = OptimizerProxy(torch.optim.SGD([bad], 1.0), gradients, scaling, [])
    gradients.optimizers += [optimizer, other]
    gradients.backward((kept + bad * float("inf")).sum(), None)
    other.step()
    gradients.backward(kept.sum(), None)
    optimizer.step()
    assert scaler.get_scale() == 4
    assert (kept.item(), bad.item()) == (-2, 0)
