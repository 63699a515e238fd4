"""A rank's place, from the variables as each launcher really exports them."""

from __future__ import annotations

import os
import pty
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import TopologyError
from phalanx.rank.topology import Topology

Env = dict[str, str]
Place = tuple[int, int, int, int, int, int]


def env(text: str, **more: str) -> Env:
    """`A=1 B=2` as an environment."""
    return dict(item.split("=", 1) for item in text.split()) | more


def place(topology: Topology) -> Place:
    t = topology
    return (t.rank, t.world_size, t.local_rank, t.local_world_size, t.node_rank, t.num_nodes)


def read(environ: Env) -> Place:
    return place(Topology.from_environ(environ))


SINGLE = (0, 1, 0, 1, 0, 1)

# The body of a batch script with 2 nodes x 2 tasks: task variables without a step.
BATCH = env(
    "SLURM_JOB_ID=811 SLURM_JOBID=811 SLURM_JOB_NAME=train SLURM_JOB_NODELIST=lab[01-02] SLURM_NODELIST=lab[01-02] "
    "SLURM_JOB_NUM_NODES=2 SLURM_NNODES=2 SLURM_NTASKS=4 SLURM_NPROCS=4 SLURM_NTASKS_PER_NODE=2 "
    "SLURM_TASKS_PER_NODE=2(x2) SLURM_NODEID=0 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_GTIDS=0 SLURM_TASK_PID=4242 "
    "SLURMD_NODENAME=lab01 SLURM_SUBMIT_HOST=login1 ENVIRONMENT=BATCH"
)


def task(rank: int, local: int, node: int, per_node: str = "2(x2)", tasks: int = 4, **more: str) -> Env:
    """A task of `srun` in that job, whose step may be smaller than the job."""
    step = {
        "SLURM_STEP_ID": "0",
        "SLURM_STEPID": "0",
        "SLURM_STEP_NODELIST": "lab[01-02]",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_TASKS_PER_NODE": per_node,
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(node),
        "SLURMD_NODENAME": f"lab0{node + 1}",
        "SLURM_LAUNCH_NODE_IPADDR": "10.9.9.9",
        "SLURM_TASK_PID": "4243",
    }
    return BATCH | step | more


TORCHRUN = env(
    "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=1 GROUP_WORLD_SIZE=2 ROLE_RANK=3 ROLE_WORLD_SIZE=4 "
    "ROLE_NAME=default MASTER_ADDR=lab01 MASTER_PORT=29511 TORCHELASTIC_RUN_ID=811.0 TORCHELASTIC_RESTART_COUNT=0 "
    "TORCHELASTIC_MAX_RESTARTS=0 TORCHELASTIC_USE_AGENT_STORE=True"
)
OPENMPI = env(
    "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 "
    "OMPI_COMM_WORLD_NODE_RANK=1 OMPI_UNIVERSE_SIZE=4 OMPI_MCA_orte_num_nodes=2 PMIX_RANK=3"
)
HYDRA = env("PMI_RANK=3 PMI_SIZE=4 PMI_FD=9 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2")
HOROVOD = env(
    "HOROVOD_RANK=3 HOROVOD_SIZE=4 HOROVOD_LOCAL_RANK=1 HOROVOD_LOCAL_SIZE=2 HOROVOD_CROSS_RANK=1 HOROVOD_CROSS_SIZE=2 "
    "HOROVOD_HOSTNAME=lab02 HOROVOD_CONTROLLER=gloo HOROVOD_GLOO_RENDEZVOUS_ADDR=10.0.0.1"
)
EXPLICIT = env(
    "PHALANX_RANK=1 PHALANX_WORLD_SIZE=6 PHALANX_LOCAL_RANK=1 PHALANX_LOCAL_WORLD_SIZE=3 PHALANX_NODE_RANK=0 "
    "PHALANX_NUM_NODES=2"
)
STATIC = env("RANK=3 WORLD_SIZE=4 LOCAL_RANK=1")
LAST = (3, 4, 1, 2, 1, 2)


