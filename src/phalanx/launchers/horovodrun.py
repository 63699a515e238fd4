"""Horovod's own launcher, on one node, with its gloo controller: the MPI one would start mpirun, which is a launcher
of its own here."""

from __future__ import annotations

from ..planning.plan import LaunchPlan
from ..shell import Word
from .base import Launcher, guarded, master, srun, task


class Horovodrun(Launcher):
    agents = True

    def command(self, plan: LaunchPlan) -> list[Word]:
        ranks = str(plan.nproc_per_node)
        words: list[Word] = [plan.python, "-m", "horovod.runner.launch", "--gloo"]
        words += ["-np", ranks, "-H", f"localhost:{ranks}", plan.python, "-m", *guarded(plan)]
        return task(plan, words) if plan.local else srun(plan, 1, plan.cpus_per_node, words)

    def environment(self, plan: LaunchPlan) -> dict[str, Word]:
        return master(plan)
