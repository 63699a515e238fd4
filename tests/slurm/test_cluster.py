"""The cluster itself: that its nodes are as separate as machines, and that nothing of it shows or stays on this one."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from . import traces
from .conftest import NODES, Cluster, cluster_of

pytestmark = pytest.mark.timeout(200)
NAMES = [f"node{number}" for number in range(1, NODES + 1)]


def reachable(cluster: Cluster, one: str, other: str) -> bool:
    """Whether slurmd on the other node answers."""
    connect = f"exec 3<>/dev/tcp/{other}/6818"
    return cluster.run("exec", one, "timeout", "2", "bash", "-c", connect).returncode == 0


def state(cluster: Cluster, node: str) -> str:
    return cluster.ctl("sinfo", "-h", "-N", "-n", node, "-p", "main", "-o", "%t").strip()


def wait_for_state(cluster: Cluster, node: str, *states: str, seconds: float = 60) -> None:
    limit = time.monotonic() + seconds
    while state(cluster, node) not in states:
        assert time.monotonic() < limit, cluster.ctl("sinfo", "-N", "-l")
        time.sleep(0.2)


def test_each_node_has_a_name_and_an_address_of_its_own(slurm: Cluster) -> None:
    assert sorted(slurm.ctl("srun", f"-N{NODES}", "hostname").split()) == NAMES
    addresses = slurm.ctl("srun", f"-N{NODES}", "hostname", "-I").split()
    assert len(set(addresses)) == NODES
    assert slurm.ctl("hostname").strip() == "ctl"
    assert all(reachable(slurm, "node1", node) for node in NAMES)


def test_each_node_has_a_disk_and_shared_memory_of_its_own_and_one_that_all_share(slurm: Cluster) -> None:
    common = slurm.folder / "common"
    for path, seen in ((slurm.scratch / "x", ["node1"]), (Path("/dev/shm/x"), ["node1"]), (common, NAMES)):
        slurm.ctl("srun", "-w", "node1", "touch", path)
        assert sorted(slurm.ctl("srun", f"-N{NODES}", "sh", "-c", f"[ ! -e {path} ] || hostname").split()) == seen
    assert not Path("/dev/shm/x").exists()
    common.unlink()


def test_devices_are_given_to_one_job_at_a_time(slurm: Cluster, tmp_path: Path) -> None:
    show = ("sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
    assert slurm.ctl("srun", "-N2", "--ntasks-per-node=1", "--gres=gpu:2", *show).split() == ["0,1", "0,1"]
    words = ("-w", "node1", "--gres=gpu:1", "-o", tmp_path / "%j", "--wrap", "echo $CUDA_VISIBLE_DEVICES; sleep 3")
    jobs = [slurm.ctl("sbatch", "--parsable", *words).strip() for _ in range(2)]
    assert [slurm.wait(job)["JobState"] for job in jobs] == ["COMPLETED"] * 2
    assert sorted((tmp_path / job).read_text() for job in jobs) == ["0\n", "1\n"]
    refused = slurm.run("exec", "ctl", "srun", "--gres=gpu:3", "true")
    assert "Requested node configuration is not available" in refused.stderr


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="this machine has one CPU: binding to CPUs was not tested")
def test_tasks_are_bound_to_their_cpus(slurm: Cluster) -> None:
    for bind, cpus in (("cores", "1"), ("none", "2")):  # none: to those of the job, as with cgroups
        assert slurm.ctl("srun", "-N1", "-n2", "-c1", f"--cpu-bind={bind}", "nproc").split() == [cpus, cpus]


def test_what_a_job_leaves_running_ends_with_it(slurm: Cluster) -> None:
    slurm.ctl("srun", "-w", "node2", "sh", "-c", "setsid -f sleep 4821 >/dev/null 2>&1")
    limit = time.monotonic() + 20
    while "4821" in slurm("exec", "node2", "ps", "-eo", "args"):
        assert time.monotonic() < limit
        time.sleep(0.2)


def test_nodes_that_crash_or_lose_their_cable_go_down_and_come_back(fragile: Cluster, tmp_path: Path) -> None:
    words = ("-w", "node4", "--no-requeue", "-o", tmp_path / "out", "--wrap", "sleep 300")
    job = fragile.ctl("sbatch", "--parsable", *words).strip()
    fragile.wait(job, "RUNNING")
    fragile("cut", "node3")
    fragile("crash", "node4")
    assert not reachable(fragile, "node1", "node3")
    assert not reachable(fragile, "node3", "node1")
    assert reachable(fragile, "node1", "node2")
    wait_for_state(fragile, "node3", "down", "down*")
    assert fragile.wait(job)["JobState"] == "NODE_FAIL"
    fragile("heal", "node3")
    fragile("boot", "node4")
    assert reachable(fragile, "node1", "node3")
    wait_for_state(fragile, "node4", "idle")
    fragile.mend()
    assert state(fragile, "node3") == "idle"


def test_nothing_of_it_shows_on_this_machine(slurm: Cluster) -> None:
    seen = subprocess.run(["ip", "-o", "address"], capture_output=True, text=True, check=True).stdout
    seen += subprocess.run(["ip", "route"], capture_output=True, text=True, check=True).stdout
    assert "10.77." not in seen
    assert "p-node" not in Path("/proc/net/dev").read_text()
    assert str(slurm.folder) not in Path("/proc/mounts").read_text()


def test_ended_it_takes_all_with_it(tmp_path: Path, slurm: Cluster) -> None:
    """A job, and what it started in a session of its own; and that such a process would be seen."""
    folder = Path(f"{slurm.folder}-2")
    with cluster_of(folder, 1) as second:
        second.ctl("sbatch", "-o", tmp_path / "out", "--wrap", "setsid -f sleep 4822; sleep 4823")
        with traces.namespaces(folder) as spaces:
            limit = time.monotonic() + 20
            while not all(f"sleep {number}" in str(traces.processes(spaces)) for number in (4822, 4823)):
                assert time.monotonic() < limit
                time.sleep(0.1)
    assert not folder.exists()  # and leaving the cluster has looked for the rest
    assert reachable(slurm, "node1", "node2")  # the first cluster is as it was
