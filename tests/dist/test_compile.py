"""torch.compile at every place where a script may call it: the same weights, under the module's own names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from tests.dist.engines import needs
from tests.dist.harness import run_ranks
from tests.dist.test_orders import Net, X, Y

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

BACKEND = "aot_eager"  # takes the graphs apart as the default does, and generates no code
PLACES = ("nowhere", "before", "method before", "blocks", "after", "method after")


def train(strategy: str, place: str, precision: str) -> dict[str, Tensor]:
    """A whole script: accumulation, clipping, an evaluation, a checkpoint and its loading."""
    torch._dynamo.reset()
    with phalanx.init(strategy=strategy, precision=precision, accumulate=2, progress=False) as run:
        model: nn.Module = Net(0.0, scalar=strategy != "deepspeed")
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        if place == "before":
            model = torch.compile(model, backend=BACKEND)
        if place == "method before":
            model.compile(backend=BACKEND)
        if place == "blocks":
            for block in model.blocks:
                block.compile(backend=BACKEND)
        data = TensorDataset(X, Y)
        loaders = DataLoader(data, 4 // run.world_size, shuffle=True), DataLoader(data, 4)
        model, optimizer, training, validation = run.prepare(model, optimizer, *loaders)
        if place == "after":
            model = torch.compile(model, backend=BACKEND)
        if place == "method after":
            model.compile(backend=BACKEND)
        for _ in run.epochs(2):
            for x, y in run.steps(training):
                with run.accumulate(model):
                    run.backward(nn.functional.mse_loss(model(x), y))
                    run.clip_grad_norm(model, 0.05)
                    optimizer.step()
                    optimizer.zero_grad()
            for x, _ in run.evaluate(validation):
                model(x)
        path = run.save()
        for x, _ in run.evaluate(validation):
            model(x)
        run.resume(path)
        return run.state_dict(model)


def everywhere(strategy: str, precisions: tuple[str, ...]) -> list[dict[str, Tensor]]:
    return [train(strategy, place, precision) for precision in precisions for place in PLACES]


@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [pytest.param(*line, marks=needs(line[0])) for line in (("single", 1), ("ddp", 2), ("fsdp", 2), ("deepspeed", 1))],
)
def test_a_model_may_be_compiled_anywhere(tmp_path: Path, strategy: str, world_size: int) -> None:
    precisions = ("bf16",) if world_size > 1 else ("fp32", "bf16")
    ranks = run_ranks(everywhere, world_size, strategy, precisions, folder=tmp_path, timeout=300)
    names = list(Net(0.0).state_dict())
    for at, state in enumerate(ranks[0]):
        plain = ranks[0][at // len(PLACES) * len(PLACES)]
        assert list(state) == names, PLACES[at % len(PLACES)]
        for name in names:
            torch.testing.assert_close(state[name], plain[name], rtol=1e-5, atol=1e-6)
