"""`phalanx env`: make a virtual environment here, or by a Slurm job on the nodes that will use it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from .. import bootstrap
from ..batch import syntax
from ..bootstrap import BootstrapError, Wanted
from ..config import Loaded, load_config
from ..environments.job import Build, build_plan, launcher_of_horovod, render_build
from ..environments.wheelhouse import Target, check_use, fill
from ..errors import PlanError, UsageError, did_you_mean
from ..planning.facts import gather
from ..schedulers.slurm import client, submit
from .options import Scanned, scan

HELP = """\
usage: phalanx env create --cpu|--gpu [PATH] [options]
       phalanx env job [-c FILE]... [--cpu|--gpu] [options] [KEY=VALUE]... [PATH]

create: make a virtual environment with torch and Phalanx here; PATH is .venv if not given. An existing one
is never overwritten. phalanx env create --help shows its options; bootstrap.py does the same without Phalanx.

job: write, save and submit the Slurm job that makes it on a node of the job file's, with the same modules,
proxies, variables and lines before. PATH is the settings' venv if not given. What is built for: GPUs if the
job file asks for some.

      --preview            only print the script
      --with EXTRA...      extras of Phalanx and packages, such as horovod, which is built after torch
      --wheelhouse DIR     download here, into DIR, and install from DIR, without network, in the job
      --python-version V   with --wheelhouse: the nodes' version of Python, such as 3.11; unset: this one's
      --platform NAME      with --wheelhouse: the nodes' platform in pip's form, if it isn't this one's
      --index-url URL      package index; unset: as pip is configured
      --torch-index-url URL  package index of torch alone
      --pip-constraint FILE  pip's constraints: versions to take; may be given several times
      --phalanx WHAT       folder, wheel or URL of Phalanx; unset: where this one is from
      --python EXE         interpreter of the environment; unset: the first fit one of the node"""

_VALUED = ("wheelhouse", "python-version", "platform", "index-url", "torch-index-url", "pip-constraint", "phalanx")
_ACTIONS = ("create", "job")


def main(argv: Sequence[str]) -> int:
    """`argv` without `env`; the result is the exit code."""
    action, rest = (argv[0], list(argv[1:])) if argv else ("", [])
    if action in ("-h", "--help") or (action == "job" and {"-h", "--help"} & set(rest)):
        print(HELP)
        return 0
    if action not in _ACTIONS:
        said = f"unknown action {action!r}" if action else "no action given"
        raise UsageError(f"{said}: expected phalanx env create or phalanx env job.{did_you_mean(action, _ACTIONS)}")
    try:
        if action == "create":
            bootstrap.carry_out(rest, "phalanx env create")
        else:
            _job(rest)
    except BootstrapError as error:
        told = PlanError(str(error))
        told.exit_code = error.code
        raise told from None
    return 0


def _job(argv: list[str]) -> None:
    words, extras = split_extras(argv)
    scanned = _scan(words)
    loaded = submit.with_paths(load_config(scanned.files, scanned.overrides, os.environ), os.environ)
    _refuse_pips_constraint(loaded)
    job, build = job_of(loaded, scanned, extras)
    for note in loaded.notes:
        print(f"note: {note}", file=sys.stderr)
    config = job.loaded.config
    if "preview" in scanned.flags or not (config.save_script or config.submit_job):
        sys.stdout.write(job.script)
        return
    bootstrap.check_target(Path(build.venv))
    if config.submit_job:
        client.require("sbatch")
    if build.wanted.wheelhouse:
        _download(build, scanned, extras)
    script = submit.save(job) if config.save_script else None
    if script is not None:
        print(f"script: {script}", file=sys.stderr)
    if config.submit_job:
        print(submit.submit_script(job), flush=True)


def _refuse_pips_constraint(loaded: Loaded) -> None:
    """`--constraint` is pip's in `env create`, and sbatch's, with features of nodes, here."""
    text = loaded.config.sbatch.model_dump().get("constraint")
    if text and (text.endswith((".txt", ".in")) or "/" in text or Path(text).is_file()):
        raise UsageError(
            f"--constraint {text}: in `phalanx env job` that is sbatch's option, which names features of nodes, and "
            f"this is a file: for pip's constraints give --pip-constraint {text}"
        )


def split_extras(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words without those of `--with EXTRA...`, which end at an option or a setting; and those."""
    rest: list[str] = []
    extras: list[str] = []
    taking = False
    for word in argv:
        if word == "--with" or word.startswith("--with="):
            taking = word == "--with"
            extras += [] if taking else [word.removeprefix("--with=")]
        elif taking and not word.startswith("-") and not re.match(r"[\w.-]+=[^=]", word):
            extras.append(word)
        else:
            taking = False
            rest.append(word)
    return rest, extras


