"""The same training loop by hand and with Phalanx, taking turns in one process.

    python benchmarks/loops.py CASE OUT.json      (CASE is a key of CASES; with several ranks each runs it)

A machine that others use is never quiet, but what disturbs one loop's steps disturbs the other's next ones as
well: so the two take turns every few steps, and each block compares their sums. Where a model happens to lie in
memory makes its steps faster or slower by up to a percent: so both train the same one. What a pass costs once, at
its beginning, is left out.
"""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import phalanx

Loop: TypeAlias = "Iterator[None]"  # yields after each step


@dataclass(frozen=True)
class Case:
    """`blocks` blocks, in each of which either loop has `turns` turns of `steps` steps."""

    blocks: int
    turns: int
    steps: int
    work: float = 0.0  # seconds of a step; 0: a model that does nothing
    drawn: bool = False  # whether the progress bar is on, on a terminal
    own_dataset: bool = False  # a dataset class of the user's, which may draw random numbers


CASES = {
    "empty": Case(blocks=100, turns=4, steps=100),
    "20ms": Case(blocks=25, turns=40, steps=1, work=0.02),
    # Turns of 0.4 s, as the bar is drawn by the clock.
    "20ms-drawn": Case(blocks=12, turns=2, steps=20, work=0.02, drawn=True),
    "20ms-own-dataset": Case(blocks=12, turns=40, steps=1, work=0.02, own_dataset=True),
    "ddp": Case(blocks=12, turns=40, steps=1, work=0.02),
}
BATCH, FEATURES = 32, 256
WARM_UP = 4  # steps


class Nothing(nn.Module):
    """A model without work: what is left is the loop's own cost."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight


class Work(nn.Module):
    """A small network, run as often as the step has to last."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.rounds = rounds
        self.layers = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.GELU(), nn.Linear(FEATURES, FEATURES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.rounds):
            x = x + self.layers(x)
        return x.square().mean()


class OwnDataset(Dataset[Any]):
    """What most scripts have: a class with `__getitem__`."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor]:
        return (self.rows[index],)


def by_hand(model: nn.Module, optimizer: Any, loader: Any, clip: bool) -> Loop:
    """One pass in plain torch."""
    for (x,) in loader:
        loss = model(x)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield


def with_phalanx(run: phalanx.Run, model: nn.Module, optimizer: Any, loader: Any, clip: bool) -> Loop:
    """The same with the API."""
    for (x,) in run.steps(loader):
        with run.accumulate(model):
            loss = model(x)
            run.backward(loss)
            if clip:
                run.clip_grad_norm(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        yield


def calibrate(seconds: float) -> int:
    """How often the network has to run for a step of `seconds`."""
    model, x = Work(1), torch.randn(BATCH, FEATURES)
    times = []
    for _ in range(200):
        begin = time.perf_counter()
        model(x).backward()
        times.append(time.perf_counter() - begin)
    return max(1, round(seconds / sorted(times)[len(times) // 4]))


def measure(case: Case, run: phalanx.Run) -> list[dict[str, float]]:
    """For each block: CPU and wall seconds a step, of either loop."""
    loops = make_loops(case, run)
    for loop in loops.values():
        turn(loop, WARM_UP)
    return [block(loops, case, number) for number in range(case.blocks)]


def make_loops(case: Case, run: phalanx.Run) -> dict[str, Loop]:
    """One pass of either loop, over the same model and data; long enough for all blocks."""
    batch, clip = (BATCH, True) if case.work else (1, False)
    steps = WARM_UP + case.blocks * case.turns * case.steps
    rows = torch.randn(steps * batch * run.world_size, FEATURES if case.work else 1)
    data: Any = OwnDataset(rows) if case.own_dataset else TensorDataset(rows)
    model: nn.Module = Work(run.broadcast(calibrate(case.work))) if case.work else Nothing()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader: Any = DataLoader(data, batch, shuffle=True)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    api = with_phalanx(run, model, optimizer, loader, clip)
    sampler: Any = DistributedSampler(data) if run.world_size > 1 else None
    loader = DataLoader(data, batch, shuffle=sampler is None, sampler=sampler)
    hand = by_hand(model, torch.optim.SGD(model.parameters(), lr=1e-3), loader, clip)
    return {"hand": hand, "api": api}


def block(loops: dict[str, Loop], case: Case, number: int) -> dict[str, float]:
    sums = dict.fromkeys(("hand.cpu", "hand.wall", "api.cpu", "api.wall"), 0.0)
    for index in range(number, number + case.turns):
        for name in ("hand", "api") if index % 2 else ("api", "hand"):
            cpu, wall = time.process_time(), time.perf_counter()
            turn(loops[name], case.steps)
            sums[f"{name}.cpu"] += time.process_time() - cpu
            sums[f"{name}.wall"] += time.perf_counter() - wall
    return {name: seconds / (case.turns * case.steps) for name, seconds in sums.items()}


def turn(loop: Loop, steps: int) -> None:
    for _ in islice(loop, steps):
        pass


def draw_to_a_terminal() -> subprocess.Popen[bytes]:
    """stderr becomes a terminal that another process reads."""
    master, slave = pty.openpty()
    reader = subprocess.Popen(["cat"], stdin=master, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.close(master)
    sys.stderr = os.fdopen(slave, "w")
    return reader


def main(name: str, out: str) -> None:
    case = CASES[name]
    torch.set_num_threads(1)
    reader = draw_to_a_terminal() if case.drawn else None
    with tempfile.TemporaryDirectory() as folder, phalanx.init(progress=case.drawn, run_root=folder) as run:
        blocks = measure(case, run)
        if run.is_main:
            Path(out).write_text(json.dumps({"case": asdict(case), "blocks": blocks}))
    if reader is not None:
        sys.stderr.close()
        sys.stderr = sys.__stderr__
        reader.wait(10)


if __name__ == "__main__":
    main(*sys.argv[1:])
