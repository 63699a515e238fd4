"""The order of a script's calls: wherever steps, clearing and other forwards stand, gradients are those of the group.

Right values come from a loop by hand over whole groups, in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from phalanx.errors import UsageError
from tests.dist.engines import engine_of, environ_for, needs
from tests.dist.harness import run_ranks

pytestmark = pytest.mark.slow

SAMPLES, BATCH, EPOCHS = 22, 4, 2  # six global batches an epoch, the last of two samples
X = torch.sin(torch.arange(SAMPLES * 3.0)).reshape(SAMPLES, 3)
Y = torch.cos(torch.arange(float(SAMPLES))).reshape(SAMPLES, 1)
TOKENS = 1.0 + torch.arange(SAMPLES) % 5  # what a sample weighs where weights are explicit
DATA = TensorDataset(X, Y, TOKENS)
Case = tuple[Callable[..., None], int, bool]  # the order, accumulate, and whether weights are explicit


class Net(nn.Module):
    """With blocks, so that FSDP has units, and a parameter of no dimension."""

    def __init__(self, start: float, scalar: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 1)
        self.scale = nn.Parameter(torch.full(() if scalar else (1,), 0.5))
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                values = torch.sin(start + number + torch.arange(float(parameter.numel())))
                parameter.copy_(values.reshape(parameter.shape))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x) * self.scale


def loss_of(model: nn.Module, x: Tensor, y: Tensor, tokens: Tensor, weighted: bool) -> Tensor:
    each = (model(x) - y).square().squeeze(1)
    return (each * tokens).sum() / tokens.sum() if weighted else each.mean()


def groups(accumulate: int) -> Iterator[Tensor]:
    """The samples of each group, in an order that is the data's own."""
    for _ in range(EPOCHS):
        yield from torch.arange(SAMPLES).split(BATCH * accumulate)


def by_hand(start: float, case: Case, clip: float, scalar: bool) -> dict[str, Tensor]:
    _, accumulate, weighted = case
    model = Net(start, scalar)
    optimizer = torch.optim.SGD(model.parameters(), 0.3, momentum=0.9)
    for ids in groups(accumulate):
        optimizer.zero_grad()
        loss_of(model, X[ids], Y[ids], TOKENS[ids], weighted).backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return dict(model.state_dict())


class Script:
    """One model with its optimizer, and what is done with them in each order."""

    def __init__(self, run: phalanx.Run, start: float, clip: float, scalar: bool) -> None:
        self.run, self.clip = run, clip
        model = Net(start, scalar)
        optimizer = torch.optim.SGD(model.parameters(), 0.3, momentum=0.9)
        self.model, self.optimizer = run.prepare(model, optimizer)

    def back(self, batch: list[Tensor], weighted: bool) -> None:
        weight = batch[2].sum() if weighted else None
        self.run.backward(loss_of(self.model, *batch, weighted), weight=weight)

    def step(self) -> None:
        self.run.clip_grad_norm(self.model, self.clip)
        self.optimizer.step()

    def zero(self) -> None:
        self.optimizer.zero_grad()


def zero_at_the_end(run: phalanx.Run, scripts: list[Script], batch: Any, weighted: bool) -> None:
    with run.accumulate(*(script.model for script in scripts)):
        for script in scripts:
            script.back(batch, weighted)
            script.step()
            script.zero()


def zero_at_the_start(run: phalanx.Run, scripts: list[Script], batch: Any, weighted: bool) -> None:
    with run.accumulate(*(script.model for script in scripts)):
        for script in scripts:
            script.zero()
            script.back(batch, weighted)
            script.step()


def all_alike(run: phalanx.Run, scripts: list[Script], batch: Any, weighted: bool) -> None:
    with run.accumulate(*(script.model for script in scripts)):
        for script in scripts:
            script.zero()
        for script in scripts:
            script.back(batch, weighted)
        for script in scripts:
            script.step()


def steps_after_the_block(run: phalanx.Run, scripts: list[Script], batch: Any, weighted: bool) -> None:
    for script in scripts:
        script.zero()
    with run.accumulate(*(script.model for script in scripts)):
        for script in scripts:
            script.back(batch, weighted)
    for script in scripts:
        script.step()


def asked_for_the_last(run: phalanx.Run, scripts: list[Script], batch: Any, weighted: bool) -> None:
    """Steps and clearing only where the group ends."""
    with run.accumulate(*(script.model for script in scripts)):
        for script in scripts:
            script.back(batch, weighted)
        if run._session.gradients.last:
            for script in scripts:
                script.step()
                script.zero()


def with_forwards_between(run: phalanx.Run, scripts: list[Script], batch: Any, weighted: bool) -> None:
    """A training accuracy, a forward that nobody differentiates, and an evaluation."""
    with run.accumulate(*(script.model for script in scripts)):
        for script in scripts:
            script.back(batch, weighted)
            with torch.no_grad():
                script.model(batch[0])
            run.unwrap(script.model)(batch[0])
            for part in run.evaluate(run._session.loaders[-1]):
                script.model(part[0])
            script.step()
            script.zero()


ORDERS = (
    zero_at_the_end,
    zero_at_the_start,
    all_alike,
    steps_after_the_block,
    asked_for_the_last,
    with_forwards_between,
)
CASES: list[Case] = [
    (order, accumulate, weighted) for order in ORDERS for accumulate in (1, 4) for weighted in (False, True)
]


