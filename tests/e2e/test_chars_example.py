"""examples/chars on CPUs: steps rather than epochs, data that one rank prepares, and a dry run of it."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from phalanx.records import Metric, Step, read_records

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).resolve().parents[2] / "examples/chars/train.py"


def run(folder: Path, *words: str) -> str:
    command = [sys.executable, "-m", "phalanx", "run", "--device", "cpu", *words, str(SCRIPT)]
    small = ["--width", "32", "--layers", "1", "--length", "32", "--log-every", "5", "--batch-size", "16"]
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *small], cwd=folder, env=environ, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_it_learns_in_so_many_steps(tmp_path: Path) -> None:
    said = run(tmp_path, "--dry-run")
    assert "training loop 1: Subset, 1 batch of [int64 (16, 32), int64 (16, 32)]" in said
    assert not list(tmp_path.glob("runs/train/*/*checkpoints*"))
    said = run(tmp_path, "--nproc", "2", "--accumulate", "2", "--max-steps", "60")
    (loss,) = re.findall(r"step 60: validation loss (\d+\.\d+)", said)
    saved = torch.load(tmp_path / "chars.pt")
    shares = saved["text"].bincount().double() / len(saved["text"])
    assert float(loss) < float(-(shares * shares.log()).sum())  # better than how often each character comes
    assert float(loss) < math.log(saved["size"]) - 1
    (run_dir,) = (path for path in tmp_path.glob("runs/train/*") if not (path / "DRY_RUN").exists())
    records = [record for record in read_records(run_dir) if record.rank == 0]
    assert [record.step for record in records if isinstance(record, Step)] == list(range(1, 61))
    logged = [record.step for record in records if isinstance(record, Metric) and "loss" in record.values]
    assert logged == list(range(0, 60, 5))
