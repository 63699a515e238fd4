"""Carries out a plan at once: on this machine, or in an allocation that exists."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from .. import claims, shell
from ..config import RESERVED, Loaded, save_run_config
from ..containers import probe
from ..errors import MissingExtraError, PhalanxError, PlanError
from ..planning import conda, engines
from ..planning.plan import LaunchPlan
from ..planning.program import interpreter_of
from ..planning.uses_api import check_dry_run
from ..registry import LAUNCHERS, load
from ..rundir import DRY_CHECKPOINTS, discard, find_run_dir, mark_dry, new_run_dir, shared, write_atomic
from . import failure as verdict
from . import local_notes, process
from .source import save_source

# Variables by which another launch would tell its ranks who they are. Those of Slurm and MPI stay: their
# libraries need them, and a rank of ours takes the ones that its own launcher sets before them.
_INHERITED = (RESERVED - {"PHALANX_SITE"}) | {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "NODE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("HOROVOD_RANK", "HOROVOD_LOCAL_RANK", "HOROVOD_CROSS_RANK"),
    *("HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_SIZE"),
    "SLURM_EXPORT_ENV",  # by which srun would hide from ranks what they are told
}
_INHERITED_PREFIXES = ("TORCHELASTIC_", "PET_")  # PET_* are torchrun's own options


@dataclass(frozen=True)
class Outcome:
    """How a launch ended: `code` is the command's exit code; `lines` say who failed, `culprit` is that rank, and
    `traceback` its own. `stopped`: by a signal to the command. `signal` is the first that came, also if the script
    then ended well."""

    run_dir: Path
    code: int = 0
    lines: tuple[str, ...] = ()
    culprit: int | None = None
    stopped: bool = False
    signal: int | None = None
    traceback: tuple[str, ...] = ()


def run_now(plan: LaunchPlan, loaded: Loaded, run_dir: Path | None = None, take_over: bool = False) -> int:
    """Start the plan's ranks, wait for them, and say who failed; the exit code is the script's.
    What `phalanx status` and `cancel` need to know stands in the run directory meanwhile.

    Raises PlanError or MissingExtraError before anything is written when it can't work.
    """
    noted = local_notes.Noted(local_notes.of_launch(plan, None))
    try:
        outcome = launch(plan, loaded, run_dir, take_over, noted.begin)
    except PhalanxError as error:
        noted.end(error.exit_code, False, (str(error),), None)
        raise
    noted.end(outcome.code, outcome.signal is not None, outcome.lines, outcome.culprit)
    if outcome.lines:
        print("\n".join([*outcome.traceback, *outcome.lines]), file=sys.stderr)
    return outcome.code


def launch(
    plan: LaunchPlan,
    loaded: Loaded,
    run_dir: Path | None = None,
    take_over: bool = False,
    begin: Callable[[Path], None] = lambda _: None,
) -> Outcome:
    """The same, with the words on its end left to the caller; in a run directory that is there, if
    one is given. `begin` is told the run directory once it is claimed; `take_over`: also from an
    attempt that may still run."""
    check(plan)
    resume, new = loaded.config.resume, run_dir is None
    if loaded.config.dry_run:
        loaded = with_source(loaded, plan.name)
    elif run_dir is None and resume is not None:
        run_dir, new = find_run_dir(loaded.config.run_root, plan.name, resume), False
    run_dir = run_dir or new_run_dir(loaded.config.run_root, plan.name, loaded.config.run_permissions)
    launch_id = secrets.token_hex(4)
    me = claims.of_this_process(launch_id, _job(plan))
    with _removed_unless_started(run_dir if new else None), claims.claimed(run_dir, me, take_over):
        begin(run_dir)
        environment = {**_write(plan, loaded, run_dir), "PHALANX_LAUNCH_ID": launch_id}
        print(f"run directory: {run_dir}", file=sys.stderr, flush=True)
        start = time.time()
        ended = process.run(_words(plan), environment)
    shutil.rmtree(run_dir / DRY_CHECKPOINTS, ignore_errors=True)
    return _conclude(plan, run_dir, start, ended)


def _job(plan: LaunchPlan) -> claims.Job | None:
    """The allocation whose end is that of all ranks."""
    if plan.allocation is None:
        return None
    around = claims.job_around(os.environ)
    if around is not None and around.number == plan.allocation.job_id:
        return around
    return claims.Job(claims.cluster_name(os.environ) or "", plan.allocation.job_id)


def with_source(loaded: Loaded, name: str) -> Loaded:
    """A dry run's settings with the path of the run that it goes on from: it has a run directory of its own."""
    resume = loaded.config.resume
    if resume is None:
        return loaded
    source = find_run_dir(loaded.config.run_root, name, resume)
    return replace(loaded, config=loaded.config.model_copy(update={"resume": str(source)}))


