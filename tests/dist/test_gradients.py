"""What a step is: precision, weights of ranks and batches, learning rates, and optimizers with closures."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from phalanx.errors import UsageError
from tests.dist.harness import run_ranks
from tests.dist.test_api import BOTH, line
from tests.dist.test_parity import full

pytestmark = pytest.mark.slow

# Precision.


class Probe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 16)
        self.two = nn.Linear(16, 1)
        self.inside: torch.dtype | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.one(x))
        self.inside = hidden.dtype
        return self.two(hidden)


def fit(strategy: str, precision: str, batch: int, settings: dict[str, Any]) -> dict[str, Any]:
    with phalanx.init(strategy=strategy, precision=precision, seed=2, progress=False, **settings) as run:
        small_scale(run)
        model = Probe()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
        x = torch.sin(torch.arange(256.0)).reshape(64, 4)
        data = TensorDataset(x, x.sum(1, keepdim=True))
        loader = DataLoader(data, batch_size=batch // run.world_size, shuffle=True)
        model, optimizer, loader, scheduler = run.prepare(model, optimizer, loader, scheduler)
        for _ in run.epochs(6):
            for xb, yb in run.steps(loader):
                with run.accumulate(model):
                    out = model(xb)
                    assert out.dtype == torch.float32
                    run.backward(nn.functional.mse_loss(out, yb))
                    norm = run.clip_grad_norm(model, 10.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
        loss = sum(
            run.reduce(nn.functional.mse_loss(model(xb), yb), weight=len(xb)).item() for xb, yb in run.evaluate(loader)
        )
        weights = [full(p) for p in model.parameters()]
        dtype = (model.module if strategy == "ddp" else model).inside
        scaler = run._session.gradients.scaler
        return {
            "loss": loss,
            "weights": weights,
            "inside": dtype,
            "norm": float(norm),
            "scale": scaler and scaler.get_scale(),
        }


def small_scale(run: phalanx.Run) -> None:
    """fp16 without the overflows of the first steps, by which the scaler finds its scale."""
    scaler = run._session.gradients.scaler
    if scaler is not None:
        scaler.load_state_dict({**scaler.state_dict(), "scale": 64.0})


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precision(tmp_path: Path, precision: str, accumulate: int) -> None:
    """The forward runs in it, replicas stay bit-equal, and the loss is the single process's within 1%."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    settings = {"accumulate": accumulate}
    (single,) = run_ranks(fit, 1, "single", precision, 16, settings, folder=tmp_path)
    (exact,) = run_ranks(fit, 1, "single", "fp32", 16, settings, folder=tmp_path)
    assert exact["inside"] == torch.float32
    assert single["loss"] == pytest.approx(exact["loss"], rel=0.05)
    for strategy in ("ddp", "fsdp"):
        ranks = run_ranks(fit, 2, strategy, precision, 16, settings, folder=tmp_path)
        for rank in ranks:
            assert rank["inside"] == dtype
            assert rank["loss"] == pytest.approx(single["loss"], rel=0.01)
            assert rank["norm"] == pytest.approx(single["norm"], rel=0.05)
            for mine, other in zip(rank["weights"], ranks[0]["weights"], strict=True):
                assert torch.equal(mine, other)


def overflow(strategy: str) -> dict[str, Any]:
    """One rank's gradient overflows in fp16: no rank may step, the scheduler neither."""
    with phalanx.init(strategy=strategy, precision="fp16", progress=False) as run:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        model, optimizer, scheduler, loader = run.prepare(
            model, optimizer, scheduler, DataLoader(line(6 * run.world_size), batch_size=2)
        )
        before = [full(p) for p in model.parameters()]
        changed = []
        for batch, (x, y) in enumerate(run.steps(loader)):
            with run.accumulate(model):
                loss = nn.functional.mse_loss(model(x / 100), y / 100)
                if batch == 0 and run.rank == run.world_size - 1:
                    loss = loss * float("inf")
                run.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            now = [full(p) for p in model.parameters()]
            changed.append(not all(torch.equal(a, b) for a, b in zip(before, now, strict=True)))
            before = now
        return {
            "changed": changed,
            "lr": optimizer.param_groups[0]["lr"],
            "scale": run._session.gradients.scaler.get_scale(),
        }