@pytest.mark.parametrize(
    ("environ", "source", "expected"),
    [
        (TORCHRUN, "torchrun", LAST),
        (HOROVOD, "horovodrun", LAST),
        (OPENMPI, "openmpi", LAST),
        (HYDRA, "mpich", LAST),
        (task(3, 1, 1), "slurm", LAST),
        (EXPLICIT, "phalanx", (1, 6, 1, 3, 0, 2)),
        ({}, "single", SINGLE),
        # each launcher above those that it may be nested in
        (EXPLICIT | TORCHRUN | OPENMPI | task(3, 1, 1), "phalanx", (1, 6, 1, 3, 0, 2)),
        (TORCHRUN | task(1, 0, 1, "1(x2)", 2), "torchrun", LAST),
        (TORCHRUN | env("OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2"), "torchrun", LAST),
        (HOROVOD | task(0, 0, 0, "1", 1, SLURM_STEP_NUM_NODES="1"), "horovodrun", LAST),
        (OPENMPI | task(0, 0, 0, "1", 1, SLURM_STEP_NUM_NODES="1", SLURMD_NODENAME="lab02"), "openmpi", LAST),
        # Open MPI's own daemons are a Slurm step on all nodes but the first: its node number is not the rank's
        (OPENMPI | task(0, 0, 0, "1", 1, SLURMD_NODENAME="lab02"), "openmpi", LAST),
        # DeepSpeed's launcher
        (
            STATIC | env("LOCAL_SIZE=2 CROSS_RANK=1 CROSS_SIZE=2 MASTER_ADDR=lab01 MASTER_PORT=29500"),
            "environment",
            LAST,
        ),
        # what a wrapper or our own worker made of another launcher's words
        (task(3, 1, 1) | STATIC, "slurm", LAST),
        (OPENMPI | STATIC | env("LOCAL_WORLD_SIZE=2"), "openmpi", LAST),
    ],
)
def test_each_launcher_is_understood(environ: Env, source: str, expected: Place) -> None:
    topology = Topology.from_environ(environ)
    assert (topology.source, place(topology)) == (source, expected)


def test_torchrun_inside_slurm_wins_over_the_task_that_started_it() -> None:
    """The agent's task has rank 1 of 2; its worker has rank 3 of 4."""
    bare = env("SLURM_PROCID=1 SLURM_LOCALID=0 SLURM_NTASKS=2 SLURM_STEP_ID=0")
    assert read(STATIC | bare)[:3] == (3, 4, 1)
    # also with as many agents as workers, where the numbers of the two may well differ
    agents = env(
        "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 GROUP_RANK=0 GROUP_WORLD_SIZE=2 MASTER_ADDR=lab02"
    )
    assert read(agents | task(1, 0, 1, "1(x2)", 2, TORCHELASTIC_RUN_ID="811"))[0] == 0


@pytest.mark.parametrize("step", ["", "4294967290", "4294967291", "4294967292", "batch", "interactive", "extern"])
def test_a_batch_script_or_allocation_shell_is_a_single_process(step: str) -> None:
    assert read(BATCH | ({"SLURM_STEP_ID": step} if step else {})) == SINGLE


@pytest.mark.parametrize(
    "environ",
    [
        env("SLURM_JOB_ID=5 SLURM_NODELIST=cn01 SLURM_NNODES=1"),  # ssh or OnDemand shell
        env("SLURM_JOB_ID=5"),
        env("SLURM_JOB_ID=5 SLURM_NTASKS=8 SLURM_JOB_NUM_NODES=2 SLURM_JOB_NODELIST=cn[01-02]"),  # salloc shell
        task(0, 0, 0, "1", 1, SLURM_STEP_NUM_NODES="1", SLURM_JOB_NAME="bash", SLURM_PTY_PORT="4000"),  # srun --pty
        env("WORLD_SIZE=1"),
        env("LOCAL_RANK=0"),
        env("RANK=0 WORLD_SIZE=1"),
        env("PMI_RANK=0 PMI_SIZE=1"),
        env("MASTER_ADDR=localhost MASTER_PORT=29500"),
    ],
)
def test_a_process_launched_by_nothing_is_single_at_once(environ: Env) -> None:
    assert read(environ) == SINGLE


@pytest.mark.parametrize(
    ("per_node", "tasks", "node", "local_size"),
    [("2(x3),1", 7, 0, 2), ("2(x3),1", 7, 3, 1), ("1(x4)", 4, 2, 1), ("4", 16, 3, 4), ("3,2(x3)", 9, 1, 2)],
)
def test_compressed_task_counts_give_this_nodes_own(per_node: str, tasks: int, node: int, local_size: int) -> None:
    step = task(0, 0, node, per_node, tasks, SLURM_STEP_NUM_NODES="4", SLURM_STEP_NODELIST="lab[01-04]")
    assert read(step) == (0, tasks, 0, local_size, node, 4)


def test_cyclic_placement_is_not_divided() -> None:
    assert read(task(1, 0, 1)) == (1, 4, 0, 2, 1, 2)


