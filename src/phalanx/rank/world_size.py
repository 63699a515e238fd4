"""Worlds of one: N processes of which each believes that it is all there is, and would train alone."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import TopologyError
from .launch_variables import integer
from .topology import Topology

EXPECTED = "PHALANX_EXPECTED_WORLD_SIZE"

_MPI = "set mpirun.executable and mpirun.flavor to one and the same MPI, or use --launcher srun"
_REMEDIES = {
    "single": "no variables of a launcher are set. Under mpirun, {mpi}; under srun, set mpi to a plugin that "
    "`srun --mpi=list` shows, or to none",
    "openmpi": "Open MPI says so. Under mpirun, {mpi}; under srun, set mpi to a plugin that `srun --mpi=list` shows",
    "mpich": "the variables PMI_RANK and PMI_SIZE say so. Under mpirun, {mpi}; under srun, set mpi to a plugin that "
    "`srun --mpi=list` shows, or to none",
    "slurm": "Slurm's variables say so. Leave the number of tasks to nodes and nproc_per_node: no --ntasks or --nodes "
    "in srun_args, no SLURM_NTASKS or SLURM_STEP_NUM_TASKS of your own. If this is mpirun, its own variables "
    "are missing: {mpi}",
}
_OTHER = "the environment's rank variables say so. Unset WORLD_SIZE and its like before the launch"


def check_world_size(topology: Topology, environ: Mapping[str, str]) -> None:
    """Raises TopologyError when the launch was to start another number of ranks than this one counts."""
    if not environ.get(EXPECTED):
        return
    expected = integer(environ, EXPECTED, least=1)
    if topology.world_size == expected:
        return
    alone = ", and each process would train alone" if topology.world_size == 1 else ""
    remedy = _REMEDIES.get(topology.source, _OTHER).format(mpi=_MPI)
    raise TopologyError(
        f"the world size is {topology.world_size} here (source: {topology.source}), but the launch starts {expected} "
        f"ranks{alone}: {remedy}"
    )
