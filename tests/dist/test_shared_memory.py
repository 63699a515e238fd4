"""Buffers and other state whose elements share memory: the training of a loop by hand, saved and gone on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from tests.dist.engines import environ_for, needs
from tests.dist.harness import RankFailed, run_ranks

pytestmark = pytest.mark.slow

TYPES = [torch.int16, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.uint16, torch.float16]
PLACES = [("single", 1), ("ddp", 2), ("fsdp", 2), ("horovod", 2), *((f"deepspeed-{n}", 2) for n in (0, 1, 3))]


class Sharing(nn.Module):
    """Buffers that share memory within themselves and with each other, some written to by `forward`."""

    def __init__(self, value: int = 1) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        nn.init.constant_(self.linear.weight, 0.5)
        nn.init.zeros_(self.linear.bias)
        for number, dtype in enumerate(TYPES):
            self.register_buffer(f"typed{number}", torch.full((1,), value).to(dtype).expand(3))
        self.register_buffer("rows", torch.full((3, 1), float(value)).expand(3, 4))
        self.register_buffer("deep", torch.full((2, 1, 3, 1), float(value)).expand(2, 5, 3, 4))
        self.register_buffer("again", self.rows)
        self.register_buffer("single", torch.full((1,), float(value)).expand(4))
        self.register_buffer("unsaved", torch.full((1,), float(value)).expand(2), persistent=False)
        self.register_buffer("history", torch.arange(6.0) * value)
        self.register_buffer("windows", self.history.unfold(0, 3, 1))
        self.register_buffer("drift", torch.zeros(1).expand(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.single[:1].add_(1)
            self.history.add_(1)
            self.drift = self.drift + torch.arange(4.0)
        scale = self.rows[0, 0] + self.windows[1].mean() * 1e-2 + self.drift[3] * 1e-3 + self.unsaved[1]
        return self.linear(x) * scale


def train(model: nn.Module, run: Any, optimizer: Any, batches: Any) -> None:
    for (x,) in batches:
        loss = model(x).mean()
        run.backward(loss) if run else loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def by_hand(steps: int) -> dict[str, Tensor]:
    model = Sharing()
    train(model, None, torch.optim.SGD(model.parameters(), 0.1), [(torch.ones(1, 2),)] * steps)
    return model.state_dict()


def script(resumed: bool) -> tuple[dict[str, Tensor], bool]:
    """Six steps, or four, a checkpoint, and two more of a second run."""
    path = None
    for last in (4, 6) if resumed else (6,):
        with phalanx.init(progress=False, max_steps=last) as run:
            own = Sharing(int(run.rank == 0))
            optimizer = torch.optim.SGD(own.parameters(), 0.1)
            data = DataLoader(TensorDataset(torch.ones(6 * run.world_size, 2)), 1)
            model, optimizer, data = run.prepare(own, optimizer, data)
            if path is not None:
                run.resume(path)
            for _ in run.epochs(1):
                train(model, run, optimizer, run.steps(data))
            path = run.save()
            weights = {name: value.to(torch.complex128) for name, value in run.state_dict(model).items()}
    own = run.unwrap(model)
    return weights, own.again is own.rows and bool((own.unsaved == 1).all())


def both() -> list[tuple[dict[str, Tensor], bool]]:
    return [script(resumed) for resumed in (False, True)]


@pytest.mark.parametrize(("strategy", "ranks"), [pytest.param(*place, marks=needs(place[0])) for place in PLACES])
def test_training_and_resuming_are_those_of_a_loop_by_hand(tmp_path: Path, strategy: str, ranks: int) -> None:
    found = run_ranks(both, ranks, folder=tmp_path, env=environ_for(strategy, ranks), timeout=240)
    right = by_hand(6)
    for weights, _ in found[0]:
        assert list(weights) == list(right)
        for name, value in right.items():
            torch.testing.assert_close(weights[name], value.to(torch.complex128), rtol=1e-6, atol=1e-6, msg=name)
    assert all(kept for rank in found for _, kept in rank)


def expanded_parameter(frozen: bool) -> None:
    with phalanx.init(progress=False) as run:
        model = nn.Sequential(nn.Linear(1, 1), nn.Module())
        model[1].scale = nn.Parameter(torch.ones(3, 1).expand(3, 4), requires_grad=not frozen)
        run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))


@pytest.mark.parametrize(("strategy", "ranks"), [pytest.param(*place, marks=needs(place[0])) for place in PLACES[:3]])
def test_a_parameter_whose_elements_share_memory_is_an_error(tmp_path: Path, strategy: str, ranks: int) -> None:
    for frozen in (False, True):
        with pytest.raises(RankFailed) as error:
            run_ranks(expanded_parameter, ranks, frozen, folder=tmp_path, env=environ_for(strategy, ranks))
        for rank in range(ranks):
            assert "the parameter 1.scale of Sequential has elements that share memory" in error.value.traces[rank]
            assert "strides (1, 0)" in error.value.traces[rank]
            assert "nn.Parameter(tensor.clone())" in error.value.traces[rank]


def own_state() -> list[Any]:
    """Registered values and a module, and an optimizer's state from before: written, saved and loaded."""
    path = None
    for value in (1.0, 0.0):
        with phalanx.init(progress=False) as run:
            kept = {
                "same": torch.full((1,), value).expand(3),
                "other": torch.zeros(1).expand(3) if path else torch.arange(3.0),
                "list": [torch.full((2, 1), value).expand(2, 2)],
            }
            judge = Sharing(int(value))
            model = nn.Linear(2, 1, bias=False)
            nn.init.zeros_(model.weight)
            optimizer = torch.optim.SGD(model.parameters(), 1.0, momentum=0.5)
            optimizer.state[model.weight]["momentum_buffer"] = torch.full((1,), value).expand(1, 2)
            model, optimizer = run.prepare(model, optimizer)
            names = run.register("kept", kept), run.register("judge", judge)
            if path is not None:
                run.resume(path)
            else:
                path = run.save()
            run.backward(model(torch.ones(1, 2)).mean())
            optimizer.step()
            weight = run.state_dict(model).get("weight", torch.zeros(1, 2)).tolist()
    state = {name: value.tolist() for name, value in names[0].items() if name != "list"}
    return [weight, state, names[0]["list"][0].tolist(), judge.rows.tolist(), judge.single.tolist()]


