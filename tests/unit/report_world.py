"""Run directories and CSV files with times that are known beforehand."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

from phalanx.records import Epoch, Exit, Gpu, Peak, Profile, RecordWriter, Start, Workload

_BEGINNINGS = itertools.count(1_700_000_000.0, 1000.0)  # no two runs begin at once
WORK = Workload(1000, 4000, 8, 1, 800, "fp32")


def write_run(
    folder: Path,
    epochs: Sequence[float] = (),
    ranks: int = 1,
    nodes: int = 1,
    strategy: str = "ddp",
    steps: int = 0,
    seconds: float = 0.1,
    wait: float = 0.01,
    samples: int = 8,
    work: Workload | None = WORK,
    script: str | None = "train.py",
    scaling: str | None = None,
    api: str = "run",
    only: Sequence[int] | None = None,
    ends: bool = True,
    profile: Profile | None = None,
    gpu: Gpu | None = None,
    device: str = "cpu",
    attempt: int = 1,
    first_epoch: int = 0,
    time: float | None = None,
) -> Path:
    """A run as `ranks` ranks leave it: `steps` steps an epoch of `seconds` each, and epochs of the given seconds."""
    time = next(_BEGINNINGS) if time is None else time
    for rank in range(ranks) if only is None else only:
        writer = RecordWriter(folder, rank, attempt)
        writer.write(
            Start(ranks, rank * nodes // ranks, rank // -(-ranks // nodes), f"host{rank * nodes // ranks}", 100 + rank,
                  device, strategy, {}, num_nodes=nodes, launched_by="torchrun", api=api, time=time)
        )  # fmt: skip
        if work is not None:
            writer.write(work)
        if profile is not None:
            writer.write(profile)
        count = first_epoch * steps
        for epoch, length in enumerate(epochs, first_epoch):
            for _ in range(steps):
                count += 1
                writer.step(count, epoch, seconds, wait, samples)
            writer.write(Epoch(epoch, count, length))
        if not epochs:
            for number in range(1, steps + 1):
                writer.step(number, 0, seconds, wait, samples)
        if gpu is not None:
            writer.write(gpu)
        writer.write(Peak(count, 0.0, 100.0 + rank))
        if ends:
            writer.write(Exit(count, sum(epochs), ""))
        writer.close()
    if script is not None:
        (folder / "plan.json").write_text(json.dumps({"name": folder.parent.name, "script": script}))
    if scaling is not None:
        (folder / "config.yaml").write_text(f"name: x\nscaling: {scaling}\n")
    return folder


def write_csv(path: Path, rows: Sequence[Sequence[object]], header: str = "name,nodes,epoch_id,time") -> Path:
    """An epoch-time file as itwinai writes it, or with another header."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path
