"""One MPI process per rank, with Open MPI's mpirun."""

from __future__ import annotations

from ..plan import LaunchPlan
from ..shell import Word
from .base import Launcher, worker


class Mpirun(Launcher):
    def command(self, plan: LaunchPlan) -> list[Word]:
        """Processes stay unbound: bound ones would hold all threads of a rank on one core."""
        words: list[Word] = ["mpirun", "-np", str(plan.world_size)]
        words += ["--map-by", f"ppr:{plan.nproc_per_node}:node", "--bind-to", "none"]
        for name in plan.environment:
            words += ["-x", name]
        return [*words, plan.python, *worker(plan)]