@pytest.mark.parametrize(("strategy", "ranks"), PLACES[:3])
def test_state_of_the_scripts_own_may_share_memory(tmp_path: Path, strategy: str, ranks: int) -> None:
    for rank, got in enumerate(run_ranks(own_state, ranks, folder=tmp_path, env=environ_for(strategy, ranks))):
        weight, state, items, rows, single = got
        assert weight == ([[-1.5, -1.5]] if rank == 0 else [[0.0, 0.0]])  # half of 1 before, and a gradient of 1
        assert state == {"same": [1, 1, 1], "other": [0, 1, 2]}
        assert (items, rows, single) == ([[1, 1]] * 2, [[1] * 4] * 3, [1] * 4)


def values() -> list[Any]:
    with phalanx.init(progress=False) as run:
        mine = torch.full((1,), float(run.rank)).expand(4)
        return [
            run.gather(mine[:1]).tolist(),
            run.gather(mine).tolist(),
            run.broadcast(mine[1:2], src=1).tolist(),
            run.broadcast(mine, src=1).tolist(),
            run.reduce(mine, "sum").tolist(),
            run.reduce(mine[:1], "max").tolist(),
        ]


def test_values_over_ranks_may_share_memory(tmp_path: Path) -> None:
    for got in run_ranks(values, 2, folder=tmp_path):
        assert got == [[0, 1], [0] * 4 + [1] * 4, [1], [1] * 4, [1] * 4, [1]]
