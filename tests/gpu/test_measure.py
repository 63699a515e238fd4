"""What is measured on real GPUs, against CUDA's own events and what a GPU can be."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from phalanx.records import Gpu, Peak, Profile, Step, Workload, read_records
from tests.dist.harness import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

COUNT = torch.cuda.device_count()
WIDTH, LAYERS, STEPS, WINDOW = 8192, 4, 60, 5


def train(strategy: str, size: int) -> dict[str, float]:
    """Large products, so that the GPU is busy; the seconds of a step by CUDA's events, without the profiler."""
    measure = {"profile_steps": WINDOW, "profile_start": 10, "gpu_interval": 0.1}
    with phalanx.init(strategy=strategy, name="measured", progress=False, measure=measure) as run:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        data = TensorDataset(torch.randn(512 * size, WIDTH))
        model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, batch_size=512))
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        taken = []
        for _ in run.epochs(STEPS):
            for (x,) in run.steps(loader):
                begin.record()
                loss = model(x).square().mean()
                run.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                end.record()
                end.synchronize()
                taken.append(begin.elapsed_time(end) / 1000)
        return {"step": sorted(taken)[len(taken) // 2]}


@pytest.mark.parametrize(("strategy", "size"), [("single", 1), ("ddp", 2)])
def test_a_profiled_window_and_the_gpus_own_counters(tmp_path: Path, strategy: str, size: int) -> None:
    if size > COUNT:
        pytest.skip(f"needs {size} GPUs, this machine has {COUNT}")
    ranks = run_ranks(train, size, strategy, size, folder=tmp_path, cuda=True)
    (run_dir,) = tmp_path.glob("**/measured/*")
    records = read_records(run_dir)
    windows = [record for record in records if isinstance(record, Profile)]
    assert len(windows) == size
    for window, rank in zip(windows, ranks, strict=True):
        assert 1 <= window.steps <= WINDOW
        step = window.seconds / window.steps
        busy = (window.compute + window.exposed) / window.steps
        assert rank["step"] * 0.8 < busy <= step  # the GPU does nothing else
        assert 0 <= window.exposed <= window.communication
        if size == 1:
            assert window.communication == 0
            assert window.compute / window.steps == pytest.approx(rank["step"], rel=0.2)
        else:
            moved = LAYERS * WIDTH * WIDTH * 4  # bytes of gradients; two GPUs send each once
            assert 1e9 < moved * window.steps / window.communication < 1e12
    (work,) = [record for record in records if isinstance(record, Workload)]
    assert (work.parameters, work.gradient_bytes) == (LAYERS * WIDTH**2, LAYERS * WIDTH**2 * 4)
    held = LAYERS * WIDTH**2 * 4 / 2**20
    for peak in (record for record in records if isinstance(record, Peak)):
        assert held * 2 <= peak.device < held * 10  # weights and gradients at least
    assert len([record for record in records if isinstance(record, Step)]) == STEPS * size
    if find_spec("pynvml") is None:
        pytest.skip("nvidia-ml-py is not installed here: use, energy and memory were not looked at")
    looks = [record for record in records if isinstance(record, Gpu)]
    assert {record.rank for record in looks} == set(range(size))
    for record in looks:
        assert 0 <= record.utilisation <= 100
        assert record.memory > held
    seconds, joules = (sum(getattr(record, name) for record in looks) for name in ("seconds", "energy"))
    assert 40 < joules / seconds < 1200  # watts: between idle and more than a GPU can take
