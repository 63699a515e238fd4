"""How far the forecast is off: smaller sizes foretell the largest, which was measured too.

    python benchmarks/forecast.py OUT [--ranks 1 2 4] [--repeats 2] [--width W --depth D --batch B --steps S]
    python benchmarks/forecast.py OUT --judge        (runs that are in OUT already, of any training)

Trains linear layers by `phalanx run` on this machine at each number of ranks, with a profiled window, and times
all-reduces at all but the largest. Prints what each way of fitting says of the largest size: with the all-reduce
benchmark, with profiled windows, and by the sizes' times alone, where they allow it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from phalanx.report.analyse.analysis import Options, analyse
from phalanx.report.analyse.forecast import forecast
from phalanx.report.model import Forecast, Line, Point, RunData
from phalanx.report.read.inputs import gather

HERE = Path(__file__).resolve().parent
PHALANX = [sys.executable, "-m", "phalanx"]
ON_CPU = {"width": 256, "depth": 8, "batch": 64, "steps": 120}
ON_GPU = {"width": 4096, "depth": 8, "batch": 2048, "steps": 100}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--judge", action="store_true")
    parser.add_argument(
        "--sleep", default="0", help="seconds of a step that ranks sleep, as if an accelerator computed"
    )
    for name in ON_CPU:
        parser.add_argument(f"--{name}", type=int)
    options = parser.parse_args()
    if not options.judge:
        work = ON_GPU if Path("/dev/nvidiactl").exists() else ON_CPU
        train(options, [word for name in work for word in (f"--{name}", str(getattr(options, name) or work[name]))]
              + ["--most", str(max(options.ranks)), "--sleep", options.sleep])  # fmt: skip
    judge(options.out)


def train(options: argparse.Namespace, script: list[str]) -> None:
    """In turns, so that what disturbs the machine for a while disturbs all sizes."""
    ranks = sorted(options.ranks)
    for _ in range(options.repeats):
        for number in ranks:
            own = [f"--nproc={number}", f"--name=ranks-{number}", "--strategy=ddp", "measure.profile_steps=10"]
            start(options.out, ["run", *own, str(HERE / "forecast_train.py"), *script])
            if 1 < number < ranks[-1]:
                start(options.out, ["allreduce", f"--nproc={number}", "--max-mib=64"])


def start(out: Path, words: list[str]) -> None:
    print(f"… {' '.join(words[:2])}", file=sys.stderr, flush=True)
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*PHALANX, words[0], "--local", f"--run-root={out}/runs", "--no-progress", *words[1:]]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def judge(out: Path) -> None:
    runs, looked_at = gather([str(out)], out)
    benchmarks = [run for run in runs if len(run.allreduce)]
    for group in analyse(runs, looked_at, Options()).groups:
        for line in group.lines:
            own = [
                run
                for run in runs
                if run.label == line.label and run.work.parameters in (None, group.work.parameters)
                if not len(run.allreduce)
            ]
            print(f"\n{group.title}\n{line.label}")
            if len(line.points) > 2:
                compare(line, own, benchmarks)
            else:
                print(f"  {len(line.points)} sizes: nothing to compare")


def compare(line: Line, runs: list[RunData], benchmarks: list[RunData]) -> None:
    """All ways of fitting the smaller points, and what each says of the largest."""
    *smaller, largest = line.points
    assert largest.step is not None
    for point in line.points:
        print(f"  {point.size.text}: {_ms(point.step.value)} ({_ms(point.step.low)} to {_ms(point.step.high)}), "
              f"exposed {point.exposed.value:.1%} of the profiled window" if point.step and point.exposed
              else f"  {point.size.text}: {point.step and _ms(point.step.value)}")  # fmt: skip
    known = [run for run in benchmarks if (run.size.ranks or 0) < (largest.size.ranks or 0)]
    bare = replace(line, points=tuple(_bare(point) for point in smaller))
    profiled = replace(line, points=tuple(smaller))
    ways = {
        "all-reduce benchmark": forecast(bare, runs, known, 0.01),
        "profiled windows": forecast(profiled, runs, [], 0.01),
        "the sizes alone": forecast(bare, runs, [], 0.01),
    }
    for name, found in ways.items():
        say(name, found, largest)


def _bare(point: Point) -> Point:
    return replace(point, exposed=None, communication=None)


def say(name: str, found: Forecast, largest: Point) -> None:
    assert largest.step is not None
    measured = largest.step.value
    rows = [row for row in found.curve if row[1] == largest.size.ranks]
    if found.refused or not rows:
        print(f"  by {name}: refused: {found.refused[:100]}")
        return
    row = min(rows, key=lambda each: abs(each[0] - largest.size.nodes))
    inside = "within" if row[3] <= measured <= row[4] else "outside"
    print(f"  by {name}, from the smaller sizes: {largest.size.text} takes {_ms(row[2])} "
          f"({_ms(row[3])} to {_ms(row[4])}); measured {_ms(measured)}, {inside} the band; "
          f"off by {row[2] / measured - 1:+.1%}")  # fmt: skip


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


if __name__ == "__main__":
    main()
