"""Ray Train inside an allocation."""

from __future__ import annotations

from ..plan import LaunchPlan
from ..shell import Word
from .base import Launcher


class Ray(Launcher):
    def command(self, plan: LaunchPlan) -> list[Word]:
        """No command: Ray's workers are started through its API once its cluster is up."""
        return []

    def notes(self, plan: LaunchPlan) -> list[str]:
        cpus = f" with {plan.cpus_per_node} CPUs" if plan.cpus_per_node is not None else ""
        return [
            f"ray: a Ray node is started on each of {plan.nodes} nodes{cpus}, "
            f"then {plan.world_size} Ray Train workers run the script; this has no single command line"
        ]