@BOTH
def test_an_fp16_overflow_on_one_rank_skips_the_step_on_all(tmp_path: Path, strategy: str, world_size: int) -> None:
    for rank in run_ranks(overflow, world_size, strategy, folder=tmp_path):
        assert rank["changed"] == [False, True, True]
        assert rank["lr"] == pytest.approx(0.1 * 0.5**2)
        assert rank["scale"] == 65536.0 / 2


def copy_of_autocast_model() -> list[float]:
    """An averaged copy of the weights must run itself, not the original."""
    with phalanx.init(precision="bf16", progress=False) as run:
        model = run.prepare(nn.Linear(1, 1, bias=False))
        twin = copy.deepcopy(model)
        with torch.no_grad():
            model.weight.fill_(1.0)
            twin.weight.fill_(3.0)
        x = torch.ones(1, 1)
        return [model(x).item(), twin(x).item()]


def test_a_deep_copy_runs_its_own_weights(tmp_path: Path) -> None:
    assert run_ranks(copy_of_autocast_model, 1, folder=tmp_path) == [[1.0, 3.0]]


# Gradient weights, accumulation, learning rates.


def token_weights(strategy: str, accumulate: int, precision: str) -> dict[str, Any]:
    """Sequences of unequal length: the loss is a mean over tokens, so ranks weigh by tokens."""
    with phalanx.init(strategy=strategy, accumulate=accumulate, precision=precision, progress=False) as run:
        small_scale(run)
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        x = torch.sin(torch.arange(8 * 5 * 3.0)).reshape(8, 5, 3)
        lengths = torch.tensor([1, 5, 2, 4, 3, 5, 1, 2])
        data = TensorDataset(x, lengths)
        model, optimizer, loader = run.prepare(
            model, optimizer, DataLoader(data, batch_size=8 // run.world_size // accumulate)
        )
        for xb, nb in run.steps(loader):
            with run.accumulate(model):
                mask = torch.arange(5) < nb[:, None]
                loss = (model(xb).squeeze(-1)[mask] - 1.0).square().mean()
                run.backward(loss, weight=mask.sum())
                norm = run.clip_grad_norm(model, 1e9)
                optimizer.step()
                optimizer.zero_grad()
        return {"weights": [full(p) for p in model.parameters()], "norm": float(norm), "steps": run.step}


@pytest.mark.parametrize(
    ("strategy", "world_size", "accumulate", "precision"),
    [
        ("single", 1, 1, "fp32"),
        ("single", 1, 4, "fp32"),
        ("ddp", 2, 2, "fp32"),
        ("fsdp", 2, 1, "fp32"),
        ("ddp", 2, 1, "fp16"),
    ],
)
def test_explicit_weights_give_the_mean_over_all_tokens(
    tmp_path: Path, strategy: str, world_size: int, accumulate: int, precision: str
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    x = torch.sin(torch.arange(8 * 5 * 3.0)).reshape(8, 5, 3)
    mask = torch.arange(5) < torch.tensor([1, 5, 2, 4, 3, 5, 1, 2])[:, None]
    (model(x).squeeze(-1)[mask] - 1.0).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    expected = [p.detach() - 0.5 * p.grad for p in model.parameters()]
    close = {"rtol": 1e-5, "atol": 1e-6} if precision == "fp32" else {"rtol": 1e-2, "atol": 1e-3}
    for rank in run_ranks(token_weights, world_size, strategy, accumulate, precision, folder=tmp_path):
        assert rank["steps"] == 1
        for got, want in zip(rank["weights"], expected, strict=True):
            torch.testing.assert_close(got, want, **close)
        assert rank["norm"] == pytest.approx(float(norm), rel=2e-2 if precision == "fp16" else 1e-4)


def learning_rates(rule: str) -> list[float]:
    """The rate that each step used: SGD on a constant gradient of 1 moves the weight by it."""
    with phalanx.init(progress=False, lr_scaling={"rule": rule, "warmup_steps": 2}) as run:
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        model, optimizer, scheduler, loader = run.prepare(
            model, optimizer, scheduler, DataLoader(TensorDataset(torch.ones(5 * run.world_size, 1)), batch_size=1)
        )
        rates = []
        for (x,) in run.steps(loader):
            before = float(next(model.parameters()))
            run.backward(model(x).mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            rates.append(before - float(next(model.parameters())))
        assert optimizer.param_groups[0]["lr"] == 0.125 * 0.5
        return rates


@pytest.mark.parametrize(("rule", "factor"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_learning_rate_scaling(tmp_path: Path, rule: str, factor: float) -> None:
    schedule = [0.125, 0.125, 0.125, 0.0625, 0.0625]
    ramp = [1.0, (1 + factor) / 2, factor, factor, factor]
    for rates in run_ranks(learning_rates, 4, rule, folder=tmp_path):
        assert rates == pytest.approx([a * b for a, b in zip(schedule, ramp, strict=True)], rel=1e-5)


def two_losses(strategy: str, weighted: bool) -> list[Tensor]:
    with phalanx.init(strategy=strategy, progress=False) as run:
        torch.manual_seed(0)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model, optimizer, loader = run.prepare(model, optimizer, DataLoader(line(4), batch_size=4 // run.world_size))
        for x, y in run.steps(loader):
            for loss in (nn.functional.mse_loss, nn.functional.l1_loss):
                run.backward(loss(model(x), y), weight=len(x) if weighted else None)
            optimizer.step()
        return [full(p) for p in model.parameters()]


@BOTH
def test_a_batch_with_two_losses_counts_once(tmp_path: Path, strategy: str, world_size: int) -> None:
    """Their gradients add up, as those of the sum would, with an explicit weight too."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    x, y = line(4).tensors
    (nn.functional.mse_loss(model(x), y) + nn.functional.l1_loss(model(x), y)).backward()
    expected = [p.detach() - 0.01 * p.grad for p in model.parameters()]
    for weighted in (False, True):
        for rank in run_ranks(two_losses, world_size, strategy, weighted, folder=tmp_path):
            for got, want in zip(rank, expected, strict=True):
                torch.testing.assert_close(got, want)


def closure_fit(strategy: str, accumulate: int, search: str | None) -> Any:
    try:
        with phalanx.init(strategy=strategy, accumulate=accumulate, progress=False) as run:
            torch.manual_seed(0)
            model = nn.Linear(3, 1)
            optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=7, line_search_fn=search)
            x = torch.sin(torch.arange(30.0)).reshape(10, 3)
            data = TensorDataset(x, x.sum(1, keepdim=True).square())
            batch = -(-10 // (run.world_size * accumulate))
            model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, batch_size=batch))
            for _ in run.epochs(2):
                for xb, yb in run.steps(loader):

                    def closure(xb: Tensor = xb, yb: Tensor = yb) -> Tensor:
                        optimizer.zero_grad()
                        loss = nn.functional.mse_loss(model(xb), yb)
                        run.backward(loss)
                        return loss

                    with run.accumulate(model):
                        optimizer.step(closure)
            return [full(p) for p in model.parameters()]
    except UsageError as error:
        return str(error)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_takes_the_single_processs_steps(tmp_path: Path, search: str | None) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=7, line_search_fn=search)
    x = torch.sin(torch.arange(30.0)).reshape(10, 3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True).square())
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    for strategy, world_size in (("single", 1), ("ddp", 3)):  # 10 samples: uneven
        for rank in run_ranks(closure_fit, world_size, strategy, 1, search, folder=tmp_path):
            for got, want in zip(rank, model.parameters(), strict=True):
                torch.testing.assert_close(got, want.detach(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("strategy", "accumulate", "words"), [("single", 2, "accumulate=1"), ("fsdp", 1, "strategy ddp")]
)
def test_a_closure_where_it_cannot_work_is_refused(tmp_path: Path, strategy: str, accumulate: int, words: str) -> None:
    (message,) = run_ranks(closure_fit, 1, strategy, accumulate, None, folder=tmp_path)
    assert "closure" in message
    assert words in message


# Two models against each other, as docs/api.md has it.


def adversaries() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)), nn.Sequential(nn.Linear(2, 5), nn.Linear(5, 1))


def critic_loss(scores: Tensor) -> Tensor:
    real, fake = scores.chunk(2)
    return nn.functional.softplus(-real).mean() + nn.functional.softplus(fake).mean()


def gan(strategy: str, batch: int) -> list[Tensor]:
    with phalanx.init(strategy=strategy, accumulate=2, progress=False) as run:
        generator, critic = adversaries()
        opt_g = torch.optim.SGD(generator.parameters(), lr=0.2)
        opt_d = torch.optim.SGD(critic.parameters(), lr=0.2)
        train = DataLoader(TensorDataset(points()), batch_size=batch)
        generator, critic, opt_g, opt_d, train = run.prepare(generator, critic, opt_g, opt_d, train)
        for (x,) in run.steps(train):
            with run.accumulate(generator, critic):
                fake = generator(x.flip(1))
                run.backward(critic_loss(critic(torch.cat([x, fake.detach()]))))
                opt_d.step()
                opt_d.zero_grad()
                judge = run.unwrap(critic).requires_grad_(False)
                run.backward(nn.functional.softplus(-judge(fake)).mean())
                opt_g.step()
                opt_g.zero_grad()
                judge.requires_grad_(True)
        return [*run.state_dict(generator).values(), *run.state_dict(critic).values()]


def points() -> Tensor:
    return torch.sin(torch.arange(44.0)).reshape(22, 2)


def gan_by_hand() -> list[Tensor]:
    """Micro-batches of 4 rows, two a step; the last has 2. The critic's gradient holds the critic's loss only."""
    generator, critic = adversaries()
    of_g, of_d = list(generator.parameters()), list(critic.parameters())
    micros = list(points().split(4))
    for group in (micros[:2], micros[2:4], micros[4:]):
        rows = sum(map(len, group))
        grads_g, grads_d = [torch.zeros_like(p) for p in of_g], [torch.zeros_like(p) for p in of_d]
        for number, x in enumerate(group):
            share, last = len(x) / rows, number == len(group) - 1
            fake = generator(x.flip(1))
            for total, part in zip(
                grads_d,
                torch.autograd.grad(critic_loss(critic(torch.cat([x, fake.detach()]))), of_d),
                strict=True,
            ):
                total += share * part
            if last:
                descend(of_d, grads_d)
            loss = nn.functional.softplus(-critic(fake)).mean()
            for total, part in zip(grads_g, torch.autograd.grad(loss, of_g), strict=True):
                total += share * part
            if last:
                descend(of_g, grads_g)
    return [value.detach() for value in (*of_g, *of_d)]


def descend(parameters: list[nn.Parameter], gradients: list[Tensor]) -> None:
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter -= 0.2 * gradient


@pytest.mark.parametrize(("strategy", "world_size"), [("single", 1), ("ddp", 2), ("fsdp", 2)])
def test_two_adversaries_accumulate_each_its_own_loss(tmp_path: Path, strategy: str, world_size: int) -> None:
    weights = run_ranks(gan, world_size, strategy, 4 // world_size, folder=tmp_path)[0]
    torch.testing.assert_close(weights, gan_by_hand())