def test_srun_in_an_interactive_allocation_is_a_launch() -> None:
    environ = env(
        "SLURM_JOB_NAME=interactive SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_LOCALID=0 SLURM_NODEID=1 SLURM_NTASKS=2 "
        "SLURM_STEP_TASKS_PER_NODE=1(x2) SLURM_NNODES=2"
    )
    assert read(environ) == (1, 2, 0, 1, 1, 2)
    # the inner srun's tasks inherit the terminal variables of the outer one
    assert read(task(0, 0, 0, SLURM_PTY_PORT="4000", SLURM_JOB_NAME="interactive"))[:2] == (0, 4)


def test_a_smaller_step_counts_before_its_job() -> None:
    small = task(1, 1, 0, "2", 2, SLURM_STEP_NUM_NODES="1", SLURM_STEP_NODELIST="lab02")
    assert Topology.from_environ(small) == Topology(1, 2, 1, 2, 0, 1, "lab02", 20000 + 31 * 811 % 12000, "slurm")


def test_plain_srun_gives_all_that_torch_needs() -> None:
    environ = env(
        "SLURM_JOB_ID=70001 SLURM_STEP_ID=0 SLURM_PROCID=2 SLURM_LOCALID=0 SLURM_NTASKS=3 "
        "SLURM_STEP_NODELIST=lab[01-02]"
    )
    said = Topology.from_environ(environ).environ()
    port = said.pop("MASTER_PORT")  # of 3 tasks, the last is alone on the second node
    assert said == env("RANK=2 WORLD_SIZE=3 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=lab01")
    assert 1024 < int(port) < 32768


def test_srun_with_a_pmi_plugin_is_completed_by_slurm() -> None:
    assert read(task(3, 1, 1) | env("PMI_RANK=3 PMI_SIZE=4")) == LAST


def test_ranks_set_in_each_task_are_completed_by_slurm() -> None:
    """`srun bash -c 'RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS python …'`."""
    topology = Topology.from_environ(task(3, 1, 1) | env("RANK=3 WORLD_SIZE=4"))
    assert (place(topology), topology.master_addr) == (LAST, "lab01")


@pytest.mark.parametrize(
    ("environ", "asked", "expected"),
    [
        (env("RANK=1 WORLD_SIZE=2"), env("LOCAL_RANK=1"), (1, 2, 1, 2, 0, 1)),
        (
            env("RANK=1 WORLD_SIZE=2 MASTER_ADDR=lab01 MASTER_PORT=29500 LOCAL_WORLD_SIZE=2"),
            env("LOCAL_RANK=1"),
            (1, 2, 1, 2, 0, 1),
        ),
        (env("PHALANX_RANK=0 PHALANX_WORLD_SIZE=2 NNODES=1"), env("PHALANX_LOCAL_RANK=0"), (0, 2, 0, 2, 0, 1)),
        (env("PMI_RANK=0 PMI_SIZE=2"), env("MPI_LOCALRANKID=0"), (0, 2, 0, 2, 0, 1)),
        (env("PMI_RANK=1 PMI_SIZE=2"), env("MPI_LOCALRANKID=1"), (1, 2, 1, 2, 0, 1)),
        (env("PMI_RANK=1 PMI_SIZE=2"), env("MPI_LOCALRANKID=0"), (1, 2, 0, 1, 1, 2)),
        (
            env("PMI_RANK=2 PMI_SIZE=4 MPI_LOCALRANKID=0 MASTER_ADDR=lab01"),
            env("MPI_LOCALNRANKS=2"),
            (2, 4, 0, 2, 1, 2),
        ),
        (env("RANK=2 WORLD_SIZE=4 LOCAL_RANK=0"), env("LOCAL_WORLD_SIZE=2"), (2, 4, 0, 2, 1, 2)),
        (env("RANK=1 WORLD_SIZE=4 LOCAL_RANK=1", **BATCH), env("LOCAL_WORLD_SIZE=2"), (1, 4, 1, 2, 0, 2)),
        (
            env("SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=4 SLURM_JOB_NODELIST=lab[01-02]"),
            env("SLURM_STEP_NUM_NODES=2"),
            (0, 4, 0, 2, 0, 2),
        ),
        (
            HYDRA | env("PMI_RANK=2"),
            env("PHALANX_RANK=2 PHALANX_WORLD_SIZE=4 PHALANX_NODE_RANK=0"),
            (2, 4, 1, 2, 0, 2),
        ),
    ],
)
def test_a_place_that_cannot_be_known_is_asked_for(environ: Env, asked: Env, expected: Place) -> None:
    """The error names the variables that are missing, and setting them is enough."""
    with pytest.raises(TopologyError) as caught:
        read(environ)
    assert [name for name in asked if name not in str(caught.value).rpartition("set ")[2]] == []
    assert read(environ | asked) == expected


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("nodes", [env("SLURM_NNODES=2"), env("SLURM_JOB_NODELIST=lab[01-02]")])
def test_nodes_of_a_job_are_not_guessed_to_be_one(rank: int, nodes: Env) -> None:
    """Two ranks on each of two nodes, or four on one? Either may be, and the ranks must not differ over it."""
    said = env(f"RANK={rank} WORLD_SIZE=4 LOCAL_RANK={rank % 2}") | nodes
    if rank == 3:  # local rank 1 of rank 3: nodes of two, whatever the job
        assert read(said) == LAST
    else:
        with pytest.raises(TopologyError, match="set LOCAL_WORLD_SIZE"):
            read(said)
    assert read(said | env("LOCAL_WORLD_SIZE=2")) == (rank, 4, rank % 2, 2, rank // 2, 2)
    alone = env(f"RANK={rank} WORLD_SIZE=4 LOCAL_RANK={rank} MASTER_ADDR=localhost") | nodes
    assert read(alone) == (rank, 4, rank, 4, 0, 1)


def test_the_last_node_may_have_fewer_ranks() -> None:
    """Open MPI with 5 ranks on 3 nodes, filled in turn."""
    for rank, node in enumerate([0, 0, 1, 1, 2]):
        said = {"RANK": rank, "SIZE": 5, "LOCAL_RANK": rank % 2, "LOCAL_SIZE": 1 + (node < 2)}
        mpi = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in said.items()}
        assert read(mpi | env("OMPI_MCA_orte_num_nodes=3")) == (rank, 5, rank % 2, 1 + (node < 2), node, 3)