def prepare(plan: LaunchPlan, loaded: Loaded) -> Path:
    """A new run directory for a launch to come, with all that is known before it."""
    run_dir = new_run_dir(loaded.config.run_root, plan.name, loaded.config.run_permissions)
    with _removed_unless_started(run_dir):
        _write(plan, loaded, run_dir)
    return run_dir


@contextmanager
def _removed_unless_started(new: Path | None) -> Iterator[None]:
    """A launch that fails before its ranks exist leaves no half-written run directory."""
    try:
        yield
    except (OSError, PlanError, KeyboardInterrupt) as error:
        if new is not None and not (new / "logs").exists():
            discard(new)
        if isinstance(error, OSError):
            raise PlanError(f"cannot write the run directory: {error}") from None
        raise


def _words(plan: LaunchPlan) -> list[str]:
    """The command for exec; one with shell text needs a shell."""
    words = [word for word in plan.command if isinstance(word, str)]
    if len(words) == len(plan.command) and not plan.before:
        return words
    return ["bash", "-c", "\n".join([*plan.before, f"exec {shell.render(plan.command)}"])]


def check(plan: LaunchPlan) -> None:
    """All that can be known to fail before a start. Raises PlanError or MissingExtraError."""
    if plan.allocation is None:
        check_place(plan)
    elif plan.launcher == "mpirun" and not plan.allocation.inside:
        raise PlanError("launcher mpirun finds the nodes only inside the allocation: use --launcher srun or torchrun")
    if not plan.command:
        raise PlanError(f"launcher {plan.launcher} has no single command to run here: use --launcher torchrun")
    if plan.script is not None:
        _check_script(Path(plan.script))
        if plan.config.dry_run:
            check_dry_run(Path(plan.script))
    engines.check(plan)
    probe.check(plan)
    _check_python(plan)
    if plan.runtime != "venv" and (plan.allocation is None or plan.allocation.inside):
        for note in probe.look(plan):
            if not note.startswith("image: "):
                print(f"note: {note}", file=sys.stderr)


def check_place(plan: LaunchPlan) -> None:
    """Whether this machine alone is a place for the plan. Raises PlanError."""
    job = os.environ.get("SLURM_JOB_ID")
    alone, over = _alone(job)
    if plan.nodes > 1:
        raise PlanError(f"{plan.nodes} nodes were asked for, and {alone}: use nodes=1, `phalanx submit`, or {over}")
    needs = load("launcher", LAUNCHERS, plan.launcher).needs
    if needs is not None:
        here = " or ".join(name for name in LAUNCHERS if load("launcher", LAUNCHERS, name).needs is None)
        raise PlanError(
            f"launcher {plan.launcher} needs {needs}, and {alone}: {f'{over}, or ' if job else ''}"
            f"use --launcher {here} (`phalanx plan` shows the command)"
        )
    if plan.config.master_port is not None:
        _check_port(plan.config.master_port)


def _alone(job: str | None) -> tuple[str, str]:
    """Why a launch is on this machine alone, and how it would be over an allocation."""
    if job is None:
        return "`phalanx run` outside an allocation starts on this machine", "--jobid ID of a running job"
    alone = f"this launch is on this machine alone though inside job {job}"
    if shutil.which("srun") is None:
        return f"{alone}, as srun is not on PATH", "put srun on PATH"
    return f"{alone} (--local, or Slurm doesn't say what it holds)", "leave --local out"


