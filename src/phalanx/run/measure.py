"""What is measured beside the training, with no word of it in the script: workload, memory, GPU, a profiled window."""

from __future__ import annotations

import resource
import sys

import torch
from torch import nn

from ..config import JobConfig
from ..data.loader import PreparedLoader
from ..records import Peak, RecordWriter, Workload
from ..strategies.base import Strategy
from .gpu_sampler import start_sampler
from .profiling import Window


class Measure:
    """One rank's. `window` is asked at each step boundary as long as it is `wanted`."""

    def __init__(self, strategy: Strategy, config: JobConfig, writer: RecordWriter) -> None:
        self._config, self._writer, self._device = config, writer, strategy.device
        self._main = strategy.comm.rank == 0
        self._told = False
        self._parameters = self._gradient_bytes = 0
        # Horovod's own collectives are no torch operators; its NCCL kernels show like any.
        self.window = Window(config.measure, strategy.device, writer, seen=strategy.name != "horovod")
        self._sampler = start_sampler(strategy.device, writer, config.measure.gpu_interval, self._main)

    def count(self, model: nn.Module) -> None:
        """A model that is about to be prepared, whole on this rank."""
        for parameter in model.parameters():
            self._parameters += parameter.numel()
            if parameter.requires_grad:
                self._gradient_bytes += parameter.numel() * parameter.element_size()

    def begin(self, loader: PreparedLoader) -> None:
        """The first steps are about to be taken."""
        if self._told or not self._main:
            return
        self._told = True
        self._writer.write(
            Workload(
                parameters=self._parameters,
                gradient_bytes=self._gradient_bytes,
                batch_size=loader.batch_size,
                accumulate=loader.accumulate or self._config.accumulate,
                dataset=loader.samples(),
                precision=self._config.precision,
            )
        )

    @property
    def parameters(self) -> int:
        """Of all prepared models, whole."""
        return self._parameters

    def memory(self) -> tuple[float, float]:
        """MiB that this rank has had at most: on its GPU (by torch, 0 on a CPU), and resident."""
        on_cuda = self._device.type == "cuda"
        return (torch.cuda.max_memory_allocated(self._device) / 2**20 if on_cuda else 0.0), _host()

    def wait(self) -> None:
        """For the device's queued work: an epoch's time is that of all its steps."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def peak(self, step: int) -> None:
        device, host = self.memory()
        self._writer.write(Peak(step=step, device=device, host=host))

    def close(self, step: int, failed: bool) -> None:
        try:
            if not failed:  # a GPU that failed can't be waited for
                self.window.close()
        finally:
            if self._sampler is not None:
                self._sampler.close()
            self.peak(step)


def _host() -> float:
    """MiB that this process has had resident at most."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / 2**20 if sys.platform == "darwin" else most / 2**10