def test_a_launch_on_some_of_a_jobs_nodes_counts_its_own() -> None:
    job = env("SLURM_JOB_ID=7 SLURM_NNODES=8 SLURM_JOB_NODELIST=lab[01-08]")
    assert read(job | env("RANK=1 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1")) == (1, 2, 0, 1, 1, 2)


EMPTY = env("RANK= WORLD_SIZE= LOCAL_RANK= LOCAL_WORLD_SIZE= MASTER_ADDR= MASTER_PORT= GROUP_RANK= PMI_RANK=")
NULL = dict.fromkeys(("SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_JOB_ID", "SLURM_NNODES"), "(null)")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (EMPTY, SINGLE),
        (env("RANK= LOCAL_RANK=0"), SINGLE),
        (env("PHALANX_RANK= PHALANX_WORLD_SIZE="), SINGLE),
        (task(3, 1, 1) | EMPTY, LAST),
        (task(3, 1, 1, SLURM_STEP_TASKS_PER_NODE="", SLURM_TASKS_PER_NODE="2(x2)"), LAST),
        (OPENMPI | EMPTY, LAST),
        (NULL, SINGLE),
        (env("RANK=1 WORLD_SIZE=2 LOCAL_RANK=1") | NULL, (1, 2, 1, 2, 0, 1)),
        (HYDRA | NULL | env("SLURMD_NODENAME=(null)"), LAST),
    ],
)
def test_an_empty_variable_counts_as_unset(environ: Env, expected: Place) -> None:
    assert read(environ) == expected


def test_a_steps_number_under_its_older_name() -> None:
    step = task(3, 1, 1, SLURM_STEPID="5")
    del step["SLURM_STEP_ID"]
    assert Topology.from_environ(step) == Topology.from_environ(step | env("SLURM_STEP_ID=5"))
    assert read(step) == LAST


