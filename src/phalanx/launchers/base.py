"""What a launcher is: a class that writes the command line of a plan; and the steps that Slurm and MPI start."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from ..config import JobConfig
from ..containers.wrap import inside
from ..errors import PlanError
from ..planning.plan import LaunchPlan
from ..shell import Sh, Word, layout, quote, render

# Where agents meet. The batch script sets both; they are read in the task.
HEAD = Sh('"$PHALANX_RDZV_HOST"')
PORT = Sh('"$PHALANX_RDZV_PORT"')


class Launcher(ABC):
    """Stateless. To add one: write `command` in a file here and add a line to `registry.LAUNCHERS`."""

    agents = False
    """Whether Slurm starts one process a node, which starts the node's ranks, and not the ranks themselves."""

    needs: str | None = None
    """What its ranks can't start without, as an error names it; None if this machine alone is enough."""

    @abstractmethod
    def command(self, plan: LaunchPlan) -> list[Word]:
        """The words that start all ranks of `plan`; empty if no single command does."""

    def before(self, plan: LaunchPlan) -> list[str]:
        """Lines of shell that come before the command, on the first node."""
        return []

    def environment(self, plan: LaunchPlan) -> dict[str, Word]:
        """What the launcher's own ranks need on top of the plan's environment."""
        return {}

    def notes(self, plan: LaunchPlan) -> list[str]:
        """What the reader of a plan must know beside the command."""
        return []


def node_address(config: JobConfig) -> str:
    """Shell text: what other nodes call the node that evaluates it. A site's suffix stands before the domain."""
    node = "${SLURMD_NODENAME:-$(hostname)}"
    if config.host_suffix:
        suffix = quote(config.host_suffix)
        return f'"$(node="{node}"; echo "${{node%%.*}}"{suffix}"${{node#"${{node%%.*}}"}}")"'
    if config.interface:
        device = quote(config.interface.split(",")[0])
        return f'"$(ip -o -4 addr show dev {device} | awk \'{{sub("/.*", "", $4); print $4; exit}}\')"'
    return f'"{node}"'


def master(plan: LaunchPlan) -> dict[str, Word]:
    """Where ranks that find each other by themselves meet, as far as the user says."""
    said = {"MASTER_ADDR": plan.config.master_addr, "MASTER_PORT": plan.config.master_port}
    return {name: str(value) for name, value in said.items() if value is not None}


def horovod(plan: LaunchPlan) -> dict[str, Word]:
    """What makes ranks Horovod's under a launcher that isn't."""
    return {"PHALANX_HOROVOD_RANKS": "1"} if plan.strategy == "horovod" else {}


def rank(plan: LaunchPlan) -> list[Word]:
    """The whole command of one rank."""
    return [plan.python, "-m", *worker(plan)]


def worker(plan: LaunchPlan) -> list[Word]:
    """The module that makes a process a rank, with the script or the command that it runs."""
    if plan.late_script:
        return ["phalanx.worker", *plan.args]
    return ["phalanx.worker", "--exec" if plan.script is None else plan.script, *plan.args]


def task(plan: LaunchPlan, words: list[Word]) -> list[Word]:
    """`words` as what one task runs: shell text in them is evaluated there, not where the step is started; with a
    container, that is around them."""
    before = f"{_guard(plan)}\n" if _GUARDED in words else ""
    if plan.runtime != "venv":
        return ["bash", "-c", before + inside(plan, words)]
    if any(isinstance(word, Sh) for word in words):
        return ["bash", "-c", before + layout([Sh("exec"), *words])]
    return words


_GUARDED = Sh('"${words[@]/#/=}"')


def guarded(plan: LaunchPlan) -> list[Word]:
    """`worker` for a launcher that would look for its own options among the script's: no word begins with a dash. The
    worker takes the `=` away."""
    module, *words = worker(plan)
    literal = [f"={word}" for word in words if isinstance(word, str)]
    return [module, "=", *literal] if len(literal) == len(words) else [module, "=", _GUARDED]


