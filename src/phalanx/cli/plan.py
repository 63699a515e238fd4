"""`phalanx plan`: show what `phalanx run`, or a job with the same options, would start."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .. import secret
from ..config.deepspeed import engine_config
from ..containers.wrap import shown
from ..errors import PhalanxError
from ..planning.plan import LaunchPlan
from ..shell import Sh, Word, render
from .launch import OPTIONS, Request, plan_of, request_of
from .options import Scanned, scan
from .run import find_share, over_allocation

HELP = """\
usage: phalanx plan [options] [KEY=VALUE]... SCRIPT [script arguments]

Show nodes, ranks, devices, threads, environment and command of a launch, on this machine or on any
number of nodes of a cluster; of a series (--mode), its members. Nothing is started and nothing is written;
SCRIPT need not exist.

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
    if request.loaded.config.mode != "single":
        return _series(scanned, request)
    found = over_allocation(request, scanned)
    plan = found[0] if found is not None else plan_of(request)
    if plan.strategy == "deepspeed":
        engine_config(plan.config)
    if "json" in scanned.flags:
        print(plan.to_json())
    else:
        _show(plan)
    return 0


def _series(scanned: Scanned, request: Request) -> int:
    """The members: those of a series here or in the allocation, and those of one of jobs. Raises PhalanxError if there
    can be neither."""
    from . import series, submit

    share = find_share(scanned)
    here = f"in job {share.allocation.job_id}" if share is not None else "on this machine"
    found = {
        "run": _planned(lambda: series.plans(scanned, request, share)),
        "submit": _planned(lambda: [job.plan for job in submit.jobs_of(scanned)]),
    }
    if isinstance(found["run"], PhalanxError) and isinstance(found["submit"], PhalanxError):
        raise found["run"]
    if "json" in scanned.flags:
        print(json.dumps({name: _plain(plans) for name, plans in found.items()}, indent=1))
        return 0
    for name, where in (("run", f"one after the other {here}"), ("submit", "as jobs of Slurm")):
        repeats = request.loaded.config.repeats
        print(f"phalanx {name}, {where}{f', each {repeats} times' if repeats > 1 else ''}:")
        plans = found[name]
        for line in [f"  can't be: {plans}"] if isinstance(plans, PhalanxError) else _table(plans):
            print(line)
    return 0


def _planned(plans: Callable[[], list[LaunchPlan]]) -> list[LaunchPlan] | PhalanxError:
    """Of the two ways, one may not be possible with the settings that the other needs."""
    try:
        return plans()
    except PhalanxError as error:
        return error


def _plain(plans: list[LaunchPlan] | PhalanxError) -> Any:
    return {"error": str(plans)} if isinstance(plans, PhalanxError) else [plan.as_dict() for plan in plans]


def _table(plans: list[LaunchPlan]) -> Iterator[str]:
    rows = [("NAME", "STRATEGY", "LAUNCHER", "NODES x RANKS", "DEVICE")]
    for plan in plans:
        size = f"{plan.nodes} x {plan.nproc_per_node}"
        rows.append((plan.name, plan.strategy, plan.launcher, size, plan.device or "known on the nodes"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in dict.fromkeys(rows):
        yield "  " + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()


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
        "\n".join(f"{name}={secret.shown(name, _text(value))}" for name, value in plan.environment.items()),
    )
    yield "command", render(plan.command) or "none: see notes"
    yield "notes", "\n".join(plan.notes) or "none"


def _text(word: Word) -> str:
    return word.text if isinstance(word, Sh) else word


def _number(count: int | None) -> str:
    return "known on the nodes" if count is None else str(count)
