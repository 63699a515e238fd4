"""What a rank's GPU does, asked of NVML by a thread beside the training."""

from __future__ import annotations

import logging
import threading
import time
from importlib.util import find_spec
from typing import Any

import torch

from ..records import Gpu, RecordWriter

log = logging.getLogger("phalanx")

_LOOKS = 10  # to a record
_UNKNOWN = float("nan")


class GpuSampler:
    """Looks every `interval` seconds and writes a `Gpu` record every ten looks, and at the end."""

    def __init__(self, nvml: Any, handle: Any, writer: RecordWriter, interval: float) -> None:
        self._nvml, self._handle, self._writer, self._interval = nvml, handle, writer, interval
        self._ended = threading.Event()
        self._utilisation: list[float] = []
        self._memory, self._watts = _UNKNOWN, 0.0
        self._since, self._energy = time.monotonic(), self._joules()
        self._thread = threading.Thread(target=self._watch, name="phalanx-gpu", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join(timeout=10)
        if not self._thread.is_alive():
            self._look()
            self._write()

    def _watch(self) -> None:
        while not self._ended.wait(self._interval):
            self._look()
            if len(self._utilisation) >= _LOOKS:
                self._write()

    def _look(self) -> None:
        nvml = self._nvml
        self._utilisation.append(self._ask(lambda: nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu))
        memory = self._ask(lambda: nvml.nvmlDeviceGetMemoryInfo(self._handle).used / 2**20)
        self._memory = memory if not memory <= self._memory else self._memory  # NaN: not known yet
        self._watts += self._ask(lambda: nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000)

    def _joules(self) -> float:
        """Since the driver was loaded; NaN on GPUs that don't count (older than Volta)."""
        return self._ask(lambda: self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1000)

    def _ask(self, question: Any) -> float:
        try:
            return float(question())
        except self._nvml.NVMLError:
            return _UNKNOWN

    def _write(self) -> None:
        now, joules = time.monotonic(), self._joules()
        seconds, looks = now - self._since, len(self._utilisation)
        used = joules - self._energy
        known = [value for value in self._utilisation if value == value]
        self._writer.write(
            Gpu(
                seconds=seconds,
                utilisation=sum(known) / len(known) if known else _UNKNOWN,
                memory=self._memory,
                energy=used if used == used else self._watts / looks * seconds,  # mean power, where nothing counts
            )
        )
        self._since, self._energy = now, joules
        self._utilisation, self._memory, self._watts = [], _UNKNOWN, 0.0


def start_sampler(device: torch.device, writer: RecordWriter, interval: float, main: bool) -> GpuSampler | None:
    """None where there is no NVIDIA GPU to look at, no NVML, or nobody asked."""
    if device.type != "cuda" or interval <= 0 or torch.version.cuda is None:
        return None
    if find_spec("pynvml") is None:
        if main:
            log.info("the GPUs' use and energy aren't recorded: pip install 'phalanx[nvml]' would do it")
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        return GpuSampler(pynvml, handle, writer, interval)
    except pynvml.NVMLError as error:  # a part of a GPU (MIG), or a container without the library
        log.info("this GPU's use and energy aren't recorded: NVML says %s", error)
        return None
