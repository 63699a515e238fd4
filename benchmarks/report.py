"""What a report over many runs costs: run directories made by our own writer, then the whole command.

python benchmarks/report.py [--runs 1000] [--records 1000000] [--keep DIR]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from phalanx.records import Epoch, Exit, Peak, RecordWriter, Start, Workload

SIZES = (1, 2, 4, 8)
LABELS = ("ddp", "fsdp", "deepspeed", "horovod")
EPOCHS = 5


def generate(root: Path, runs: int, records: int) -> None:
    """`runs` run directories with `records` step records in all; their steps take 0.1 s, less what scaling gives."""
    generator = np.random.default_rng(0)
    a_rank = max(EPOCHS, records * len(SIZES) // (runs * sum(SIZES)))
    for number in range(runs):
        ranks, label = SIZES[number % len(SIZES)], LABELS[number // len(SIZES) % len(LABELS)]
        folder = root / f"bench-{label}-1x{ranks}" / f"20260101-000000-{number:04x}"
        seconds = generator.gamma(400, 0.1 / 400, a_rank)
        for rank in range(ranks):
            _rank(folder, rank, ranks, label, seconds + generator.random(a_rank) * 1e-3)
        (folder / "plan.json").write_text(json.dumps({"name": folder.parent.name, "script": "train.py"}))
        (folder / "config.yaml").write_text(f"name: {folder.parent.name}\nstrategy: {label}\n")


def _rank(folder: Path, rank: int, ranks: int, label: str, seconds: np.ndarray) -> None:
    writer = RecordWriter(folder, rank, 1)
    writer.write(Start(ranks, rank, 0, "node0", 1000 + rank, "cpu", label, {}, num_nodes=1, launched_by="torchrun"))
    writer.write(Workload(1_000_000, 4_000_000, 32, 1, 32 * len(seconds), "fp32"))
    length = len(seconds) // EPOCHS
    for index, step in enumerate(seconds.tolist()):
        writer.step(index + 1, index // length, step, step / 50, 32)
        if (index + 1) % length == 0:
            writer.write(Epoch(index // length, index + 1, float(seconds[index + 1 - length : index + 1].sum())))
    writer.write(Peak(len(seconds), 0.0, 512.0))
    writer.write(Exit(len(seconds), float(seconds.sum()), ""))
    writer.close()


def cost(command: list[str]) -> tuple[float, float, float]:
    """CPU seconds, user and system, wall seconds and peak MiB of a command that runs alone in a fresh process."""
    code = (
        "import resource, subprocess, sys, time; begin = time.time();"
        "subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL);"
        "use = resource.getrusage(resource.RUSAGE_CHILDREN);"
        "print(use.ru_utime + use.ru_stime, time.time() - begin, use.ru_maxrss / 1024)"
    )
    done = subprocess.run([sys.executable, "-c", code, *command], check=True, capture_output=True, text=True)
    cpu, wall, peak = map(float, done.stdout.split())
    return cpu, wall, peak


def report_cost(runs: int, records: int, keep: Path | None = None) -> tuple[float, float, float]:
    """CPU seconds, wall seconds and peak MiB of a report over so many generated runs."""
    with tempfile.TemporaryDirectory() as folder:
        root = keep or Path(folder) / "runs"
        if not root.exists():
            generate(root, runs, records)
        words = ["-m", "phalanx", "report", str(root), "--out", str(Path(folder) / "report")]
        return cost([sys.executable, *words])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--keep", type=Path, help="where the generated runs are left, and found again")
    args = parser.parse_args()
    begin = time.time()
    cpu, wall, peak = report_cost(args.runs, args.records, args.keep)
    print(f"report over {args.runs:,} runs with {args.records:,} step records (all: {time.time() - begin:.0f} s)")
    print(f"  CPU  {cpu:.1f} s, wall {wall:.1f} s   target ≤ 8 s of CPU   {'ok' if cpu <= 8 else 'MISSED'}")
    print(f"  peak {peak:.0f} MiB               target ≤ 1 GB           {'ok' if peak <= 953 else 'MISSED'}")


if __name__ == "__main__":
    main()
