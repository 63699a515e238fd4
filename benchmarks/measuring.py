"""What measuring costs: a step's record, on against off in one loop, and a look at the GPU (a stand-in's)."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from phalanx.records import RecordWriter
from phalanx.run.gpu_sampler import GpuSampler

STEPS, LOOKS = 8_000, 400
NVML_CALL = 50e-6  # seconds of CPU that a question to NVML takes, about


class Nvml:
    """Answers after as much CPU time as NVML does."""

    class NVMLError(Exception):
        pass

    def __getattr__(self, name: str) -> Any:
        return self._answer

    @staticmethod
    def _answer(_: Any) -> Any:
        end = time.thread_time() + NVML_CALL
        while time.thread_time() < end:
            pass
        return _Answer(1)


class _Answer(int):
    gpu, used = 1, 1


def step_seconds() -> float:
    """Seconds that a step's record takes in a real loop: on and off in turns of a step; difference of medians."""
    taken: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder, phalanx.init(name="steps", run_root=folder, progress=False) as run:
        model, loader = run.prepare(nn.Linear(1, 1), DataLoader(TensorDataset(torch.zeros(STEPS, 1))))
        on, mark = False, time.perf_counter()
        run._session.writes_steps = lambda: on  # type: ignore[method-assign]
        for (batch,) in run.steps(loader):
            taken[on].append(time.perf_counter() - mark)
            run.backward(model(batch).sum())
            on, mark = not on, time.perf_counter()
    return statistics.median(taken[True]) - statistics.median(taken[False])


def look_seconds() -> float:
    """CPU seconds of one look at a GPU."""
    with tempfile.TemporaryDirectory() as folder:
        writer = RecordWriter(Path(folder), 0, 1)
        begin = time.process_time()
        sampler = GpuSampler(Nvml(), None, writer, 0.001)
        (records,) = Path(folder).glob("records/*")
        while len(records.read_bytes().splitlines()) < LOOKS // 10:
            time.sleep(0.05)
        sampler.close()
        taken = time.process_time() - begin
        writer.close()
    return taken / LOOKS
