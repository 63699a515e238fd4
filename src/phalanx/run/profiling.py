"""A profiled window of some steps: how long the device computed, and how long it communicated."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import torch

from ..config.measure_schema import MeasureSettings
from ..records import Profile, RecordWriter
from .spans import Span, beside, covered, union

log = logging.getLogger("phalanx")

_COLLECTIVES = ("gloo:", "nccl:", "mpi:", "ucc:")  # what torch calls those that it starts
_UNSEEN = float("nan")


class Window:
    """Profiles `profile_steps` steps from `profile_start` on, once in a run. `seen` False: collectives of this strategy
    don't show on a CPU."""

    def __init__(self, settings: MeasureSettings, device: torch.device, writer: RecordWriter, seen: bool) -> None:
        self._steps, self._wait = settings.profile_steps, settings.profile_start
        self._device, self._writer, self._seen = device, writer, seen
        self._profiler: Any = None
        self._first = self._done = 0
        self._begin = 0.0
        self._yielded = False

    @property
    def wanted(self) -> bool:
        """Whether there is still something to do at step boundaries."""
        return self._steps > 0

    def before_step(self, step: int) -> None:
        """Called before the step after `step`."""
        if self._profiler is not None or self._wait > 0 or not self._steps:
            return
        if _profiled_by_script():  # torch has one profiler a process: ours would end the script's
            self._yielded = True
        else:
            self._start(step + 1)

    def after_step(self) -> None:
        self._wait -= 1
        if self._profiler is not None:
            self._done += 1
            if self._done >= self._steps:
                self.end()

    def end(self) -> None:
        """At a loop's end too: what comes between loops is no step."""
        if self._profiler is None:
            return
        self._wait_for_device()
        seconds = time.perf_counter() - self._begin
        profiler, self._profiler = self._profiler, None
        profiler.__exit__(None, None, None)
        if self._done:
            self._record(profiler, seconds)
        self._steps = 0

    def close(self) -> None:
        self.end()
        if self._steps and self._yielded:
            log.warning("no profiled window (measure.profile_steps): the script's own torch.profiler ran all the time")
        elif self._steps:
            log.warning("the run ended before its profiled window began: measure.profile_start is too late")

    def _start(self, step: int) -> None:
        from torch.profiler import ProfilerActivity, profile

        # Else CUDA's tracer stays attached after the window, and each launch of a kernel goes on taking longer.
        os.environ.setdefault("TEARDOWN_CUPTI", "1")
        kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self._device.type == "cuda")
        self._profiler = profile(activities=kinds)
        self._profiler.__enter__()
        self._first = step
        self._wait_for_device()
        self._begin = time.perf_counter()

    def _wait_for_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _record(self, profiler: Any, seconds: float) -> None:
        on_device = self._device.type == "cuda"
        compute, communication = spans_of(profiler.events(), on_device)
        at_once = beside(communication, compute)
        known = self._seen or on_device  # control messages show anyhow
        self._writer.write(
            Profile(
                step=self._first,
                steps=self._done,
                seconds=seconds,
                compute=covered(compute),
                communication=covered(communication) if known else _UNSEEN,
                exposed=covered(communication) - at_once if known else _UNSEEN,
            )
        )
        log.info("profiled steps %d to %d", self._first, self._first + self._done - 1)


def _profiled_by_script() -> bool:
    from torch.autograd import profiler

    return bool(getattr(profiler, "_is_profiler_enabled", False))


def spans_of(events: Any, on_device: bool) -> tuple[list[Span], list[Span]]:
    """When kernels (operators, on a CPU) and when collectives ran, in seconds."""
    compute: list[Span] = []
    communication: list[Span] = []
    for event in events:
        if (event.device_type.name == "CUDA") != on_device:
            continue
        span = (event.time_range.start / 1e6, event.time_range.end / 1e6)
        if _is_collective(event.name, on_device):
            communication.append(span)
        elif _is_compute(event, on_device):
            compute.append(span)
    return union(compute), union(communication)


def _is_collective(name: str, on_device: bool) -> bool:
    return "nccl" in name.lower() if on_device else name.startswith(_COLLECTIVES)


def _is_compute(event: Any, on_device: bool) -> bool:
    """A kernel; on a CPU an operator. Copies between host and device and what users mark are neither."""
    if on_device:
        return not event.name.startswith(("Memcpy", "Memset")) and not getattr(event, "is_user_annotation", False)
    return bool(event.name.startswith("aten::"))
