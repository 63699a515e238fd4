"""`phalanx retry`: the failed runs of a series once more, and only those."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from .. import claims
from ..config import Loaded, load_config
from ..config.saved import CONFIG_FILE
from ..errors import PlanError, UsageError
from ..planning.facts import Facts
from ..planning.program import Program
from ..schedulers import local_series
from ..schedulers.local import run_now
from ..schedulers.local_series import Planned
from ..schedulers.slurm import client, jobs, outcome, resubmit
from ..schedulers.slurm.jobs import OurJob
from ..shell import Sh, Word
from .jobs import OPTIONS, Wanted, read
from .launch import Request, facts_for

HELP = """\
usage: phalanx retry JOB...

Run those runs of each JOB (a series, mostly) once more whose newest job failed, was cancelled or ran out of time;
nothing else is touched. Each goes on in its run directory with the settings and the script that are written there:
from its newest checkpoint, or from the beginning if it saved none. Slurm jobs are submitted, and the last lines on
stdout are their ids; what `phalanx run` has started runs here, one after the other.

      --take-over        though another attempt may still run in the run directory

{options}"""


def main(argv: Sequence[str]) -> int:
    """`argv` without `retry`; the result is the exit code."""
    wanted = read(argv, flags=("take-over",))
    if "help" in wanted.scanned.flags:
        print(HELP.format(options=OPTIONS))
        return 0
    if not wanted.targets:
        raise UsageError("no job given: expected phalanx retry SERIES; phalanx status lists them")
    runs = jobs.newest(jobs.with_states(wanted.chosen(), wanted.config.sacct))
    failed = [run for run in runs if run.failed]
    if not failed:
        said = ", ".join(f"{run.name} is {_state(run)}" for run in runs)
        print(f"nothing to retry: {said}")
        return 0
    local = [run for run in failed if run.local is not None]
    take_over = "take-over" in wanted.scanned.flags
    planned = _plan_local(local, [run for run in runs if run.local is not None])
    for run in local:
        claims.check(run.run_dir, take_over)
    _submit([run for run in failed if run.local is None], wanted.config.sacct, take_over)
    return max((_run_local(one, wanted) for one in planned.items()), default=0)


def _state(run: OurJob) -> str:
    unknown = run.state.state == "UNKNOWN" and run.state.reason
    return f"UNKNOWN ({run.state.reason})" if unknown else run.state.state


def _submit(failed: list[OurJob], sacct: str, take_over: bool) -> None:
    """Check all, then submit one by one, each of which is said at once."""
    if failed:
        client.require("sbatch")
    for run in failed:
        resubmit.check(run, sacct, take_over)
    for run in failed:
        job_id = resubmit.resubmit(run)
        print(f"{run.name}: job {job_id} in {run.run_dir}, after {run.job_id}: {run.state.state}", file=sys.stderr)
        print(job_id, flush=True)


def _plan_local(failed: list[OurJob], all_runs: list[OurJob]) -> dict[str, list[Planned]]:
    """By series. Raises PlanError for what can't be run now, or not here."""
    for run in all_runs:
        if not run.state.finished and run.series:
            raise PlanError(
                f"{run.name} of series {run.series} is {run.state.state}: two at once would measure each other; wait "
                f"for the end, or phalanx cancel {run.series}"
            )
    planned: dict[str, list[Planned]] = {}
    for run in failed:
        planned.setdefault(run.series or "", []).append(_plan(run))
    return planned


def _plan(run: OurJob) -> Planned:
    """The same launch, from what the run directory says."""
    note = run.local
    assert note is not None
    resubmit.check_secrets(run.run_dir, os.environ)
    if note.allocation is None and note.runner.host != platform.node():
        raise PlanError(f"{run.name} ran on host {note.runner.host}, and this is {platform.node()}: retry it there")
    if not Path(note.cwd).is_dir():
        raise PlanError(f"{run.name} was started in {note.cwd}, which is no folder any more: start it anew")
    os.chdir(note.cwd)
    request = Request(_saved_settings(run.run_dir), _program(run.run_dir))
    return _over(request, note.allocation, facts_for(request.loaded), run)


def _over(request: Request, allocation: str | None, facts: Facts, run: OurJob) -> Planned:
    from .options import Scanned
    from .run import find_share
    from .series import plan_one

    share = find_share(Scanned()) if allocation is not None else None
    if allocation is not None and share is None:
        raise PlanError(f"{run.name} ran in allocation {allocation}: retry it within one, salloc … phalanx retry …")
    one = plan_one(request, share, facts)
    return Planned(one.plan, one.loaded, run.run_dir)


def _saved_settings(run_dir: Path) -> Loaded:
    """Those of the run, whatever is in the environment now."""
    environ = {name: text for name, text in os.environ.items() if not name.startswith("PHALANX_")}
    return load_config([run_dir / CONFIG_FILE], (), environ)


def _program(run_dir: Path) -> Program:
    plan = outcome.plan_of(run_dir)
    try:
        args: list[Word] = [word if isinstance(word, str) else Sh(word["shell"]) for word in plan["args"]]
        return Program(plan["script"], tuple(args))
    except (KeyError, TypeError):
        raise PlanError(f"{run_dir / 'plan.json'} doesn't say what ran: start it anew") from None


def _run_local(one: tuple[str, list[Planned]], wanted: Wanted) -> int:
    """A series, or runs that belong to none."""
    series, planned = one
    if series:
        return local_series.run(planned, series, wanted.root_option)
    return max(run_now(run.plan, run.loaded, run.run_dir) for run in planned)
