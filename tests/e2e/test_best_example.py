"""The example of averages, the best checkpoint and registered state, run by the command and resumed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parents[2] / "examples/digits/best.py"


def phalanx(*words: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", *words],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_example_resumes_and_its_best_is_exported(tmp_path: Path) -> None:
    first = phalanx("run", "--nproc", "2", str(SCRIPT), "--epochs", "1", cwd=tmp_path)
    assert "1437 images seen" in first
    again = phalanx("run", "--nproc", "2", "--resume", "latest", str(SCRIPT), "--epochs", "2", cwd=tmp_path)
    assert "2874 images seen" in again
    (run_dir,) = (tmp_path / "runs" / "best").iterdir()
    phalanx("checkpoint", "export", str(run_dir), "best.pt", "--best", cwd=tmp_path)
    assert (tmp_path / "best.pt").stat().st_size > 1000
