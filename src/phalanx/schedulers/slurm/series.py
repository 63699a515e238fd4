"""What a series needs as Slurm jobs: output files that don't collide, and what it may cost."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ...config import JobConfig
from ...config.walltime import seconds
from ...plan import LaunchPlan
from ..series import Member

_OWN_FILE = re.compile(r"%\d*[jJA]")  # patterns that differ from job to job
_NAMED = re.compile(r"%\d*x")  # and that of the job's name, which repeats share
CONFIRM_ABOVE = 8  # jobs that are submitted without being asked for twice


def output_files(base: JobConfig, config: JobConfig, member: Member) -> dict[str, str]:
    """Output and error of a member, whose settings are `config`, that would otherwise be the same file as another
    member's."""
    found = {}
    repeat = [f"r{member.repeat}"] if base.repeats > 1 else []
    for setting in ("output", "error"):
        pattern = getattr(config, setting)
        if pattern is None or pattern != getattr(base, setting) or _OWN_FILE.search(pattern):
            continue
        folder, slash, leaf = pattern.rpartition("/")
        words = [*([] if _NAMED.search(pattern) else [config.job_name]), *repeat, leaf]
        if len(words) > 1:
            found[setting] = f"{folder}{slash}{'-'.join(map(str, words))}"
    return found


def node_hours(plans: Iterable[LaunchPlan]) -> float:
    """The most that the jobs could use, by their time limits; jobs without one don't count."""
    limits = [(plan.nodes, seconds(plan.config.time) or 0) for plan in plans if plan.config.time]
    return sum(nodes * limit for nodes, limit in limits) / 3600
