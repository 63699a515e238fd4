"""What an existing allocation gives to a launch, from Slurm's own words for it."""

import pytest

from phalanx.config import load_config
from phalanx.errors import PlanError
from phalanx.planning.facts import Facts
from phalanx.planning.planner import make_plan
from phalanx.planning.program import Program
from phalanx.schedulers.slurm import allocation, client

# As scontrol of Slurm 22.05 shows a job on two nodes with 8 CPUs and 4 GPUs in all.
RUNNING = {
    "JobId": "17",
    "JobState": "RUNNING",
    "NodeList": "node[1-2]",
    "NumNodes": "2",
    "NumCPUs": "8",
    "TRES": "cpu=8,mem=8000M,node=2,billing=8,gres/gpu=4",
}


@pytest.fixture
def slurm(monkeypatch):
    """Slurm knows job 17; what it says of it may be changed."""
    said = dict(RUNNING)
    monkeypatch.setattr(client, "show_job", lambda job: said if job == "17" else None)
    monkeypatch.setattr(allocation.shutil, "which", lambda name: f"/usr/bin/{name}")
    return said


def filled(*overrides, environ=None):
    share = allocation.find("17", environ or {})
    return allocation.fill(load_config((), overrides, {}), share).config


def test_nodes_cpus_and_gpus_are_the_allocations(slurm):
    config = filled()
    assert (config.nodes, config.cpus_per_task, config.gpus_per_node) == (2, 4, 2)


@pytest.mark.parametrize(
    ("said", "per_node"),
    [
        ({"TresPerNode": "gres:gpu:2"}, 2),  # salloc -N 2 --gpus-per-node 2, and --gres gpu:2, of Slurm 22.05
        ({"TresPerNode": "gres/gpu:a100:4"}, 4),  # newer ones
        ({"TresPerNode": "gres:nvme:1,gres:gpu:a100:4"}, 4),
        ({"TresPerJob": "gres:gpu:6"}, 3),  # salloc -N 2 --gpus 6
        ({"TresPerTask": "gres:gpu:1", "NumTasks": "8"}, 4),
        ({"TresPerTask": "cpu=4,gres/gpu=1", "NumTasks": "8"}, 4),
        ({"TresPerNode": "gres:nvme:1"}, None),
        ({"TresPerNode": "gres/gpu:a100:2,gres/gpu:h100:1"}, 3),
        ({"AllocTRES": "cpu=8,node=2,gres/gpu=6,gres/gpu:a100=4,gres/gpu:h100=2"}, 3),  # newer ones count both
        ({"AllocTRES": "cpu=8,node=2,gres/gpu:a100=4,gres/gpu:h100=2"}, 3),
        ({"AllocTRES": "cpu=8,gres/gpu:h100=2,gres/gpu=6,gres/gpu:a100=4"}, 3),
        ({}, None),
    ],
)
def test_gpus_are_known_where_slurm_does_not_count_them(slurm, said, per_node):
    """Unless AccountingStorageTRES names gres/gpu, as it doesn't by default, TRES has none."""
    slurm.update(said, TRES="cpu=8,mem=8000M,node=2,billing=8")
    assert filled().gpus_per_node == per_node


def test_tasks_that_were_asked_for_divide_the_cpus(slurm):
    config = filled(environ={"SLURM_JOB_ID": "17", "SLURM_NTASKS_PER_NODE": "2"})
    assert (config.ntasks_per_node, config.cpus_per_task) == (2, 2)


@pytest.mark.parametrize(
    ("overrides", "name", "value"),
    [
        (["nodes=1"], "nodes", 1),
        (["cpus_per_task=1"], "cpus_per_task", 1),
        (["gpus_per_node=0"], "gpus_per_node", 0),
        (["gres=gpu:1"], "gpus_per_node", None),
        (["ntasks_per_node=4"], "cpus_per_task", 1),
    ],
)
def test_what_the_user_says_stands(slurm, overrides, name, value):
    assert getattr(filled(*overrides), name) == value


def test_a_plan_in_an_allocation_names_its_hosts_and_shares_it_with_the_shell(slurm):
    share = allocation.find("17", {})
    loaded = allocation.fill(load_config((), ["device=cpu", "launcher=srun", "nproc=2"], {}), share)
    facts = Facts("login", 64, 0, "/py", "Linux", "x86_64")
    plan = make_plan(loaded.config, facts, Program("t.py"), allocation=share.allocation)
    assert [node["host"] for node in plan.as_dict()["nodes"]] == ["node1", "node2"]
    assert plan.cpus_per_rank == 2  # of the allocation, not of this machine
    assert {"--overlap", "--jobid=17", "--cpus-per-task=2"} <= set(plan.command)


def test_agents_of_two_launches_in_one_job_meet_at_different_ports(slurm, monkeypatch):
    share = allocation.find("17", {})
    points = []
    for pid in (100, 101):
        monkeypatch.setattr(allocation.os, "getpid", lambda pid=pid: pid)
        points.append(allocation.meeting_point(share, "i"))
    assert {point["PHALANX_RDZV_HOST"] for point in points} == {"node1i"}
    assert points[0]["PHALANX_RDZV_PORT"] != points[1]["PHALANX_RDZV_PORT"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"JobState": "PENDING"}, ["17", "PENDING", "no nodes yet"]),
        ({"JobState": "COMPLETED"}, ["17", "COMPLETED", "has ended"]),
    ],
)
def test_a_job_that_is_not_running_is_refused(slurm, change, words):
    slurm.update(change)
    with pytest.raises(PlanError) as caught:
        allocation.find("17", {})
    for word in words:
        assert word in str(caught.value)


def test_a_heterogeneous_job_is_refused(slurm):
    slurm.update({"HetJobId": "17", "HetJobOffset": "0"})
    with pytest.raises(PlanError, match=r"job 17 has several components .*srun --het-group=0,1"):
        allocation.find("17", {})


def test_an_unknown_job_and_too_many_nodes_are_refused(slurm):
    with pytest.raises(PlanError, match="18"):
        allocation.find("18", {})
    with pytest.raises(PlanError, match=r"nodes=3.*job 17 has 2: node1,node2"):
        filled("nodes=3")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "17"}, "17"),  # salloc's shell, or a batch script
        ({"SLURM_JOB_ID": "17", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, "17"),
        ({"SLURM_JOB_ID": "17", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"}, None),  # srun -n4 phalanx run …
        ({"SLURM_JOB_ID": "17", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "SLURM_PTY_PORT": "9"}, "17"),
    ],
)
def test_where_a_launch_goes_over_the_allocation(slurm, environ, expected):
    assert allocation.current(environ) == expected


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"}, "SLURM_STEP_NUM_TASKS=4"),
        ({"SLURM_STEP_NUM_TASKS": "1", "OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE=2"),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "PMI_SIZE=2"),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0", "SLURM_PTY_PORT": "9", "PMI_SIZE": "4"}, None),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, None),  # a batch script
        ({"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}, None),  # leftovers
        ({"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}, None),
        ({"HOROVOD_SIZE": "2", "HOROVOD_RANK": "0"}, "HOROVOD_SIZE=2"),
    ],
)
def test_a_command_that_was_started_several_times_is_known(environ, expected):
    assert allocation.one_of_several(environ) == expected


def test_without_srun_there_is_no_allocation_to_launch_over(monkeypatch):
    monkeypatch.setattr(allocation.shutil, "which", lambda name: None)
    assert allocation.current({"SLURM_JOB_ID": "17"}) is None
