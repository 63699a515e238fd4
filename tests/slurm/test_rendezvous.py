"""Ranks that srun and mpirun start on several nodes meet at a port of their own, or say why they can't."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import phalanx

from .conftest import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.timeout(300)]
SOURCES = Path(phalanx.__file__).parents[1]
SCRIPT = """
import os, socket, sys, time
said = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")]
print(*said, socket.gethostname(), flush=True)
time.sleep(float(sys.argv[1]))
"""
HEAD = """#!/bin/bash
#SBATCH --nodes=2 --nodelist=node[1-2]
#SBATCH --ntasks-per-node=2 --cpus-per-task=1 --output={folder}/out-%j.txt --open-mode=append
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PHALANX_RUN_DIR={folder} PYTHONPATH={sources}
export PHALANX_EXPECTED_WORLD_SIZE=4
derived=$((20000 + 31 * SLURM_JOB_ID % 12000))
rank="{python} -m phalanx.worker {folder}/train.py"
SRUN="srun --kill-on-bad-exit=1"
MPIRUN="mpirun -np 4 --map-by ppr:2:node --bind-to none"
"""


class Jobs:
    """Batch scripts of this test's own; what their ranks said."""

    def __init__(self, slurm: Cluster, folder: Path) -> None:
        self.slurm, self.folder = slurm, folder
        (folder / "train.py").write_text(SCRIPT)

    def submit(self, body: str, *options: str) -> str:
        path = self.folder / "job.sh"
        path.write_text(HEAD.format(folder=self.folder, sources=SOURCES, python=sys.executable) + body + "\n")
        return self.slurm.ctl("sbatch", "--parsable", *options, path).strip()

    def output(self, job: str) -> str:
        self.slurm.wait(job)
        return (self.folder / f"out-{job}.txt").read_text()

    def wait_for(self, job: str, text: str) -> None:
        """Until the job has printed `text`."""
        output, limit = self.folder / f"out-{job}.txt", time.monotonic() + 90
        while not (output.exists() and text in output.read_text()):
            assert time.monotonic() < limit, f"job {job} hasn't printed {text!r}"
            time.sleep(0.2)

    def places(self) -> list[tuple[str, str]]:
        """MASTER_ADDR and MASTER_PORT of ranks 1 to 3, in all their launches; the same number for each."""
        lines = [
            line.split() for log in sorted((self.folder / "logs").iterdir()) for line in log.read_text().splitlines()
        ]
        assert {(line[0], line[1], line[4]) for line in lines} == {
            ("1", "4", "node1"), ("2", "4", "node2"), ("3", "4", "node2"),
        }  # fmt: skip
        return [(line[2], line[3]) for line in lines]


@pytest.fixture
def jobs(slurm: Cluster, tmp_path: Path) -> Jobs:
    return Jobs(slurm, tmp_path)


@pytest.mark.parametrize("launcher", ["$SRUN", "$MPIRUN", "$SRUN --mpi=pmix"])
def test_ranks_on_two_nodes_meet_at_the_first_node_on_a_port_of_the_jobs_own(jobs: Jobs, launcher: str) -> None:
    """Also Open MPI's ranks without its PMI: they are Slurm's tasks then."""
    job = jobs.submit(f"{launcher} $rank 0")
    assert jobs.slurm.wait(job)["JobState"] == "COMPLETED", jobs.output(job)
    ((addr, port),) = set(jobs.places())
    assert addr == "node1"
    assert 20000 <= int(port) < 32000


def test_a_port_in_use_on_the_first_node_is_passed_over_by_all_ranks(jobs: Jobs) -> None:
    code = "import socket, time; s = socket.socket(); s.bind(('', $derived)); s.listen(); time.sleep(60)"
    hold = f'{sys.executable} -c "{code}"'
    job = jobs.submit(f"{hold} & sleep 1\n$SRUN $rank 0; echo status $? derived $derived; kill %1")
    output = jobs.output(job)
    assert "status 0" in output
    ((_, port),) = set(jobs.places())
    assert f"derived {port}" not in output


