"""Launcher ray in real jobs: two clusters of Ray on one node at once, failures, and nothing that stays."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from .conftest import Cluster, User
from .test_endings import processes
from .test_jobs import TRAIN
from .train import closed_form

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: `make engines` does it"),
]
STEPS = 5
STRATEGIES = ("ddp", "fsdp", *(("deepspeed",) if find_spec("deepspeed") else ()))
NODES = ("node1", "node2", "node3", "node4")

# Says where Ray is, and what it counts as the job's, while another job is on the same node.
ASKING = f"""
import json, os, runpy, sys
from pathlib import Path
if os.environ["RANK"] == "0":
    import ray
    ray.init(log_to_driver=False)
    folder = Path(os.environ["PHALANX_RUN_DIR"])
    said = {{"address": os.environ["RAY_ADDRESS"], "resources": ray.cluster_resources(), "nodes": len(ray.nodes())}}
    (folder / "ray.json").write_text(json.dumps(said))
    ray.shutdown()
sys.argv[0] = {str(TRAIN)!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
SLEEPER = """
import os, sys, time
from pathlib import Path
rank, folder = os.environ["RANK"], Path(os.environ["PHALANX_RUN_DIR"])
(folder / f"pid{rank}").touch()
while len(list(folder.glob("pid*"))) < 4: time.sleep(0.1)
if rank == "3":
    %s
time.sleep(1000)
"""


@dataclass(frozen=True)
class Jobs:
    user: User
    two: str
    """2 x 2 ranks on node1 and node2 …"""
    one: str
    """… and 2 ranks on node1, at the same time."""
    failing: str
    cancelled: str
    """Both on node3 and node4, one after the other."""


@pytest.fixture(scope="module")
def jobs(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Any:
    user = User(cluster, tmp_path_factory.mktemp("ray"), "work")
    (user.work / "asking.py").write_text(ASKING)
    (user.work / "failing.py").write_text(SLEEPER % "sys.exit(5)")
    (user.work / "sleeping.py").write_text(SLEEPER % "pass")
    train = ("asking.py", f"--steps={STEPS}", f"--strategies={','.join(STRATEGIES)}")
    two, one = submit(user, "two", "node[1-2]", 2, *train), submit(user, "one", "node1", 1, *train)
    failing = submit(user, "failing", "node[3-4]", 2, "failing.py")
    cancelled = submit(user, "cancelled", "node[3-4]", 2, f"sbatch.dependency=afterany:{failing}", "sleeping.py")
    yield Jobs(user, two, one, failing, cancelled)
    cluster.ctl("scancel", "-u", "root")


def submit(user: User, name: str, hosts: str, nodes: int, *program: str) -> str:
    size = ("-N", str(nodes), "--nproc", "2", "--cpus-per-task", "2", f"sbatch.nodelist={hosts}", "time=15")
    return user.submit(*size, "--launcher", "ray", f"name={name}", "ray.start_timeout=300", *program)


def test_a_failing_rank_on_another_node_is_named_with_its_exit_code(jobs: Jobs) -> None:
    ended, output = jobs.user.cluster.wait(jobs.failing, timeout=600), jobs.user.output("failing")
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "5:0"), output
    assert "rank 3 on node4 failed: SystemExit: 5" in output
    assert output.count("ray: rank ") == 1  # the others were ended
    assert_nothing_stays(jobs.user, jobs.failing)


def test_a_cancelled_job_leaves_no_process(jobs: Jobs) -> None:
    run_dir = jobs.user.run_dir("cancelled")
    limit = time.monotonic() + 400
    while len(list(run_dir.glob("pid*"))) < 4:
        assert time.monotonic() < limit, jobs.user.output("cancelled")
        time.sleep(0.2)
    assert min(processes(jobs.user.cluster, node, f"SLURM_JOB_ID={jobs.cancelled}") for node in NODES[2:]) > 5
    assert jobs.user.phalanx("cancel", "cancelled").returncode == 0
    assert jobs.user.cluster.wait(jobs.cancelled)["JobState"] == "CANCELLED"
    assert_nothing_stays(jobs.user, jobs.cancelled)


def assert_nothing_stays(user: User, job: str) -> None:
    """On any node: no process of the job."""
    limit = time.monotonic() + 30
    while left := [node for node in NODES if processes(user.cluster, node, f"SLURM_JOB_ID={job}")]:
        assert time.monotonic() < limit, left
        time.sleep(0.5)


@pytest.mark.parametrize(("name", "nodes"), [("two", 2), ("one", 1)])
def test_every_strategy_trains_to_the_closed_form(jobs: Jobs, name: str, nodes: int) -> None:
    job, user = getattr(jobs, name), jobs.user
    ended, output = user.cluster.wait(job, timeout=900), user.output(name)
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), output
    run_dir = user.run_dir(name)
    for strategy in STRATEGIES:
        weights = json.loads((run_dir / f"weights-{strategy}.json").read_text())
        assert weights["weight"] == pytest.approx(closed_form(STEPS).flatten().tolist(), rel=1e-5), strategy
    facts = sorted((json.loads(path.read_text()) for path in run_dir.glob("facts/*.json")), key=lambda one: one["rank"])
    places = [(fact["host"], fact["local_rank"]) for fact in facts]
    assert places == [(f"node{node + 1}", local) for node in range(nodes) for local in range(2)]
    assert output.count("phalanx: rank 0 of") == len(STRATEGIES)  # on the terminal, once
    assert_nothing_stays(user, job)


def test_ray_holds_what_was_allocated_and_two_jobs_on_a_node_have_their_own(jobs: Jobs) -> None:
    said, times = {}, {}
    for name, nodes in (("two", 2), ("one", 1)):
        ended = jobs.user.cluster.wait(getattr(jobs, name), timeout=900)
        said[name] = json.loads((jobs.user.run_dir(name) / "ray.json").read_text())
        times[name] = (ended["StartTime"], ended["EndTime"])
        assert said[name]["nodes"] == nodes
        assert said[name]["resources"]["CPU"] == 2 * nodes  # the nodes have more
        assert "GPU" not in said[name]["resources"]
    assert max(start for start, _ in times.values()) < min(end for _, end in times.values())  # they met
    assert said["two"]["address"].split(":")[1] != said["one"]["address"].split(":")[1]  # both heads are on node1


def test_no_file_of_rays_stays(jobs: Jobs) -> None:
    """TMPDIR is each node's own here."""
    for job in (jobs.two, jobs.one, jobs.failing, jobs.cancelled):
        jobs.user.cluster.wait(job, timeout=900)
    for node in NODES:
        assert not [
            name for name in jobs.user.cluster("exec", node, "ls", jobs.user.cluster.scratch).split() if "r" in name[:1]
        ]
    assert not list(Path("/tmp").glob(f"ray-{jobs.two}-*"))
    assert not list(Path(jobs.user.environment["HOME"]).glob(".ray*"))
    assert not list(jobs.user.run_dir("two").glob("rendezvous/*.ray*"))
