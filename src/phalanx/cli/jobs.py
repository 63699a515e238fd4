"""What `phalanx status`, `logs` and `cancel` share: their words, and the jobs that they mean."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..config import JobConfig, load_config
from ..errors import UsageError
from ..schedulers.slurm import jobs
from ..schedulers.slurm.jobs import OurJob
from .options import Scanned, scan

OPTIONS = """\
      --run-root DIR     where run directories are (the setting run_root)
  -c, --config FILE      settings file that says so
  -h, --help             show this help

A job is meant by its Slurm id, its run's name or id (the newest run of that name), or its series."""


@dataclass(frozen=True)
class Wanted:
    """The command line: options, and the words that name jobs."""

    scanned: Scanned
    config: JobConfig
    targets: tuple[str, ...]

    def all(self) -> list[OurJob]:
        return jobs.known(Path(self.config.run_root).expanduser().absolute())

    def chosen(self) -> list[OurJob]:
        """The jobs of all targets, each once."""
        here = self.all()
        found = [job for target in self.targets for job in jobs.select(here, target)]
        return list(dict.fromkeys(found))


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
    """The newest job of the one target."""
    if len(wanted.targets) != 1:
        raise UsageError(f"expected one job: phalanx {command} JOB; see phalanx {command} --help")
    return wanted.chosen()[-1]
