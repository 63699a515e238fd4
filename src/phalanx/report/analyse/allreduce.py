"""What an all-reduce costs, by the benchmark's runs: latency and transfer, within a node and between nodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..model import Numbers, RunData, Size
from .groups import kind_of_device
from .nonnegative import solve

_MESSAGE = 25 * 2**20  # bytes that DDP reduces at once


def doublings(size: Size) -> tuple[float, float]:
    """How often ranks double within a node, and nodes: the rounds of messages that an all-reduce can't do without."""
    ranks = size.ranks or size.nodes
    return math.log2(ranks / size.nodes), math.log2(size.nodes)


def traffic(size: Size) -> float:
    """What each rank sends of an all-reduce's bytes, at best."""
    ranks = size.ranks or size.nodes
    return 2 * (ranks - 1) / ranks


@dataclass(frozen=True)
class Links:
    """Seconds of an all-reduce of the gradients: `latency` a doubling (within a node, between nodes), `transfer` of
    all bytes once (the same two; None: not measured)."""

    bytes: int
    messages: float
    latency: tuple[float, float]
    transfer: tuple[float | None, float | None]

    def seconds(self, size: Size) -> float:
        """With links that weren't measured taken to be like the others."""
        within, between = doublings(size)
        inner, outer = self.transfer
        own = inner if size.nodes == 1 else outer
        each = own if own is not None else inner if inner is not None else outer or 0.0
        outer_latency = self.latency[1] if outer is not None else self.latency[0]
        return self.latency[0] * within + outer_latency * between + each * traffic(size)


def links_of(benchmarks: Sequence[RunData], runs: Sequence[RunData]) -> Links | None:
    """From benchmarks on the runs' kind of device; None without any, or if the gradients' size isn't known."""
    total = next((run.work.gradient_bytes for run in runs if run.work.gradient_bytes), None)
    devices = {kind_of_device(run) for run in runs} - {None}
    fitting = [
        run for run in benchmarks if (run.size.ranks or 0) > 1 and (not devices or kind_of_device(run) in devices)
    ]
    if total is None or not fitting:
        return None
    message = min(total, _MESSAGE)
    number = total / message
    latencies = np.array([run.allreduce[:, 1].min() for run in fitting])
    whole = np.array([_seconds(run.allreduce, message) for run in fitting])
    rounds = np.array([doublings(run.size) for run in fitting])
    each = solve(rounds / latencies[:, None], np.ones((len(fitting), 1)))[:, 0]  # relative errors count
    spent = np.maximum(whole - rounds @ each, 0.0) / [traffic(run.size) for run in fitting]
    several = np.array([run.size.nodes > 1 for run in fitting])
    return Links(
        bytes=total,
        messages=number,
        latency=(float(each[0] * number), float(each[1] * number)),
        transfer=(_mean(spent[~several], number), _mean(spent[several], number)),
    )


def _seconds(table: Numbers, message: int) -> float:
    """Of one all-reduce of `message` bytes: between measured sizes, or in proportion beyond them."""
    ordered = table[np.argsort(table[:, 0])]
    if message > ordered[-1, 0]:
        return float(ordered[-1, 1] * message / ordered[-1, 0])
    return float(np.exp(np.interp(np.log(message), np.log(ordered[:, 0]), np.log(ordered[:, 1]))))


def _mean(values: Numbers, factor: float) -> float | None:
    return float(values.mean() * factor) if len(values) else None
