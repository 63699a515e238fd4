"""PyTorch's agent, one per node; on several nodes Slurm or MPI starts the agents."""

from __future__ import annotations

from ..planning.plan import LaunchPlan
from ..shell import Sh, Word, quote
from .base import HEAD, PORT, Launcher, mpirun, node_address, srun, task, worker

# Which node this is, in the words of what started the task: in the batch shell every node would be node 0.
_NODE = {"srun": "$SLURM_NODEID", "openmpi": "$OMPI_COMM_WORLD_RANK", "mpich": "$PMI_RANK"}
# What all agents of one launch share and no other launch has. MPI's own processes are no tasks of one step.
_STEP = {"srun": "$SLURM_STEP_ID"}


class Torchrun(Launcher):
    agents = True

    def command(self, plan: LaunchPlan) -> list[Word]:
        by_mpi = plan.config.torchrun.start == "mpirun"
        if plan.local:
            return task(plan, _agent(plan, _local_rendezvous(plan)))
        agent = _agent(plan, _rendezvous(plan, plan.mpi_flavor if by_mpi else "srun"))
        return mpirun(plan, 1, agent) if by_mpi else srun(plan, 1, plan.cpus_per_node, agent)


def _agent(plan: LaunchPlan, rendezvous: list[Word]) -> list[Word]:
    """`--` because torchrun otherwise takes a script's `--n` for an abbreviation of its own options;
    `$` doubled because it substitutes `$local_rank` and `$$` in the arguments it passes on."""
    executable = plan.config.torchrun.executable
    agent: list[Word] = [executable] if executable else [plan.python, "-m", "torch.distributed.run"]
    # It makes folders in /tmp for reports that our ranks leave elsewhere, and removes none.
    agent += [*rendezvous, "--log-dir", "/dev/null", "--nproc-per-node", str(plan.nproc_per_node)]
    agent += ["-m", "--"]
    return agent + [word if isinstance(word, Sh) else word.replace("$", "$$") for word in worker(plan)]


def _local_rendezvous(plan: LaunchPlan) -> list[Word]:
    """On loopback, so that a machine whose own name doesn't resolve works too."""
    if plan.config.master_port is None:
        return ["--standalone", "--local-addr", "127.0.0.1"]
    return ["--master-addr", "127.0.0.1", "--master-port", str(plan.config.master_port)]


def _rendezvous(plan: LaunchPlan, starter: str) -> list[Word]:
    """`is_host` is said outright: on a port in use an agent would otherwise join another job's store. `rank` is for
    the reader: c10d numbers the agents itself."""
    config = plan.config
    node, step = _NODE[starter], _STEP.get(starter, "$PHALANX_RDZV_PORT")
    head = quote(config.master_addr or HEAD)
    if config.master_port is not None:
        return _fixed_rendezvous(plan, node, head)
    port = quote(PORT)
    return [
        *("--nnodes", str(plan.nodes)),
        *_own_address(plan),
        *("--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", Sh(f"{head}:{port}")),
        *("--rdzv-conf", Sh(f"is_host=$(({node} == 0)),rank={node}")),
        *("--rdzv-id", Sh(f'"$SLURM_JOB_ID.{step}.${{SLURM_RESTART_COUNT:-0}}"')),
    ]


def _own_address(plan: LaunchPlan) -> list[Word]:
    """What the ranks meet at is the first agent's own address: by default a name that it has in the wrong network."""
    config = plan.config
    return ["--local-addr", Sh(node_address(config))] if config.host_suffix or config.interface else []


def _fixed_rendezvous(plan: LaunchPlan, node: str, head: str) -> list[Word]:
    """At the user's port: over c10d the ranks would meet at another one, which the first agent takes at random."""
    return [
        *("--nnodes", str(plan.nodes)),
        *("--node-rank", Sh(f'"{node}"')),
        *("--master-addr", Sh(head)),
        *("--master-port", str(plan.config.master_port)),
    ]
