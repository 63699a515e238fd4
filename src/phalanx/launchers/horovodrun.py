"""Horovod's own launcher, on one node."""

from __future__ import annotations

from ..plan import LaunchPlan
from ..shell import Word
from .base import Launcher, rank


class Horovodrun(Launcher):
    def command(self, plan: LaunchPlan) -> list[Word]:
        ranks = str(plan.nproc_per_node)
        words: list[Word] = ["horovodrun", "--gloo", "-np", ranks, "-H", f"localhost:{ranks}"]
        return [*words, *rank(plan)]
