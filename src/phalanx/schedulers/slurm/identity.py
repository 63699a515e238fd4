"""Whose a job's number is: numbers repeat on other clusters, and where a cluster's counter began
anew."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...claims import cluster_name
from ...errors import PhalanxError
from ...rundir import write_atomic
from . import client

if TYPE_CHECKING:
    from .jobs import OurJob
    from .states import JobState

_SKEW = 120.0  # seconds between a submission and our note of it, in notes that lack Slurm's own time
_AT_ONCE = 10.0


def here() -> str | None:
    """The cluster that Slurm's commands talk to; None if that isn't known."""
    return cluster_name(os.environ)


def keep(path: Path, note: dict[str, Any], new: tuple[str, str | None]) -> None:
    """Write down a job just submitted, at once, and then with what Slurm says of it. `new` is its
    id, and its cluster's name if sbatch told it. What an earlier job of this number left is not
    this one's."""
    if path.exists():
        for left in (".start", ".exit", ".stopped", ".notrun", ".verdict"):
            path.with_suffix(left).unlink(missing_ok=True)
    write_atomic(path, json.dumps({**note, "cluster": new[1]}))
    write_atomic(path, json.dumps({**note, **_told(*new)}))


def _told(job_id: str, cluster: str | None) -> dict[str, Any]:
    """`cluster` is the one that sbatch named, if it did."""
    mine = here()
    kept: dict[str, Any] = {"cluster": cluster or mine}
    if cluster in (None, mine):
        try:
            said = client.show_job(job_id) or {}
        except PhalanxError:  # it is busy; our own clock and the plan's name must do
            said = {}
        kept |= {"job_name": said["JobName"]} if said.get("JobName") else {}
        kept |= {"slurm_submitted": unix(said.get("SubmitTime", ""))}
    return kept


def unix(stamp: str) -> float | None:
    """Slurm's local time as Unix time."""
    try:
        return time.mktime(time.strptime(stamp, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None


def is_ours(job: OurJob, said: JobState) -> bool:
    """Whether what Slurm says of the number is about the job that was noted. Its name may have been
    changed since, and a requeue renews the time of submission: both at once are another job."""
    if said.submitted is None:
        return True
    named = not (said.name and job.job_name) or said.name == job.job_name
    requeued = said.restarts is None or said.restarts > 0  # sacct doesn't tell
    if job.slurm_submitted is not None:
        later = requeued and named and said.submitted > job.slurm_submitted
        return said.submitted == job.slurm_submitted or later
    away = said.submitted - job.submitted
    if job.by_hand:  # all that is known is when its directory was made
        return requeued or away <= _SKEW
    if abs(away) <= _SKEW:
        return named or abs(away) <= _AT_ONCE
    return requeued and named and away > 0


def on_another_cluster(cluster: str | None, mine: str | None) -> bool:
    """False also where one of the two isn't known, as in old notes."""
    return bool(cluster and mine) and cluster != mine