def _check_script(script: Path) -> None:
    if not script.exists():
        raise PlanError(f"there is no script {str(script)!r} in {Path.cwd()}: give the path of a python file")
    if not script.is_file():
        raise PlanError(f"script {str(script)!r} is not a file: give the path of a python file")
    if not os.access(script, os.R_OK):
        raise PlanError(f"script {str(script)!r} can't be read: change its permissions")


def _check_python(plan: LaunchPlan) -> None:
    if plan.runtime != "venv":
        program = plan.config.container.executable or plan.runtime
        if plan.allocation is None and shutil.which(program) is None:
            raise PlanError(f"{program} is not on PATH: load its module, or use --runtime venv")
        return
    if plan.config.conda and not conda.is_folder(plan.config.conda):
        raise PlanError(
            f"conda={plan.config.conda!r} is a name, which only a job's script looks up: give the environment's folder "
            "here (conda info --envs lists them)"
        )
    if plan.python != sys.executable:
        if shutil.which(plan.python) is None:
            raise PlanError(f"there is no python at {plan.python}: set venv to a virtual environment's folder")
        if "/" not in plan.python and engines.folder_of(plan.python, "phalanx") == "":
            raise PlanError(
                f"{interpreter_of(plan.config.training_cmd, plan.python)}, and {shutil.which(plan.python)} has no "
                f"phalanx, which the ranks need: set python={sys.executable}, or give the script alone "
                "(training_cmd: train.py)"
            )
    elif plan.launcher == "torchrun" and find_spec("torch") is None:
        raise MissingExtraError("launcher torchrun needs torch, not installed here: pip install 'phalanx[torch]'")


def _check_port(port: int) -> None:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
    except OSError as error:
        raise PlanError(
            f"master_port {port} can't be used on {socket.gethostname()} ({error.strerror}): "
            "choose another, or leave it unset for a free one"
        ) from None


def _write(plan: LaunchPlan, loaded: Loaded, run_dir: Path) -> dict[str, str]:
    """The files that a launch leaves in its run directory; returns the ranks' whole environment."""
    plan = plan.in_run_dir(str(run_dir))
    with shared(run_dir):
        save_run_config(loaded, run_dir)
        if loaded.config.dry_run:
            mark_dry(run_dir)
        write_atomic(run_dir / "plan.json", plan.to_json())
        write_atomic(run_dir / "job.sh", shell.script(plan.command, plan.environment, str(Path.cwd())))
        save_source(Path(plan.script or "."), run_dir)
    own = {name: shell.evaluate(value) for name, value in plan.environment.items()}
    return {**without_other_launches(os.environ), **own}


def without_other_launches(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environ.items()
        if name not in _INHERITED and not name.startswith(_INHERITED_PREFIXES)
    }


def _conclude(plan: LaunchPlan, run_dir: Path, start: float, ended: process.Ended) -> Outcome:
    """Who failed, and the command's exit code."""
    if ended.returncode == 0:
        return Outcome(run_dir, signal=ended.signal)
    if ended.signal is not None:
        return Outcome(
            run_dir, 128 + ended.signal, (f"stopped by {verdict.signal_name(ended.signal)}",), None, True, ended.signal
        )
    attempt = verdict.Attempt(
        run_dir=run_dir,
        since=start,
        returncode=ended.returncode,
        stderr=ended.stderr,
        host=plan.host or socket.gethostname(),
        launcher=plan.launcher,
        world_size=plan.world_size,
        nproc_per_node=plan.nproc_per_node,
    )
    lines, code = verdict.conclude(attempt)
    culprit, _ = verdict.judge(attempt)
    told = tuple(verdict.traceback(culprit, plan.launcher))
    return Outcome(run_dir, code, tuple(lines), culprit.rank if culprit else None, traceback=told)
