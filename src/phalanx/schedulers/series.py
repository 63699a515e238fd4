"""A series: one set of settings as several runs, one a strategy (runall) or one a strategy and size (scaling-test).

As jobs a size is a number of nodes; here it is a number of processes.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeVar

from ..config import JobConfig
from ..errors import MissingExtraError, PlanError
from ..planning import cells, engines
from ..planning.facts import Facts
from ..planning.plan import LaunchPlan
from ..planning.program import Program
from ..planning.resources import Resources
from ..registry import STRATEGIES

DEFAULT_STRATEGIES = ("ddp", "horovod", "deepspeed")
_Planned = TypeVar("_Planned")


@dataclass(frozen=True)
class Size:
    """How large a member is; `nproc` None: as many ranks a node as the settings say."""

    nodes: int
    nproc: int | None = None


@dataclass(frozen=True)
class Member:
    """One run of a series: all else is the same for all. `repeat` counts from 1."""

    strategy: str
    size: Size
    repeat: int = 1

    @property
    def own(self) -> dict[str, str]:
        """What tells this run from others, as settings."""
        found = {"strategy": self.strategy, "nodes": str(self.size.nodes)}
        return found if self.size.nproc is None else {**found, "nproc_per_node": str(self.size.nproc)}

    def settings(self, name: str, ranks: int) -> dict[str, str]:
        """What the series sets in this run, above everything else: `name` is that of this member's own settings
        (`x-${strategy}` is another in each), `ranks` are those of a node."""
        full = f"{name}-{self.strategy}-{self.size.nodes}x{ranks}"
        return {**self.own, "job_name": full, "name": full}


def sizes_of_jobs(config: JobConfig) -> list[Size]:
    """The sizes as Slurm jobs."""
    counts = config.scalability_nodes if config.mode == "scaling-test" else (config.nodes,)
    return [Size(nodes) for nodes in dict.fromkeys(counts)]


def sizes_here(config: JobConfig, cpus: int, gpus: int) -> list[Size]:
    """The sizes on one machine that has so many CPUs and GPUs."""
    if config.mode != "scaling-test":
        return [Size(config.nodes)]
    most = gpus if gpus and config.device != "cpu" else cpus
    counts = config.scalability_nproc or [*(2**power for power in range(most.bit_length())), most]
    return [Size(1, count) for count in dict.fromkeys(counts)]


def sizes_in_allocation(config: JobConfig, nodes: int, chosen: bool) -> tuple[list[Size], list[str]]:
    """The sizes within so many nodes, and a note on what is left out; sizes that the user has `chosen` stay, to be
    refused."""
    found = sizes_of_jobs(config)
    large = [size.nodes for size in found if size.nodes > nodes and config.mode == "scaling-test"]
    if not large or chosen:
        return found, []
    note = f"{' and '.join(map(str, large))} nodes are left out: this allocation has {nodes}"
    return [size for size in found if size.nodes <= nodes], [note]


def members(config: JobConfig, sizes: Sequence[Size]) -> list[Member]:
    """The runs of `mode`, strategy by strategy; repeats come after all others, so that they see other minutes.

    Raises PlanError for a strategy that there isn't.
    """
    strategies = config.strategies or _default_strategies(config.launcher, sizes)
    for name in strategies:
        if name not in STRATEGIES:
            raise PlanError(f"strategies has {name!r}: expected some of {', '.join(STRATEGIES)}")
    return [
        Member(name, size, repeat)
        for repeat in range(1, config.repeats + 1)
        for name in dict.fromkeys(strategies)
        for size in sizes
    ]


def _default_strategies(launcher: str, sizes: Sequence[Size]) -> list[str]:
    """Those of DEFAULT_STRATEGIES that the launcher can start; ddp, if it is none of them."""
    if launcher == "auto":
        return list(DEFAULT_STRATEGIES)
    nodes = max(size.nodes for size in sizes)
    processes = max(size.nodes * (size.nproc or 2) for size in sizes)
    pairs = [(name, cells.cell(launcher, name, "venv", nodes)) for name in DEFAULT_STRATEGIES]
    return [name for name, cell in pairs if cells.refusal(cell, processes) is None] or ["ddp"]


def able(planned: Sequence[_Planned], plan_of: Callable[[_Planned], LaunchPlan]) -> tuple[list[_Planned], list[str]]:
    """Those whose strategy the ranks' environment has the packages for, and a note on each strategy that is left out:
    for strategies that nobody has named.

    Raises what is wrong with the first, if none is left.
    """
    wrong: dict[str, Exception | None] = {}
    for item in planned:
        plan = plan_of(item)
        if plan.strategy not in wrong:
            wrong[plan.strategy] = _missing(plan)
    left_out = {name: error for name, error in wrong.items() if error is not None}
    if left_out and len(left_out) == len(wrong):
        raise next(iter(left_out.values()))
    notes = [f"the series leaves out {name}: {error}" for name, error in left_out.items()]
    return [item for item in planned if plan_of(item).strategy not in left_out], notes


def _missing(plan: LaunchPlan) -> Exception | None:
    try:
        engines.check(plan)
    except (MissingExtraError, PlanError) as error:
        return error
    return None


def ranks_per_node(config: JobConfig, facts: Facts, size: Size, local: bool = False) -> int:
    """How many ranks each of a member's nodes will hold."""
    if size.nproc is not None:
        return size.nproc
    return Resources(config.model_copy(update={"nodes": size.nodes}), facts, local).ranks


def base_name(config: JobConfig, program: Program) -> str:
    """What the names of the series and of its members begin with."""
    return (config.job_name or "").replace("/", "_") or config.name or program.name


def new_name(names: Sequence[str], otherwise: str) -> str:
    """What `phalanx status`, `cancel` and `retry` know all its runs by: what its members' `names` begin with, as whole
    words; `otherwise` where that is nothing."""
    words = zip(*(re.split(r"(?<=[-_.])", name) for name in names), strict=False)
    base = "".join(first for first, *_ in takewhile(lambda same: len(set(same)) == 1, words)).strip("-_.") or otherwise
    return f"{base}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
