"""`phalanx run --dry-run` of scripts without the API: refused before they begin, or named when they have ended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def run(folder: Path, text: str, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(text)
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-m", "phalanx", "run", *words, "train.py", "--dry-run"],
        cwd=folder, env=environ, capture_output=True, text=True, timeout=200,
    )  # fmt: skip


def test_a_script_without_the_api_is_refused(tmp_path: Path) -> None:
    refused = run(tmp_path, "import torch\nprint('trained')\n", "--dry-run")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "would train in full" in refused.stderr
    assert not (tmp_path / "runs").exists()
    alone = run(tmp_path, "import sys\nprint(sys.argv[1:])\n")
    assert (alone.returncode, alone.stdout) == (0, "['--dry-run']\n")  # the script's own


@pytest.mark.parametrize("end", ["", "raise SystemExit(0)"])
def test_one_that_makes_no_run_fails_at_its_end(tmp_path: Path, end: str) -> None:
    done = run(tmp_path, f"import phalanx\nprint('trained')\n{end}", "--dry-run")
    assert done.returncode == 1
    assert "the script ended without phalanx.init()" in done.stderr


def test_a_script_with_it_says_what_it_saw(tmp_path: Path) -> None:
    script = """
import torch, phalanx
from torch.utils.data import DataLoader, TensorDataset
with phalanx.init() as run:
    model = torch.nn.Linear(2, 1)
    model, loader = run.prepare(model, DataLoader(TensorDataset(torch.ones(8, 2)), 2))
    for _ in run.epochs(5):
        for (x,) in run.steps(loader):
            run.backward(model(x).mean())
"""
    done = run(tmp_path, script, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "dry run: training loop 1: TensorDataset, 1 batch of [float32 (2, 2)]" in done.stderr
    assert done.stderr.count("epoch 0 done") == 1
    assert "epoch 1" not in done.stderr