def _guard(plan: LaunchPlan) -> str:
    """The words of which only the shell knows how many there are."""
    return f"words=({render(worker(plan)[1:])})"


def srun(plan: LaunchPlan, per_node: int, cpus_per_task: int | None, words: list[Word]) -> list[Word]:
    """A Slurm step over all nodes that ends when one task fails.

    A step doesn't inherit the job's CPUs per task, so they are said again.
    """
    config = plan.config
    step: list[Word] = ["srun", f"--nodes={plan.nodes}"]
    uneven = plan.ntasks is not None and per_node > 1
    step.append(f"--ntasks={plan.ntasks}" if uneven else f"--ntasks-per-node={per_node}")
    if not uneven:
        step.insert(2, f"--ntasks={per_node * plan.nodes}")
    if cpus_per_task is not None:
        step.append(f"--cpus-per-task={cpus_per_task}")
    step.append("--kill-on-bad-exit=1")
    if plan.allocation is not None:
        step += [f"--jobid={plan.allocation.job_id}", "--overlap"]
        if plan.nodes < len(plan.allocation.hosts):  # Slurm would pass by the first, where ranks meet, if it is busy
            step.append(f"--nodelist={','.join(plan.allocation.hosts[: plan.nodes])}")
    if config.mpi:
        step.append(f"--mpi={config.mpi}")
    # Bound to the cores of one task, an agent would hold all its ranks there.
    bind = config.cpu_bind or ("none" if per_node == 1 else None)
    if bind:
        step.append(f"--cpu-bind={bind}")
    _check_export(config.srun_args)
    return [*step, *config.srun_args, *task(plan, words)]


def _check_export(words: Sequence[str]) -> None:
    """Raise PlanError for an option that hides from the ranks what they are told in the environment."""
    said = next((word.partition("=")[2] for word in words if word.startswith("--export=")), None)
    if said is not None and "ALL" not in said.split(","):
        raise PlanError(
            f"srun_args has --export={said}, which hides the run directory and the settings from the ranks: use "
            f"--export=ALL{'' if said in ('NONE', 'NIL') else f',{said}'}, or env for what they need besides"
        )


def mpirun(plan: LaunchPlan, per_node: int, words: list[Word]) -> list[Word]:
    """Processes by MPI, unbound (bound ones would hold all threads of a rank on one core), with the environment."""
    config = plan.config.mpirun
    count = plan.ntasks if plan.ntasks is not None and per_node > 1 else per_node * plan.nodes
    if plan.mpi_flavor == "mpich":
        place: list[Word] = ["-n", str(count)]
        place += [] if plan.ntasks else ["-ppn", str(per_node)]
        place += ["-bind-to", "none", "-genvlist", Sh(f'"$({_travelling(plan)} | paste -sd, -)"')]
    else:
        place = ["-np", str(count), "--map-by", "slot" if plan.ntasks else f"ppr:{per_node}:node"]
        place += ["--oversubscribe"] if plan.local else []  # ranks of a test may outnumber this machine's cores
        place += ["--bind-to", "none", Sh(f"$({_travelling(plan)} | sed 's/^/-x /')")]
    return [config.executable, *place, *config.args, *task(plan, words)]


def _travelling(plan: LaunchPlan) -> str:
    """A shell command that lists the set variables that MPI must carry to other nodes."""
    names = "|".join(["PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "TMPDIR", *_plain(plan.environment)])
    return f"compgen -e | grep -E '^(({names})$|(NCCL|GLOO|UCX|PHALANX|OMP|TRITON|TORCHINDUCTOR)_)'"


def _plain(names: Iterable[str]) -> list[str]:
    return [name for name in names if not name.startswith(("PHALANX_", "NCCL_", "GLOO_", "UCX_", "OMP_"))]
