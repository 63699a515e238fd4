"""DeepSpeed's own launcher, one on each node: it needs no ssh where Slurm starts it there."""

from __future__ import annotations

import shlex

from ..planning.plan import LaunchPlan
from ..shell import Sh, Word, render
from .base import HEAD, PORT, Launcher, guarded, srun, task

_HOSTFILE = '"$PHALANX_RUN_DIR/hostfile"'


class Deepspeed(Launcher):
    agents = True

    def command(self, plan: LaunchPlan) -> list[Word]:
        option = "--num_gpus" if plan.device == "cuda" else "--num_accelerators"
        # It numbers the devices from 0, whatever was allocated: the worker puts the node's own list back.
        words: list[Word] = ["env", Sh('PHALANX_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-}"')]
        words += [plan.python, "-m", "deepspeed.launcher.runner", *_place(plan)]
        words += [option, str(plan.nproc_per_node), "--module", *guarded(plan)]  # the worker takes `--local_rank=N` out
        return task(plan, words) if plan.local else srun(plan, 1, plan.cpus_per_node, words)

    def before(self, plan: LaunchPlan) -> list[str]:
        """The file of nodes, without which the launcher takes the first node to be all there is."""
        if plan.local:
            return []
        hosts = render(["printf", "%s\\n", *plan.allocation.hosts]) if plan.allocation else "scontrol show hostnames"
        return [f"{hosts} | sed 's/$/ slots={plan.nproc_per_node}/' >{_HOSTFILE}"]

    def environment(self, plan: LaunchPlan) -> dict[str, Word]:
        # Asked for a CPU, DeepSpeed would look for every accelerator it knows, and say so.
        return {"DS_ACCELERATOR": "cpu"} if plan.device == "cpu" else {}


def _place(plan: LaunchPlan) -> list[Word]:
    config = plan.config
    port = str(config.master_port) if config.master_port else None
    if plan.local:
        free = Sh(f'"$({shlex.quote(plan.host_python)} -m phalanx.ports "$$")"')  # its own default is one for all
        return ["--master_port", port or free]
    head: Word = config.master_addr or HEAD
    place: list[Word] = ["--hostfile", Sh(_HOSTFILE), "--no_ssh", "--node_rank", Sh('"$SLURM_NODEID"')]
    return [*place, "--num_nodes", str(plan.nodes), "--master_addr", head, "--master_port", port or PORT]
