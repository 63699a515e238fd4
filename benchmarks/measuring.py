"""What measuring costs: a step's record and clocks, and a look at the GPU (with a stand-in that takes as long)."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from phalanx.records import RecordWriter
from phalanx.run.gpu_sampler import GpuSampler

STEPS, LOOKS = 20_000, 400
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
    """CPU seconds of what a step's measuring does: four readings of the clock and one line of records."""
    with tempfile.TemporaryDirectory() as folder:
        writer, clock = RecordWriter(Path(folder), 0, 1), time.perf_counter
        window = SimpleNamespace(wanted=False)
        begin = time.process_time()
        for step in range(STEPS):
            mark = clock()
            waited = clock() - mark
            seconds = clock() - mark
            if window.wanted or window.wanted:
                continue
            writer.step(step, 0, seconds, waited, 32)
            mark = clock()
        taken = time.process_time() - begin
        writer.close()
    return taken / STEPS


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
