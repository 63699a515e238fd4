"""Buffers of any type and layout are rank 0's after `prepare`, under ddp at each forward, and in an evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from tests.dist.engines import environ_for, needs
from tests.dist.harness import run_ranks

pytestmark = pytest.mark.slow

TYPES = [torch.int16, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.uint16, torch.float16, torch.float32]


class Model(nn.Module):
    """`fill(x)` fills every buffer by x, 0 or 1."""

    def __init__(self, value: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        for number, dtype in enumerate(TYPES):
            self.register_buffer(f"typed{number}", torch.zeros(3, dtype=dtype))
        self.register_buffer("unsaved", torch.zeros(2, dtype=torch.int16), persistent=False)
        self.register_buffer("scalar", torch.zeros((), dtype=torch.int16))
        self.register_buffer("expanded", torch.zeros(1, 2).expand(4, 2))
        self.register_buffer("turned", torch.zeros(2, 3, dtype=torch.int16).t())
        self.register_buffer("none", torch.zeros(0, dtype=torch.int16))
        self.fill(value)

    def fill(self, value: int) -> None:
        for name, buffer in self.named_buffers():
            (buffer[:1] if name == "expanded" else buffer).copy_(torch.full((), value))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def seen(model: nn.Module) -> set[float]:
    """All values in all buffers."""
    return {value for buffer in model.buffers() for value in buffer.to(torch.complex64).real.flatten().tolist()}


def script(options: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with phalanx.init(progress=False, **options) as run:
        own = Model(int(run.rank == 0))
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
        data = TensorDataset(torch.ones(4, 2), torch.ones(4, 1))
        model, optimizer, train, val = run.prepare(own, optimizer, DataLoader(data, 1), DataLoader(data, 1))
        own = run.unwrap(model)
        found["prepared"] = seen(own)
        for x, y in run.steps(train):
            own.fill(int(run.rank == 1))
            loss = nn.functional.mse_loss(model(x), y)
            found["trained"] = seen(own)
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        own.fill(int(run.rank == 0))
        for x, _ in run.evaluate(val):
            model(x)
        found["evaluated"] = seen(own)
    return found


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("ddp", {}),
        ("ddp", {"ddp": {"broadcast_buffers": False}}),
        ("fsdp", {}),
        pytest.param("horovod", {}, marks=needs("horovod")),
        pytest.param("deepspeed-1", {}, marks=needs("deepspeed")),
    ],
)
def test_buffers_are_rank_0s(tmp_path: Path, strategy: str, options: dict[str, Any]) -> None:
    ranks = run_ranks(script, 2, options, folder=tmp_path, env=environ_for(strategy, 2), timeout=240)
    sent = strategy == "ddp" and not options
    for rank, found in enumerate(ranks):
        assert found["prepared"] == {1.0}
        assert found["trained"] == ({0.0} if sent else {float(rank)})
        assert found["evaluated"] == {1.0}