def test_local_ranks_as_cray_and_mvapich_say_them() -> None:
    assert read(env("PMI_RANK=3 PMI_SIZE=4 PMI_LOCAL_RANK=1 PMI_LOCAL_SIZE=2")) == LAST
    mvapich = env("PMI_RANK=3 PMI_SIZE=4 MV2_COMM_WORLD_LOCAL_RANK=1 MV2_COMM_WORLD_LOCAL_SIZE=2")
    assert read(mvapich) == LAST


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (env("RANK=0 WORLD_SIZE=1 MASTER_ADDR=lab01 MASTER_PORT=29500"), SINGLE),
        (env("RANK=1 WORLD_SIZE=2 LOCAL_WORLD_SIZE=1"), (1, 2, 0, 1, 1, 2)),
        (env("RANK=1 WORLD_SIZE=2 NNODES=1"), (1, 2, 1, 2, 0, 1)),
        (env("RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 MASTER_ADDR=localhost"), (1, 2, 1, 2, 0, 1)),
        (env("RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 NNODES=2"), (5, 8, 1, 4, 1, 2)),
        (env("PMI_RANK=5 PMI_SIZE=6 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2"), (5, 6, 1, 2, 2, 3)),
    ],
)
def test_what_follows_for_certain_is_derived(environ: Env, expected: Place) -> None:
    assert read(environ) == expected


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        # an index beyond its size
        (env("RANK=4 WORLD_SIZE=4 LOCAL_RANK=0"), ["RANK=4", "WORLD_SIZE=4"]),
        (TORCHRUN | env("LOCAL_RANK=2"), ["LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2"]),
        (TORCHRUN | env("GROUP_RANK=2"), ["GROUP_RANK=2", "GROUP_WORLD_SIZE=2"]),
        (TORCHRUN | env("LOCAL_WORLD_SIZE=8"), ["LOCAL_WORLD_SIZE=8", "WORLD_SIZE=4"]),
        (HOROVOD | env("HOROVOD_RANK=4"), ["HOROVOD_RANK=4", "HOROVOD_SIZE=4"]),
        (OPENMPI | env("OMPI_COMM_WORLD_LOCAL_RANK=2"), ["OMPI_COMM_WORLD_LOCAL_RANK=2", "_LOCAL_SIZE=2"]),
        (HYDRA | env("PMI_RANK=9"), ["PMI_RANK=9", "PMI_SIZE=4"]),
        (task(4, 1, 1), ["SLURM_PROCID=4", "SLURM_STEP_NUM_TASKS=4"]),
        (task(3, 2, 1), ["SLURM_LOCALID=2", "SLURM_STEP_TASKS_PER_NODE=2"]),
        (task(3, 1, 2), ["SLURM_NODEID=2", "SLURM_STEP_NUM_NODES=2"]),
        (EXPLICIT | env("PHALANX_RANK=6"), ["PHALANX_RANK=6", "PHALANX_WORLD_SIZE=6"]),
        # no whole numbers
        (env("RANK=abc WORLD_SIZE=2 LOCAL_RANK=0"), ["RANK='abc'"]),
        (env("RANK= WORLD_SIZE=2 LOCAL_RANK=0"), ["WORLD_SIZE=2", "RANK is not set"]),
        (env("RANK=-1 WORLD_SIZE=2 LOCAL_RANK=0"), ["RANK='-1'"]),
        (env("RANK=1_0 WORLD_SIZE=20 LOCAL_RANK=0"), ["RANK='1_0'"]),
        (env("RANK=0 WORLD_SIZE=2.0 LOCAL_RANK=0"), ["WORLD_SIZE='2.0'"]),
        (env("RANK=0 WORLD_SIZE=0 LOCAL_RANK=0"), ["WORLD_SIZE='0'"]),
        (task(0, 0, 0) | env("SLURM_LOCALID=x"), ["SLURM_LOCALID='x'"]),
        # one half of a pair
        (env("RANK=0"), ["RANK=0", "WORLD_SIZE is not set"]),
        (env("WORLD_SIZE=2"), ["WORLD_SIZE=2", "RANK is not set"]),
        (env("PHALANX_RANK=1"), ["PHALANX_RANK=1", "PHALANX_WORLD_SIZE is not set"]),
        (env("PHALANX_WORLD_SIZE=1") | TORCHRUN, ["PHALANX_WORLD_SIZE=1", "PHALANX_RANK is not set"]),
        (env("LOCAL_RANK=1"), ["LOCAL_RANK=1", "WORLD_SIZE"]),
        (BATCH | env("WORLD_SIZE=4"), ["WORLD_SIZE=4", "RANK is not set"]),
        (task(1, 1, 0) | env("WORLD_SIZE=8"), ["WORLD_SIZE=8", "SLURM_STEP_NUM_TASKS=4"]),
        (OPENMPI | env("RANK=0"), ["RANK=0", "OMPI_COMM_WORLD_RANK=3"]),
        # RANK=0 exported in the batch script, and so the same in every task
        (task(1, 1, 0) | env("RANK=0 WORLD_SIZE=4 LOCAL_RANK=0"), ["RANK=0", "SLURM_PROCID=1", "Unset"]),
        (OPENMPI | env("RANK=0 WORLD_SIZE=4 LOCAL_RANK=0"), ["RANK=0", "OMPI_COMM_WORLD_RANK=3"]),
        (
            task(2, 0, 1) | env("RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2"),
            ["WORLD_SIZE=2", "SLURM_STEP_NUM_TASKS=4", "more tasks than ranks"],
        ),
        # a list for other nodes than there are
        (task(0, 0, 0, "2(x3)"), ["SLURM_STEP_TASKS_PER_NODE='2(x3)'", "SLURM_STEP_NUM_NODES=2"]),
        # MPI ranks dealt round-robin, on nodes that nothing numbers
        (HYDRA | env("PMI_RANK=2"), ["node rank", "PMI_RANK=2", "PHALANX_NODE_RANK"]),
        (env("RANK=1 WORLD_SIZE=4 LOCAL_RANK=1 MASTER_ADDR=lab01"), ["local world size", "set LOCAL_WORLD_SIZE"]),
    ],
)
def test_contradictions_name_both_values(environ: Env, said: list[str]) -> None:
    with pytest.raises(TopologyError) as caught:
        read(environ)
    assert [part for part in said if part not in str(caught.value)] == []


