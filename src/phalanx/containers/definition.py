"""Definition files: an image's own torch, and on it what `phalanx env create` would install."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ..bootstrap import (
    HOROVOD_TOOLCHAIN,
    HOROVOD_VARIABLES,
    PIN,
    TOOLCHAIN,
    BootstrapError,
    Wanted,
    parser,
    pip_steps,
    wanted_of,
)
from ..errors import PlanError
from ..shell import render

BASES = {
    "nvidia": "nvcr.io/nvidia/pytorch:25.09-py3",
    "pytorch": "docker.io/pytorch/pytorch:2.9.0-cuda12.8-cudnn9-runtime",
    "rocm": "docker.io/rocm/pytorch:latest",
}
_AGENTS = ("docker", "oras", "library", "shub", "docker-daemon", "docker-archive", "oci-archive", "oci", "localimage")
_FILES = ("docker-archive", "oci-archive", "oci", "localimage")  # which name a file or folder of this machine
_FOR_CPU = "import sys, torch; sys.exit(torch.version.cuda is not None)"
_SOURCES = ("pyproject.toml", "README.md", "LICENSE", "src")
_COPIES = "/opt/phalanx"


def text(base: str, extras: Sequence[str], requirements: str | None) -> str:
    """Of a checkout of Phalanx, what a wheel is made of is copied; of the project nothing is, so
    that no secret (.env) gets in. Raises PlanError for an image or an extra that can't be one."""
    agent, image = bootstrap_of(base)
    wanted, copies = _copied(_wanted(extras))
    copies += [(str(Path(requirements).absolute()), "/requirements.txt")] if requirements else []
    lines_of = [f"    {_quoted(source)} {_quoted(target)}\n" for source, target in copies]
    files = "\n%files\n" + "".join(lines_of) if copies else ""
    lines = "\n".join(_post(wanted, requirements is not None))
    return f"""\
Bootstrap: {agent}
From: {image}
{files}
%post
    set -eu
    export PIP_USER=0 PIP_BREAK_SYSTEM_PACKAGES=1
    # The image's own torch stays: whatever is installed must take it.
    python3 -c 'import torch; print("torch==" + torch.__version__)' > /{PIN}
{lines}
    python3 -c 'import torch, phalanx'
    rm -rf /root/.cache

%environment
    export LC_ALL=C.UTF-8

%labels
    made-by phalanx
"""


def _quoted(path: str) -> str:
    """As Apptainer splits lines of %files; it knows no escape."""
    if '"' in path or "\n" in path:
        raise PlanError(f"{path!r}: a definition can't hold a path with quotes or breaks: rename it, or copy it")
    return f'"{path}"' if re.search(r"\s", path) else path


def bootstrap_of(base: str) -> tuple[str, str]:
    """Apptainer's bootstrap agent for an image, and its name in that agent's words: `--from` takes
    addresses as `pull` does, files, and names without an address, which are Docker's."""
    agent, name = _split(BASES.get(base, base))
    if agent not in _AGENTS:
        raise PlanError(
            f"--from {base!r}: no image is built from {agent}://; expected NAME:TAG, a .sif file, or one of "
            f"{', '.join(f'{known}://' for known in _AGENTS)}. Pull it first, and give the file"
        )
    known, _, rest = name.partition(":")
    if agent == "docker" and known in _AGENTS and re.match(r"(?!\d+/)[^/]*/", rest):  # a host's port is a number
        raise PlanError(f"--from {base!r}: an address has //, such as {known}://{rest}")
    if not name or re.search("\n" if agent in _FILES else r"\s", name):
        raise PlanError(f"--from {base!r}: expected {', '.join(BASES)}, an image's name or address, or a .sif file")
    return agent, _file(name, agent, base) if agent in _FILES else name


def _split(base: str) -> tuple[str, str]:
    address = re.fullmatch(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", base, re.DOTALL)
    short = re.fullmatch(r"(docker-daemon|docker-archive|oci-archive|localimage):(.*)", base, re.DOTALL)
    found = address or short
    if found:
        agent = found[1].lower()
        return ("localimage" if agent == "file" else agent), found[2]
    local = base.startswith(("/", "./", "../", "~")) or base.endswith((".sif", ".img"))
    return ("localimage" if local else "docker"), base


def _file(name: str, agent: str, base: str) -> str:
    """The whole path, as it may be built in another folder; a tag may follow an archive's."""
    path, colon, tag = (name, "", "") if agent == "localimage" else name.partition(":")
    whole = Path(path).expanduser().absolute()
    if not whole.exists():
        raise PlanError(f"--from {base!r}: there is no {whole}: give an image's file, or an address such as docker://…")
    return f"{whole}{colon}{tag}"


def _wanted(extras: Sequence[str]) -> Wanted:
    """As `phalanx env create` understands the same words."""
    try:
        words = ["--gpu", *(["--with", *extras] if extras else [])]
        return wanted_of(parser().parse_args(words))
    except BootstrapError as error:
        raise PlanError(str(error)) from None


def _copied(wanted: Wanted) -> tuple[Wanted, list[tuple[str, str]]]:
    """The same with the places that this machine's files have in the image, and the copies."""
    copies = []
    if Path(wanted.phalanx).is_dir():
        copies += [(f"{wanted.phalanx}/{name}", f"{_COPIES}/{name}") for name in _SOURCES]
        wanted = wanted._replace(phalanx=_COPIES)
    extras = []
    for word in wanted.extras:
        path, bracket, names = word.partition("[")
        if Path(path).is_absolute():
            copies.append((path, f"/opt/extras/{Path(path).name}"))
            word = copies[-1][1] + bracket + names
        extras.append(word)
    return wanted._replace(extras=tuple(extras)), copies


def _post(wanted: Wanted, requirements: bool) -> list[str]:
    steps = pip_steps(wanted, "/")[2:]  # the image has its pip and its torch
    if requirements:
        steps.insert(1, ["--no-cache-dir", "-r", "/requirements.txt", "--constraint", f"/{PIN}"])
    lines = [f"    python3 -m pip install {render(words)}" for words in steps]
    if not wanted.horovod:
        return lines
    return [*_before_horovod(), *lines, *_after_horovod()]


def _before_horovod() -> list[str]:
    """A compiler, the build's variables, and C++17 for torch's headers."""
    variables = " ".join(f"{name}={value}" for name, value in {**HOROVOD_VARIABLES, "HOROVOD_WITH_GLOO": "1"}.items())
    return [
        "    # Horovod is compiled against that torch.",
        "    command -v g++ >/dev/null && command -v make >/dev/null || "
        "{ apt-get update; apt-get install -y --no-install-recommends g++ make; }",
        f"    export {variables}",
        f"    python3 -c '{_FOR_CPU}' || export HOROVOD_GPU_OPERATIONS=NCCL",
        f"    cat >/{TOOLCHAIN} <<'END'",
        *HOROVOD_TOOLCHAIN.splitlines(),
        "END",
        f"    export CMAKE_TOOLCHAIN_FILE=/{TOOLCHAIN}",
    ]


def _after_horovod() -> list[str]:
    check = (
        'import os; from phalanx.bootstrap import check_horovod; check_horovod(open("/horovod.txt").read(), os.environ)'
    )
    return [
        "    horovodrun --check-build >/horovod.txt",
        "    cat /horovod.txt",
        f"    python3 -c '{check}'",
    ]
