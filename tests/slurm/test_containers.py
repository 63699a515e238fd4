"""Jobs whose ranks run in the real Apptainer, on the real cluster: each launcher once on two nodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.containers import image

from .conftest import Cluster, User
from .train import closed_form

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
TRAIN = Path(__file__).with_name("train.py")
LAUNCHERS = {
    "torchrun": ("--launcher", "torchrun"),
    "srun": ("--launcher", "srun"),
    "mpirun": ("--launcher", "mpirun"),
    "mpirun-torchrun": ("--launcher", "torchrun", "torchrun.start=mpirun"),
}


@pytest.fixture(scope="module")
def jobs(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """All at once; srun's with a clean environment."""
    image.skip_or_pass()
    folder = tmp_path_factory.mktemp("contained")
    (folder / "job.yaml").write_text(image.settings(image.make(folder)))
    user = User(cluster, folder, "work")
    user.environment["PATH"] = image.path()
    ids = {}
    for name, words in LAUNCHERS.items():
        clean = f"container.clean_env={str(name == 'srun').lower()}"
        size = ("-c", folder / "job.yaml", "-N", "2", "--nproc", "2", "--cpus-per-task", "2")
        ids[name] = user.submit(*size, *words, clean, "env.MY_A=$x, `y`", f"name={name}", TRAIN, "--steps=3")
    return {name: (cluster.wait(job, timeout=300), user.run_dir(name), user.output(name)) for name, job in ids.items()}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_contained_job_trains_to_the_closed_form(jobs: Any, name: str) -> None:
    ended, run_dir, output = jobs[name]
    assert ended["JobState"] == "COMPLETED", output
    weights = json.loads((run_dir / "weights.json").read_text())["weight"]
    assert weights == pytest.approx(closed_form(3).flatten().tolist(), rel=1e-5)
    facts = [json.loads(path.read_text()) for path in run_dir.glob("facts/*.json")]
    assert sorted(fact["host"] for fact in facts) == ["node1", "node1", "node2", "node2"]
    assert {fact["variables"]["MY_A"] for fact in facts} == {"$x, `y`"}


def test_what_an_image_lacks_is_said_before_the_job_is_submitted(cluster: Cluster, tmp_path: Path) -> None:
    image.skip_or_pass()
    sif = image.make(tmp_path)
    user = User(cluster, tmp_path, "work")
    user.environment["PATH"] = image.path()
    words = ("submit", "-t", "5", "device=cpu", f"container.image={sif}", "container.binds=/usr:/usr:ro")
    done = user.phalanx(*words, "python=/usr/bin/python3", TRAIN)
    assert done.returncode == 2
    assert "holds no torch and no phalanx" in done.stderr
    assert not (user.work / "runs").exists()
    nothing = user.phalanx(*words, "python=/nix/python", TRAIN)
    assert nothing.returncode == 2
    assert "/nix/python does not run" in nothing.stderr