def master(environ: Env) -> tuple[str | None, int | None]:
    topology = Topology.from_environ(environ)
    return topology.master_addr, topology.master_port


@pytest.mark.parametrize(
    ("addr", "expected"),
    [
        ("lab01", ("lab01", 29511)),
        ("lab01:29511", ("lab01", 29511)),
        ("[fd00::1]:29511", ("fd00::1", 29511)),
        ("[fd00::1]", ("fd00::1", 29511)),
        ("fd00::1", ("fd00::1", 29511)),
        (" 10.0.0.4 ", ("10.0.0.4", 29511)),
    ],
)
def test_a_master_address_may_hold_its_port(addr: str, expected: tuple[str, int]) -> None:
    assert master(TORCHRUN | {"MASTER_ADDR": addr}) == expected


def test_a_port_in_the_address_is_enough() -> None:
    environ = TORCHRUN | {"MASTER_ADDR": "lab01:29611"}
    del environ["MASTER_PORT"]
    assert master(environ) == ("lab01", 29611)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (env("MASTER_ADDR=lab01:29611"), ["lab01:29611", "29511"]),
        (env("MASTER_PORT=http"), ["MASTER_PORT='http'"]),
        (env("MASTER_PORT=65536"), ["MASTER_PORT='65536'", "65535"]),
        (env("MASTER_PORT=0"), ["MASTER_PORT='0'"]),
        (env("MASTER_ADDR=lab01:x"), ["lab01:x", "port"]),
        (env("MASTER_ADDR=lab01:70000"), ["lab01:70000", "port"]),
        ({"MASTER_ADDR": "10.0.0.4 fd00::4"}, ["10.0.0.4 fd00::4", "one host"]),
        (env("MASTER_ADDR=lab[01-02]"), ["lab[01-02]", "one host"]),
    ],
)
def test_a_bad_master_is_named(more: Env, said: list[str]) -> None:
    with pytest.raises(TopologyError) as caught:
        read(TORCHRUN | more)
    assert [part for part in said if part not in str(caught.value)] == []


@pytest.mark.parametrize("addr", ["localhost", "127.0.0.1", "127.0.1.1", "::1", "[::1]:29500", "localhost.localdomain"])
def test_several_nodes_never_meet_at_a_loopback_address(addr: str) -> None:
    with pytest.raises(TopologyError, match="loopback"):
        read(task(0, 0, 0, MASTER_ADDR=addr))
    assert read(task(1, 1, 0, "4", SLURM_STEP_NUM_NODES="1", MASTER_ADDR=addr))[:2] == (1, 4)


def test_agents_that_met_at_a_loopback_address_are_on_one_host() -> None:
    assert master(TORCHRUN | env("MASTER_ADDR=127.0.0.1")) == ("127.0.0.1", 29511)


@pytest.mark.parametrize(
    ("environ", "addr"),
    [
        (task(3, 1, 1), "lab01"),
        (task(3, 1, 1, SLURM_STEP_NODELIST="jw[07-08]"), "jw07"),
        (task(3, 1, 1, SLURM_STEP_NODELIST="h-a,h-b[001,003]"), "h-a"),
        (OPENMPI | BATCH, "lab01"),
        (OPENMPI, None),
        (env("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2"), "127.0.0.1"),
        ({}, None),
        (EXPLICIT | env("PHALANX_MASTER_ADDR=a MASTER_ADDR=b"), "a"),
    ],
)
def test_the_master_is_the_first_node(environ: Env, addr: str | None) -> None:
    assert Topology.from_environ(environ).master_addr == addr


def test_ports_follow_from_job_and_step_alone() -> None:
    """All ranks agree, neighbouring jobs and steps differ, and a port that is given stays."""

    def port(job: str, step: str = "0", rank: int = 0, **more: str) -> int | None:
        node, local = divmod(rank, 2)
        return master(task(rank, local, node, SLURM_JOB_ID=job, SLURM_STEP_ID=step, **more))[1]

    array = env("SLURM_ARRAY_JOB_ID=70000 SLURM_ARRAY_TASK_ID=3")
    assert len({port("70001", rank=rank, **array) for rank in range(4)}) == 1
    ports = [port(str(70000 + job), str(step)) for job in range(20) for step in range(20)]
    assert len(set(ports)) == 400
    assert all(value is not None and 1024 < value < 32768 for value in ports)
    assert port("70001", MASTER_PORT="29611") == 29611


