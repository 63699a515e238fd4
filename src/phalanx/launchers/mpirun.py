"""One MPI process per rank, by Open MPI's or MPICH's mpirun, which take the nodes from Slurm."""

from __future__ import annotations

from ..planning.plan import LaunchPlan
from ..shell import Word
from .base import Launcher, horovod, master, mpirun, rank


class Mpirun(Launcher):
    def command(self, plan: LaunchPlan) -> list[Word]:
        return mpirun(plan, plan.nproc_per_node, rank(plan))

    def environment(self, plan: LaunchPlan) -> dict[str, Word]:
        return {**master(plan), **horovod(plan)}
