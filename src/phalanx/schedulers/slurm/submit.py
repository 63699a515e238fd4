"""Carries out a plan as a Slurm job: its run directory, its script, sbatch."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ...batch import syntax
from ...batch.directives import exporting
from ...batch.script import Inserts, render_script
from ...config import Loaded, save_run_config, walltime
from ...config.saved import run_config_text
from ...containers import probe
from ...environments import environment_warnings
from ...errors import PlanError
from ...planning import conda, engines, texts
from ...planning.facts import Facts
from ...planning.plan import LaunchPlan
from ...planning.planner import make_plan
from ...planning.program import Program, interpreter_of
from ...planning.uses_api import check_dry_run
from ...rundir import discard, find_run_dir, make_folder, mark_dry, new_run_dir, shared, write_atomic
from ...shell import Word, evaluate
from ..local import with_source, without_other_launches
from ..source import save_snapshot, save_source, tracked
from . import client, identity, in_use
from .output import before_submission, expand_pattern, unknown_patterns
from .unused import unused

_DRY_TIME, _DRY_SECONDS = "00:15:00", 900
_RUNS_ON, _ARRAYS = "slurm-%j.out", "slurm-%A_%a.out"
# sbatch's variables whose names are not their options'.
_INPUT = {
    **{"time": "TIMELIMIT", "mem": "MEM_PER_NODE", "array": "ARRAY_INX", "switches": "REQ_SWITCH"},
    **{"requeue": "NO_REQUEUE", "no-requeue": "REQUEUE", "gres": "GPUS_PER_NODE", "gpus-per-node": "GRES"},
}
_JOBS_OWN = ("SLURM_", "SRUN_", "PMI_", "PMIX_")
_PATHS = ("output", "error", "chdir", "run_root", "venv", "conda", "python", "save_dir", "pre_exec_file", "exec_file")
_VARIABLE = re.compile(r"\$([A-Za-z_]\w*)", re.ASCII)
_NAME = re.compile(r"[^\w@%+=:,.-]+", re.ASCII)


@dataclass(frozen=True)
class Job:
    """A job that could be submitted: settings, plan, and the script as it would be."""

    loaded: Loaded
    plan: LaunchPlan
    script: str
    series: str | None = None

    @property
    def name(self) -> str:
        return self.loaded.config.job_name or self.plan.name


def build(loaded: Loaded, program: Program, facts: Facts) -> Job:
    """Plan and render; reads `pre_exec_file` and `exec_file`, writes nothing.

    Raises PlanError for what Slurm could not run.
    """
    loaded = with_paths(loaded, os.environ)
    if loaded.config.dry_run:
        loaded = _short(loaded)
    loaded = _conda(loaded, facts.cwd)
    plan = make_plan(loaded.config, facts, program, for_slurm=True)
    inserts = Inserts(
        file_text(loaded.config.pre_exec_file, "pre_exec_file", plan.cwd),
        file_text(loaded.config.exec_file, "exec_file", plan.cwd),
    )
    config = plan.config
    texts = {"before": config.before, "pre_exec_file": inserts.before, "after": config.after}
    own = {"exec_command": config.exec_command, "exec_file": inserts.launch, "training_cmd": config.training_cmd}
    syntax.check_waited_for(own)
    syntax.check({**texts, **own, "container.pre": config.container.pre})
    return Job(loaded, plan, render_script(plan, run_config_text(loaded), inserts))


def _conda(loaded: Loaded, cwd: str) -> Loaded:
    """`venv` may be a conda environment's folder, which is entered in another way."""
    venv = loaded.config.venv
    if venv is None or loaded.config.conda or not conda.is_environment(Path(cwd, venv)):
        return loaded
    folder = str(Path(cwd, venv))
    return replace(loaded, config=loaded.config.model_copy(update={"venv": None, "conda": folder}))


def _short(loaded: Loaded) -> Loaded:
    """A dry run's settings: a quarter of an hour at most, which lets a job start where long ones wait."""
    config = loaded.config
    limit = walltime.seconds(config.time) if config.time else None
    if limit is not None and limit <= _DRY_SECONDS:
        return loaded
    return replace(loaded, config=config.model_copy(update={"time": _DRY_TIME}))


