"""A run's job once more: the same script in the same run directory, where it goes on from its newest checkpoint."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

from ... import secret
from ...errors import PlanError
from . import client, identity, in_use, outcome
from .jobs import OurJob
from .submit import submission_environment, with_secrets

_OUTPUT = re.compile(r"^#SBATCH --output[= ]", re.MULTILINE)


def check(job: OurJob, sacct: str, take_over: bool) -> None:
    """Raise PlanError for a run whose job can't be submitted once more; `take_over`: also where one
    may still run."""
    if job.run_dir.name.startswith("array-"):
        task = job.run_dir.name.removeprefix("array-")
        raise PlanError(f"job {job.job_id} is a task of an array: submit that one anew, with --array {task}")
    if not (job.run_dir / "job.sh").is_file() or not (job.run_dir / "jobs" / f"{job.job_id}.json").is_file():
        raise PlanError(f"{job.run_dir} has no job.sh of phalanx submit: submit its script by sbatch, as before")
    check_secrets(job.run_dir, os.environ)
    in_use.check(job.run_dir, None, sacct, take_over)


def check_secrets(run_dir: Path, environ: Mapping[str, str]) -> None:
    """What a run directory doesn't keep must be in the environment. Raises PlanError that names what isn't."""
    missing = [name for name in _secrets(run_dir) if name not in environ]
    if missing:
        raise PlanError(f"{', '.join(missing)}: secret, so not kept in {run_dir}: set it in the environment, and retry")


def _secrets(run_dir: Path) -> list[str]:
    kept = outcome.plan_of(run_dir)
    hidden = [name for name, text in kept.get("environment", {}).items() if text == secret.HIDDEN]
    return list(dict.fromkeys([*hidden, *kept.get("secrets", [])]))


def resubmit(job: OurJob) -> str:
    """The new job's id. Raises SchedulerError with sbatch's words if it refuses."""
    script = (job.run_dir / "job.sh").read_text(encoding="utf-8")
    words = [str(job.run_dir / "job.sh"), str(job.run_dir)]
    if not _OUTPUT.search(script):
        words.insert(0, f"--output={str(job.run_dir).replace('%', '%%')}/slurm-%j.out")
    names = {name: os.environ[name] for name in _secrets(job.run_dir)}
    new = client.submit_to(words, with_secrets(submission_environment(script), names))
    note = json.loads((job.run_dir / "jobs" / f"{job.job_id}.json").read_text(encoding="utf-8"))
    note |= {"job_id": new[0], "submitted": time.time(), "chain": None, "after": None}
    identity.keep(job.run_dir / "jobs" / f"{new[0]}.json", note, new)
    return new[0]
