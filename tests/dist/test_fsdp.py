"""What FSDP does with models and calls that it refuses or gets wrong by itself."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from phalanx.errors import PlanError, UsageError
from phalanx.strategies.fsdp_unused import SWITCH
from tests.dist.harness import run_ranks

pytestmark = pytest.mark.slow

SMALL = 2.0**-9  # lost beside 1 in bf16, which has 8 bits


class OneWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def reduced(param_dtype: str, reduce_dtype: str, factors: list[float]) -> tuple[float, float]:
    """Gradients of one parameter: averaged over ranks that find 1 and SMALL, and summed over `factors` on each."""
    settings = {"param_dtype": param_dtype, "reduce_dtype": reduce_dtype}
    with phalanx.init(strategy="fsdp", fsdp=settings, progress=False, accumulate=len(factors)) as run:
        model = OneWeight()
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 1.0))
        run.backward(model(torch.tensor([1.0, SMALL])[run.rank]))
        averaged = grad_of(model)
        optimizer.zero_grad()
        loader = run.prepare(DataLoader(TensorDataset(torch.zeros(2 * len(factors), 1)), 1))
        for number, _ in enumerate(run.steps(loader)):
            with run.accumulate(model):
                run.backward(model(torch.tensor(factors[number] * len(factors))))
        return averaged, grad_of(model)


def grad_of(model: nn.Module) -> float:
    return float(model.weight.grad.full_tensor()[0])


@pytest.mark.parametrize(
    ("param_dtype", "reduce_dtype", "exact"),
    [("fp32", "fp32", True), ("bf16", "fp32", True), ("bf16", "bf16", False)],
)
def test_gradients_are_reduced_and_added_up_in_the_type_that_is_set(
    tmp_path: Path, param_dtype: str, reduce_dtype: str, exact: bool
) -> None:
    factors = [1.0] + [SMALL / 2] * 15
    for averaged, added in run_ranks(reduced, 2, param_dtype, reduce_dtype, factors, folder=tmp_path):
        assert (averaged == (1 + SMALL) / 2) == exact
        # The factors are powers of two, whole in bf16; their sum is not.
        assert (added == sum(factors)) == exact


class Tied(nn.Module):
    """Blocks that share a weight with each other, and an embedding that shares one with a block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.blocks[1].weight = self.blocks[0].weight
        self.outlet = nn.Linear(6, 6, bias=False)
        self.outlet.weight = self.blocks[2].weight
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(self.outlet(x))


class Scalars(nn.Module):
    """Parameters of no dimension: trained, frozen, and reached by some batches only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 1)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.shift = nn.Parameter(torch.tensor(-0.25))
        self.still = nn.Parameter(torch.tensor(2.0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * self.scale * self.still
        return y + self.shift if x[0, 0] > 0 else y


INPUT = torch.sin(torch.arange(96.0)).reshape(16, 6)
TARGET = INPUT.cumsum(1)[:, -1:]


def seeded(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return kind()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)


def fit(kind: type[nn.Module], settings: dict[str, Any], norm_type: float) -> tuple[dict[str, Tensor], list[float]]:
    """Two epochs of whole batches, with a save and a resume by a second run of the same directory between them."""
    model = seeded(kind)
    norms: list[float] = []
    path: Any = None
    for last in (1, 2):
        with phalanx.init(strategy="fsdp", fsdp=settings, progress=False, accumulate=2) as run:
            model = seeded(kind)
            loader = DataLoader(TensorDataset(INPUT, TARGET), 4 // run.world_size)
            model, optimizer, loader = run.prepare(model, optimizer_of(model), loader)
            if path is not None:
                run.resume(path)
            for _ in run.epochs(last):
                for x, y in run.steps(loader):
                    with run.accumulate(model):
                        run.backward(nn.functional.mse_loss(model(x), y))
                        norm = run.clip_grad_norm(model, 0.1, norm_type)
                        optimizer.step()
                        optimizer.zero_grad()
                    if norm is not None:
                        norms.append(float(norm))
            path = run.save()
            weights = run.state_dict(model)
    return weights, norms


def by_hand(kind: type[nn.Module], norm_type: float) -> tuple[dict[str, Tensor], list[float]]:
    model = seeded(kind)
    optimizer = optimizer_of(model)
    norms = []
    for _ in range(2):
        for pair in torch.arange(16).split(8):
            optimizer.zero_grad()
            for ids in pair.split(2 if kind is Scalars else 8):  # the branch is taken by a rank's micro-batch
                loss = nn.functional.mse_loss(model(INPUT[ids]), TARGET[ids])
                (loss * len(ids) / 8).backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type)))
            optimizer.step()
    return copy.deepcopy(dict(model.state_dict())), norms


CASES: list[tuple[type[nn.Module], dict[str, Any], float]] = [
    (Tied, {}, 2.0),
    (Tied, {"wrap": ("Linear",)}, float("inf")),
    (Tied, {"reshard_after_forward": False}, 1.0),
    (Scalars, {}, 2.0),
    (Scalars, {"wrap": ("size:5",), "param_dtype": "fp32"}, float("inf")),
    (Scalars, {"reshard_after_forward": False}, float("-inf")),
]


def fits() -> list[tuple[dict[str, Tensor], list[float]]]:
    return [fit(*case) for case in CASES]


def test_tied_weights_scalars_and_every_norm_train_as_by_hand(tmp_path: Path) -> None:
    for rank in run_ranks(fits, 2, folder=tmp_path):
        for (kind, settings, norm_type), (weights, norms) in zip(CASES, rank, strict=True):
            expected, by_torch = by_hand(kind, norm_type)
            where = f"{kind.__name__}, {settings}, norm {norm_type}"
            torch.testing.assert_close(norms, by_torch, rtol=1e-5, atol=1e-7, msg=lambda m, w=where: f"{w}: {m}")
            if weights:  # on rank 0
                torch.testing.assert_close(weights, expected, rtol=2e-5, atol=2e-6, msg=lambda m, w=where: f"{w}: {m}")


class TwoTypes(nn.Module):
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6)
            self.second = nn.Linear(6, 6, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.tanh(self.first(x)).double()).float()

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([TwoTypes.Block()])
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[0](self.inlet(x)))


class MixedModule(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 1)
        self.more = nn.Parameter(torch.ones(2, dtype=torch.float64))


class Sometimes(nn.Module):
    """One layer is for inputs of one sign only: on some ranks for no sample of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(6, 6)
        self.extra = nn.Linear(6, 6)
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.inlet(x))
        chosen = x[:, 0] > 0
        if chosen.any():
            y = y + self.extra(x) * chosen[:, None]
        return self.head(y)


