"""What `phalanx status`, `logs` and `cancel` share: their words, and the jobs that they mean."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..config import JobConfig, load_config
from ..config.table import canonical
from ..errors import PhalanxError, UsageError
from ..schedulers.slurm import jobs, states
from ..schedulers.slurm.jobs import OurJob
from .options import Scanned, scan

OPTIONS = """\
      --run-root DIR     where run directories are (the setting run_root)
  -c, --config FILE      settings file that says so
  -h, --help             show this help

A JOB is a Slurm job id (12, or 12_3 for a task of an array), the name, id or directory of a run, or the
name of a series; `phalanx run` makes runs and series too, which have no job id."""


_LISTED = 8  # jobs that are named where one is shown


@dataclass(frozen=True)
class Wanted:
    """The command line: options, and the words that name jobs."""

    scanned: Scanned
    config: JobConfig
    targets: tuple[str, ...]

    @property
    def root(self) -> Path:
        return Path(self.config.run_root).expanduser().absolute()

    @property
    def root_option(self) -> str:
        """What another command on the same jobs needs too."""
        given = [value for key, value, *_ in self.scanned.overrides if canonical((key,)) == ("run_root",)]
        return f" --run-root {shlex.quote(given[-1])}" if given else ""

    def all(self) -> list[OurJob]:
        return jobs.known(self.root)

    def chosen(self) -> list[OurJob]:
        """The jobs of all targets, each once. Raises PlanError for a target that means none."""
        here = self.all()
        found = [job for target in self.targets for job in self._chosen(here, target)]
        return list(dict.fromkeys(found))

    def _chosen(self, here: list[OurJob], target: str) -> list[OurJob]:
        found = jobs.select(here, target)
        if not found and states.is_id(target):
            other = jobs.elsewhere(target)
            found = [other] if other else []
        if not found:
            raise jobs.unknown(here, target, self.root)
        return found


def read(argv: Sequence[str], flags: Sequence[str] = (), valued: Sequence[str] = ()) -> Wanted:
    """Options may stand before and after the words that name jobs."""
    targets: list[str] = []
    rest = list(argv)
    scanned = Scanned()
    while True:
        part = scan(rest, script=True, flags=flags, valued=valued)
        scanned = replace(
            scanned,
            files=scanned.files + part.files,
            overrides=scanned.overrides + part.overrides,
            flags=scanned.flags | part.flags,
            values={**scanned.values, **part.values},
        )
        if part.script is None:
            break
        targets.append(part.script)
        rest = list(part.args)
    config = load_config(scanned.files, scanned.overrides, os.environ).config
    return Wanted(scanned, config, tuple(targets))


def one(wanted: Wanted, command: str) -> OurJob:
    """The one job that is meant, with its state: of several (runs of a name, links of a chain), the last that began.

    Raises UsageError if there isn't one target.
    """
    if len(wanted.targets) != 1:
        raise UsageError(f"expected one job: phalanx {command} JOB; see phalanx {command} --help")
    found = with_states(wanted.chosen(), wanted.config.sacct)
    chosen = next((job for job in reversed(found) if job.began), found[-1])
    if len(found) > 1:
        print(_of_several(found, chosen, command), file=sys.stderr)
    return chosen


def _of_several(found: list[OurJob], chosen: OurJob, command: str) -> str:
    names = [_word_for(job) for job in found if job != chosen]
    listed = ", ".join(names[:_LISTED]) + (", …" if len(names) > _LISTED else "")
    which = f"this is {_word_for(chosen)}, the last of {len(found)} that began"
    return f"{which}; phalanx {command} JOB shows another: {listed}"


def _word_for(job: OurJob) -> str:
    return job.run_dir.name if job.local else job.job_id


def with_states(chosen: list[OurJob], sacct: str) -> list[OurJob]:
    """What Slurm says; if it doesn't answer, what the run directories tell, with a warning."""
    try:
        return jobs.with_states(chosen, sacct)
    except PhalanxError as error:
        print(f"warning: {error}; what follows is from the run directories alone", file=sys.stderr)
        return jobs.with_states(chosen, ask=False)
