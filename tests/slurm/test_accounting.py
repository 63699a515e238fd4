"""A cluster with accounting (slurmdbd and MariaDB): jobs are known after Slurm's controller has forgotten them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from .conftest import Cluster, User

pytestmark = pytest.mark.timeout(200)


@dataclass(frozen=True)
class Forgotten:
    user: User
    done: str
    failed: str
    cancelled: str


@pytest.fixture(scope="module")
def forgotten(accounting: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Forgotten:
    """Jobs of which only sacct and their run directories know."""
    user = User(accounting, tmp_path_factory.mktemp("accounting"), "work")
    commands = {"done": "echo done here", "failed": "exit 7", "cancelled": "echo begins; sleep 300"}
    ids = {
        name: user.submit("--cpus-per-task", "1", f"name={name}", f"training_cmd=bash -c '{command}'")
        for name, command in commands.items()
    }
    accounting.wait(ids["cancelled"], "RUNNING")
    wait_until(lambda: "begins" in user.output("cancelled"))
    assert user.phalanx("cancel", ids["cancelled"]).returncode == 0
    states = [accounting.wait(job)["JobState"] for job in ids.values()]
    assert states == ["COMPLETED", "FAILED", "CANCELLED"]
    wait_until(lambda: sacct(accounting, *ids.values()) == ["COMPLETED 0:0", "FAILED 7:0", "CANCELLED 0:0"])
    accounting("ctld", "forget")
    wait_until(lambda: "up" in accounting.ctl("sinfo", "-h", "-o", "%a", check=False))
    for job in ids.values():
        assert "Invalid job id" in accounting.run("exec", "ctl", "scontrol", "show", "job", job).stderr
    return Forgotten(user, **ids)


def sacct(cluster: Cluster, *jobs: str) -> list[str]:
    lines = cluster.ctl("sacct", "-nXP", "-j", ",".join(jobs), "-o", "State,ExitCode").splitlines()
    return [" ".join((state.split()[0], code)) for state, _, code in (line.partition("|") for line in lines)]


def wait_until(true: Callable[[], Any], seconds: float = 60) -> None:
    limit = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.2)


def status(forgotten: Forgotten, *words: str) -> list[tuple[str, int | None]]:
    ids = (forgotten.done, forgotten.failed, forgotten.cancelled)
    done = forgotten.user.phalanx("status", *ids, "--json", *words)
    assert done.returncode == 0, done.stderr
    return [(job["state"], job["exit_code"]) for job in json.loads(done.stdout)]


@pytest.mark.parametrize("setting", ["true", "auto"])
def test_a_forgotten_job_is_told_by_sacct(forgotten: Forgotten, setting: str) -> None:
    states = status(forgotten, f"sacct={setting}")
    assert states[:2] == [("COMPLETED", 0), ("FAILED", 7)]
    assert states[2][0] == "CANCELLED"
    assert "CANCELLED" in forgotten.user.phalanx("status", "cancelled", f"sacct={setting}").stdout


def test_without_sacct_it_is_told_by_what_it_left_behind(forgotten: Forgotten) -> None:
    states = status(forgotten, "sacct=false")
    assert states[:2] == [("COMPLETED", 0), ("FAILED", 7)]
    assert states[2][0] != "COMPLETED"


@pytest.mark.parametrize("setting", ["true", "false"])
def test_its_output_is_shown_and_it_cannot_be_cancelled_again(forgotten: Forgotten, setting: str) -> None:
    printed = forgotten.user.phalanx("logs", forgotten.done, f"sacct={setting}")
    assert (printed.returncode, printed.stdout) == (0, "done here\n")
    again = forgotten.user.phalanx("cancel", forgotten.done, f"sacct={setting}")
    assert (again.returncode, again.stdout) == (0, f"nothing to cancel: {forgotten.done} is COMPLETED\n")


def test_an_account_that_does_not_exist_is_refused_in_slurm_s_words(accounting: Cluster, forgotten: Forgotten) -> None:
    refused = forgotten.user.phalanx("submit", "-t", "5", "-A", "nobody", "device=cpu", "name=x", "training_cmd=true")
    assert refused.returncode == 2
    assert "Invalid account" in refused.stderr
    assert "to change: account" in refused.stderr
    assert not (forgotten.user.work / "runs" / "x").exists()