def split_constraints(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words without those of `--pip-constraint FILE`, which may be given several times; and the files."""
    rest: list[str] = []
    files: list[str] = []
    words = iter(argv)
    for word in words:
        name, equals, file = word.partition("=")
        if name == "--pip-constraint" and (equals or (file := next(words, ""))):
            files.append(file)
        else:
            rest.append(word)
    return rest, files


def _scan(words: list[str]) -> Scanned:
    """PATH may stand anywhere among the options."""
    words, constraints = split_constraints(words)
    flags = ("preview", "cpu", "gpu")
    scanned = scan(words, script=True, flags=flags, valued=_VALUED)
    if scanned.args:
        path = scanned.script
        start = len(words) - len(scanned.args) - 1
        scanned = replace(
            scan(words[:start] + words[start + 1 :], script=False, flags=flags, valued=_VALUED), script=path
        )
    if constraints:
        scanned = replace(scanned, values={**scanned.values, "pip-constraint": "\n".join(constraints)})
    if {"cpu", "gpu"} <= scanned.flags:
        raise UsageError("--cpu and --gpu: give one of them")
    for name in ("python-version", "platform"):
        if name in scanned.values and "wheelhouse" not in scanned.values:
            raise UsageError(f"--{name} says whose wheels are downloaded: give --wheelhouse DIR too")
    return scanned


def job_of(loaded: Loaded, scanned: Scanned, extras: Sequence[str]) -> tuple[submit.Job, Build]:
    """The job as it would be submitted; writes nothing. Raises UsageError without a PATH, PlanError."""
    config = loaded.config
    path = scanned.script or config.venv
    if not path:
        raise UsageError("no PATH given: expected phalanx env job [options] PATH, or venv in the settings")
    facts = gather(os.environ)
    venv = os.path.normpath(Path(facts.cwd, path).expanduser())
    plan = build_plan(config, facts, venv)
    kind = next(iter({"cpu", "gpu"} & scanned.flags), None) or _kind(loaded, plan.gpus_per_node)
    wanted = _wanted(scanned, extras, kind, offline=True)
    build = Build(venv, wanted, config.python, _version(scanned) if wanted.wheelhouse else None)
    before = submit.file_text(config.pre_exec_file, "pre_exec_file", plan.cwd)
    syntax.check({"before": config.before, "pre_exec_file": before})
    script = render_build(plan, build, config, before, launcher_of_horovod(config, facts))
    return submit.Job(replace(loaded, config=plan.config), plan, script), build


def _kind(loaded: Loaded, gpus: int | None) -> str:
    return "gpu" if gpus and loaded.config.device != "cpu" else "cpu"


def _wanted(scanned: Scanned, extras: Sequence[str], kind: str, offline: bool) -> Wanted:
    """As `phalanx env create` understands the same options; a wheelhouse has one version of each package already."""
    words = [f"--{kind}"]
    offline = offline and "wheelhouse" in scanned.values
    for name in ("wheelhouse",) if offline else ("index-url", "torch-index-url", "pip-constraint", "phalanx"):
        if name in scanned.values:
            words += [f"--{name}={value}" for value in scanned.values[name].splitlines()]
    words += ["--with", *extras] if extras else []
    return bootstrap.wanted_of(bootstrap.parser().parse_args(words))


def _version(scanned: Scanned) -> str:
    version = scanned.values.get("python-version", f"{sys.version_info[0]}.{sys.version_info[1]}")
    if not re.fullmatch(r"3\.\d+", version):
        raise UsageError(f"--python-version {version!r}: expected a version such as 3.11")
    return version


def _download(build: Build, scanned: Scanned, extras: Sequence[str]) -> None:
    folder = Path(str(build.wanted.wheelhouse))
    target = Target(str(build.version), scanned.values.get("platform"))
    check_use(folder, build.wanted.kind, target)
    python = bootstrap.find_python(sys.executable)
    fill(folder, _wanted(scanned, extras, build.wanted.kind, offline=False), target, python)
