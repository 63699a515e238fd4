"""Steps that fp16 leaves out: schedulers that count steps leave theirs out too, whatever the loop looks like.

Every gradient is 1 or overflows, so that weights follow from the learning rates of the steps that were taken.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from tests.dist.engines import environ_for, needs
from tests.dist.harness import run_ranks

pytestmark = pytest.mark.slow

STEPS, BAD = 12, (1, 7)
TAKEN = STEPS - len(BAD)
INF = float("inf")


def halving(optimizer: Any) -> Any:
    """The k-th rate, from 0, is 1/(k + 1)."""
    return lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (k + 1))


def sequential(optimizer: Any) -> Any:
    parts = [lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (k + 1)), lr_scheduler.LambdaLR(optimizer, lambda k: 0.0)]
    return lr_scheduler.SequentialLR(optimizer, parts, [1000])


def chained(optimizer: Any) -> Any:
    return lr_scheduler.ChainedScheduler([halving(optimizer), lr_scheduler.ConstantLR(optimizer, 1.0)])


class Weights(nn.Module):
    """The gradient of each parameter is that of the input's column."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.zeros(1)) for _ in "ab")

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0] * self.a + x[:, 1] * self.b


def loader(run: phalanx.Run, bad: dict[int, list[float]]) -> Any:
    """A sample a rank and step, the factors on the two gradients; those of the last rank may overflow."""
    rows = torch.ones(STEPS * run.world_size, 2)
    for step, factors in bad.items():
        rows[(step + 1) * run.world_size - 1] = torch.tensor(factors)
    return run.prepare(DataLoader(TensorDataset(rows), 1))


def quiet_scale(run: phalanx.Run) -> None:
    """Without the overflows of the first steps, by which the scaler finds its scale."""
    scaler = run._session.gradients.scaler
    assert scaler is not None
    scaler.load_state_dict({**scaler.state_dict(), "scale": 8.0})


def train(make: Callable[[Any], Any], loop: str, kind: Any = torch.optim.SGD, **options: Any) -> tuple[float, float]:
    """One epoch: the final weight, and the last learning rate."""
    accumulate = 2 if loop.startswith("group") else 1
    with phalanx.init(precision="fp16", progress=False, accumulate=accumulate) as run:
        quiet_scale(run)
        net = Weights()
        raw = kind([net.a], 1.0, **options)
        scheduler = make(raw) if loop != "proxy" else None
        model, optimizer = run.prepare(net, raw)
        scheduler = run.prepare(make(optimizer) if scheduler is None else scheduler)
        for x, *_ in run.steps(loader(run, {step: [INF, 1.0] for step in BAD})):
            if loop in ("before", "group, before"):
                scheduler.step()
            if loop == "accumulate" or accumulate > 1:
                with run.accumulate(model):
                    run.backward(model(x).mean())
                    optimizer.step()
                    if loop != "group, before":
                        scheduler.step()
                    optimizer.zero_grad()
                continue
            run.backward(model(x).mean())
            optimizer.step()
            if loop in ("after", "proxy"):
                scheduler.step()
            optimizer.zero_grad()
        return float(run.state_dict(model).get("a", 0.0)), optimizer.param_groups[0]["lr"]


def loops() -> list[tuple[float, float]]:
    fused = {"kind": torch.optim.Adam, "fused": True}  # of equal gradients it makes steps of the learning rate
    cases: list[tuple[Any, str, dict[str, Any]]] = [
        (halving, "after", {}),
        (halving, "proxy", {}),
        (halving, "accumulate", {}),
        (sequential, "after", {}),
        (chained, "after", {}),
        (halving, "after", fused),
    ]
    return [train(make, loop, **options) for make, loop, options in cases]


PLACES = [("single", 1), ("ddp", 2), ("fsdp", 2), ("horovod", 2)]
EVERYWHERE = pytest.mark.parametrize(("strategy", "ranks"), [pytest.param(*p, marks=needs(p[0])) for p in PLACES])


@EVERYWHERE
def test_a_scheduler_counts_the_steps_that_were_taken(tmp_path: Path, strategy: str, ranks: int) -> None:
    found = run_ranks(loops, ranks, folder=tmp_path, env=environ_for(strategy, ranks))
    weight = -sum(1 / (k + 1) for k in range(TAKEN))
    for got in found[0]:
        assert got == pytest.approx((weight, 1 / (TAKEN + 1)), rel=1e-5)
    assert [rate for rank in found for _, rate in rank] == pytest.approx([1 / (TAKEN + 1)] * 6 * ranks)


def loops_with_it_first() -> list[tuple[float, float]]:
    cases = [("before", False), ("before", True), ("group, before", False)]
    return [train(halving, loop, fused=fused) for loop, fused in cases]


