"""Slurm jobs from Python: what `phalanx submit` does, for a user's own `slurm.py`.

from phalanx.slurm import SlurmScriptBuilder, slurm_parser

args = slurm_parser().parse_args()
SlurmScriptBuilder(args, training_cmd="train.py --epochs 3").run()
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from .cli.options import Scanned, is_flag
from .cli.submit import carry_out, jobs_of
from .config import JobConfig, load_config
from .config.sbatch import FLAGS, SHORT
from .config.table import ALIASES, keys
from .errors import UsageError
from .schedulers.slurm.submit import Job, save
from .script.argument_parser import Suggesting

_DEST = "phalanx_setting:"
_ORIGIN = "SlurmScriptBuilder"  # of settings that are its arguments


class SlurmScriptBuilder:
    """Batch scripts of a job file and of settings given here; the files' are the lowest, the parser's the highest.

    Args:
        args: what `slurm_parser()` has read, if it is used.
        config: one or more settings files, below those of the command line.
        script: the training script; unset: `training_cmd` of the settings.
        script_args: the script's arguments, as written.
        override: settings above the command line's.
        settings: any setting by its name, sections as mappings (`modules={"load": ["CUDA"]}`).
    """

    def __init__(
        self,
        args: argparse.Namespace | None = None,
        *,
        config: str | Path | Sequence[str | Path] = (),
        script: str | Path | None = None,
        script_args: Sequence[str] = (),
        override: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        given = vars(args) if args is not None else {}
        files = (config,) if isinstance(config, (str, Path)) else tuple(config)
        overrides: list[tuple[str, Any] | tuple[str, Any, str]] = [
            *_by_python(settings),
            *_parsed(given),
            *_by_python(override or {}),
        ]
        self._scanned = Scanned(
            files=tuple(str(file) for file in (*files, *given.get("phalanx_config", ()))),
            overrides=tuple(overrides),
            flags=frozenset(name for name in ("yes", "wait", "force") if given.get(f"phalanx_{name}")),
            script=None if script is None else str(script),
            args=tuple(script_args),
        )

    @property
    def settings(self) -> JobConfig:
        """All settings as files, variables, Python and the command line have them. Raises ConfigError."""
        return load_config(self._scanned.files, self._scanned.overrides, os.environ).config

    def jobs(self) -> list[Job]:
        """The job, or those of `mode=runall` and `scaling-test`; writes nothing. Raises PhalanxError."""
        return jobs_of(self._scanned)

    def scripts(self) -> dict[str, str]:
        """The text of each script by its job's name."""
        return {job.name: job.script for job in self.jobs()}

    def save(self) -> list[Path]:
        """Save the scripts in `save_dir`; returns where they lie."""
        return [save(job) for job in self.jobs()]

    def run(self, chain: int = 1) -> list[str]:
        """Print, save and submit as `save_script` and `submit_job` say; returns the ids of submitted jobs.

        Raises PhalanxError before anything is submitted, SchedulerError with sbatch's words if it refuses.
        """
        return carry_out(self.jobs(), self._scanned.flags, chain)


def slurm_parser(**options: Any) -> argparse.ArgumentParser:
    """A parser with `-c FILE`, sbatch's short options and an option for each setting; add your own to it.

    `options` are those of `argparse.ArgumentParser`.
    """
    parser = Suggesting(**{"allow_abbrev": False, **options})
    parser.add_argument("-c", "--config", action="append", dest="phalanx_config", default=[], metavar="FILE")
    for name in ("yes", "wait", "force"):
        parser.add_argument(f"--{name}", action="store_true", dest=f"phalanx_{name}")
    shorts = {key: short for short, key in SHORT.items()}
    group = parser.add_argument_group("settings")
    for key, field in keys().items():
        names = _spellings(key)
        short = [shorts[key]] if key in shorts else []
        help_text = (field.description or "").replace("%", "%%")
        if is_flag(key):
            group.add_argument(*short, *names, nargs="?", const="true", dest=_DEST + key, metavar="true|false",
                               default=argparse.SUPPRESS, help=help_text)  # fmt: skip
            negated = [f"--no-{name[2:]}" for name in names if f"no_{name[2:]}".replace("-", "_") not in FLAGS]
            if negated:
                group.add_argument(*negated, action="store_const", const="false", dest=_DEST + key,
                                   default=argparse.SUPPRESS, help=argparse.SUPPRESS)  # fmt: skip
        else:
            group.add_argument(*short, *names, dest=_DEST + key, metavar="VALUE", default=argparse.SUPPRESS,
                               help=help_text)  # fmt: skip
    return parser


def _spellings(key: str) -> list[str]:
    """`--job-name`, `--job_name`, and the same for aliases; options of sbatch without their section."""
    names = [key.removeprefix("sbatch."), *(alias for alias, meant in ALIASES.items() if meant == key)]
    return list(dict.fromkeys(f"--{spelt}" for name in names for spelt in (name.replace("_", "-"), name)))


def _parsed(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in given.items():
        if name.startswith(_DEST):
            yield name.removeprefix(_DEST), value


def _by_python(settings: Mapping[str, Any]) -> list[tuple[str, Any, str]]:
    """What the script says, and nobody typed."""
    return [(key, value, _ORIGIN) for key, value in _flat(settings)]


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Python values by dotted key, as they lie above files."""
    for name, value in settings.items():
        key = prefix + name
        if isinstance(value, Mapping):
            yield from _flat(value, f"{key}.")
        elif value is not None:
            yield key, _value(key, value)


def _value(key: str, value: Any) -> Any:
    """A text as the command line's, lists as they are."""
    if isinstance(value, timedelta):
        hours, seconds = divmod(round(value.total_seconds()), 3600)
        return f"{hours}:{seconds // 60:02}:{seconds % 60:02}"
    if key.rpartition(".")[2] == "time" and not isinstance(value, str):
        # YAML makes 43200 of an unquoted 12:00:00, and for Slurm that is 30 days.
        raise UsageError(f"{key}={value!r}: a number may be minutes or seconds; write '12:00:00', or a timedelta")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (str, int, float, Path)):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [str(item) if isinstance(item, Path) else item for item in value]
    raise UsageError(f"{key}={value!r}: expected a text, a number, true or false, a list or a mapping")


__all__ = ["SlurmScriptBuilder", "slurm_parser"]
