"""`phalanx plan`: show what `phalanx run`, or a job with the same options, would start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .. import secret
from ..containers.wrap import shown
from ..deepspeed_config import engine_config
from ..plan import LaunchPlan
from ..shell import Sh, Word, render
from .launch import OPTIONS, plan_of, request_of
from .options import scan
from .run import over_allocation

HELP = """\
usage: phalanx plan [options] [KEY=VALUE]... SCRIPT [script arguments]

Show nodes, ranks, devices, threads, environment and command of a launch, on this machine or on any
number of nodes of a cluster. Nothing is started and nothing is written; SCRIPT need not exist.

      --json             for programs: one object, with an entry a node
      --jobid ID         in the running Slurm job ID; --local: on this machine, also inside an allocation

{options}"""


def main(argv: Sequence[str]) -> int:
    """`argv` without `plan`; the result is the exit code."""
    scanned = scan(argv, script=True, flags=("json", "local"), valued=("jobid",))
    if "help" in scanned.flags:
        print(HELP.format(options=OPTIONS))
        return 0
    request = request_of(scanned, "plan")
    found = over_allocation(request, scanned)
    plan = found[0] if found is not None else plan_of(request)
    if plan.strategy == "deepspeed":
        engine_config(plan.config)
    if "json" in scanned.flags:
        print(plan.to_json())
    else:
        _show(plan)
    return 0


def _show(plan: LaunchPlan) -> None:
    """Two columns; plain text, as loading a library to draw it would take longer than all the rest."""
    rows = list(_rows(plan))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        first, *more = value.split("\n")
        print(f"{name:<{width}}  {first}")
        for line in more:
            print(" " * width, line, sep="  ")


def _rows(plan: LaunchPlan) -> Iterator[tuple[str, str]]:
    """Nodes are summed up: they all hold the same number of ranks."""
    where = f" ({plan.host})" if plan.host else ""
    versions = ", ".join(f"{package} {version}" for package, version in plan.versions.items())
    last = plan.world_size - 1
    yield "script", render(plan.args if plan.script is None else (plan.script, *plan.args))
    yield "strategy", plan.strategy
    yield "launcher", plan.launcher
    yield "nodes", f"{plan.nodes}{where}"
    yield "ranks per node", str(plan.nproc_per_node)
    order = "node by node" if plan.ntasks is None else "as Slurm places them"
    yield "ranks", "1 (rank 0)" if last == 0 else f"{plan.world_size} (ranks 0 to {last}, {order})"
    yield "device", plan.device or "known on the nodes"
    yield "backend", plan.backend or "known on the nodes"
    yield "CPUs per node", _number(plan.cpus_per_node)
    yield "CPUs per rank", _number(plan.cpus_per_rank)
    yield "OMP_NUM_THREADS", plan.omp_num_threads or "known on the nodes"
    yield "loader workers", "each loader's own" if plan.num_workers is None else str(plan.num_workers)
    yield "python", f"{plan.python} ({versions})" if versions else plan.python
    yield "runtime", plan.runtime if plan.runtime == "venv" else shown(plan)
    yield (
        "environment",
        "\n".join(
            f"{name}={secret.HIDDEN if secret.is_secret(name) else _text(value)}"
            for name, value in plan.environment.items()
        ),
    )
    yield "command", render(plan.command) or "none: see notes"
    yield "notes", "\n".join(plan.notes) or "none"


def _text(word: Word) -> str:
    return word.text if isinstance(word, Sh) else word


def _number(count: int | None) -> str:
    return "known on the nodes" if count is None else str(count)
