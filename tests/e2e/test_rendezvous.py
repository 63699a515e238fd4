"""Ranks as srun starts them, with torch itself: its store listens on the port that rank 0 keeps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, subprocess, sys
import torch, torch.distributed as dist

def refused():
    probe = "import socket, sys; socket.socket().bind(('', int(sys.argv[1])))"
    return subprocess.run([sys.executable, "-c", probe, os.environ["MASTER_PORT"]], capture_output=True).returncode != 0

before = refused()
for _ in range(2):  # a script may end its process group and make another
    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    during = refused()
    dist.destroy_process_group()
if os.environ["RANK"] == "0":
    print(total.item(), before, during, refused(), os.environ["MASTER_PORT"])
"""


@pytest.mark.slow
def test_torchs_store_listens_on_the_kept_port_and_other_jobs_are_refused(tmp_path: Path) -> None:
    """Before it listens, while it does, and after."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "PHALANX", "OMPI"))}
    source = str(Path(__file__).parents[2] / "src")
    ranks = []
    for rank in (1, 0):
        step = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "0"}
        step |= {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "70001"}
        environ = kept | step | {"PHALANX_RUN_DIR": str(tmp_path), "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "phalanx.worker", str(script)]
        ranks.append(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True))
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    total, *refused, port = said[1].split()
    assert (total, refused) == ("3.0", ["True", "True", "True"])
    assert 20000 <= int(port) < 32000
