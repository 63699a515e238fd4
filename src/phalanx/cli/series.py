"""What a series is on this machine, or within an allocation: its members with their plans, for `run` and `plan`."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

from ..config import JobConfig, Loaded
from ..config.layers import COMMAND_LINE
from ..config.loader import DEFAULT
from ..planning.facts import Facts
from ..planning.plan import LaunchPlan
from ..planning.planner import make_plan
from ..planning.resources import Resources
from ..schedulers import local, local_series, series
from ..schedulers.local_series import Planned
from .launch import Request, facts_for, name_of_member, request_of
from .options import Scanned

if TYPE_CHECKING:
    from ..schedulers.slurm.allocation import Share


def main(scanned: Scanned, request: Request, share: Share | None) -> int:
    """`phalanx run` of a series: the exit code is that of the first member that failed."""
    planned, names = plan_members(scanned, request, share)
    name = series.new_name(names, request.program.name)
    return local_series.run(planned, name, root_option(request.loaded))


def root_option(loaded: Loaded) -> str:
    """What commands on a series need to find its runs, where no file or variable says so."""
    given = loaded.origins.get("run_root", DEFAULT) == COMMAND_LINE
    return f" --run-root {shlex.quote(loaded.config.run_root)}" if given else ""


def plan_members(scanned: Scanned, request: Request, share: Share | None) -> tuple[list[Planned], list[str]]:
    """The members, in the order in which they would run, and what their names begin with.

    What is left out, and what the series sets over the settings, is said on stderr.

    Raises PlanError or ConfigError if one of them can't be planned.
    """
    facts, filled = facts_for(request.loaded), _filled(request.loaded, share).config
    config = request.loaded.config
    sizes, notes = _sizes(request.loaded, filled, facts, share)
    planned, names, origin = [], [], f"--mode {config.mode}"
    for member in series.members(config, sizes):
        ranks = series.ranks_per_node(filled, facts, member.size, local=share is None)
        names.append(name_of_member(scanned, "run", member, origin))
        own = request_of(scanned, "run", member.settings(names[-1], ranks), origin)
        planned.append(plan_one(own, share, facts))
    if not config.strategies:
        planned, left_out = series.able(planned, lambda one: one.plan)
        notes += left_out
    given = [line for one in planned for line in (*one.loaded.overridden, *one.loaded.notes)]
    for note in dict.fromkeys([*notes, *given]):
        print(f"note: {note}", file=sys.stderr)
    return planned, names


def plans(scanned: Scanned, request: Request, share: Share | None) -> list[LaunchPlan]:
    """The members' plans, for one who asks what would be started. Raises PhalanxError if it can't be."""
    found = [one.plan for one in plan_members(scanned, request, share)[0]]
    for plan in found if share is None else ():
        local.check_place(plan)
    return found


def plan_one(own: Request, share: Share | None, facts: Facts) -> Planned:
    """One member, here or over its part of the allocation."""
    if share is None:
        return Planned(make_plan(own.loaded.config, facts, own.program), own.loaded)
    from .run import over_share

    return Planned(*over_share(own, share))


def _filled(loaded: Loaded, share: Share | None) -> Loaded:
    if share is None:
        return loaded
    from ..schedulers.slurm import allocation

    return allocation.fill(loaded, share)


def _sizes(loaded: Loaded, filled: JobConfig, facts: Facts, share: Share | None) -> tuple[list[series.Size], list[str]]:
    """Numbers of processes on one node, or numbers of nodes where there are several."""
    if share is None:
        here = Resources(filled.model_copy(update={"nodes": 1}), facts, local=True)
        return series.sizes_here(filled, here.cpus or 1, here.gpus or 0), []
    nodes, chosen = len(share.allocation.hosts), loaded.origins.get("scalability_nodes", DEFAULT) != DEFAULT
    if filled.mode == "scaling-test" and (filled.scalability_nproc or (nodes == 1 and not chosen)):
        return series.sizes_here(filled, share.cpus_per_node, share.gpus_per_node or 0), []
    return series.sizes_in_allocation(filled, nodes, chosen)