@given(st.integers(1, 40), st.integers(1, 16), st.data())
def test_every_rank_of_a_slurm_step_finds_itself(nodes: int, per_node: int, data: st.DataObject) -> None:
    """Whatever the placement: every node's own count, and each rank's place as Slurm gave it."""
    counts = data.draw(st.lists(st.integers(1, per_node), min_size=nodes, max_size=nodes))
    node = data.draw(st.integers(0, nodes - 1))
    local = data.draw(st.integers(0, counts[node] - 1))
    rank = data.draw(st.integers(0, sum(counts) - 1))
    step = task(rank, local, node, ",".join(map(str, counts)), sum(counts), SLURM_STEP_NUM_NODES=str(nodes))
    assert read(step) == (rank, sum(counts), local, counts[node], node, nodes)


def test_ten_thousand_nodes_take_no_time() -> None:
    hosts = ",".join(f"host-{i}" for i in range(10_000))
    big = task(7, 7, 0, "8(x10000)", 80_000, SLURM_STEP_NUM_NODES="10000", SLURM_STEP_NODELIST=hosts)
    start = time.process_time()
    topology = Topology.from_environ(big)
    assert (topology.master_addr, topology.local_world_size) == ("host-0", 8)
    assert time.process_time() - start < 1.0


def test_environ_leaves_out_what_is_not_known() -> None:
    assert Topology.from_environ({}).environ() == env("RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1")


def _in_terminal(tmp_path: Path, *shell: str, command: str) -> str:
    """Run a shell as a Slurm task on a terminal, feed it a command, and return what the command wrote."""
    out = tmp_path / "out"
    code = "from phalanx.rank.topology import Topology as T; print(T.current().world_size)"
    environ = {**os.environ, **task(0, 0, 0, SLURM_PTY_PORT="4000"), "PS1": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    script = command.format(python=shlex.join([sys.executable, "-c", code]) + f" > {shlex.quote(str(out))}")
    (tmp_path / "script.sh").write_text(script)
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(shell[0], [*shell], {**environ, "SLURM_TASK_PID": str(os.getpid())})
    if "-i" in shell:
        os.write(terminal, f"{script}\nexit\n".encode())
    try:
        while os.read(terminal, 1024):
            pass
    except OSError:
        pass
    os.waitpid(pid, 0)
    os.close(terminal)
    return out.read_text().strip()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_command_typed_in_a_tasks_shell_is_single(tmp_path: Path) -> None:
    """`srun --ntasks 4 --pty bash` has task 0's variables, yet nobody else runs what is typed there."""
    typed = _in_terminal(tmp_path, "bash", "--norc", "-i", command="{python}")
    assert typed == "1"


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_script_that_is_the_task_is_a_rank_even_on_a_terminal(tmp_path: Path) -> None:
    """`srun --ntasks 4 --pty bash script.sh` runs the script in all tasks."""
    assert _in_terminal(tmp_path, "bash", str(tmp_path / "script.sh"), command="{python}\ntrue") == "4"


def test_an_inner_sruns_task_is_a_rank(tmp_path: Path) -> None:
    """It is its own task and session, though it inherits the outer shell's terminal variables."""
    code = "import os; os.environ['SLURM_TASK_PID'] = str(os.getpid())\n"
    code += "from phalanx.rank.topology import Topology as T; print(T.current().world_size)"
    environ = {**os.environ, **task(0, 0, 0, SLURM_PTY_PORT="4000"), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, start_new_session=True
    )
    assert (done.stdout, done.stderr) == ("4\n", "")


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"NODEID": "3", "NNODES": "4", "STEP_TASKS_PER_NODE": "2(x3),1", "PROCID": "6"}, (6, 7, 1, 3, 4)),
        ({"NODEID": "1", "NTASKS": "3", "STEP_TASKS_PER_NODE": "2,1", "PROCID": "2"}, (2, 3, 1, 1, 2)),
        ({"NODEID": "1", "NTASKS": "4", "STEP_TASKS_PER_NODE": "2(x2)", "PROCID": "1"}, (1, 4, 2, 1, 2)),
        ({"NODEID": "0", "NTASKS": "7", "STEP_TASKS_PER_NODE": "3,2(x2)", "PROCID": "0"}, (0, 7, 3, 0, 3)),
        ({"NODEID": "1", "NTASKS": "4", "NTASKS_PER_NODE": "2", "PROCID": "1"}, (1, 4, 2, 1, 2)),
    ],
)
def test_a_slurm_step_that_says_little(said: dict[str, str], expected: tuple[int, ...]) -> None:
    """Tasks and nodes follow from the tasks per node, cyclic placement included, and never from division."""
    environ = {f"SLURM_{name}": value for name, value in said.items()} | {"SLURM_STEP_ID": "0", "SLURM_LOCALID": "0"}
    found = Topology.from_environ(environ)
    assert (found.rank, found.world_size, found.local_world_size, found.node_rank, found.num_nodes) == expected
    assert found.local_rank == 0
    assert found.master_port is not None


