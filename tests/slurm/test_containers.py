"""Jobs whose ranks run in the real Apptainer, on the real cluster: every cell of launcher and strategy."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from phalanx.planning.cells import NODES, TABLE
from tests.containers import image, stock
from tests.containers.test_stock import PLAIN

from .conftest import Cluster, User
from .test_cells import HOROVOD, LACKING, LAUNCHES, MANY, STEPS, Launch, skip_without
from .train import closed_form

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
TRAIN = Path(__file__).with_name("train.py")
CONTAINED = [
    *(launch for launch in LAUNCHES if launch.ranks in ((1,), (2,), (2, 2))),
    *(Launch("ray", MANY, ranks) for ranks in ((2,), (2, 2))),
]


@pytest.fixture(scope="module")
def jobs(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """All at once; srun's with a clean environment."""
    image.skip_or_pass()
    folder = tmp_path_factory.mktemp("contained")
    (folder / "job.yaml").write_text(image.settings(image.make(folder)))
    user = User(cluster, folder, "work")
    user.environment["PATH"] = image.path()
    ids = {}
    for launch in CONTAINED:
        if not set(LACKING) & {launch.launcher.replace("run", ""), *launch.strategies}:
            clean = f"container.clean_env={str(launch.launcher == 'srun').lower()}"
            patience = "ray.start_timeout=500"  # many jobs start at once here
            words = ("-c", folder / "job.yaml", *launch.words(), clean, patience, "env.MY_A=$x, `y`")
            strategies = f"--strategies={','.join(launch.strategies)}"
            ids[launch] = user.submit(*words, TRAIN, f"--steps={STEPS}", strategies)
    ended = {launch: cluster.wait(job, timeout=600) for launch, job in ids.items()}
    return {launch: (ended[launch], user.run_dir(launch.name), user.output(launch.name)) for launch in ids}


@pytest.mark.parametrize("launch", CONTAINED, ids=lambda launch: launch.name)
def test_a_contained_job_of_each_cell_trains_to_the_closed_form(jobs: Any, launch: Launch) -> None:
    skip_without(launch)
    ended, run_dir, output = jobs[launch]
    assert ended["JobState"] == "COMPLETED", output
    for strategy in launch.strategies:
        weights = json.loads((run_dir / f"weights-{strategy}.json").read_text())["weight"]
        assert weights == pytest.approx(closed_form(STEPS).flatten().tolist(), rel=1e-5), strategy
    facts = [json.loads(path.read_text()) for path in run_dir.glob("facts/*.json")]
    hosts = [fact["host"] for fact in facts]
    assert sorted(hosts.count(host) for host in set(hosts)) == sorted(launch.ranks)
    assert {fact["variables"]["MY_A"] for fact in facts} == {"$x, `y`"}


def test_every_cell_that_works_in_a_container_is_run() -> None:
    run = {(launch.launcher, name, NODES[launch.nodes > 1]) for launch in CONTAINED for name in launch.strategies}
    contained = {cell for cell, reason in TABLE.items() if reason is None and cell.runtime == "container"}
    assert run == {(cell.launcher, cell.strategy, cell.nodes) for cell in contained}
    assert any(launch.strategies == HOROVOD for launch in CONTAINED)


def test_what_an_image_lacks_is_said_before_the_job_is_submitted(cluster: Cluster, tmp_path: Path) -> None:
    image.skip_or_pass()
    sif = image.make(tmp_path)
    user = User(cluster, tmp_path, "work")
    user.environment["PATH"] = image.path()
    words = ("submit", "-t", "5", "device=cpu", f"container.image={sif}", "container.binds=/usr:/usr:ro")
    done = user.phalanx(*words, "python=/usr/bin/python3", TRAIN)
    assert done.returncode == 2
    assert "holds no torch for /usr/bin/python3" in done.stderr
    assert not (user.work / "runs").exists()
    nothing = user.phalanx(*words, "python=/nix/python", TRAIN)
    assert nothing.returncode == 2
    assert "/nix/python does not run" in nothing.stderr


STOCK = {  # launcher and ranks on each node
    "torchrun": ("torchrun", (1, 1)),
    "srun": ("srun", (2, 1)),
    "mpirun": ("mpirun", (1, 1)),
    "command": ("srun", (1, 1)),
}


@pytest.fixture(scope="module")
def stock_jobs(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Plain scripts in an image that holds Python and, by `env`, a torch; submitted at once."""
    image.skip_or_pass()
    folder = tmp_path_factory.mktemp("stock")
    full = stock.interpreter(folder / "full")
    settings = stock.settings(stock.make(folder), stock.interpreter(folder / "bare", ()), f"{full}:/mnt/full:ro")
    (site,) = full.glob("lib/python3*/site-packages")
    settings += f"env:\n  PYTHONPATH: /mnt/full/{site.relative_to(full)}:{stock.PLACE}/own\n"
    (folder / "job.yaml").write_text(settings)
    user = User(cluster, folder, "work")
    (user.work / "plain.py").write_text(PLAIN)
    user.environment["PATH"] = image.path()
    ids = {}
    for name, (launcher, ranks) in STOCK.items():
        words = ["-c", folder / "job.yaml", "-N", len(ranks), "--launcher", launcher, f"name={name}"]
        words += ["--ntasks", sum(ranks)] if len(set(ranks)) > 1 else ["--nproc", ranks[0]]
        script = ["training_cmd=bash -c 'python3 plain.py'"] if name == "command" else ["plain.py"]
        ids[name] = user.submit(*words, *script, PYTHONPATH=f"/nix:{os.environ.get('PYTHONPATH', '')}")
    ended = {name: cluster.wait(job, timeout=600) for name, job in ids.items()}
    return {name: (ended[name], user.run_dir(name), user.output(name)) for name in ids}


@pytest.mark.parametrize("name", STOCK)
def test_a_plain_script_runs_in_a_stock_image_as_a_job(stock_jobs: Any, name: str) -> None:
    """And what `env` sets is seen by the look before the submission: without it the image has no torch."""
    ended, run_dir, output = stock_jobs[name]
    ranks = sum(STOCK[name][1])
    assert ended["JobState"] == "COMPLETED", output
    facts = [json.loads(path.read_text()) for path in sorted(run_dir.glob("facts*.json"))]
    assert [(fact["total"], fact["world"]) for fact in facts] == [(ranks * (ranks + 1) / 2, ranks)] * ranks
    for fact in facts:
        assert fact["python"] == f"{stock.PLACE}/bin/python3"
        assert fact["path"][0] == "/.phalanx/lib"
        assert fact["path"][1].startswith("/mnt/full/")
        assert fact["lacking"] == ["pydantic", "yaml", "rich"]
