"""Conda environments: by name or by folder, and how a script enters one."""

from __future__ import annotations

import shlex
from pathlib import Path, PurePath


def is_folder(text: str | None) -> bool:
    """Whether `conda: TEXT` is an environment's folder, and not its name."""
    return bool(text) and ("/" in str(text) or str(text) in (".", ".."))


def is_environment(folder: Path) -> bool:
    """Whether a folder is a conda environment without the script by which virtual ones are entered."""
    return (folder / "conda-meta").is_dir() and not (folder / "bin" / "activate").exists()


def enter(text: str, cwd: str) -> list[str]:
    """Lines of a batch script after which `python` is the environment's; they end it if that can't be."""
    if is_folder(text):
        return _enter_folder(str(PurePath(cwd, text)))
    remedy = "load a module that has conda, or give its folder (conda=PATH)"
    return [
        "# Conda environment",
        f'eval "$("${{CONDA_EXE:-conda}}" shell.bash hook)" && conda activate {shlex.quote(text)} ||',
        f"  fail {shlex.quote(f'conda environment {text} can not be activated here: {remedy}')}",
    ]


def _enter_folder(folder: str) -> list[str]:
    """What `conda activate` does, for which no conda is needed."""
    where = shlex.quote(folder)
    return [
        "# Conda environment",
        f"[ -x {where}/bin/python ] || fail {shlex.quote(f'{folder} is no conda environment on this node')}",
        f'export CONDA_PREFIX={where} CONDA_DEFAULT_ENV={where} PATH={where}/bin:"$PATH"',
        f'for file in {where}/etc/conda/activate.d/*.sh; do if [ -e "$file" ]; then . "$file"; fi; done',
    ]
