"""The batch script that builds an environment on the nodes that will use it; pure, as that of training jobs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath

from .. import __version__
from ..batch.directives import directives
from ..batch.environment import modules, proxies, tmpdir
from ..bootstrap import (
    HOROVOD_HOMES,
    HOROVOD_TOOLCHAIN,
    HOROVOD_VARIABLES,
    NEWEST,
    OLDEST,
    PIN,
    PIP_VARIABLES,
    TOOLCHAIN,
    UNFINISHED,
    Wanted,
    decided,
    pip_steps,
)
from ..config import JobConfig
from ..errors import PlanError
from ..planning.facts import Facts
from ..planning.plan import LaunchPlan
from ..planning.planner import make_plan
from ..planning.program import Program
from ..planning.resources import Resources
from ..secret import without
from ..shell import Word, exports, render, required

_NEWEST_FIRST = tuple(f"python3.{minor}" for minor in range(NEWEST, OLDEST - 1, -1))


@dataclass(frozen=True)
class Build:
    """`venv` is the new folder, absolute; `python` the only interpreter to take, if any; `version` (3.11) the only
    version, where wheels for others are missing."""

    venv: str
    wanted: Wanted
    python: str | None = None
    version: str | None = None


def build_plan(config: JobConfig, facts: Facts, venv: str) -> LaunchPlan:
    """One task on one node of those that the settings ask for, with all its CPUs and GPUs.

    Raises PlanError for settings that Slurm could not take.
    """
    resources = Resources(config, facts, local=False)
    name = f"{config.job_name or config.name or PurePath(venv).name}-env"
    folder = config.output.rpartition("/")[:2] if config.output else ("", "")
    changed = {
        "job_name": name,
        "name": name,
        "nodes": 1,
        "ntasks": None,
        "ntasks_per_node": 1,
        "nproc_per_node": 1,
        "gpus_per_node": resources.asked_gpus,
        "gpus_per_task": None,
        "cpus_per_task": resources.cpus if config.cpus_per_gpu is None else None,
        "strategy": "single",
        "launcher": "python",
        "device": "auto",
        "backend": None,
        "output": "".join(folder) + f"{name}-%j.out",
        "error": None,
        "gpu_type": config.gpu_type or _gpu_type(config.sbatch.gpus),
        "sbatch": config.sbatch.model_copy(update={"array": None, "gpus": None}),
    }
    return make_plan(config.model_copy(update=changed), facts, Program(None, ("true",)), for_slurm=True)


def _gpu_type(gpus: str | None) -> str | None:
    """`a100` of `gpus: a100:8`, which are those of all nodes."""
    kind, colon, _ = (gpus or "").rpartition(":")
    return kind if colon and "," not in kind else None


def launcher_of_horovod(config: JobConfig, facts: Facts) -> str:
    """What will start the ranks of Horovod in a job with these settings."""
    changed = {} if config.strategy == "horovod" else {"strategy": "horovod"}
    try:
        program = Program(None, ("true",))
        return make_plan(config.model_copy(update=changed), facts, program, for_slurm=True).launcher
    except PlanError:  # a launcher that starts no Horovod; what else is wrong the job's own plan has said
        return config.launcher


def render_build(
    plan: LaunchPlan, build: Build, config: JobConfig, before: str = "", launcher: str | None = None
) -> str:
    """The whole script; `config` are the training's settings, `before` is the text of `pre_exec_file`, `launcher` what
    will start its ranks.

    Raises PlanError for values that cannot stand in a directive.
    """
    texts = [text.rstrip("\n") for text in (config.before, before) if text and text.strip()]
    parts = [
        [
            "#!" + config.shebang.removeprefix("#!").strip(),
            *directives(plan),
            f"# {build.venv}, torch for the {build.wanted.kind} (phalanx {__version__})",
        ],
        ["set -o pipefail"],
        _notes(),
        *modules(config.modules, ["# Before", *texts] if texts else []),
        required(plan.secrets),
        proxies(config.proxy),
        ["# Environment", *exports(without(_environment(plan))), "unset PYTHONHOME PIP_TARGET PIP_PREFIX"],
        tmpdir(config.tmpdir),
        _horovod(build, config, launcher or config.launcher) if build.wanted.horovod else [],
        _python(build),
        _target(build.venv),
        _build(build, config),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _environment(plan: LaunchPlan) -> Mapping[str, Word]:
    """What the user has set; nothing of ranks."""
    kept = ("PYTHONUNBUFFERED", "OMP_NUM_THREADS", *plan.config.env)
    own = {name: value for name, value in plan.environment.items() if name in kept}
    return {**own, **PIP_VARIABLES}


def _horovod(build: Build, config: JobConfig, launcher: str) -> list[str]:
    """Horovod's build variables that the user has not set: MPI is needed where MPI or Slurm starts the ranks."""
    controller = "MPI" if launcher in ("mpirun", "srun") else "GLOO"
    chosen = {**HOROVOD_VARIABLES, f"HOROVOD_WITH_{controller}": "1"}
    if build.wanted.kind == "gpu":
        chosen["HOROVOD_GPU_OPERATIONS"] = "NCCL"
    lines = [f'export {name}="${{{name}:-{text}}}"' for name, text in chosen.items() if not decided(name, config.env)]
    for name, (first, second) in HOROVOD_HOMES.items() if build.wanted.kind == "gpu" else ():
        if name not in config.env:
            home = f"${{{name}:-${{{first}:-${{{second}:-}}}}}}"
            lines.append(f'[ -z "{home}" ] || export {name}="{home}"')
    return ["# How Horovod is built", *lines]


