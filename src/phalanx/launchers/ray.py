"""Ray Train: one agent on each node, which starts a Ray node there; on the first also the driver."""

from __future__ import annotations

from ..planning.plan import LaunchPlan
from ..shell import Word
from .base import Launcher, master, srun, task, worker


class Ray(Launcher):
    agents = True

    def command(self, plan: LaunchPlan) -> list[Word]:
        words: list[Word] = [plan.python, "-m", "phalanx.ray_launch", *_options(plan), "--", *worker(plan)]
        return task(plan, words) if plan.local else srun(plan, 1, plan.cpus_per_node, words)

    def environment(self, plan: LaunchPlan) -> dict[str, Word]:
        return master(plan)


def _options(plan: LaunchPlan) -> list[Word]:
    """CPUs and GPUs as allocated: by default Ray would take all that the node has."""
    settings = plan.config.ray
    options: list[Word] = [f"--nodes={plan.nodes}", f"--nproc-per-node={plan.nproc_per_node}"]
    if plan.cpus_per_node is not None:
        options.append(f"--num-cpus={plan.cpus_per_node}")
    gpus = 0 if plan.device == "cpu" else plan.gpus_per_node
    if gpus is not None:
        options.append(f"--num-gpus={gpus}")
    options.append(f"--object-store-memory={settings.object_store_memory}")
    options.append(f"--start-timeout={settings.start_timeout}")
    return options + ([f"--temp-dir={settings.temp_dir}"] if settings.temp_dir else [])
