"""What a launcher is: a class that writes the command line of a plan."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ..plan import LaunchPlan
from ..shell import Sh, Word

# The first host of the allocation and a port of the job's own, below the ephemeral ports. Evaluated in
# the task: in the batch shell every node would get the first node's values.
HEAD = Sh('"$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"')
PORT = Sh("$((15000 + SLURM_JOB_ID % 16000))")


class Launcher(ABC):
    """Stateless. To add one: write `command` in a file here and add a line to `registry.LAUNCHERS`."""

    @abstractmethod
    def command(self, plan: LaunchPlan) -> list[Word]:
        """The words that start all ranks of `plan`; empty if no single command does."""

    def environment(self, plan: LaunchPlan) -> dict[str, str]:
        """What the launcher's own ranks need on top of the plan's environment."""
        return {}

    def notes(self, plan: LaunchPlan) -> list[str]:
        """What the reader of a plan must know beside the command."""
        return []


def worker(plan: LaunchPlan) -> list[Word]:
    """The words after the interpreter that make it a rank."""
    return ["-m", "phalanx.worker", plan.script, *plan.args]


def srun(plan: LaunchPlan, tasks_per_node: int, cpus_per_task: int | None) -> list[Word]:
    """A Slurm step over all nodes that ends when one task fails.

    A step doesn't inherit the job's CPUs per task, so they are said again.
    """
    words: list[Word] = ["srun", f"--nodes={plan.nodes}", f"--ntasks-per-node={tasks_per_node}"]
    if cpus_per_task is not None:
        words.append(f"--cpus-per-task={cpus_per_task}")
    return [*words, "--kill-on-bad-exit=1"]