def with_paths(loaded: Loaded, environ: Mapping[str, str]) -> Loaded:
    """The settings with `~` and `$NAME` in paths replaced, as Slurm and quoting replace neither.

    Raises PlanError for a variable that isn't set.
    """
    update = {}
    for name in _PATHS:
        text = getattr(loaded.config, name)
        if text and ("$" in text or text.startswith("~")):
            update[name] = str(Path(_expanded(text, name, environ)).expanduser())
    return replace(loaded, config=loaded.config.model_copy(update=update)) if update else loaded


def _expanded(text: str, setting: str, environ: Mapping[str, str]) -> str:
    missing = [name for name in _VARIABLE.findall(text) if name not in environ]
    if missing:
        raise PlanError(f"{setting} has ${missing[0]}, which is not set here: write the path, or set the variable")
    return _VARIABLE.sub(lambda found: environ[found[1]], text)


def file_text(name: str | None, setting: str, cwd: str) -> str:
    if name is None:
        return ""
    try:
        text = Path(cwd, name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{setting}={name!r} can't be read ({error}): expected a file of shell lines") from None
    texts.refuse_secret(f"{setting}={name!r}", text)
    return text


def save(job: Job) -> Path:
    """Keep the script in `save_dir`, under the job's name; a different script of that name stays."""
    folder = Path(job.plan.cwd, job.loaded.config.save_dir)
    stem = _NAME.sub("_", job.name).strip(".") or "job"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for count in range(1, 10_000):
            path = folder / (f"{stem}.sh" if count == 1 else f"{stem}-{count}.sh")
            if not path.exists():
                write_atomic(path, job.script)
                path.chmod(0o755)
                _make_output_folders(job)
                return path
            if path.read_text(encoding="utf-8", errors="replace") == job.script:
                _make_output_folders(job)
                return path
    except OSError as error:
        raise PlanError(f"cannot save the script in {folder}: {error.strerror}; set save_dir=DIR") from None
    raise PlanError(f"{folder} holds too many scripts named {stem}: set save_dir=DIR")


def check(job: Job) -> None:
    """What would fail only after hours in the queue; raises PlanError."""
    plan = job.plan
    if plan.config.chdir and not Path(plan.config.chdir).is_dir():
        raise PlanError(
            f"chdir={plan.config.chdir!r} is no folder here: a job that can't enter it fails without a word"
        )
    engines.check(plan)
    probe.check(plan)
    if plan.config.snapshot:
        _check_snapshot(plan)
    folder = plan.config.chdir or plan.cwd
    if plan.script is not None and not Path(folder, plan.script).is_file():
        raise PlanError(
            f"there is no script {plan.script!r} in {folder}: give the path of a python file (--force submits all "
            "the same, for a file that only the nodes see)"
        )
    if plan.script is not None and plan.config.dry_run:
        check_dry_run(Path(folder, plan.script))
    _check_python(plan)


def _check_python(plan: LaunchPlan) -> None:
    """The ranks' Python, as far as it can be seen from here. Raises PlanError."""
    config = plan.config
    known_there = config.conda or config.before or config.pre_exec_file or config.modules.steps
    own_lines = config.exec_command or config.exec_file
    if plan.runtime == "venv" and "/" not in plan.python and not (known_there or own_lines):
        found = shutil.which(plan.python)
        if found is None or engines.folder_of(found, "phalanx") == "":
            raise PlanError(
                f"{interpreter_of(config.training_cmd, plan.python)}, and {found or 'there is none on PATH'}"
                f"{' has no phalanx' if found else ''}, which the ranks need: set python={sys.executable}, or "
                "venv or conda, to an environment that has it, or give the script alone (training_cmd: train.py)"
            )
    if plan.runtime == "venv" and "/" in plan.python and shutil.which(plan.python) is None:
        raise PlanError(
            f"there is no python at {plan.python}: set venv to a virtual environment's folder, or python (--force "
            "submits all the same, for one that only the nodes see)"
        )


def _check_snapshot(plan: LaunchPlan) -> None:
    top, names = tracked(Path(plan.cwd))
    script = Path(plan.cwd, plan.script or ".").resolve()
    inside = script.is_relative_to(top.resolve())
    if plan.script is not None and inside and script.relative_to(top.resolve()).as_posix() not in names:
        raise PlanError(f"snapshot=true copies what git tracks, and {plan.script!r} is not: git add it")


def warnings(job: Job, chain: int = 1) -> list[str]:
    """What may be meant, but often isn't."""
    config = job.loaded.config
    found = unused(job.loaded, job.plan)
    if chain > 1 and config.checkpoint.every_steps is None:
        found.append(
            f"--chain {chain} without checkpoint.every_steps: each job begins anew, unless the script saves by itself "
            "(run.save())"
        )
    if job.plan.cpus_per_node is None and job.plan.launcher != "python":
        found.append("cpus_per_task is unset: Slurm gives a task one CPU, which all ranks of a node then share")
    if config.time is None:
        found.append("time is unset: the partition's default limit holds")
    if config.venv is not None:
        found += environment_warnings(Path(job.plan.cwd, config.venv), config.modules)
        packages = Path(job.plan.cwd, config.venv).glob("lib*/python*/site-packages")
        if job.plan.runtime == "venv" and not any(next(folder.glob("*phalanx*"), None) for folder in packages):
            found.append(f"venv {config.venv} seems to hold no phalanx, which its ranks need: pip install it there")
    return found


def check_free(job: Job, take_over: bool) -> None:
    """Whether the run that the job goes on with is free for it. Raises InUseError; `take_over`:
    also where an attempt may still run."""
    config = job.loaded.config
    if config.resume is not None and not config.dry_run:
        run_dir = find_run_dir(config.run_root, job.plan.name, config.resume)
        in_use.check(run_dir, config.sbatch.dependency, config.sacct, take_over)


def submit(job: Job, ids: list[str], chain: int = 1) -> Path:
    """Make the run directory, which is returned, and submit; `chain` jobs run there one after the other.

    Each job's id is appended to `ids` at once. Raises PlanError if the directory can't be made, SchedulerError with
    sbatch's words if it refuses; a run directory without a job is not left behind.
    """
    config = job.loaded.config
    if config.dry_run:
        job = replace(job, loaded=with_source(job.loaded, job.plan.name))
    old = config.resume is not None and not config.dry_run
    run_dir = find_run_dir(config.run_root, job.plan.name, config.resume or "") if old else None
    run_dir = run_dir or new_run_dir(Path(job.plan.cwd, config.run_root), job.plan.name, config.run_permissions)
    environment = with_secrets(submission_environment(job.script), job.plan.secrets)
    after: str | None = None
    try:
        with shared(run_dir):
            _write(job, run_dir)
            for link in range(chain):
                new = client.submit_to(_words(job, run_dir, after), environment)
                ids.append(new[0])
                _note_job(job, run_dir, new, (link + 1, chain) if chain > 1 else None, after)
                after = new[0]
    except BaseException:
        if not old and after is None:
            discard(run_dir)
        raise
    return run_dir


def submit_script(job: Job) -> str:
    """Submit a job that trains nothing, with a run directory for `phalanx status`; the job's id.

    Raises SchedulerError with sbatch's words.
    """
    config = job.loaded.config
    run_dir = new_run_dir(Path(job.plan.cwd, config.run_root), job.plan.name, config.run_permissions)
    environment = with_secrets(submission_environment(job.script), job.plan.secrets)
    with shared(run_dir):
        try:
            write_atomic(run_dir / "job.sh", job.script)
            make_folder(run_dir / "jobs")
            _make_output_folders(job)
            new = client.submit_to(_words(job, run_dir, None), environment)
        except BaseException:
            discard(run_dir)
            raise
        _note_job(job, run_dir, new)
    return new[0]


def _write(job: Job, run_dir: Path) -> None:
    plan = job.plan.in_run_dir(str(run_dir))
    try:
        save_run_config(job.loaded, run_dir)
        if job.loaded.config.dry_run:
            mark_dry(run_dir)
        write_atomic(run_dir / "plan.json", plan.to_json())
        write_atomic(run_dir / "job.sh", job.script)
        save_source(Path(plan.cwd, plan.script or "."), run_dir)
        if job.loaded.config.snapshot:
            save_snapshot(Path(plan.cwd), run_dir)
        make_folder(run_dir / "jobs")
        _make_output_folders(job)
    except OSError as error:
        raise PlanError(f"cannot write the run directory {run_dir}: {error}") from None


def _make_output_folders(job: Job) -> None:
    """Slurm doesn't make them: a job without its folder fails before its first line, and without a word."""
    config = job.loaded.config
    for name, pattern in (("output", config.output), ("error", config.error)):
        if pattern is not None:
            if pattern.endswith("/") or Path(config.chdir or job.plan.cwd, pattern).is_dir():
                raise PlanError(f"{name}={pattern!r} is a folder: give a file, such as {pattern.rstrip('/')}/%x-%j.out")
            folder = _folder_of(pattern, name, job.name)
            try:
                Path(config.chdir or job.plan.cwd, folder).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise PlanError(f"cannot make the folder of {name}={pattern!r}: {error.strerror}") from None


def _folder_of(pattern: str, setting: str, job_name: str) -> Path:
    """The folder of an output file, as far as it is known before the job has a number."""
    folder, known = str(Path(pattern).parent), before_submission(job_name)
    unknown = unknown_patterns(folder, known)
    if unknown:
        raise PlanError(
            f"{setting}={pattern!r}: the folder's name has {unknown[0]}, known only after the submission, and Slurm "
            "makes no folders: use it in the file's name only"
        )
    return Path(expand_pattern(folder, known))


def _words(job: Job, run_dir: Path, after: str | None) -> list[str]:
    words = []
    if job.loaded.config.output is None:
        words.append(
            f"--output={str(run_dir).replace('%', '%%')}/{_ARRAYS if job.loaded.config.sbatch.array else _RUNS_ON}"
        )
    if after is not None:
        words.append(f"--dependency=afterany:{after}")
    return [*words, str(run_dir / "job.sh"), str(run_dir)]


def submission_environment(script: str, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What travels with a job: the user's environment without the words of a job or launch around the command, and
    without SBATCH_* variables that would win over a directive of the script."""
    in_mpi = "OMPI_COMM_WORLD_RANK" in environ  # otherwise OMPI_* are the user's own choices
    said = set(re.findall(r"^#SBATCH --([a-z-]+)", script, re.MULTILINE))
    inputs = {"SBATCH_" + name.replace("-", "_").upper() for name in said}
    inputs |= {f"SBATCH_{_INPUT[name]}" for name in said if name in _INPUT}
    return {
        name: value
        for name, value in without_other_launches(environ).items()
        if name not in inputs and not name.startswith(_JOBS_OWN) and not (in_mpi and name.startswith("OMPI_"))
    }


def with_secrets(environment: Mapping[str, str], secrets: Mapping[str, Word]) -> dict[str, str]:
    """A submission's environment with the secrets, and with an export option of the user's that lets them pass."""
    found = dict(environment) | {name: evaluate(value) for name, value in secrets.items()}
    export = found.get("SBATCH_EXPORT")
    if export is not None and secrets:
        found["SBATCH_EXPORT"] = exporting(export, secrets)
    return found


def _note_job(
    job: Job,
    run_dir: Path,
    new: tuple[str, str | None],
    chain: tuple[int, int] | None = None,
    after: str | None = None,
) -> None:
    """`new` is the job's id, and its cluster's name if sbatch told it; `after` is the job before it
    in the chain."""
    job_id = new[0]
    note = {
        "v": 1,
        "job_id": job_id,
        "name": job.plan.name,
        "job_name": job.name,
        "series": job.series,
        "submitted": time.time(),
        "nodes": job.plan.nodes,
        "chain": chain,
        "after": after,
    }
    identity.keep(run_dir / "jobs" / f"{job_id}.json", note, new)
