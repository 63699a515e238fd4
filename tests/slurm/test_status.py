"""Jobs as `phalanx status`, `logs` and `cancel` see them on a real cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import User

pytestmark = pytest.mark.slow

SAY = "import sys, time\nprint('begins', flush=True)\ntime.sleep(float(sys.argv[1]))\nprint('ends', flush=True)\n"


@pytest.fixture
def say(user: User) -> str:
    (user.work / "say.py").write_text(SAY)
    return "say.py"


def test_files_of_any_name_are_those_that_slurm_wrote(user: User, say: str) -> None:
    """Slurm makes the names; ours must be the same."""
    names = ["out put/%x-%A_%3a-%N.%u%%", "out put/%4j.%a.err"]
    job = user.submit(
        *("-a", "1,12", "--cpus-per-task", "1", "--job-name", "a b", "name=files"),
        *(f"output={names[0]}", f"error={names[1]}", say, "0"),
    )
    for task in ("1", "12"):
        user.cluster.wait(f"{job}_{task}")
    shown = json.loads(user.phalanx("status", job, "--json").stdout)
    ours = {path for one in shown for path in one["output"]}
    written = {str(path) for path in (user.work / "out put").iterdir()}
    assert len(written) == 4
    assert ours == written
    printed = user.phalanx("logs", f"{job}_12").stdout
    assert printed.count("ends") == 1
    assert f"==> {user.work}/out put/a b-{job}_012-node" in printed


def test_follow_waits_for_a_job_that_waits_and_ends_when_it_has(user: User, say: str) -> None:
    first = user.submit("--cpus-per-task", "1", "name=first", say, "8")  # longer than three commands take
    second = user.submit("--cpus-per-task", "1", "--dependency", f"afterany:{first}", "name=second", say, "1")
    waiting = user.phalanx("status", second).stdout
    assert "PENDING (Dependency)" in waiting
    assert f"it waits for afterany:{first}" in waiting
    followed = user.phalanx("logs", second, "--follow")
    assert followed.returncode == 0
    assert followed.stdout == "begins\nends\n"
    assert f"job {second} is PENDING (Dependency); waiting" in followed.stderr
    assert user.cluster.job(second)["JobState"] == "COMPLETED"


def test_jobs_of_others_are_left_alone_and_those_of_a_run_ended_together(user: User, say: str, tmp_path: Path) -> None:
    other = user.shell("sbatch", "--parsable", "--wrap", "sleep 60", "-o", tmp_path / "o").stdout.strip()
    mine = [user.submit("--cpus-per-task", "1", "name=mine", say, "60") for _ in range(2)]
    refused = user.phalanx("cancel", other)
    assert refused.returncode == 2
    assert "was not submitted by phalanx" in refused.stderr
    ended = user.phalanx("cancel", "mine")
    assert [line.split()[1] for line in ended.stdout.splitlines()] == mine
    assert [user.cluster.wait(job)["JobState"] for job in mine] == ["CANCELLED", "CANCELLED"]
    assert user.cluster.job(other)["JobState"] in ("PENDING", "RUNNING")
