"""`phalanx submit`, also called `phalanx generate-slurm`: batch scripts, previewed, saved and submitted."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..config.sbatch import SHORT
from ..containers import probe
from ..errors import UsageError
from ..planning.facts import Facts
from ..planning.plan import LaunchPlan
from ..schedulers import series
from ..schedulers.slurm import client, outcome, submit
from ..schedulers.slurm import jobs as our_jobs
from ..schedulers.slurm import series as slurm_series
from ..schedulers.slurm.limits import check_limits
from ..schedulers.slurm.wait import wait_for
from .launch import OPTIONS, Request, facts_for, name_of_member, request_of, warn_of_misplaced
from .options import Scanned, scan

HELP = """\
usage: phalanx submit [options] [KEY=VALUE]... [SCRIPT [script arguments]]

Write the Slurm batch script that starts SCRIPT (or the settings' training_cmd) as a job, keep it in
save_dir and submit it; the last line on stdout is the job's id. generate-slurm is the same command.

      --preview          only print the script: needs no Slurm and no file that the job needs
      --no-submit-job    only save the script; it works under plain `sbatch FILE`
      --no-save-script   only submit; the run directory keeps its job.sh. With both: as --preview
      --mode NAME        single, runall (a job per strategy) or scaling-test (also per number of nodes);
                         --strategies and --scalability-nodes say which, --repeats how often
      --yes              don't ask before more than 8 jobs
      --chain N          N jobs, each of which goes on where the one before stopped
      --wait             wait for the end; the exit code is the job's
      --force            submit what looks impossible: files or nodes that can't be seen from here
      --take-over        with --resume: though another attempt may still run in the run directory
  -N -n -t -p -A -J …    as sbatch has them; any long option of sbatch is a setting too

{options}

examples:
  phalanx submit -N 2 --gpus-per-node 4 -t 1:00:00 --preview train.py --epochs 3
  phalanx submit -c job.yaml --strategy fsdp nodes=8
  phalanx submit -c job.yaml --mode scaling-test --scalability-nodes 1,2,4"""

_SUBMISSION = (
    *("submit-job", "no-submit-job", "save-script", "no-save-script", "save-dir", "nodes", "ntasks", "time", "qos"),
    *("partition", "account", "job-name", "gpus-per-node", "cpus-per-task", "array", "dependency"),
)
_FLAGS = ("preview", "yes", "wait", "force", "take-over")


def main(argv: Sequence[str]) -> int:
    """`argv` without `submit`; the result is the exit code."""
    scanned = scan(argv, script=True, flags=_FLAGS, valued=("chain",))
    if "help" in scanned.flags:
        print(HELP.format(options=OPTIONS))
        return 0
    chain = _chain(scanned.values.get("chain"))
    if "preview" in scanned.flags:
        overrides = (*scanned.overrides, ("save_script", "false"), ("submit_job", "false"))
        scanned = replace(scanned, overrides=overrides)
    jobs = jobs_of(scanned)
    if chain > 1 and jobs[0].plan.config.dry_run:
        raise UsageError(f"--chain {chain} with --dry-run: a dry run keeps no checkpoint for a next job to go on from")
    warn_of_misplaced(scanned, (*_FLAGS, "chain", *_SUBMISSION), SHORT)
    ids = carry_out(jobs, scanned.flags, chain)
    for job_id in ids:
        print(job_id, flush=True)
    return _wait(ids, jobs[0].plan) if ids and "wait" in scanned.flags else 0


def _wait(ids: list[str], plan: LaunchPlan) -> int:
    """Wait, and say of those that failed what `phalanx status` would."""
    code = wait_for(ids, plan.config.sacct)
    ours = our_jobs.of_ids(Path(plan.cwd, plan.config.run_root), ids) if code else []
    for job in our_jobs.with_states(ours, plan.config.sacct):
        failed = outcome.failure(job)
        for line in failed.lines if failed else ():
            print(f"  {line}", file=sys.stderr)
    return code


def _chain(text: str | None) -> int:
    if text is None:
        return 1
    if not (text.isascii() and text.isdecimal() and int(text) >= 1):
        raise UsageError(f"--chain {text!r}: expected a number of jobs from 1")
    return int(text)


def jobs_of(scanned: Scanned) -> list[submit.Job]:
    """One job, or those of a series: each with settings, `${…}` included, of its own."""
    request = request_of(scanned, "submit")
    facts = facts_for(request.loaded)
    config = request.loaded.config
    if config.mode == "single":
        return [submit.build(request.loaded, request.program, facts)]
    jobs = _members(scanned, request, facts)
    if config.strategies or "force" in scanned.flags:
        return jobs
    jobs, notes = series.able(jobs, lambda job: job.plan)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    return jobs


def _members(scanned: Scanned, request: Request, facts: Facts) -> list[submit.Job]:
    config, origin = request.loaded.config, f"--mode {request.loaded.config.mode}"
    found = series.members(config, series.sizes_of_jobs(config))
    names = [name_of_member(scanned, "submit", member, origin) for member in found]
    settings = [
        member.settings(name, series.ranks_per_node(config, facts, member.size))
        for member, name in zip(found, names, strict=True)
    ]
    own = [request_of(scanned, "submit", one, origin) for one in settings]
    files = slurm_series.output_files([(member, one.loaded.config) for member, one in zip(found, own, strict=True)])
    own = [
        request_of(scanned, "submit", one | more, origin) if more else done
        for done, one, more in zip(own, settings, files, strict=True)
    ]
    series_name = series.new_name(names, request.program.name)
    return [replace(submit.build(one.loaded, one.program, facts), series=series_name) for one in own]


def carry_out(jobs: list[submit.Job], flags: frozenset[str] = frozenset(), chain: int = 1) -> list[str]:
    """Print, save and submit as `save_script` and `submit_job` say; returns the ids of submitted jobs."""
    config = jobs[0].loaded.config
    _say(jobs, chain)
    if not config.submit_job:
        _say_secrets(jobs)
    if not config.save_script and not config.submit_job:
        for job in jobs:
            sys.stdout.write(job.script)
        return []
    if config.submit_job:
        _check(jobs, flags, chain)
    if config.save_script:
        for job in jobs:
            print(f"script: {submit.save(job)}", file=sys.stderr)
    return _submit(jobs, chain) if config.submit_job else []


def _say(jobs: list[submit.Job], chain: int) -> None:
    """On stderr, so that a preview on stdout is the script alone."""
    said: set[str] = set()
    for job in jobs:
        for line in (*job.loaded.overridden, *job.loaded.notes, *job.plan.notes):
            if line not in said:
                print(f"{job.name}: {line}" if len(jobs) > 1 else f"note: {line}", file=sys.stderr)
                said.add(line)
    for warning in dict.fromkeys(warning for job in jobs for warning in submit.warnings(job, chain)):
        print(f"warning: {warning}", file=sys.stderr)


def _say_secrets(jobs: list[submit.Job]) -> None:
    """What plain `sbatch FILE` must find in its environment."""
    names = dict.fromkeys(name for job in jobs for name in job.plan.secrets)
    if names:
        print(
            f"note: {', '.join(names)}: secret, so not in the script; under plain sbatch they must be set in the "
            "environment, and the job ends at once if one isn't",
            file=sys.stderr,
        )


def _check(jobs: list[submit.Job], flags: frozenset[str], chain: int) -> None:
    """All that can be known before anything is written or submitted."""
    client.require("sbatch")
    for job in jobs:
        submit.check_free(job, "take-over" in flags)
    if "force" not in flags:
        partitions = client.partitions()
        for job in jobs:
            submit.check(job)
            check_limits(job.plan, partitions)
        _look_into_images(jobs)
    count = len(jobs) * chain
    if count > slurm_series.CONFIRM_ABOVE and "yes" not in flags:
        _confirm(count, slurm_series.node_hours([job.plan for job in jobs]) * chain)


def _look_into_images(jobs: list[submit.Job]) -> None:
    """Once an image; what its ranks need differs by launcher and strategy."""
    notes = [note for job in jobs if job.plan.runtime != "venv" for note in probe.look(job.plan)]
    for note in dict.fromkeys(notes):
        print(f"note: {note}", file=sys.stderr)


def _confirm(count: int, node_hours: float) -> None:
    what = f"{count} jobs" + (f", up to {node_hours:g} node-hours" if node_hours else "")
    if not sys.stdin.isatty():
        raise UsageError(f"{what}: more than {slurm_series.CONFIRM_ABOVE} are submitted from a terminal, or with --yes")
    print(f"submit {what}? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageError("nothing was submitted")


def _submit(jobs: list[submit.Job], chain: int) -> list[str]:
    """Submit one by one; if one is refused, say what was submitted before it."""
    ids: list[str] = []
    try:
        for number, job in enumerate(jobs, 1):
            before = len(ids)
            run_dir = submit.submit(job, ids, chain)
            count = f"[{number}/{len(jobs)}] " if len(jobs) > 1 else ""
            print(f"{count}{job.name}: job {' '.join(ids[before:])} in {run_dir}", file=sys.stderr, flush=True)
    except BaseException:
        if ids:
            words = " ".join(ids)
            print(f"submitted before this: {words}; cancel with: phalanx cancel {words}", file=sys.stderr)
        raise
    if jobs[0].series is not None:
        print(f"series {jobs[0].series}: phalanx status, cancel and retry take this name", file=sys.stderr)
    return ids
