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

BASES = {
    "nvidia": "nvcr.io/nvidia/pytorch:25.09-py3",
    "pytorch": "docker.io/pytorch/pytorch:2.9.0-cuda12.8-cudnn9-runtime",
    "rocm": "docker.io/rocm/pytorch:latest",
}

_SOURCES = ("pyproject.toml", "README.md", "LICENSE", "src")


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


def _make(words: Sequence[str], target: Path, config: ContainerSettings, runtime: str) -> int:
    """Into a file beside the target, which is moved there when it is whole."""
    program = config.executable or runtime
    if shutil.which(program) is None:
        raise PlanError(f"{program} is not on PATH: load its module, or set container.executable")
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


def definition(base: str, extras: Sequence[str], requirements: str | None, checkout: Path | None) -> str:
    """A definition file on top of `base`, whose own torch is kept. Of a `checkout` of Phalanx, what a wheel is made of
    is copied; of the project nothing is, so that no secret (.env) gets in."""
    image = BASES.get(base, base)
    copies = [(f"{checkout}/{name}", f"/opt/phalanx/{name}") for name in _SOURCES] if checkout else []
    copies += [(requirements, "/requirements.txt")] if requirements else []
    installs = [f"pip install --no-cache-dir -c /torch.txt {'/opt/phalanx' if checkout else 'phalanx'}"]
    installs += ["pip install --no-cache-dir -c /torch.txt -r /requirements.txt"] if requirements else []
    lines = "\n    ".join([*installs, *map(_extra, extras)])
    files = "\n%files\n" + "".join(f"    {source} {target}\n" for source, target in copies) if copies else ""
    return f"""\
Bootstrap: docker
From: {image}
{files}
%post
    set -eu
    # The image's own torch stays: whatever is installed must take it.
    python3 -c 'import torch; print("torch==" + torch.__version__)' > /torch.txt
    {lines}
    python3 -c 'import torch, phalanx'
    rm -rf /root/.cache

%environment
    export LC_ALL=C.UTF-8

%labels
    made-by phalanx
"""


def _extra(name: str) -> str:
    """Horovod is built against the image's torch; other extras are packages."""
    if name != "horovod":
        return f"pip install --no-cache-dir -c /torch.txt {name}"
    return """\
export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
    [ ! -e /usr/local/cuda ] || export HOROVOD_GPU_OPERATIONS=NCCL
    pip install --no-cache-dir --no-build-isolation -c /torch.txt horovod
    horovodrun --check-build"""
