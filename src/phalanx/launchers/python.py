"""One process, started directly."""

from __future__ import annotations

from ..planning.plan import LaunchPlan
from ..shell import Word
from .base import Launcher, rank, srun, task


class Python(Launcher):
    def command(self, plan: LaunchPlan) -> list[Word]:
        """Directly, or as the one task of a Slurm step: so a job's process is bound and ended as any other."""
        return task(plan, rank(plan)) if plan.local else srun(plan, 1, plan.cpus_per_node, rank(plan))

    def environment(self, plan: LaunchPlan) -> dict[str, Word]:
        """Rank 0 of 1, so that a step or an MPI job around it doesn't make it a rank of theirs, and a
        script that calls `init_process_group` finds what torchrun would set."""
        ranks = dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), "0")
        sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1")
        port = {"MASTER_PORT": str(plan.config.master_port)} if plan.config.master_port else {}
        return {**ranks, **sizes, "MASTER_ADDR": "127.0.0.1", **port}
