"""How Horovod's ranks find each other where Horovod's launcher hasn't started them."""

import pytest

from phalanx.errors import MissingExtraError, PlanError
from phalanx.rank import horovod_ranks
from phalanx.rank.topology import Topology

BOTH, MPI, GLOO = frozenset({"mpi", "gloo"}), frozenset({"mpi"}), frozenset({"gloo"})


def slurm(rank, counts, **more):
    """What Slurm says in a step with so many tasks on each node."""
    node = next(n for n in range(len(counts)) if rank < sum(counts[: n + 1]))
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank - sum(counts[:node])),
        "SLURM_NODEID": str(node),
        "SLURM_NTASKS": str(sum(counts)),
        "SLURM_STEP_NUM_TASKS": str(sum(counts)),
        "SLURM_STEP_NUM_NODES": str(len(counts)),
        "SLURM_STEP_NODELIST": f"lab[1-{len(counts)}]" if len(counts) > 1 else "lab1",
        "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, counts)),
        "SLURMD_NODENAME": f"lab{node + 1}",
        **more,
    }


OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
HOROVODRUN = {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2"}


@pytest.mark.parametrize(
    ("environ", "built", "how"),
    [
        (HOROVODRUN, GLOO, "given"),
        (HOROVODRUN, BOTH, "given"),
        ({}, MPI, "given"),  # a single process
        (OPENMPI, BOTH, "mpi"),
        (HYDRA, MPI, "mpi"),
        (slurm(1, [2]), GLOO, "gloo"),
        (slurm(1, [2]), BOTH, "gloo"),  # no MPI plugin around it
        (slurm(1, [2], PMIX_RANK="1"), BOTH, "mpi"),
        (slurm(1, [2], PMIX_RANK="1"), GLOO, "gloo"),
        (slurm(1, [2], PMIX_RANK="1", HOROVOD_CONTROLLER="gloo"), BOTH, "gloo"),
        (slurm(1, [2], PMI_RANK="1", PMI_SIZE="2"), GLOO, "gloo"),  # srun --mpi=pmi2
    ],
)
def test_how_ranks_find_each_other(environ, built, how):
    assert horovod_ranks.controller(Topology.from_environ(environ), environ, built) == how


@pytest.mark.parametrize(
    ("environ", "built", "words"),
    [
        (OPENMPI, GLOO, ["without MPI", "2 processes", "alone", "HOROVOD_WITH_MPI=1"]),
        (HYDRA, GLOO, ["without MPI", "alone"]),
        (slurm(1, [2]), MPI, ["MPI alone", "set mpi", "pmix", "mpirun"]),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "1"},
            BOTH,
            ["torchrun cannot start"],
        ),
    ],
)
def test_worlds_of_one_are_refused(environ, built, words):
    with pytest.raises(PlanError) as caught:
        horovod_ranks.controller(Topology.from_environ(environ), environ, built)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_ranks_variables_are_those_that_horovodrun_gives():
    """Of 2 + 1 ranks on two nodes, Horovod's own assignment of slots knows the answer."""
    hosts = pytest.importorskip("horovod.runner.common.util.hosts", reason="horovod is not installed: make engines")
    slots = hosts.get_host_assignments([hosts.HostInfo("lab1", 2), hosts.HostInfo("lab2", 1)], 3)
    for slot in slots:
        environ = slurm(slot.rank, [2, 1])
        topology = Topology.from_environ(environ)
        counts = horovod_ranks.ranks_per_node(topology, environ)
        made = horovod_ranks.gloo_variables(topology, counts, "lab1", 4711)
        for name in ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"):
            assert made[f"HOROVOD_{name.upper()}"] == str(getattr(slot, name)), (slot.rank, name)
        assert made["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "lab1"
        assert made["HOROVOD_GLOO_RENDEZVOUS_PORT"] == "4711"


def test_what_a_library_was_built_with(tmp_path):
    with pytest.raises(MissingExtraError, match="no library for torch"):
        horovod_ranks.built_with(tmp_path)
    (tmp_path / "torch").mkdir()
    library = tmp_path / "torch" / "mpi_lib_v2.cpython-311.so"
    library.write_bytes(b"\x7fELF..libmpi.so.40..")
    assert horovod_ranks.built_with(tmp_path) == MPI
    library.write_bytes(b"\x7fELF..HOROVOD_GLOO_RENDEZVOUS_ADDR..")
    assert horovod_ranks.built_with(tmp_path) == GLOO


def test_the_real_library_says_what_horovod_says():
    hvd = pytest.importorskip("horovod.torch", reason="horovod is not installed: make engines")
    said = {"mpi": hvd.mpi_built(), "gloo": hvd.gloo_built()}
    assert horovod_ranks.built_with() == {name for name, built in said.items() if built}
