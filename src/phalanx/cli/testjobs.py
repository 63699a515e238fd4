"""`phalanx test --submit`: the same as Slurm jobs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..schedulers import local
from ..schedulers.slurm import jobs, outcome, submit
from ..schedulers.slurm.wait import wait_for
from ..testing import results
from . import logs
from .launch import facts_for
from .submit import carry_out

if TYPE_CHECKING:
    from .test import Suite


def submitted(suites: list[Suite], flags: frozenset[str]) -> list[results.Launch]:
    """Preview or submit a job a suite, all at once; with --wait, what they left. Without, nothing is known yet."""
    requests = [suite.request for suite in suites]
    planned = [submit.build(one.loaded, one.program, facts_for(one.loaded)) for one in requests]
    ids = carry_out(planned, flags)
    for job_id in ids:
        print(job_id, flush=True)
    if "wait" not in flags or not ids:
        return []
    try:
        for job_id, job in zip(ids, planned, strict=True):
            logs.main([job_id, "--follow", f"--run-root={_root(job)}"])
    except KeyboardInterrupt:
        print(f"\nno longer waiting; the jobs go on: {' '.join(ids)}", file=sys.stderr)
        raise
    return [_ended(suite, job, job_id) for suite, job, job_id in zip(suites, planned, ids, strict=True)]


def _root(job: submit.Job) -> Path:
    return Path(job.plan.cwd, job.plan.config.run_root)


def _ended(suite: Suite, job: submit.Job, job_id: str) -> results.Launch:
    from .test import launch_of

    code = wait_for([job_id], job.plan.config.sacct)
    found = jobs.with_states(jobs.of_ids(_root(job), [job_id]), job.plan.config.sacct)[0]
    failure = outcome.failure(found) if code else None
    lines, culprit = (failure.lines, failure.culprit) if failure else ((), None)
    left = local.Outcome(found.run_dir, code, lines, culprit.rank if culprit else None)
    return launch_of(suite, job.plan, left)
