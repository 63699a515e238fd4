"""DeepSpeed's own launcher: on one node it starts the ranks; on several Slurm starts it on each."""

from __future__ import annotations

from ..plan import RUN_DIR_UNKNOWN, LaunchPlan
from ..shell import Sh, Word
from .base import HEAD, PORT, Launcher, srun, worker


class Deepspeed(Launcher):
    agents = True

    def command(self, plan: LaunchPlan) -> list[Word]:
        if plan.nodes == 1:
            return ["deepspeed", *_ranks(plan), *_module(plan)]
        head: Word = plan.config.master_addr or HEAD
        port: Word = str(plan.config.master_port) if plan.config.master_port else PORT
        task: list[Word] = [
            "deepspeed",
            "--hostfile",
            Sh('"$PHALANX_RUN_DIR/hostfile"'),
            "--no_ssh",
        ]
        task += ["--node_rank", Sh('"$SLURM_NODEID"'), "--num_nodes", str(plan.nodes), *_ranks(plan)]
        task += ["--master_addr", head, "--master_port", port, *_module(plan)]
        return srun(plan, 1, plan.cpus_per_node, task)

    def notes(self, plan: LaunchPlan) -> list[str]:
        return [f"deepspeed reads the nodes from {RUN_DIR_UNKNOWN}/hostfile"] if plan.nodes > 1 else []


def _ranks(plan: LaunchPlan) -> list[Word]:
    option = "--num_gpus" if plan.device == "cuda" else "--num_accelerators"
    return [option, str(plan.nproc_per_node)]


def _module(plan: LaunchPlan) -> list[Word]:
    return ["--module", *worker(plan)]