def test_a_scheduler_that_comes_first_leaves_out_the_next_of_its_steps(tmp_path: Path) -> None:
    """Each step taken has the next learning rate, as without the overflows; a group counts once."""
    (found,) = run_ranks(loops_with_it_first, 1, folder=tmp_path)
    for got, taken in zip(found, (TAKEN, TAKEN, STEPS // 2 - len(BAD)), strict=True):
        assert got == pytest.approx((-sum(1 / (k + 2) for k in range(taken)), 1 / (taken + 1)))


def in_and_out_of_groups() -> list[float]:
    """Two optimizers of one loop, the second without accumulation; their schedulers come first."""
    with phalanx.init(progress=False, accumulate=2) as run:
        nets = [nn.Linear(1, 1), nn.Linear(1, 1)]
        optimizers = [torch.optim.SGD(net.parameters(), 1.0) for net in nets]
        data = DataLoader(TensorDataset(torch.ones(7, 1)), 1)
        *prepared, data = run.prepare(*nets, *optimizers, data)
        (grouped, single), (first, second) = prepared[:2], prepared[2:]
        plans = [run.prepare(halving(optimizer)) for optimizer in (first, second)]
        for (x,) in run.steps(data):
            for plan in plans:
                plan.step()
            run.backward(single(x).mean())
            second.step()
            second.zero_grad()
            with run.accumulate(grouped):
                run.backward(grouped(x).mean())
                first.step()
                first.zero_grad()
        return [optimizer.param_groups[0]["lr"] for optimizer in (first, second)]


def test_a_scheduler_that_comes_first_counts_its_own_optimizers_steps(tmp_path: Path) -> None:
    """Seven batches are four groups of two."""
    (rates,) = run_ranks(in_and_out_of_groups, 1, folder=tmp_path)
    assert rates == pytest.approx([1 / 5, 1 / 8])


def test_groups_count_once(tmp_path: Path) -> None:
    (got,) = run_ranks(train, 1, halving, "group", folder=tmp_path)
    taken = STEPS // 2 - len(BAD)
    assert got == pytest.approx((-sum(1 / (k + 1) for k in range(taken)), 1 / (taken + 1)))


def test_a_step_after_the_loop_counts_epochs(tmp_path: Path) -> None:
    """Also where the loop's last step was left out."""
    (got,) = run_ranks(epochwise, 1, folder=tmp_path)
    assert got == pytest.approx(0.5)


def epochwise() -> float:
    with phalanx.init(precision="fp16", progress=False) as run:
        quiet_scale(run)
        net = Weights()
        model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), 1.0))
        scheduler = run.prepare(halving(optimizer))
        for (x,) in run.steps(loader(run, {STEPS - 1: [INF, 1.0]})):
            run.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
        return float(optimizer.param_groups[0]["lr"])


def two_optimizers() -> tuple[list[float], list[float], int]:
    """The second one's gradients overflow; a plateau's scheduler of its counts all values."""
    with phalanx.init(precision="fp16", progress=False) as run:
        quiet_scale(run)
        net = Weights()
        pair = [torch.optim.SGD([parameter], 1.0) for parameter in (net.a, net.b)]
        model, *pair = run.prepare(net, *pair)
        plans = [run.prepare(halving(optimizer)) for optimizer in pair]
        plateau = run.prepare(lr_scheduler.ReduceLROnPlateau(pair[1], patience=1000))
        for (x,) in run.steps(loader(run, {step: [1.0, INF] for step in BAD})):
            run.backward(model(x).mean())
            for optimizer, plan in zip(pair, plans, strict=True):
                optimizer.step()
                plan.step()
                optimizer.zero_grad()
            plateau.step(1.0)
        weights = run.state_dict(model)
        rates = [optimizer.param_groups[0]["lr"] for optimizer in pair]
        return [float(weights[name]) for name in "ab"], rates, plateau.last_epoch


def test_each_scheduler_follows_its_own_optimizer(tmp_path: Path) -> None:
    ((weights, rates, plateau),) = run_ranks(two_optimizers, 1, folder=tmp_path)
    assert weights == pytest.approx([-sum(1 / (k + 1) for k in range(n)) for n in (STEPS, TAKEN)])
    assert rates == pytest.approx([1 / (STEPS + 1), 1 / (TAKEN + 1)])
    assert plateau == STEPS


def seldom() -> tuple[float, float]:
    """An optimizer that steps at every third batch, and a scheduler that counts batches."""
    with phalanx.init(precision="fp16", progress=False) as run:
        quiet_scale(run)
        net = Weights()
        model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), 1.0))
        scheduler = run.prepare(halving(optimizer))
        for at, (x,) in enumerate(run.steps(loader(run, {3: [INF, 1.0]}))):
            if at % 3 == 0:
                run.backward(model(x).mean())
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()
        return float(run.state_dict(model)["a"]), float(optimizer.param_groups[0]["lr"])


def test_a_step_left_out_is_left_out_once(tmp_path: Path) -> None:
    (got,) = run_ranks(seldom, 1, folder=tmp_path)
    assert got == pytest.approx((-(1 + 1 / 6 + 1 / 9), 1 / STEPS))


def resumed_both(order: str) -> list[list[float]]:
    return [resumed(order, fused) for fused in (False, True)]


def resumed(order: str, fused: bool) -> list[float]:
    """Saved right after the step that is left out, in the middle of an epoch, and gone on from."""
    path = None
    for last in (4, STEPS):
        with phalanx.init(precision="fp16", progress=False, max_steps=last) as run:
            quiet_scale(run)
            net = Weights()
            model, optimizer = run.prepare(net, torch.optim.SGD([net.a], 1.0, fused=fused))
            scheduler = run.prepare(halving(optimizer))
            data = loader(run, {3: [INF, 1.0]})
            if path is not None:
                run.resume(path)
            for _ in run.epochs(1):
                for (x,) in run.steps(data):
                    if order == "before":
                        scheduler.step()
                    run.backward(model(x).mean())
                    optimizer.step()
                    if order == "after":
                        scheduler.step()
                    optimizer.zero_grad()
            path = run.save()
            weight = float(run.state_dict(model)["a"])
    return [weight, optimizer.param_groups[0]["lr"]]


@pytest.mark.parametrize(("order", "first"), [("after", 1), ("before", 2)])
def test_a_resumed_run_knows_of_it(tmp_path: Path, order: str, first: int) -> None:
    (found,) = run_ranks(resumed_both, 1, order, folder=tmp_path)
    for got in found:
        assert got == pytest.approx([-sum(1 / (k + first) for k in range(STEPS - 1)), 1 / STEPS])
