"""The values that a report is made of: what was read of each run, and what was computed from them.

Reading (`read/inputs.py`) makes `RunData`, analysis (`analyse/analysis.py`) makes `Analysis`; tables, plots and the
page show an `Analysis` and compute nothing. Times are seconds, energy joules, memory MiB, shares 0 to 1.
None: not known.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]


@dataclass(frozen=True, order=True)
class Size:
    """How large a run was. `ranks` over all nodes; None in files that tell nodes only. `nodes` 0: not known, in files
    that tell ranks only. Two sizes with the same ranks on other numbers of nodes are two points."""

    nodes: int
    ranks: int | None

    @property
    def text(self) -> str:
        """`2x4`, nodes x ranks a node; `5 on 2` if those differ; `2 nodes`, `8 ranks` where that is all."""
        if self.nodes == 0:
            return f"{self.ranks} rank{'s' if self.ranks != 1 else ''}"
        if self.ranks is None:
            return f"{self.nodes} node{'s' if self.nodes > 1 else ''}"
        if self.ranks % self.nodes:
            return f"{self.ranks} on {self.nodes}"
        return f"{self.nodes}x{self.ranks // self.nodes}"


@dataclass(frozen=True)
class Input:
    """One thing that was looked at: what of it was used, and what was left out, with the reason."""

    path: Path
    kind: str  # "run", "epoch times", "GPU energy", "computation", "?"
    used: str = ""  # such as "4 ranks, 3 epochs, 96 steps"; empty: nothing
    left_out: tuple[str, ...] = ()  # such as "epoch 0: warm-up", "step 7: NaN"
    notes: tuple[str, ...] = ()  # what else to know of it, such as "ranks 2, 3: no records"


@dataclass(frozen=True)
class Work:
    """What must be equal for runs to be on one curve. `name` is the run's or file's; see records.Workload."""

    name: str
    parameters: int | None = None
    gradient_bytes: int | None = None
    batch_size: int | None = None  # per rank and micro-batch
    accumulate: int = 1
    dataset: int | None = None
    precision: str | None = None


@dataclass(frozen=True)
class Window:
    """A profiled window, as means over ranks, a step: see records.Profile."""

    seconds: float
    compute: float
    communication: float
    exposed: float


@dataclass(frozen=True)
class RunData:
    """One run, all ranks together.

    A step takes as long as its slowest rank, waits the mean of its ranks, and has the samples of all. `epochs` is
    (epoch, seconds); `steps` (step, epoch, seconds, wait, samples): one row each, in order.
    """

    path: Path
    run_id: str
    label: str  # what a curve is called: the strategy, with " (baseline)" for a hand-written script
    size: Size
    work: Work
    baseline: bool = False
    scaling: str = "strong"
    launcher: str | None = None
    device: str | None = None
    epochs: Numbers = field(default_factory=lambda: np.empty((0, 2)))
    steps: Numbers = field(default_factory=lambda: np.empty((0, 5)))
    window: Window | None = None
    gpu_utilisation: float | None = None  # percent
    energy: float | None = None  # of all GPUs, whole run
    peak_device: float | None = None  # of the rank that has most
    peak_host: float | None = None
    origin: tuple[object, ...] = ()  # when, where and as which process it began: copies of its directory share that
    samples: float | None = None  # of the whole run, with steps that are left out
    restarts: tuple[int, ...] = ()  # rows of `steps` at which a later attempt went on
    allreduce: Numbers = field(default_factory=lambda: np.empty((0, 3)))  # (bytes, seconds, repeats), of a benchmark


@dataclass(frozen=True)
class Stat:
    """A figure of `count` observations, with what it varies by: `low` and `high` enclose the middle 95% of a bootstrap,
    or are the value itself when there is one observation. Over runs it is the median; within a run, the mean of epochs
    and the median of steps."""

    value: float
    low: float
    high: float
    count: int


@dataclass(frozen=True)
class Point:
    """All runs of one label and size, warm-up left out."""

    size: Size
    runs: int
    epoch: Stat | None = None  # seconds an epoch
    step: Stat | None = None  # seconds a step
    throughput: Stat | None = None  # samples a second, all ranks
    speedup: Stat | None = None  # against the line's base
    efficiency: Stat | None = None
    wait: Stat | None = None  # share of the step
    compute: Stat | None = None  # share of the profiled window in kernels
    communication: Stat | None = None  # share of it in collectives
    exposed: Stat | None = None  # share of it in collectives with nothing beside them
    gpu_utilisation: Stat | None = None  # percent
    energy: Stat | None = None  # joules a run
    energy_per_sample: Stat | None = None  # joules
    peak_device: float | None = None
    peak_host: float | None = None
    seconds_to_epochs: Stat | None = None  # to Analysis.epochs_wanted epochs
    device_hours: Stat | None = None  # the same, times devices / 3600


@dataclass(frozen=True)
class Term:
    """One term of the forecast's step time, and where its value is from: "fitted", "profile", "all-reduce benchmark",
    "measured" or "not there"."""

    name: str
    value: float
    unit: str
    source: str
    high_error: float | None = None  # standard error


@dataclass(frozen=True)
class Forecast:
    """What epochs, or steps, would take at other sizes; or, with `refused`, why nothing can be said.

    `curve` rows: (nodes, ranks, seconds, low, high, efficiency); ranks None where they aren't known. `error`:
    relative, of the fit at its points; None where as many terms as points leave none. `left_out_error`: the largest at
    a point that was left out of the fit. `of`: what the times are of, "step" or "epoch".
    """

    refused: str = ""
    terms: tuple[Term, ...] = ()
    curve: tuple[tuple[int, int | None, float, float, float, float], ...] = ()
    error: float | None = None
    left_out_error: float | None = None
    of: str = "step"
    most: Size | None = None  # the largest size that keeps Analysis.efficiency_wanted
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Line:
    """One label's points on one workload, smallest first; `base` is what speedup and efficiency are against."""

    label: str
    scaling: str
    base: Size
    points: tuple[Point, ...]
    baseline: bool = False
    forecast: Forecast | None = None
    step_forecast: Forecast | None = None  # beside a forecast of epochs, that of their steps
    of: str = "epoch"  # whose time speedup and efficiency are of: "epoch", "sample" or "step"
    verdict: str = ""  # one sentence: is the next size worth it?


@dataclass(frozen=True)
class Comparison:
    """The API's time relative to a hand-written script's of the same strategy and size: 1.01 is 1% slower."""

    label: str
    against: str
    size: Size
    ratio: Stat
    of: str  # "epoch" or "step"


@dataclass(frozen=True)
class Group:
    """Runs of one workload: lines that may be compared. `axis` is "ranks", or "nodes" where ranks aren't known."""

    title: str
    work: Work
    axis: str
    lines: tuple[Line, ...]
    comparisons: tuple[Comparison, ...] = ()
    notes: tuple[str, ...] = ()  # words that belong beside the plots


@dataclass(frozen=True)
class Analysis:
    """Everything a report shows."""

    title: str
    groups: tuple[Group, ...]
    inputs: tuple[Input, ...]
    warnings: tuple[str, ...] = ()
    warmup_epochs: int = 1
    warmup_steps: int = 10
    epochs_wanted: int = 100
    efficiency_wanted: float = 0.7
    runs: tuple[RunData, ...] = ()
    meta: dict[str, Any] = field(default_factory=dict)  # version, date: what the page's foot shows