def _python(build: Build) -> list[str]:
    """The first fit interpreter; a module's python3 comes before the system's newer ones."""
    names = [build.python] if build.python else ["python3", *_NEWEST_FIRST]
    if build.version:
        names = [build.python] if build.python else ["python3", f"python{build.version}"]
        major, _, minor = build.version.partition(".")
        test = f"sys.version_info[:2] != ({major}, {minor})"
        what = f"Python {build.version}, which the wheels in {build.wanted.wheelhouse} are for"
    else:
        test, what = f"sys.version_info < (3, {OLDEST})", f"Python from 3.{OLDEST}"
    error = f"error: no {what}, with its module venv: load a module that has one (modules.load), or set python=PATH"
    return [
        "# Python",
        "python=",
        f"for try in {render(names)}; do",
        f"  if \"$try\" -c 'import sys, venv, ensurepip; sys.exit({test})' 2>/dev/null; then python=$try; break; fi",
        "done",
        f'if [ -z "$python" ]; then echo {shlex.quote(error)} >&2; exit 2; fi',
    ]


def _notes() -> list[str]:
    """For `phalanx status`, which looks where `phalanx env job` says in the argument; `sbatch FILE`
    says nothing."""
    return [
        "# How it went, for phalanx status",
        "run_dir=${1:-}",
        '[ -z "$run_dir" ] || date +%s >>"$run_dir/jobs/$SLURM_JOB_ID.start"',
        'note() { [ -z "$run_dir" ] || echo "$1" >"$run_dir/jobs/$SLURM_JOB_ID.exit"; }',
        "trap 'note \"$?\"' EXIT",
    ]


def _target(venv: str) -> list[str]:
    return [
        "# The folder: an existing one is left alone, one that a failure leaves is removed",
        f"venv={shlex.quote(venv)}",
        f'if ! mkdir -p {shlex.quote(str(PurePath(venv).parent))} || ! mkdir "$venv"; then',
        '  echo "error: $venv is there already or can\'t be made: remove it, or give another PATH" >&2',
        "  exit 2",
        "fi",
        f': >"$venv/{UNFINISHED}"',
        f'trap \'note "$?"; [ ! -e "$venv/{UNFINISHED}" ] || rm -rf "$venv"\' EXIT',
    ]


def _build(build: Build, config: JobConfig) -> list[str]:
    """Each command is printed, and the first that fails is the last; `--finish` checks and writes the record."""
    wanted = build.wanted
    source = ["--wheelhouse", wanted.wheelhouse] if wanted.wheelhouse else []
    loaded = ["--loaded", ":".join(config.modules.load)] if config.modules.load else []
    finish = ["python", "-m", "phalanx.bootstrap", "--finish", f"--{wanted.kind}", build.venv, *source, *loaded]
    commands = [["python", "-m", "pip", "install", *words] for words in pip_steps(wanted, build.venv)]
    pin = 'python -c \'from importlib.metadata import version; print("torch==" + version("torch"))\''
    lines = [render(command) for command in commands]
    lines.insert(2, f'{pin} >"$venv/{PIN}"')
    toolchain = []
    if wanted.horovod:
        lines.append("horovodrun --check-build")
        # torch's headers need C++17, which Horovod's build doesn't ask for
        toolchain = [f"cat >\"$venv/{TOOLCHAIN}\" <<'END'", *HOROVOD_TOOLCHAIN.splitlines(), "END"]
        toolchain.append(f'export CMAKE_TOOLCHAIN_FILE="${{CMAKE_TOOLCHAIN_FILE:-$venv/{TOOLCHAIN}}}"')
    return [
        "# Build",
        "set -ex",
        '"$python" -m venv "$venv"',
        'export VIRTUAL_ENV="$venv" PATH="$venv/bin:$PATH"',
        *toolchain,
        *lines,
        render(finish),
    ]
