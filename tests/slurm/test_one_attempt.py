"""One attempt at a time in a run directory, also where two clusters share a file system and a job's number."""

from __future__ import annotations

import copy
import shutil
import tempfile
from pathlib import Path

import pytest

from .conftest import User, cluster_of

pytestmark = pytest.mark.slow

SAY = "import sys, time\nprint('begins', flush=True)\ntime.sleep(float(sys.argv[1]))\nprint('ends', flush=True)\n"
RESUME = ("-t", "5", "--resume", "latest", "device=cpu", "say.py", "0")


@pytest.fixture
def say(user: User) -> str:
    (user.work / "say.py").write_text(SAY)
    return "say.py"


def test_two_clusters_leave_each_others_jobs_alone(user: User, say: str) -> None:
    mine = user.submit("--cpus-per-task", "1", say, "60")
    user.cluster.wait(mine, "RUNNING")
    folder = Path(tempfile.mkdtemp(prefix="phx-"))
    try:
        with cluster_of(folder, 1, "--conf", "ClusterName=beta", "--conf", f"FirstJobId={mine}") as beta:
            there = copy.copy(user)
            there.cluster = beta
            there.environment = {**user.environment, "CLUSTER_DIR": str(folder), "TMPDIR": str(beta.scratch)}
            _beside(user, there, mine)
            beta.ctl("scancel", "-u", "root")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _beside(here: User, there: User, mine: str) -> None:
    words = ("sbatch", "--parsable", "-J", "say", "-o", "/dev/null", "--wrap", "sleep 300")
    assert there.shell(*words).stdout.strip() == mine  # a stranger's job of the same number and name
    there.cluster.wait(mine, "RUNNING")
    refused = there.phalanx("cancel", "say")
    assert (refused.returncode, "on cluster lab, and this is beta: not touched" in refused.stderr) == (2, True)
    assert there.cluster.job(mine)["JobState"] == "RUNNING"
    assert "UNKNOWN (on cluster lab, and this is beta)" in there.phalanx("status").stdout
    assert "nothing to retry: say is UNKNOWN (on cluster lab" in there.phalanx("retry", "say").stdout
    for user, reason in ((here, f"job {mine} is RUNNING"), (there, "only cluster lab can tell")):
        second = user.phalanx("submit", *RESUME)
        assert (second.returncode, reason in second.stderr) == (2, True), second.stderr
        second = user.phalanx("run", "--local", "--resume", "latest", "say.py", "0")
        assert (second.returncode, f"job {mine} of cluster lab" in second.stderr) == (2, True), second.stderr
    assert here.phalanx("cancel", "say").stdout.startswith(f"cancelled {mine} ")
    here.cluster.wait(mine)
    assert there.phalanx("submit", *RESUME).returncode == 2  # from there nobody can tell
    again = there.phalanx("submit", "--take-over", *RESUME)
    assert again.returncode == 0, again.stderr
    assert there.cluster.wait(again.stdout.split()[-1])["JobState"] == "COMPLETED"
    assert here.phalanx("run", "--local", "--resume", "latest", "say.py", "0").returncode == 0


def test_a_job_that_finds_another_in_its_directory_ends_before_its_launch(user: User, say: str) -> None:
    first = user.submit("--cpus-per-task", "1", say, "40")
    user.cluster.wait(first, "RUNNING")
    run_dir = user.run_dir("say")
    second = user.shell("sbatch", "--parsable", run_dir / "job.sh", run_dir).stdout.strip()
    assert user.cluster.wait(second)["ExitCode"] == "2:0"
    said = Path(user.cluster.job(second)["StdOut"]).read_text()
    assert f"not run: {run_dir} is in use: job {first} of cluster lab" in said
    assert "begins" not in said
    user.phalanx("cancel", first)
    user.cluster.wait(first)
    assert user.phalanx("run", "--local", "--resume", "latest", "say.py", "0").returncode == 0


def test_a_launch_within_an_allocation_ends_with_it(user: User, say: str) -> None:
    """Its command was killed with its job: only the cluster can tell that, from another host."""
    (user.work / "job.sh").write_text(f"#!/bin/bash\nexec {user.here(['python3'])[0]} -m phalanx run say.py 300\n")
    job = user.shell("sbatch", "--parsable", "-t", "5", "-o", "/dev/null", "job.sh").stdout.strip()
    user.cluster.wait(job, "RUNNING")
    root = user.work / "runs" / "say"
    while not list(root.glob("*/claims/1.json")):
        assert user.cluster.job(job)["JobState"] == "RUNNING"
    resume = ("run", "--local", "--resume", "latest", "say.py", "0")
    refused = user.phalanx(*resume)
    assert (refused.returncode, f"in job {job} of cluster lab" in refused.stderr) == (2, True), refused.stderr
    user.cluster.ctl("scancel", "-s", "KILL", job)
    user.cluster.wait(job)
    assert user.phalanx(*resume).returncode == 0
