"""What `phalanx submit` costs beside sbatch, which is a stand-in here that takes no time of its own."""

from __future__ import annotations

import os
import resource
import subprocess
import tempfile
from pathlib import Path

JOBS = 50
PROGRAMS = {
    "sbatch": "#!/bin/sh\necho $$\n",
    "sinfo": "#!/bin/sh\necho 'main*|up|10000|128|512000|infinite|gpu:8'\n",
}


def submission(command: str, environ: dict[str, str]) -> float:
    """CPU seconds a job of a series of 50, less what the stand-in for sbatch takes."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in PROGRAMS.items():
            path = Path(folder, name)
            path.write_text(text)
            path.chmod(0o755)
        Path(folder, "train.py").write_text("")
        environ = {**environ, "PATH": f"{folder}:{os.environ['PATH']}"}
        sizes = ",".join(str(nodes) for nodes in range(1, JOBS // 2 + 1))
        words = ["submit", "--yes", "--mode", "scaling-test", "--scalability-nodes", sizes, "strategies=ddp,fsdp"]
        words += ["--nproc", "4", "--cpus-per-task", "8", "--time", "5", "train.py"]
        series = _cpu([command, *words], folder, environ)
        alone = _cpu(["sh", "-c", f"for i in $(seq {JOBS}); do sbatch; done"], folder, environ)
        return (series - alone) / JOBS


def _cpu(words: list[str], folder: str, environ: dict[str, str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(words, check=True, cwd=folder, env=environ, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
