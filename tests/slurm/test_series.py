"""A series as jobs of a real cluster, and within an allocation."""

from __future__ import annotations

import re
import shlex

import pytest

from .conftest import PHALANX, User

pytestmark = pytest.mark.slow

SCRIPT = """
import os, pathlib, platform, sys, time
run_dir = pathlib.Path(os.environ["PHALANX_RUN_DIR"])
(run_dir / f"seen-{os.environ['RANK']}").write_text(f"{platform.node()} {os.environ['WORLD_SIZE']} {sys.argv[1]}")
if "fsdp-2x1" in str(run_dir):
    done = run_dir / "done"
    if not done.exists():
        done.touch()
        raise ValueError("not yet")
    time.sleep(float(pathlib.Path("pause").read_text()))
"""
SIZES = ("--mode", "scaling-test", "--scalability-nodes", "1,2", "--launcher", "srun", "--nproc", "1")
SMALL = (*SIZES, "--cpus-per-task", "1", "--mem", "100")


def test_one_member_fails_is_submitted_again_cancelled_and_ends_well(user: User) -> None:
    """States are scontrol's."""
    (user.work / "s.py").write_text(SCRIPT)
    (user.work / "pause").write_text("60")
    done = user.phalanx("submit", *SMALL, "--strategies", "ddp,fsdp", "-t", "5", "s.py", "it's $1")
    assert done.returncode == 0, done.stderr
    ids = done.stdout.split()
    series = re.search(r"series (s-\d{8}-\d{6}):", done.stderr)[1]  # type: ignore[index]
    ended = [user.cluster.wait(job) for job in ids]
    assert [(job["JobName"], job["JobState"]) for job in ended] == [
        ("s-ddp-1x1", "COMPLETED"),
        ("s-ddp-2x1", "COMPLETED"),
        ("s-fsdp-1x1", "COMPLETED"),
        ("s-fsdp-2x1", "FAILED"),
    ]
    shown = user.phalanx("status", series).stdout
    assert f"series {series}: 4 runs: 3 COMPLETED, 1 FAILED\n  failed: s-fsdp-2x1\n" in shown
    assert "failed: ValueError: not yet" in shown

    (again,) = user.phalanx("retry", series).stdout.split()
    assert user.cluster.wait(again, "RUNNING")["Command"] == ended[3]["Command"]
    assert user.phalanx("retry", series).stdout.startswith("nothing to retry: ")
    assert f"cancelled {again} (s-fsdp-2x1)" in user.phalanx("cancel", series).stdout
    assert user.cluster.wait(again)["JobState"] == "CANCELLED"
    assert "3 COMPLETED, 1 CANCELLED" in user.phalanx("status", series).stdout

    (user.work / "pause").write_text("0")
    (last,) = user.phalanx("retry", series).stdout.split()
    assert user.cluster.wait(last)["JobState"] == "COMPLETED"
    assert f"series {series}: 4 runs: 4 COMPLETED\n" in user.phalanx("status", series).stdout
    seen = {path.read_text() for path in user.run_dir("s-fsdp-2x1").glob("seen-*")}
    assert {text.split(" ", 1)[1] for text in seen} == {"2 it's $1"}
    assert len(seen) == 2  # two hosts
    assert "ids" not in user.phalanx("retry", series).stdout


def test_within_an_allocation_members_have_the_first_of_its_nodes(user: User) -> None:
    """Also where another step is at work there, which Slurm would pass by."""
    (user.work / "s.py").write_text(SCRIPT.replace("fsdp-2x1", "none"))
    sizes = ["--mode", "scaling-test", "--launcher", "srun", "--nproc", "1", "--strategies", "ddp", "device=cpu"]
    run = shlex.join([*PHALANX, "run", *sizes, "s.py", "x"])
    busy = "srun -N1 -n1 -r0 sleep 60 & until squeue -hs | grep -q sleep; do sleep 0.1; done"
    lines = f"{busy}; {run}; kill %1; echo $SLURM_NODELIST"
    done = user.shell("salloc", "-N", "3", "-t", "5", "-c", "1", "--mem", "100", "bash", "-c", lines)
    assert done.returncode == 0, done.stderr
    assert "note: 4 and 8 nodes are left out: this allocation has 3" in done.stderr
    hosts = {}
    for nodes in (1, 2):
        seen = [path.read_text().split() for path in sorted(user.run_dir(f"s-ddp-{nodes}x1").glob("seen-*"))]
        assert [world for _, world, _ in seen] == [str(nodes)] * nodes
        hosts[nodes] = [host for host, _, _ in seen]
    first = user.cluster.ctl("scontrol", "show", "hostnames", done.stdout.split()[-1]).split()
    assert hosts == {1: first[:1], 2: first[:2]}
    series = re.search(r"series (s-\d{8}-\d{6}):", done.stderr)[1]  # type: ignore[index]
    assert f"series {series}: 2 runs: 2 COMPLETED\n" in user.phalanx("status", series).stdout
