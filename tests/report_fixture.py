"""Analyses to draw: two strategies on 1, 2, 4 and 8 nodes, a hand-written baseline, a profile, energy and a forecast.

Times follow a closed form, so that what is drawn can be checked against it: a step is `COMPUTE / ranks` of computing
plus `LATENCY` seconds for each doubling of nodes, both times a factor of the strategy's.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from phalanx.report.analyse.recommendation import verdict
from phalanx.report.model import (
    Analysis,
    Comparison,
    Forecast,
    Group,
    Input,
    Line,
    Point,
    Size,
    Stat,
    Term,
    Work,
)

COMPUTE, LATENCY, STEPS, BATCH = 0.8, 0.004, 1250, 64
NODES = (1, 2, 4, 8)
FACTORS = {"ddp": (1.0, 1.0), "ddp (baseline)": (0.99, 1.0), "horovod": (1.04, 1.9)}


def seconds_of_step(nodes: int, label: str = "ddp") -> float:
    compute, latency = FACTORS[label]
    return compute * COMPUTE / nodes / 4 + latency * LATENCY * math.log2(2 * nodes)


def around(value: float, share: float = 0.04, count: int = 30) -> Stat:
    return Stat(value, value * (1 - share), value * (1 + share * 1.2), count)


def point(nodes: int, label: str = "ddp") -> Point:
    """Four ranks a node, against one node."""
    size, profiled, exact = Size(nodes, 4 * nodes), "baseline" not in label, nodes == 1
    step = seconds_of_step(nodes, label)
    speedup = seconds_of_step(1, label) / step
    return Point(
        size=size,
        runs=3,
        epoch=around(step * STEPS),
        step=around(step, 0.01, 2400),
        throughput=around(BATCH * 4 / step, 0.01, 2400),
        speedup=Stat(1.0, 1.0, 1.0, 1) if exact else around(speedup),
        efficiency=Stat(1.0, 1.0, 1.0, 1) if exact else around(speedup / nodes),
        wait=around(0.03),
        communication=around(0.10 + 0.04 * math.log2(nodes)) if profiled else None,
        exposed=around(0.02 + 0.03 * math.log2(nodes)) if profiled else None,
        gpu_utilisation=around(96 - 4 * math.log2(nodes)),
        energy=around(step * STEPS * 20 * 4 * nodes * 310),
        energy_per_sample=around(step * nodes * 310 / BATCH),
        peak_device=14_300.0 - 100 * nodes,
        peak_host=5_100.0 + 90 * nodes,
        seconds_to_epochs=around(step * STEPS * 100),
        device_hours=around(step * STEPS * 100 * nodes * 4 / 3600),
    )


def line(label: str, nodes: tuple[int, ...] = NODES, forecast: Forecast | None = None) -> Line:
    points = tuple(point(count, label) for count in nodes)
    of_steps = replace(forecast, of="step", curve=tuple(_per_step(row) for row in forecast.curve)) if forecast else None
    made = Line(label, "strong", points[0].size, points, "baseline" in label, forecast, of_steps)
    return replace(made, verdict=verdict(made, 0.7))


def _per_step(
    row: tuple[int, int | None, float, float, float, float],
) -> tuple[int, int | None, float, float, float, float]:
    nodes, ranks, seconds, low, high, efficiency = row
    return nodes, ranks, seconds / STEPS, low / STEPS, high / STEPS, efficiency


def forecast(label: str = "ddp", until: int = 64) -> Forecast:
    nodes = [2**power for power in range(int(math.log2(until)) + 1)]
    base = seconds_of_step(1, label)
    curve = [
        (n, 4 * n, epoch, epoch * (1 - 0.01 * n**0.6), epoch * (1 + 0.012 * n**0.6), base * STEPS / epoch / n)
        for n in nodes
        for epoch in [seconds_of_step(n, label) * STEPS]
    ]
    return Forecast(
        of="epoch",
        terms=(
            Term("compute", COMPUTE * FACTORS[label][0], "s a step on one rank", "fitted", 0.003),
            Term(
                "latency of the all-reduce",
                LATENCY * 1e6 * FACTORS[label][1],
                "µs a message",
                "all-reduce benchmark",
                40.0,
            ),
            Term("bandwidth of the all-reduce", 11.8, "GB/s", "all-reduce benchmark", 0.4),
            Term("input", 0.0, "s", "not there"),
        ),
        curve=tuple(curve),
        error=0.021,
        most=Size(4, 16),
        warnings=("64x4 is 8 times the largest that was measured: an extrapolation that far is a guess",),
    )


def comparisons() -> tuple[Comparison, ...]:
    return tuple(
        Comparison(
            "ddp", "ddp (baseline)", Size(n, n * 4), Stat(1.005, 1.005 - 0.004 * n, 1.005 + 0.005 * n, 3), "epoch"
        )
        for n in NODES
    )


def group(title: str = "resnet152: 60,192,808 parameters, 64 samples a rank and batch", **more: object) -> Group:
    values: dict[str, object] = {
        "title": title,
        "work": Work("resnet152", 60_192_808, 240_771_232, BATCH, 1, 1_281_167, "bf16"),
        "axis": "ranks",
        "lines": (
            line("ddp", forecast=forecast()),
            line("ddp (baseline)"),
            line("horovod", forecast=forecast("horovod")),
        ),
        "comparisons": comparisons(),
    }
    return Group(**{**values, **more})  # type: ignore[arg-type]


def inputs() -> tuple[Input, ...]:
    return (
        *(
            Input(
                Path(f"runs/resnet152/{label}-{n}x4"),
                "run",
                f"{4 * n} ranks, 20 epochs, 25,000 steps",
                ("epoch 0: warm-up",),
            )
            for label in ("ddp", "horovod")
            for n in NODES
        ),
        Input(
            Path("scalability-metrics/epoch-time/epochtime_ddp_2N.csv"), "epoch times", "19 epochs", ("epoch 7: NaN",)
        ),
        Input(Path("runs/resnet152/ddp-16x4"), "run", "", ("half-written: no epoch and no step",)),
    )


def analysis(*groups: Group, **more: object) -> Analysis:
    values: dict[str, object] = {
        "title": "Scalability report",
        "groups": groups or (group(),),
        "inputs": inputs(),
        "warnings": ("runs/resnet152/ddp-16x4 was left out: half-written, no epoch and no step",),
        "meta": {"phalanx": "0.1.0", "date": "2026-01-02 12:00 UTC"},
    }
    return Analysis(**{**values, **more})  # type: ignore[arg-type]


def two_of_a_size() -> Group:
    """1x4 and 2x2 have the same ranks."""
    sizes = (Size(1, 1), Size(1, 2), Size(1, 4), Size(2, 4), Size(2, 8))
    values = {size: 100 / (size.ranks or 1) ** (0.9 if size.nodes == 1 else 0.8) for size in sizes}
    base = values[sizes[0]]
    points = tuple(
        Point(
            size,
            1,
            epoch=Stat(value, value, value, 1),
            speedup=Stat(base / value, base / value, base / value, 1),
            efficiency=Stat(*[base / value / (size.ranks or 1)] * 3, 1),
        )
        for size, value in values.items()
    )
    return group("two of a size", lines=(Line("ddp", "strong", sizes[0], points),), comparisons=())


def one_point() -> Group:
    return group("one point", lines=(line("ddp", (1,)),), comparisons=(), notes=("ddp: only 1x4 was run",))


def refused() -> Group:
    words = "2 free terms and 2 points: run a third size, or `phalanx allreduce` on the nodes"
    return group("refused", lines=(line("ddp", (1, 2), Forecast(refused=words)),), comparisons=())


HOSTILE = (
    "</script><img src=x onerror=alert(1)>",
    "\"'><svg/onload=alert(2)>",
    '<a href="javascript:alert(3)">x</a>',
    "%{y} ${x} `b` {{c}} <!--",
    "名前 \u202e evil \U0001f4a5 \x00\x07\udcff \u2028",
    "long" * 200,
)


def hostile() -> Analysis:
    """Names from a user who means harm, wherever names are shown."""
    lines = tuple(replace(line("ddp"), label=name, verdict=f"{name} is worth it") for name in HOSTILE)
    groups = [
        group(
            name,
            lines=lines,
            work=replace(Work("w"), name=name),
            comparisons=(replace(comparisons()[0], label=name, against=name),),
            notes=(name,),
        )
        for name in HOSTILE[:1]
    ]
    bad = replace(forecast(), warnings=(HOSTILE[0],), terms=(Term(HOSTILE[0], 1.0, HOSTILE[1], HOSTILE[2]),))
    groups.append(
        group(
            "forecast",
            lines=(replace(lines[0], forecast=bad), replace(lines[1], forecast=Forecast(refused=HOSTILE[0]))),
        )
    )
    return analysis(
        *groups,
        title=HOSTILE[0],
        inputs=tuple(Input(Path(f"runs/{name}"), name, name, (name,)) for name in HOSTILE),
        warnings=HOSTILE,
        meta={name: name for name in HOSTILE},
    )
