"""Modules that torch.compile has taken inside a model: all names are those of the model without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from phalanx.checkpoint.export import export
from phalanx.strategies.saved import Names
from tests.dist.engines import environ_for, needs
from tests.dist.harness import RankFailed, run_ranks

pytestmark = pytest.mark.slow

STEPS = 4
X = torch.sin(torch.arange(2.0 * STEPS * 4)).reshape(2 * STEPS, 4)


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.scale

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"version": 3}


class Own(nn.Module):
    """With a part that has the very name that torch.compile uses."""

    def __init__(self) -> None:
        super().__init__()
        self._orig_mod = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self._orig_mod(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.deep = nn.ModuleDict({"a": nn.Sequential(Block(), nn.Tanh())})
        self.own, self.other = Own(), Own()
        self.again = self.blocks[1]  # stands in two places
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for part in (*self.blocks, self.deep["a"], self.own, self.other, self.again):
            x = part(x)
        return self.head(x)

    def compile_parts(self, shared: bool) -> None:
        self.blocks[0] = compiled(self.blocks[0])
        if shared:  # what torch can't compile once more with all around it
            self.blocks[1] = self.again = compiled(self.again)
        self.deep["a"][0] = compiled(self.deep["a"][0])
        self.deep["a"] = compiled(self.deep["a"])
        self.other = compiled(self.other)


def made(parts: bool, shared: bool = True) -> Net:
    torch.manual_seed(0)
    net = Net()
    if parts:
        net.compile_parts(shared)
    return net


def by_hand(steps: int) -> dict[str, Any]:
    net = made(parts=False)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    for at in range(steps):
        net(X[2 * at : 2 * at + 2]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net.state_dict()


def train(parts: bool, whole: bool, last: int, path: Path | None = None) -> tuple[dict[str, Any], dict[str, Any], Path]:
    """Up to step `last`: the weights, those of an average that follows them at once, and a checkpoint."""
    torch._dynamo.reset()
    with phalanx.init(progress=False, max_steps=last) as run:
        net = made(parts, shared=not whole)
        optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
        data = DataLoader(TensorDataset(X), 2 // run.world_size)
        model, optimizer, data = run.prepare(compiled(net) if whole else net, optimizer, data)
        average = run.ema(model, decay=0.0)
        if path is not None:
            run.resume(path)
        for _ in run.epochs(1):
            for (x,) in run.steps(data):
                run.backward(model(x).square().mean())
                run.clip_grad_norm(model, 1e9)
                optimizer.step()
                optimizer.zero_grad()
        path = run.save()
        assert path is not None
        return run.state_dict(model), average.state_dict(), path


def everything() -> list[Any]:
    """Compiled parts in an unbroken run; then a checkpoint of a run with them, in one without, and back."""
    unbroken = [train(True, whole, STEPS) for whole in (False, True)]
    _, _, path = train(True, False, 2)
    _, _, path = train(False, False, 3, path)
    return [*unbroken, train(True, True, STEPS, path)]


def check(states: list[dict[str, Any]]) -> None:
    right = by_hand(STEPS)
    for state in states:
        assert list(state) == list(right)
        torch.testing.assert_close(state, dict(right), rtol=1e-5, atol=1e-6)


PLACES = [("single", 1), ("fsdp", 2), ("deepspeed-1", 2), ("ddp", 2), ("horovod", 2)]
PARAMETERS = [pytest.param(*place, marks=needs(place[0])) for place in PLACES]


@pytest.mark.parametrize(("strategy", "ranks"), PARAMETERS)
def test_names_are_those_of_the_model_without(tmp_path: Path, strategy: str, ranks: int) -> None:
    found = run_ranks(everything, ranks, folder=tmp_path, env=environ_for(strategy, ranks), timeout=240)
    check([state for weights, average, _ in found[0] for state in (weights, average)])
    path = found[0][-1][2]
    keys = FileSystemReader(path).read_metadata().state_dict_metadata
    names = [name for name in by_hand(0) if not name.endswith("_extra_state")]
    assert {f"model.0/{name}" for name in names} == {key for key in keys if key.startswith("model.0/")}
    trained = {name for name, _ in made(parts=False).named_parameters()}
    assert {key.rpartition("/")[0] for key in keys if key.startswith("optim.0/")} == {f"optim.0/0/{n}" for n in trained}
    export(path, tmp_path / "weights.pt", 0)
    exported = torch.load(tmp_path / "weights.pt")
    assert set(exported) == set(by_hand(0))
    made(parts=False).load_state_dict(exported)


def as_before() -> list[tuple[dict[str, Any], dict[str, Any], Path]]:
    """A checkpoint with the names of versions that kept torch.compile's, and runs that go on from it."""
    plain = Names.plain
    Names.plain = lambda self, name: name  # type: ignore[method-assign]
    try:
        _, _, path = train(True, False, 2)
    finally:
        Names.plain = plain  # type: ignore[method-assign]
    keys = FileSystemReader(path).read_metadata().state_dict_metadata
    assert "optim.0/0/deep.a._orig_mod.0._orig_mod.linear.weight/exp_avg" in keys
    assert "user.ema/weights/blocks.0._orig_mod.linear.weight" in keys
    return [train(parts, False, STEPS, path) for parts in (True, False)]


@pytest.mark.parametrize(("strategy", "ranks"), PARAMETERS[:3])
def test_checkpoints_with_the_former_names_can_be_loaded(tmp_path: Path, strategy: str, ranks: int) -> None:
    found = run_ranks(as_before, ranks, folder=tmp_path, env=environ_for(strategy, ranks), timeout=240)
    check([state for weights, average, _ in found[0] for state in (weights, average)])


def thawed() -> None:
    with phalanx.init(progress=False) as run:
        net = made(parts=True)
        net.blocks[0].linear.weight.requires_grad_(False)
        data = DataLoader(TensorDataset(X), 1)
        *_, data = run.prepare(net, torch.optim.SGD(net.parameters(), 0.1), data)
        net.blocks[0].linear.weight.requires_grad_(True)
        next(iter(run.steps(data)))


def test_errors_give_plain_names(tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as error:
        run_ranks(thawed, 2, folder=tmp_path)
    assert "UsageError: blocks.0.linear.weight became trainable" in error.value.traces[0]


def sharded() -> None:
    with phalanx.init(progress=False) as run:
        net = made(parts=True)
        run.prepare(net, torch.optim.SGD(net.parameters(), 0.1))


@pytest.mark.parametrize("strategy", [pytest.param("deepspeed-3", marks=needs("deepspeed"))])
def test_zero_3_refuses_compiled_modules(tmp_path: Path, strategy: str) -> None:
    with pytest.raises(RankFailed) as error:
        run_ranks(sharded, 2, folder=tmp_path, env=environ_for(strategy, 2))
    for trace in error.value.traces.values():
        assert "ZeRO stage 3 can't shard a module that torch.compile has taken (blocks.0)" in trace
        assert "module.compile()" in trace
