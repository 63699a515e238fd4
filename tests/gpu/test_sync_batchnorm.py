"""`ddp.sync_batchnorm` on real GPUs: the ranks' BatchNorm is that of one process over the whole batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from tests.dist import engines
from tests.dist.harness import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

COUNT = torch.cuda.device_count()
STEPS = 6


def network() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 4),
        nn.BatchNorm1d(4), nn.Linear(4, 1),
    )  # fmt: skip


def data() -> TensorDataset:
    """Whose halves of a batch differ much, so that a rank's own statistics are others."""
    x = torch.sin(torch.arange(16 * STEPS * 48.0)).reshape(16 * STEPS, 3, 4, 4)
    x += torch.arange(16 * STEPS).remainder(16).div(8).floor().mul(3).reshape(-1, 1, 1, 1)
    return TensorDataset(x, x.mean(dim=(1, 2, 3)).square())


def by_hand() -> dict[str, Tensor]:
    """Plain torch in one process, on the CPU: SGD with momentum, batches of 16."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for x, y in DataLoader(data(), batch_size=16):
        nn.functional.mse_loss(model(x).flatten(), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def train(strategy: str, sync: bool, early: bool, settings: dict[str, Any]) -> dict[str, Any]:
    """`early`: the optimizer is built before `prepare`, from the modules that are replaced there."""
    torch.backends.cudnn.allow_tf32 = False
    with phalanx.init(strategy=strategy, progress=False, ddp={"sync_batchnorm": sync}, **settings) as run:
        model = network()
        loader = run.prepare(DataLoader(data(), batch_size=16 // run.world_size))
        if early:
            model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9))
        else:
            model = run.prepare(model)
            optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9))
        for x, y in run.steps(loader):
            run.backward(nn.functional.mse_loss(model(x).flatten(), y))
            optimizer.step()
            optimizer.zero_grad()
        kinds = {type(module).__name__ for module in model.modules() if "BatchNorm" in type(module).__name__}
        return {"weights": run.state_dict(model), "kinds": kinds}


def apart(got: dict[str, Tensor]) -> float:
    """The largest difference to the whole batch's training by hand."""
    return max(float((got[name].double() - value.double()).abs().max()) for name, value in by_hand().items())


def check(tmp_path: Path, strategy: str, world_size: int, early: bool, env: Any = None, **settings: Any) -> None:
    ranks = run_ranks(train, world_size, strategy, True, early, settings, folder=tmp_path, cuda=True, env=env)
    assert list(ranks[0]["weights"]) == list(by_hand())
    assert apart(ranks[0]["weights"]) < 0.01
    if world_size > 1:
        assert ranks[0]["kinds"] == {"SyncBatchNorm"}


LINES = [
    ("ddp", True), ("ddp", False), ("fsdp", True),
    pytest.param("deepspeed", True, marks=engines.needs("deepspeed")),
    pytest.param("horovod", True, marks=engines.needs("horovod")),
]  # fmt: skip


@pytest.mark.parametrize(("strategy", "early"), LINES)
def test_statistics_are_the_whole_batchs(tmp_path: Path, strategy: str, early: bool) -> None:
    if COUNT < 2:
        pytest.skip(f"needs 2 GPUs, this machine has {COUNT}")
    env = None
    if strategy in ("deepspeed", "horovod"):
        of = engines.environ_for(strategy, 2)
        env = lambda rank: {name: value for name, value in of(rank).items() if name != "DS_ACCELERATOR"}  # noqa: E731
    check(tmp_path, strategy, 2, early, env)


def test_two_ranks_on_one_gpu(tmp_path: Path) -> None:
    """NCCL refuses a GPU twice, gloo doesn't (with DDP; FSDP's collectives on the GPU are not gloo's)."""
    if COUNT < 1:
        pytest.skip("needs a GPU, this machine has none")
    env = {"CUDA_VISIBLE_DEVICES": "0"}
    check(tmp_path, "ddp", 2, True, env, backend="gloo")
    ranks = run_ranks(train, 2, "ddp", False, True, {"backend": "gloo"}, folder=tmp_path, cuda=True, env=env)
    assert apart(ranks[0]["weights"]) > 1  # each rank's own statistics: what the setting is for


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_one_rank_has_the_whole_batch_anyhow(tmp_path: Path, strategy: str) -> None:
    if COUNT < 1:
        pytest.skip("needs a GPU, this machine has none")
    check(tmp_path, strategy, 1, True)