def train(strategy: str, case: Case, models: int, settings: dict[str, Any]) -> list[dict[str, Tensor]]:
    order, accumulate, weighted = case
    name, _, stage = strategy.partition("-")
    zero = {"deepspeed": {"zero_stage": int(stage)}} if stage else {}
    with phalanx.init(strategy=name, accumulate=accumulate, progress=False, **zero, **settings) as run:
        scripts = [Script(run, float(number), 0.8, name != "deepspeed") for number in range(models)]
        loader = run.prepare(DataLoader(DATA, BATCH // run.world_size))
        run.prepare(DataLoader(DATA, 3))
        for _ in run.epochs(EPOCHS):
            for batch in run.steps(loader):
                order(run, scripts, batch, weighted)
        return [run.state_dict(script.model) for script in scripts]


def all_cases(strategy: str, models: int, settings: dict[str, Any]) -> list[list[dict[str, Tensor]]]:
    return [train(strategy, case, models, settings) for case in CASES]


LINES = [
    ("single", 1, 1, {}),
    ("single", 1, 2, {}),
    ("ddp", 2, 1, {}),
    ("ddp", 2, 2, {}),
    ("fsdp", 1, 2, {}),
    ("fsdp", 2, 2, {}),
    ("fsdp", 4, 1, {"fsdp": {"reshard_after_forward": False, "replicate": 2}}),
    ("deepspeed-0", 2, 1, {}),
    ("deepspeed-1", 2, 1, {}),
    ("deepspeed-2", 2, 1, {}),
    ("deepspeed-3", 1, 1, {}),
    ("horovod", 2, 1, {}),
    ("horovod", 2, 2, {}),
]


@pytest.mark.parametrize(
    ("strategy", "world_size", "models", "settings"),
    [pytest.param(*line, marks=needs(line[0])) for line in LINES],
)
def test_every_order_of_calls_trains_on_whole_groups(
    tmp_path: Path, strategy: str, world_size: int, models: int, settings: dict[str, Any]
) -> None:
    env = environ_for(strategy, world_size) if engine_of(strategy) == "horovod" else None
    ranks = run_ranks(all_cases, world_size, strategy, models, settings, folder=tmp_path, env=env, timeout=240)
    for case, found in zip(CASES, ranks[0], strict=True):
        order, accumulate, weighted = case
        for number, state in enumerate(found):
            expected = by_hand(float(number), case, 0.8, engine_of(strategy) != "deepspeed")
            for name, value in expected.items():
                where = f"{order.__name__}, accumulate={accumulate}, weighted={weighted}, model {number}, {name}"
                torch.testing.assert_close(state[name], value, rtol=2e-5, atol=2e-6, msg=lambda m, w=where: f"{w}: {m}")


def adversaries(strategy: str) -> str:
    """The textbook's order, in which the generator's loss leaves gradients in the critic."""
    with phalanx.init(strategy=strategy, accumulate=2, progress=False) as run:
        critic, generator = Script(run, 0.0, 1.0, True), Script(run, 1.0, 1.0, True)
        try:
            for x, y, _ in run.steps(run.prepare(DataLoader(DATA, 2))):
                with run.accumulate(critic.model, generator.model):
                    critic.zero()
                    run.backward(critic.model(x).mean())
                    critic.step()
                    generator.zero()
                    run.backward((generator.model(x) * critic.model(y * x)).mean())
                    generator.step()
        except UsageError as error:
            return str(error)
    return ""


def test_another_losss_gradients_that_cannot_be_taken_away_are_refused(tmp_path: Path) -> None:
    for strategy, world_size in (("single", 1), ("ddp", 2)):
        for refused in run_ranks(adversaries, world_size, strategy, folder=tmp_path):
            assert "requires_grad_(False)" in refused


def without_steps() -> list[float]:
    """Two optimizers in a loop of one's own: each step is that of its own passes, in `accumulate` or not."""
    with phalanx.init(progress=False, accumulate=2) as run:
        models = [nn.Linear(1, 1, bias=False) for _ in range(2)]
        for model in models:
            nn.init.zeros_(model.weight)
        pairs = [run.prepare(model, torch.optim.SGD(model.parameters(), 1.0)) for model in models]
        for weight in (2.0, 6.0):
            with run.accumulate(*models):
                for number, (model, optimizer) in enumerate(pairs):
                    run.backward(model(torch.full((1, 1), 1.0 + number)).mean(), weight=weight)
                    optimizer.step()
                    optimizer.zero_grad()
        return [run.unwrap(model).weight.item() for model, _ in pairs]


def test_outside_of_steps_there_is_no_group(tmp_path: Path) -> None:
    """Gradients 1 and 2, whatever the one weight of a step is: two steps of lr 1."""
    (found,) = run_ranks(without_steps, 1, folder=tmp_path)
    assert found == pytest.approx([-2.0, -4.0])


def added_up_by_hand() -> float:
    """Two batches a step, without `accumulate`: gradients 1 and 5 with weights 3 and 1."""
    with phalanx.init(progress=False) as run:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 1.0))
        loader = run.prepare(DataLoader(TensorDataset(torch.tensor([[1.0], [5.0]] * 2)), 1))
        for number, (x,) in enumerate(run.steps(loader)):
            run.backward(model(x).mean(), weight=3.0 if number % 2 == 0 else 1.0)
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        return run.unwrap(model).weight.item()


def test_batches_that_a_script_adds_up_itself_keep_their_weights(tmp_path: Path) -> None:
    """Twice (3*1 + 1*5)/4 = 2."""
    (found,) = run_ranks(added_up_by_hand, 1, folder=tmp_path)
    assert found == pytest.approx(-4.0)
