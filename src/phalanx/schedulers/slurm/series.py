"""A series: one job file as several jobs, one a strategy (runall), or one a strategy and number of nodes."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ... import cells
from ...config import JobConfig
from ...config.walltime import seconds
from ...errors import PlanError
from ...facts import Facts
from ...plan import LaunchPlan
from ...registry import STRATEGIES
from ...resources import Resources

_OWN_FILE = re.compile(r"%\d*[jJxA]")  # patterns that differ from job to job
DEFAULT_STRATEGIES = ("ddp", "horovod", "deepspeed")
CONFIRM_ABOVE = 8  # jobs that are submitted without being asked for twice


@dataclass(frozen=True)
class Member:
    """One job of a series."""

    strategy: str
    nodes: int

    def settings(self, name: str, ranks: int) -> dict[str, str]:
        """What the series sets in this job, above everything else. Job and run get the member's name."""
        full = f"{name}-{self.strategy}-{self.nodes}x{ranks}"
        return {"strategy": self.strategy, "nodes": str(self.nodes), "job_name": full, "name": full}


def output_files(base: JobConfig, member: JobConfig) -> dict[str, str]:
    """Output and error of a member that would otherwise be the same file as another member's."""
    found = {}
    for setting in ("output", "error"):
        pattern = getattr(member, setting)
        if pattern is not None and pattern == getattr(base, setting) and not _OWN_FILE.search(pattern):
            folder, slash, leaf = pattern.rpartition("/")
            found[setting] = f"{folder}{slash}{member.job_name}-{leaf}"
    return found


def members(config: JobConfig) -> list[Member]:
    """The jobs of `mode`, strategy by strategy.

    Raises PlanError if none of them can run, or a strategy that was named can't.
    """
    sizes: Sequence[int] = config.scalability_nodes if config.mode == "scaling-test" else (config.nodes,)
    strategies = config.strategies or _default_strategies(config.launcher, max(sizes))
    for name in strategies:
        if name not in STRATEGIES:
            raise PlanError(f"strategies has {name!r}: expected some of {', '.join(STRATEGIES)}")
        if config.launcher != "auto":
            cells.check(cells.cell(config.launcher, name, "venv", max(sizes)), max(sizes), max(sizes) * 2)
    return [Member(name, count) for name in strategies for count in dict.fromkeys(sizes)]


def _default_strategies(launcher: str, nodes: int) -> list[str]:
    """Those of DEFAULT_STRATEGIES that the launcher can start; ddp, if it is none of them."""
    if launcher == "auto":
        return list(DEFAULT_STRATEGIES)
    pairs = [(name, cells.cell(launcher, name, "venv", nodes)) for name in DEFAULT_STRATEGIES]
    return [name for name, cell in pairs if cells.refusal(cell, 2 * nodes) is None] or ["ddp"]


def node_hours(plans: Iterable[LaunchPlan]) -> float:
    """The most that the jobs could use, by their time limits; jobs without one don't count."""
    limits = [(plan.nodes, seconds(plan.config.time) or 0) for plan in plans if plan.config.time]
    return sum(nodes * limit for nodes, limit in limits) / 3600


def ranks_per_node(config: JobConfig, facts: Facts, member: Member) -> int:
    """How many ranks each of the member's nodes will hold."""
    return Resources(config.model_copy(update={"nodes": member.nodes}), facts, local=False).ranks


def series_name(base: str) -> str:
    """What `phalanx status` and `phalanx cancel` know all its jobs by."""
    return f"{base}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