def test_a_port_that_the_user_gives_is_kept(jobs: Jobs) -> None:
    jobs.output(jobs.submit("MASTER_PORT=29611 $SRUN $rank 0"))
    assert set(jobs.places()) == {("node1", "29611")}


def test_launches_after_each_other_in_one_run_directory_meet_anew(jobs: Jobs) -> None:
    """Two of each in a job, and once more after a requeue: the file of an earlier one is never taken."""
    first = '[ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] || { $SRUN $rank 0; $MPIRUN $rank 0; echo ready; sleep 60; }'
    job = jobs.submit(f"{first}\n$SRUN $rank 0; $MPIRUN $rank 0", "--requeue")
    jobs.wait_for(job, "ready")
    jobs.slurm.ctl("scontrol", "requeue", job)
    assert jobs.slurm.wait(job)["JobState"] == "COMPLETED"
    assert len(list((jobs.folder / "rendezvous").iterdir())) == 4
    assert len(jobs.places()) == 4 * 3


def test_two_jobs_on_one_node_have_different_ports(jobs: Jobs) -> None:
    body = "PHALANX_EXPECTED_WORLD_SIZE= PHALANX_RUN_DIR={folder}/$SLURM_JOB_ID; mkdir $PHALANX_RUN_DIR; $SRUN $rank 5"
    one_node = ("--nodes=1", "--nodelist=node1")
    both = [jobs.submit(body.format(folder=jobs.folder), *one_node) for _ in range(2)]
    for job in both:
        assert jobs.slurm.wait(job)["JobState"] == "COMPLETED"
    ranks = [(jobs.folder / job / "logs/1.log").read_text().split() for job in both]
    assert [rank[1] for rank in ranks] == ["2", "2"]
    assert ranks[0][3] != ranks[1][3]


def test_the_interface_says_the_address_and_a_wrong_suffix_is_refused(jobs: Jobs) -> None:
    find = '$(ip -o -4 addr | awk \'$4 !~ /^127/ { sub("@.*", "", $2); print $2; exit }\')'
    jobs.output(jobs.submit(f"PHALANX_INTERFACE={find} $SRUN $rank 0"))
    assert {addr for addr, _ in jobs.places()} == {"10.77.0.11"}
    output = jobs.output(jobs.submit("PHALANX_HOST_SUFFIX=i $SRUN $rank 0"))
    assert "host_suffix 'i' makes 'node1i'" in output


@pytest.fixture
def loopback_names(slurm: Cluster, tmp_path: Path) -> Iterator[None]:
    """node1 and node2 call themselves 127.0.1.1, as Debian's /etc/hosts does; others know their addresses."""
    nodes = ("node1", "node2")
    for node in nodes:
        hosts = slurm("exec", node, "cat", "/etc/hosts").splitlines()
        own = [line for line in hosts if line.split()[1:] != [node]]
        (tmp_path / node).write_text("\n".join([f"127.0.1.1 {node}", *own, ""]))
        slurm("exec", node, "mount", "--bind", tmp_path / node, "/etc/hosts")
    yield
    for node in nodes:
        slurm("exec", node, "umount", "/etc/hosts")


def test_ranks_reach_each_other_though_each_node_calls_itself_loopback(jobs: Jobs, loopback_names: None) -> None:
    (jobs.folder / "train.py").write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.tensor([dist.get_rank() + 1.0])\n"
        "dist.all_reduce(total)\n"
        "print('total', total.item(), flush=True)\n"
        "dist.destroy_process_group()\n"
    )
    job = jobs.submit("$SRUN $rank; $MPIRUN $rank")
    assert jobs.output(job).count("total 10.0") == 2


def test_processes_that_believe_to_be_alone_are_refused(jobs: Jobs) -> None:
    """As when mpirun's own variables don't reach its processes."""
    lost = "bash -c 'unset ${!OMPI_COMM_*}; exec \"$@\"' lost"
    output = jobs.output(jobs.submit(f"$MPIRUN {lost} $rank 0; echo status $?"))
    assert "status 2" in output
    assert "world size is 1 here" in output
    assert "starts 4 ranks, and each process would train alone" in output
    assert " 0 1 " not in output
