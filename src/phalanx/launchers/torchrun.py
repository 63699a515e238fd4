"""PyTorch's agent, one per node; on several nodes Slurm starts the agents."""

from __future__ import annotations

from ..plan import LaunchPlan
from ..shell import Sh, Word, quote, render
from .base import HEAD, PORT, Launcher, srun


class Torchrun(Launcher):
    def command(self, plan: LaunchPlan) -> list[Word]:
        if plan.nodes == 1:
            return _agent(plan, _local_rendezvous(plan))
        task: list[Word] = [Sh("exec"), *_agent(plan, _slurm_rendezvous(plan))]
        return [*srun(plan, 1, plan.cpus_per_node), "bash", "-c", render(task)]


def _agent(plan: LaunchPlan, rendezvous: list[Word]) -> list[Word]:
    """`--` because torchrun otherwise takes a script's `--n` for an abbreviation of its own options;
    `$` doubled because it substitutes `$local_rank` and `$$` in the arguments it passes on."""
    passed = [word.replace("$", "$$") for word in (plan.script, *plan.args)]
    agent: list[Word] = [plan.python, "-m", "torch.distributed.run", *rendezvous]
    return [*agent, "--nproc-per-node", str(plan.nproc_per_node), "-m", "--", "phalanx.worker", *passed]


def _local_rendezvous(plan: LaunchPlan) -> list[Word]:
    """On loopback, so that a machine whose own name doesn't resolve works too."""
    if plan.master_port is None:
        return ["--standalone", "--local-addr", "127.0.0.1"]
    return ["--master-addr", "127.0.0.1", "--master-port", str(plan.master_port)]


def _slurm_rendezvous(plan: LaunchPlan) -> list[Word]:
    """`is_host` is said outright: on a port in use an agent would otherwise join another job's store."""
    head = quote(plan.master_addr or HEAD)
    port = quote(str(plan.master_port) if plan.master_port else PORT)
    return [
        "--nnodes",
        str(plan.nodes),
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        Sh(f"{head}:{port}"),
        "--rdzv-conf",
        Sh("is_host=$((SLURM_NODEID == 0))"),
        "--rdzv-id",
        Sh('"$SLURM_JOB_ID.$SLURM_STEP_ID.${SLURM_RESTART_COUNT:-0}"'),
    ]
