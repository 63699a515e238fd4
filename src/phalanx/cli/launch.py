"""What `phalanx run`, `plan` and `submit` share: their options, and the way from words to settings and plan."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..config import JobConfig, Loaded, load_config
from ..config.layers import COMMAND_LINE
from ..config.saved import CONFIG_FILE
from ..errors import UsageError
from ..planning.facts import Facts, gather
from ..planning.hidden_launch import Around, assigned, hidden_in
from ..planning.launch_words import is_launcher
from ..planning.plan import LaunchPlan
from ..planning.planner import make_plan, run_name
from ..planning.program import Program, as_command, from_training_cmd
from ..planning.shellwords import ShellWord
from ..registry import LAUNCHERS, STRATEGIES
from ..rundir import find_run_dir
from ..schedulers import series
from ..schedulers.series import Member
from .launcher_options import with_said
from .options import Scanned

OPTIONS = f"""\
options (before SCRIPT; what follows it is the script's own, untouched):
  -c, --config FILE      settings file (YAML); may be repeated, later ones win
      --nproc N          ranks per node: a number, auto, gpu or cpu
  -j NODESxPROCS         nodes and ranks per node, such as 2x4
  -s, --strategy NAME    {", ".join(STRATEGIES)};
                         unset: ddp if there is more than one process
      --launcher NAME    auto, {", ".join(LAUNCHERS)}
      --device NAME      auto, cpu, cuda or mps
      --backend NAME     torch.distributed backend; unset: nccl on cuda, gloo on cpu
      --resume RUN       go on with a run: its path or id, or 'latest'
      --dry-run          one step of each loop, one evaluation batch and one checkpoint, then what was seen
      --KEY VALUE        any other setting; also --KEY=VALUE, --section.key VALUE, key=value,
                         and --flag or --no-flag for those that are true or false
      --                 the next word is SCRIPT, whatever it looks like
  -h, --help             show this help

`phalanx config --explain` lists every setting with its value and where it comes from."""


@dataclass(frozen=True)
class Request:
    """A command line as settings and the program that they are for."""

    loaded: Loaded
    program: Program


def request_of(scanned: Scanned, command: str, member: Mapping[str, str] | None = None, origin: str = "") -> Request:
    """Load the settings. A resumed run keeps its settings where none are given anew; `member` are those that a
    series sets for one of its jobs.

    Raises UsageError if there is nothing to run.
    """
    loaded = _load(scanned, (), member, origin)
    program = _program(scanned, loaded, command)
    loaded = with_said(loaded, program)
    config = loaded.config
    if config.mode == "single" and config.repeats > 1 and loaded.origins.get("repeats") == COMMAND_LINE:
        raise UsageError(
            f"repeats={config.repeats} with mode=single: the members of a series are repeated; add --mode runall "
            f"(--strategies {config.strategy if config.strategy != 'auto' else 'ddp'} for one strategy)"
        )
    if config.resume is not None:
        _refuse_resume(config)
        before = find_run_dir(config.run_root, run_name(config, program), config.resume) / CONFIG_FILE
        if before.exists():
            loaded = with_said(_load(scanned, (before,), member, origin), program)
    return Request(loaded, program)


def name_of_member(scanned: Scanned, command: str, member: Member, origin: str) -> str:
    """What a member's name begins with: `${strategy}` and the like in the job's name are the member's own."""
    own = request_of(scanned, command, member.own, origin)
    return series.base_name(own.loaded.config, own.program)


def _refuse_resume(config: JobConfig) -> None:
    """Raise UsageError where a series is to go on with one run."""
    if config.mode != "single":
        raise UsageError(
            f"resume={config.resume!r} with mode={config.mode}: a series makes runs of its own; phalanx retry SERIES "
            "goes on with those that have failed, and --mode single with one run"
        )


def _load(scanned: Scanned, below: tuple[Path, ...], member: Mapping[str, str] | None, origin: str) -> Loaded:
    files: list[str | Path] = [*below, *scanned.files]
    if member is None:
        return load_config(files, scanned.overrides, os.environ)
    return load_config(files, scanned.overrides, os.environ, member=member, member_origin=origin)


def _program(scanned: Scanned, loaded: Loaded, command: str) -> Program:
    """The script of the command line, else the settings' `training_cmd`. One process may start a launcher itself."""
    if scanned.script is not None:
        if is_launcher([ShellWord(word, word) for word in (scanned.script, *scanned.args)]):
            raise UsageError(
                f"{scanned.script} starts ranks, and so does phalanx {command}: give the script that it would start, "
                f"as in phalanx {command} --launcher torchrun --nproc 2 train.py"
            )
        words = (scanned.script, *scanned.args)
        return Program(scanned.script, scanned.args, refusal=_own_launch(words, _around(loaded.config), command))
    if loaded.config.training_cmd:
        found = from_training_cmd(loaded.config.training_cmd, _around(loaded.config))
        alone = loaded.config.launcher == "python" and (found.said or found.refusal)
        return as_command(loaded.config.training_cmd) if alone else found
    if loaded.config.exec_command or loaded.config.exec_file:
        return Program(None, ("true",))  # what stands in place of the launch says what runs
    raise UsageError(
        f"no script given: expected phalanx {command} [options] SCRIPT [script arguments], or training_cmd in the "
        f"settings; see phalanx {command} --help"
    )


def _around(config: JobConfig) -> Around:
    """What the settings say of a command's folder and variables."""
    return Around(Path(config.chdir or Path.cwd()), {**config.env, **assigned(config.before or "")})


def _own_launch(words: tuple[str, ...], around: Around, command: str) -> str | None:
    """Why a command in place of the script can't be run by several ranks; None for a Python
    file."""
    name = None if words[0].endswith(".py") else hidden_in(shlex.join(words), around)
    return name and (
        f"{words[0]} starts ranks by {name}, and so does phalanx {command}: each rank would make a "
        f"world of its own. Give the script that it starts, as in phalanx {command} --launcher "
        "torchrun --nproc 2 train.py"
    )


# Options of every launch that scripts seldom have.
_LAUNCHES = ("nproc", "nproc-per-node", "launcher", "strategy", "dry-run", "run-root", "no-snapshot", "snapshot")


def warn_of_misplaced(scanned: Scanned, own: Iterable[str], short: Iterable[str] = ()) -> None:
    """Say which words after the script are options of ours; those that its text mentions are its own."""
    ours = {*(f"--{name}" for name in (*own, *_LAUNCHES)), *short}
    found = [word for word in scanned.args if word.partition("=")[0].replace("_", "-") in ours]
    try:
        text = Path(scanned.script or "").read_text(encoding="utf-8", errors="replace") if found else ""
    except OSError:
        text = ""
    found = [word for word in found if not re.search(f"['\"]{re.escape(word.partition('=')[0])}['\"]", text)]
    if found:
        words = " ".join(found)
        print(
            f"warning: {words} after {scanned.script}: what follows the script is its own, and no option of phalanx; "
            f"if you meant that, put {'it' if len(found) == 1 else 'them'} before {scanned.script}",
            file=sys.stderr,
        )


def facts_for(loaded: Loaded) -> Facts:
    """This machine's facts; MPI is asked whose it is only where it will be used."""
    config = loaded.config
    by_mpi = config.launcher == "mpirun" or config.torchrun.start == "mpirun"
    asked = by_mpi and config.mpirun.flavor == "auto"
    return gather(os.environ, config.mpirun.executable if asked else None)


def plan_of(request: Request) -> LaunchPlan:
    """A plan for this machine, or for others if the settings name several nodes."""
    return make_plan(request.loaded.config, facts_for(request.loaded), request.program)
