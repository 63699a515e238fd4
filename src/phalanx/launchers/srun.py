"""One Slurm task per rank; each finds its place from Slurm's own variables."""

from __future__ import annotations

from ..planning.plan import LaunchPlan
from ..shell import Word
from .base import Launcher, horovod, master, rank, srun


class Srun(Launcher):
    needs = "a Slurm allocation"

    def command(self, plan: LaunchPlan) -> list[Word]:
        return srun(plan, plan.nproc_per_node, plan.cpus_per_rank, rank(plan))

    def environment(self, plan: LaunchPlan) -> dict[str, Word]:
        return {**master(plan), **horovod(plan)}
