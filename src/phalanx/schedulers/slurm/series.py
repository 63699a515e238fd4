"""What a series needs as Slurm jobs: output files that don't collide, and what it may cost."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from ...config import JobConfig
from ...config.walltime import seconds
from ...planning.plan import LaunchPlan
from ..series import Member

_OWN_FILE = re.compile(r"%\d*[jJA]")  # patterns that differ from job to job
_NAMED = re.compile(r"%\d*x")  # and that of the job's name, which repeats share
CONFIRM_ABOVE = 8  # jobs that are submitted without being asked for twice


def output_files(members: Sequence[tuple[Member, JobConfig]]) -> list[dict[str, str]]:
    """For each member with its settings: output and error that would otherwise be the same file as another member's."""
    found: list[dict[str, str]] = [{} for _ in members]
    for setting in ("output", "error"):
        sharing: dict[str, list[int]] = defaultdict(list)
        for index, (_, config) in enumerate(members):
            pattern = getattr(config, setting)
            if pattern is not None and not _OWN_FILE.search(pattern):
                sharing[str(config.job_name).join(_NAMED.split(pattern))].append(index)
        for group in sharing.values():
            if len(group) > 1:
                _tell_apart(setting, [members[index] for index in group], [found[index] for index in group])
    return found


def _tell_apart(setting: str, sharing: Sequence[tuple[Member, JobConfig]], found: Sequence[dict[str, str]]) -> None:
    """Put before the file's name what differs among those that share it: their names, their repeats, or both."""
    names, repeats = ({config.job_name for _, config in sharing}, {member.repeat for member, _ in sharing})
    for (member, config), changes in zip(sharing, found, strict=True):
        folder, slash, leaf = getattr(config, setting).rpartition("/")
        own = [str(config.job_name)] * (len(names) > 1) + [f"r{member.repeat}"] * (len(repeats) > 1)
        changes[setting] = f"{folder}{slash}{'-'.join([*own, leaf])}"


def node_hours(plans: Iterable[LaunchPlan]) -> float:
    """The most that the jobs could use, by their time limits; jobs without one don't count."""
    limits = [(plan.nodes, seconds(plan.config.time) or 0) for plan in plans if plan.config.time]
    return sum(nodes * limit for nodes, limit in limits) / 3600
