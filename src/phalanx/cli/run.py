"""`phalanx run`: start a script at once, on this machine or over the allocation around the command."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..config import Loaded
from ..errors import PlanError, SchedulerError
from ..planning.plan import LaunchPlan
from ..planning.planner import make_plan
from ..schedulers.local import run_now
from .launch import OPTIONS, Request, facts_for, plan_of, request_of, warn_of_misplaced
from .options import Scanned, scan

if TYPE_CHECKING:
    from ..schedulers.slurm.allocation import Share

HELP = """\
usage: phalanx run [options] [KEY=VALUE]... SCRIPT [script arguments]

Start SCRIPT on this machine or, inside a Slurm allocation, over all its nodes. Its output goes to the
terminal from rank 0 and to logs/ in the run directory from the others. The exit code is the script's;
when a rank fails the others are ended, and the last lines say which failed, why, and where its log is.

      --mode NAME        single, runall (a run per strategy) or scaling-test (also per number of processes, or
                         of nodes in an allocation), one after the other; --strategies and --scalability-nproc
                         or --scalability-nodes say which, --repeats how often
      --jobid ID         over the running Slurm job ID, from outside it
      --local            on this machine, also on a cluster's login node or inside an allocation
      --take-over        with --resume: though another attempt may still run in the run directory

{options}

examples:
  phalanx run --nproc 2 train.py --epochs 3
  phalanx run -c base.yaml -c big.yaml --strategy fsdp --precision bf16 train.py
  phalanx run --resume latest --nproc gpu train.py
  salloc -N 2 phalanx run --launcher srun --nproc 4 train.py
  phalanx run --mode scaling-test --strategies ddp,fsdp --scalability-nproc 1,2,4 train.py"""


def main(argv: Sequence[str]) -> int:
    """`argv` without `run`; the result is the exit code."""
    scanned = scan(argv, script=True, flags=("local", "take-over"), valued=("jobid",))
    if "help" in scanned.flags:
        print(HELP.format(options=OPTIONS))
        return 0
    request = request_of(scanned, "run")
    warn_of_misplaced(scanned, ("local", "jobid"))
    share = find_share(scanned)
    if share is None:
        refuse_login_node(scanned, "phalanx submit", "phalanx run")
    if request.loaded.config.mode != "single":
        from . import series

        return series.main(scanned, request, share)
    plan, loaded = over_share(request, share) if share is not None else (plan_of(request), request.loaded)
    return run_now(plan, loaded, take_over="take-over" in scanned.flags)


def refuse_login_node(scanned: Scanned, submit: str, run: str) -> None:
    """Raise PlanError where ranks would start on a cluster's login node without having been asked to."""
    if "SLURM_JOB_ID" not in os.environ and "local" not in scanned.flags and _login_node():
        raise PlanError(
            f"this is a node of a Slurm cluster outside any job: use `{submit}`, `salloc … {run} …` or "
            "--jobid ID, or --local to train right here"
        )


def over_allocation(request: Request, scanned: Scanned) -> tuple[LaunchPlan, Loaded] | None:
    """The plan for the allocation that was named or is around this process; None where the launch is local."""
    share = find_share(scanned)
    return over_share(request, share) if share is not None else None


def find_share(scanned: Scanned) -> Share | None:
    """What the allocation gives that was named or is around this process, if any."""
    job = _allocation(scanned)
    return _share(job, "jobid" in scanned.values) if job is not None else None


def _allocation(scanned: Scanned) -> str | None:
    given = scanned.values.get("jobid")
    if given is not None and "local" in scanned.flags:
        raise PlanError(f"--jobid {given} and --local are two different places: give one of them")
    if "local" in scanned.flags:
        return None
    from ..schedulers.slurm import allocation

    several = allocation.one_of_several(os.environ)
    if several is not None:
        raise PlanError(
            f"{several}: a launcher (srun, mpirun, torchrun, horovodrun) started this command in each of its "
            "tasks, and each would train a world of its own. Give it once, in the batch script, in salloc's "
            "shell or on this machine, and it starts ranks on all nodes of an allocation itself; or start "
            "the script itself in each task (srun … python -m phalanx.worker SCRIPT); or add --local, which means a "
            "run of its own for each task"
        )
    if given is None and "SLURM_HET_SIZE" in os.environ:
        raise PlanError(allocation.heterogeneous(os.environ.get("SLURM_JOB_ID", "")) + "; or add --local")
    return given or (allocation.current(os.environ) if "SLURM_JOB_ID" in os.environ else None)


def _share(job: str, named: bool) -> Share | None:
    """What the allocation gives. One that is only known from the environment may not be one (a shell by ssh, a
    container without Slurm's key): then the launch is local, and that is said."""
    from ..schedulers.slurm import allocation

    try:
        return allocation.find(job, os.environ)
    except (PlanError, SchedulerError) as error:
        if named:
            raise
        print(f"note: SLURM_JOB_ID={job}, but {error}; starting on this machine", file=sys.stderr)
        return None


def over_share(request: Request, share: Share) -> tuple[LaunchPlan, Loaded]:
    """The plan for an allocation, and the settings with what it says."""
    from ..schedulers.slurm import allocation

    loaded = allocation.fill(request.loaded, share)
    plan = make_plan(loaded.config, facts_for(loaded), request.program, allocation=share.allocation)
    meeting = allocation.meeting_point(share, loaded.config.host_suffix)
    return replace(plan, environment={**plan.environment, **meeting}), loaded


def _login_node() -> bool:
    """Whether a Slurm cluster answers from here; having its commands alone means little."""
    if shutil.which("sbatch") is None:
        return False
    from ..schedulers.slurm import client

    return client.answers()