def other_models() -> tuple[Any, ...]:
    refused = ""
    with phalanx.init(strategy="fsdp", progress=False) as run:
        try:
            run.prepare(MixedModule())
        except UsageError as error:
            refused = str(error)
    try:
        unreached = fit(Sometimes, {"find_unused_parameters": True}, 2.0)
    except PlanError as error:
        return fit(TwoTypes, {}, 2.0), str(error), refused
    return fit(TwoTypes, {}, 2.0), unreached, refused


def test_other_types_and_parameters_that_some_ranks_do_not_reach(tmp_path: Path) -> None:
    two, sometimes, refused = run_ranks(other_models, 2, folder=tmp_path)[0]
    cases = [(TwoTypes, two)]
    if hasattr(FSDPModule, SWITCH):
        cases.append((Sometimes, sometimes))
    else:
        assert "needs torch 2.13" in sometimes
    for kind, (weights, norms) in cases:
        expected, by_torch = by_hand(kind, 2.0)
        torch.testing.assert_close(norms, by_torch, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(weights, expected, rtol=2e-5, atol=2e-6)
    assert "torch.float32 and torch.float64" in refused


class ScalarFirst(nn.Module):
    """Each rank of two holds one of the weights; the scalar is whole on both."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(()))
        self.weight = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.shift + (x * self.weight).sum(-1)


def in_fp16(clip: bool, again: bool) -> tuple[dict[str, Tensor], int, float, float]:
    """Three steps at rate 1, of which the first overflows: in the second weight alone; and the last
    forward's output, of ones."""
    with phalanx.init(strategy="fsdp", precision="fp16", progress=False) as run:
        scaler = run._session.gradients.scaler
        assert scaler is not None
        scaler.load_state_dict({**scaler.state_dict(), "scale": 8.0})
        rows = torch.ones(3 * run.world_size, 2)
        rows[: run.world_size, 1] = float("inf")
        net = ScalarFirst()
        data = DataLoader(TensorDataset(rows), batch_size=1)
        model, optimizer, data = run.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0), data)
        for (x,) in run.steps(data):
            out = model(x).mean()
            run.backward(out)
            if clip:
                run.clip_grad_norm(model, 100.0)
            if again:
                model(x)  # leaves gathered weights in the module
            optimizer.step()
            optimizer.zero_grad()
        return run.state_dict(model), optimizer.steps, scaler.get_scale(), out.item()


def all_in_fp16() -> list[tuple[dict[str, Tensor], int, float, float]]:
    return [in_fp16(*case) for case in ((False, False), (True, False), (False, True), (True, True))]


def test_ranks_leave_out_the_same_steps_and_step_on_shards(tmp_path: Path) -> None:
    expected = {"shift": torch.tensor(-2.0), "weight": torch.tensor([-2.0, -2.0])}
    for rank, found in enumerate(run_ranks(all_in_fp16, 2, folder=tmp_path)):
        for weights, steps, scale, out in found:
            assert (steps, scale, out) == (2, 4, -3)
            if rank == 0:
                torch.testing.assert_close(weights, expected)