@pytest.mark.parametrize("rank", ["0", "3"])
def test_a_task_of_unknown_many_does_not_train_alone(rank: str) -> None:
    with pytest.raises(TopologyError, match=f"SLURM_PROCID={rank}.*SLURM_NTASKS"):
        Topology.from_environ({"SLURM_STEP_ID": "0", "SLURM_PROCID": rank})


def test_the_node_rank_tells_the_local_size() -> None:
    """As AzureML and Kubernetes launch: a node rank, but no local world size."""
    master = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
    found = Topology.from_environ({"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "NODE_RANK": "1", **master})
    assert (found.local_world_size, found.num_nodes) == (4, 2)
    found = Topology.from_environ({"RANK": "1", "WORLD_SIZE": "2", "NODE_RANK": "1", "NNODES": "2", **master})
    assert (found.local_rank, found.local_world_size, found.num_nodes) == (0, 1, 2)


@pytest.mark.parametrize("own", [{}, {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, {"SLURM_STEP_NODELIST": "n[1-2]"}])
def test_a_task_is_one_also_without_its_steps_number(own):
    """A container may drop SLURM_STEP_ID; a rank above 0, or a step's own words, are no batch script's."""
    said = {"SLURM_PROCID": "1", "SLURM_NODEID": "1", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"}
    found = Topology.from_environ({**said, **own})
    assert (found.rank, found.world_size, found.node_rank, found.local_rank) == (1, 4, 1, 0)


def test_a_batch_script_stays_a_single_process_without_a_steps_words():
    found = Topology.from_environ({"SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"})
    assert (found.rank, found.world_size) == (0, 1)


@pytest.mark.parametrize(("rank", "local", "agent"), [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)])
def test_agents_that_are_slurms_tasks_tell_their_ranks_place(rank, local, agent):
    """Two agents of two ranks each, without LOCAL_WORLD_SIZE."""
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(local), "WORLD_SIZE": "4", "MASTER_ADDR": "n1"}
    step = {"SLURM_PROCID": str(agent), "SLURM_LOCALID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}
    found = Topology.from_environ({**ranks, **step, "TORCHELASTIC_RUN_ID": "7", "MASTER_PORT": "20000"})
    assert (found.rank, found.local_world_size, found.node_rank, found.num_nodes) == (rank, 2, agent, 2)


def test_an_agents_own_place_from_mpi_gives_way_to_the_ranks(monkeypatch):
    """torchrun under mpirun passes on its own OMPI_COMM_WORLD_LOCAL_RANK, which DeepSpeed compares with LOCAL_RANK."""
    agent = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    ranks = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
    for name, text in (agent | ranks).items():
        monkeypatch.setenv(name, text)
    assert Topology.from_environ(agent | ranks).environ()["OMPI_COMM_WORLD_LOCAL_RANK"] == "1"
    monkeypatch.delenv("OMPI_COMM_WORLD_LOCAL_RANK")
    assert "OMPI_COMM_WORLD_LOCAL_RANK" not in Topology.from_environ(ranks).environ()


def test_the_components_of_a_heterogeneous_step_are_one_world() -> None:
    """As srun --het-group=0,1 of Slurm 22.05 says it to the last of 1 + 2 tasks; others are a component's."""
    step = env(
        "SLURM_JOB_ID=51 SLURM_STEP_ID=0 SLURM_HET_SIZE=2 SLURM_PROCID=2 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_NTASKS=3 "
        "SLURM_NNODES=2 SLURM_STEP_NUM_TASKS=3 SLURM_STEP_NUM_NODES=2 SLURM_STEP_TASKS_PER_NODE=1,2 "
        "SLURM_JOB_NODELIST_HET_GROUP_0=node1 SLURM_JOB_NODELIST_HET_GROUP_1=node2 "
        "SLURM_STEP_NODELIST=node[1-2] SLURM_JOB_NODELIST=node[1-2]"
    )
    found = Topology.from_environ(step)
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (2, 3, 1, 2)
    assert (found.node_rank, found.num_nodes, found.master_addr) == (1, 2, "node1")


def test_each_task_may_have_a_launch_of_ours_for_itself() -> None:
    own = env("RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 PHALANX_EXPECTED_WORLD_SIZE=2")
    assert read(task(2, 0, 1) | own)[:2] == (1, 2)
