"""Making images: pulled once to a file, or built from a definition that the user edits."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..config.container_schema import ContainerSettings
from ..errors import PlanError


def file_name(uri: str) -> str:
    """`pytorch_2.9.0.sif` for `docker://host/pytorch:2.9.0`."""
    last = uri.rstrip("/").rpartition("/")[2]
    return re.sub(r"[^\w.-]+", "_", last) + ".sif"


def pull(uri: str, target: Path, config: ContainerSettings, runtime: str, more: Sequence[str] = ()) -> int:
    """Pull `uri` into `target`, which must not exist; the program's own progress is shown."""
    if not re.match(r"[a-z][a-z0-9+.-]*://", uri):
        raise PlanError(f"{uri!r} is no image's address: expected docker://HOST/NAME:TAG, oras://… or library://…")
    return _make(["pull", *more, "{target}", uri], target, config, runtime)


def build(definition: Path, target: Path, config: ContainerSettings, runtime: str, more: Sequence[str] = ()) -> int:
    """Build `target`, which must not exist, from a definition file."""
    if not definition.is_file():
        raise PlanError(f"there is no definition {str(definition)!r}: `phalanx container definition` writes one")
    return _make(["build", *more, "{target}", str(definition)], target, config, runtime)


def require(program: str) -> None:
    """Raise PlanError where the runtime isn't to be had."""
    if shutil.which(program) is None:
        raise PlanError(f"{program} is not on PATH: load its module, or set container.executable")


def _make(words: Sequence[str], target: Path, config: ContainerSettings, runtime: str) -> int:
    """Into a file beside the target, which is moved there when it is whole."""
    program = config.executable or runtime
    require(program)
    if target.exists():
        raise PlanError(f"{target} exists and is left as it is: give another FILE, or remove it")
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.part")
    part.unlink(missing_ok=True)
    try:
        command = [program, *(word.replace("{target}", str(part)) for word in words)]
        done = subprocess.run(command, env={**os.environ, **folders(config, runtime)}, check=False)
        if done.returncode == 0:
            part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    return done.returncode


def folders(config: ContainerSettings, runtime: str) -> dict[str, str]:
    """Where layers and temporary files lie, as the site says."""
    names = {"CACHEDIR": config.cache, "TMPDIR": config.tmp}
    return {f"{runtime.upper()}_{name}": str(Path(value).expanduser()) for name, value in names.items() if value}


def warn_of_home(config: ContainerSettings, runtime: str, environ: Mapping[str, str]) -> None:
    """Layers are gigabytes, and a home's quota is small."""
    home = environ.get("HOME", "")
    cache = folders(config, runtime).get(f"{runtime.upper()}_CACHEDIR") or environ.get(f"{runtime.upper()}_CACHEDIR")
    cache = cache or f"{home}/.{runtime}/cache"
    if home and Path(cache).resolve().is_relative_to(Path(home).resolve()):
        print(
            f"warning: layers are kept in {cache}, in your home: set container.cache to a larger disk", file=sys.stderr
        )
