"""A profiled window with ranks: what each engine's collectives take."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from phalanx.records import Profile, Workload, read_records
from phalanx.report.read.runs import read_run
from tests.dist import engines
from tests.dist.harness import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

WIDTH = 300  # so that gradients aren't tiny


def train(strategy: str) -> dict[str, Any]:
    measure = {"profile_steps": 3, "profile_start": 2}
    with phalanx.init(strategy=strategy, name="measured", progress=False, measure=measure) as run:
        model = nn.Sequential(nn.Linear(8, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loader = DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=4)
        model, optimizer, loader = run.prepare(model, optimizer, loader)
        for _ in run.epochs(1):
            for (x,) in run.steps(loader):
                run.backward(model(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
    return {"rank": run.rank}


@pytest.mark.parametrize(
    "strategy", ["ddp", "fsdp", *(pytest.param(name, marks=engines.needs(name)) for name in ("deepspeed", "horovod"))]
)
def test_the_collectives_of_each_engine_are_seen_or_said_not_to_be(tmp_path: Path, strategy: str) -> None:
    run_ranks(train, 2, strategy, folder=tmp_path, env=engines.environ_for(strategy, 2))
    (run_dir,) = tmp_path.glob("runs/measured/*")
    records = read_records(run_dir)
    windows = [record for record in records if isinstance(record, Profile)]
    assert [(window.rank, window.step, window.steps) for window in windows] == [(0, 3, 3), (1, 3, 3)]
    for window in windows:
        assert 0 < window.compute < window.seconds
        if strategy == "horovod":  # its threads aren't torch's
            assert math.isnan(window.communication)
            assert math.isnan(window.exposed)
        else:
            assert 0 < window.exposed <= window.communication < window.seconds
            assert window.compute + window.exposed <= window.seconds
    (work,) = [record for record in records if isinstance(record, Workload)]
    parameters = 8 * WIDTH + WIDTH + WIDTH**2 + WIDTH + WIDTH + 1
    assert (work.parameters, work.gradient_bytes, work.dataset) == (parameters, 4 * parameters, 64)
    read, _ = read_run(run_dir)[:2]
    assert read is not None
    if strategy == "horovod":
        assert read.window is None or math.isnan(read.window.communication)


LATE = 0.05  # seconds


def train_with_a_late_rank() -> None:
    measure = {"profile_steps": 8, "profile_start": 3}
    with phalanx.init(strategy="ddp", name="late", progress=False, measure=measure) as run:
        loader = DataLoader(TensorDataset(torch.randn(48, 50)), batch_size=2)
        model, loader = run.prepare(nn.Linear(50, 50), loader)
        for (x,) in run.steps(loader):
            if run.rank == 1:
                time.sleep(LATE)
            run.backward(model(x).sum())


def test_a_collective_of_known_length(tmp_path: Path) -> None:
    """The rank that is early waits in the all-reduce for the late one, which does nothing meanwhile."""
    run_ranks(train_with_a_late_rank, 2, folder=tmp_path)
    (run_dir,) = tmp_path.glob("runs/late/*")
    early, late = (record for record in read_records(run_dir) if isinstance(record, Profile))
    slept = LATE * 8
    assert slept * 0.95 <= early.exposed <= early.communication < early.seconds
    assert late.compute + late.communication <= late.seconds - slept
