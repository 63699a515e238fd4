"""`#SBATCH` lines of a plan: what Slurm must know before the job begins."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator

from ..config.exclusions import no_gpus
from ..config.sbatch import OPTIONALS
from ..errors import PlanError
from ..planning.plan import LaunchPlan
from ..registry import LAUNCHERS, load

Option = tuple[str, str | None]  # Slurm's name without dashes; None for options without a value

# What sbatch reads as one word; it understands quotes as a shell does.
_SAFE = re.compile(r"[\w@%+=:,./*^{}\[\]~!&|<>()-]+", re.ASCII)


def directives(plan: LaunchPlan) -> list[str]:
    """The lines, one option each.

    Raises PlanError for a value that can't stand in a directive, or for resources that can't be asked for in the
    chosen way.
    """
    lines = [_line(name, value) for name, value in options(plan)]
    return lines + [_own_words(word) for word in plan.config.sbatch_args]


def options(plan: LaunchPlan) -> list[Option]:
    """Options in a fixed order: name, size, GPUs, memory, limits, files, and the rest by Slurm's own names."""
    config = plan.config
    found: list[Option] = [("job-name", config.job_name or plan.name), ("nodes", str(plan.nodes))]
    found += [*_tasks(plan), *_gpus(plan)]
    named = {
        "cpus-per-gpu": config.cpus_per_gpu if _has_gpus(plan) else None,
        "mem": config.mem,
        "mem-per-cpu": config.mem_per_cpu,
        "mem-per-gpu": config.mem_per_gpu if _has_gpus(plan) else None,
        "time": config.time,
        "partition": config.partition,
        "account": config.account,
        "output": config.output,
        "error": config.error,
        "open-mode": None if config.sbatch.open_mode else "append",
        "chdir": config.chdir or plan.cwd,
    }
    found += [(name, str(value)) for name, value in named.items() if value is not None]
    return found + list(_passed_through(plan))


def tasks_per_node(plan: LaunchPlan) -> int:
    """Slurm tasks on a node: one per agent, or one per rank. The user's own launch has what the
    settings say."""
    config = plan.config
    each = -(-config.ntasks // plan.nodes) if config.ntasks else config.ntasks_per_node
    if (config.exec_command or config.exec_file) and each > 1:
        return each
    agents = load("launcher", LAUNCHERS, plan.launcher).agents
    return 1 if agents else plan.nproc_per_node


def _tasks(plan: LaunchPlan) -> Iterator[Option]:
    tasks = tasks_per_node(plan)
    if plan.ntasks is not None:
        yield "ntasks", str(plan.ntasks)
    else:
        yield "ntasks-per-node", str(tasks)
    cpus = plan.cpus_per_rank if plan.ntasks is not None else plan.cpus_per_node and plan.cpus_per_node // tasks
    if cpus is not None and not (plan.config.cpus_per_gpu and _has_gpus(plan)):
        yield "cpus-per-task", str(max(1, cpus))


def _has_gpus(plan: LaunchPlan) -> bool:
    """Slurm refuses shares of GPUs that weren't asked for."""
    return bool(plan.gpus_per_node) or not no_gpus(plan.config)


def _gpus(plan: LaunchPlan) -> Iterator[Option]:
    """GPUs as the site wants them to be asked for; none at all on a machine that has none."""
    config, count = plan.config, plan.gpus_per_node
    if config.gres is not None:
        yield "gres", config.gres
    asked_in_gres = config.gres is not None and config.gpus_per_node is None and config.gpus_per_task is None
    if (
        not count
        or config.sbatch.gpus is not None
        or asked_in_gres
        or (config.gres is not None and "gpu" in config.gres)
    ):
        return
    kind = f"{config.gpu_type}:" if config.gpu_type else ""
    if config.gpu_request == "gres":
        yield "gres", f"gpu:{kind}{count}"
    elif config.gpu_request == "gpus-per-node" and config.gpus_per_task is None:
        yield "gpus-per-node", f"{kind}{count}"
    else:
        yield "gpus-per-task", f"{kind}{_per_task(count, tasks_per_node(plan))}"


def _per_task(count: int, tasks: int) -> int:
    if count % tasks:
        raise PlanError(
            f"{count} GPUs per node don't divide over {tasks} tasks: use gpu_request=gpus-per-node, or a number of "
            "ranks per node that divides them"
        )
    return count // tasks


def _passed_through(plan: LaunchPlan) -> Iterator[Option]:
    for name, value in plan.config.sbatch.model_dump(exclude_none=True).items():
        alone = value is True or (name in OPTIONALS and value == "true")
        if name == "requeue" and value is False:  # Slurm requeues unless told not to
            yield "no-requeue", None
        if name == "export" and plan.secrets:
            value = exporting(str(value), plan.secrets)
        if value is not False and not (name in OPTIONALS and value == "false"):
            yield name.replace("_", "-"), None if alone else str(value)


def _own_words(word: str) -> str:
    """An option of `sbatch_args`: as it is, quotes included, if sbatch reads it as one word."""
    try:
        alone = len(shlex.split(word)) == 1
    except ValueError:
        alone = False
    name, equals, value = word.partition("=")
    if any(ord(letter) < 32 for letter in word):
        raise PlanError(f"sbatch_args has {word!r}: expected options of one line, such as --name=value")
    return f"#SBATCH {word}" if alone else f"#SBATCH {name}{equals}{shlex.quote(value)}"


def exporting(export: str, names: Iterable[str]) -> str:
    """sbatch's export option that lets variables pass beside those that it names: `NONE` and lists keep others away."""
    said = [] if export.upper() in ("NONE", "NIL") else export.split(",")
    if any(word.upper() == "ALL" for word in said):
        return export
    return ",".join([*said, *(name for name in names if name not in said)])


def _line(name: str, value: str | None) -> str:
    if value is None:
        return f"#SBATCH --{name}"
    setting = name.replace("-", "_")
    if any(ord(letter) < 32 for letter in value):
        raise PlanError(f"{setting}={value!r}: sbatch takes one line of text; write it without breaks")
    if not value.strip():
        raise PlanError(f"{setting}={value!r} is empty: expected a text; to leave it unset write null, or leave it out")
    return f"#SBATCH --{name}={value if _SAFE.fullmatch(value) else shlex.quote(value)}"
