"""A folder of wheels, filled where there is a network, for builds where there is none."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import bootstrap
from ..bootstrap import (
    HOROVOD_NEEDS,
    PIP_VARIABLES,
    TORCH,
    BootstrapError,
    Wanted,
    constraint_options,
    is_horovod,
    ours,
    with_extras,
)
from ..errors import UsageError

NOTE = "phalanx-wheelhouse.json"


@dataclass(frozen=True)
class Target:
    """Whose wheels are wanted: version of Python (3.11) and pip's name of a platform; None: this machine's."""

    python: str
    platform: str | None = None

    def options(self, here: str) -> list[str]:
        """pip's options where the target isn't `here`: wheels only, as nothing can be built for another machine."""
        if self.platform is None and self.python == here:
            return []
        platform = ["--platform", self.platform] if self.platform else []
        return ["--python-version", self.python, "--implementation", "cp", *platform, "--only-binary", ":all:"]


def fill(folder: Path, wanted: Wanted, target: Target, python: bootstrap.Python) -> None:
    """Download all that the build will install; each command is printed.

    Raises UsageError if the folder was filled for something else, BootstrapError if a command fails.
    """
    check_use(folder, wanted.kind, target)
    folder.mkdir(parents=True, exist_ok=True)
    environ = {**os.environ, **PIP_VARIABLES}
    options = target.options(".".join(python.version.split(".")[:2]))
    with tempfile.TemporaryDirectory() as scratch:
        bootstrap.run([*python.words, "-m", "venv", scratch], environ)
        pip = [str(bootstrap.python_in(Path(scratch))), "-m", "pip"]
        for number, words in enumerate(first_steps(wanted, str(folder), options)):
            if number == 1:
                bootstrap.refuse_cuda(pip[0], words[words.index(TORCH) :], wanted, environ)
            bootstrap.run([*pip, *words], environ)
        pin, phalanx = folder / bootstrap.PIN, _newest(folder, "phalanx-*.whl")
        pin.write_text(f"torch=={_newest(folder, 'torch-*.whl').name.split('-')[1]}\n", encoding="utf-8")
        for words in later_steps(wanted, str(folder), options, str(phalanx)):
            bootstrap.run([*pip, *words], environ)
    note = {"v": 1, "kind": wanted.kind, "python": target.python, "platform": target.platform}
    (folder / NOTE).write_text(json.dumps(note) + "\n", encoding="utf-8")


def first_steps(wanted: Wanted, folder: str, options: Sequence[str]) -> list[list[str]]:
    """Arguments of pip, call by call: pip itself, torch, and Phalanx's own wheel."""
    into = ["download", "--dest", folder]
    index = ["--index-url", wanted.index_url] if wanted.index_url else []
    torch = ["--index-url", wanted.torch_index_url] if wanted.torch_index_url else index
    given = constraint_options(wanted)
    own = ["wheel", "--no-deps", "--wheel-dir", folder, wanted.phalanx, *index]
    return [[*into, "pip", *index], [*into, *options, TORCH, *given, *torch], own]


def later_steps(wanted: Wanted, folder: str, options: Sequence[str], phalanx: str) -> list[list[str]]:
    """What Phalanx's wheel and the extras need beside the torch that is there already."""
    index = ["--index-url", wanted.index_url] if wanted.index_url else []
    extra = ["--extra-index-url", wanted.torch_index_url] if wanted.torch_index_url else []
    given = constraint_options(wanted)
    into = ["download", "--dest", folder, "--find-links", folder]
    rest = [*options, "--constraint", str(Path(folder, bootstrap.PIN)), *given, *index, *extra]
    steps = [[*into, with_extras(phalanx, ["torch", *ours(wanted)]), *rest]]
    for word in wanted.extras:
        if is_horovod(word):  # there are no wheels of it: it is built in the job
            steps += [[*into, *HOROVOD_NEEDS, *rest], [*into, "--no-deps", "--no-binary", "horovod", word, *index]]
        elif word not in ours(wanted):
            steps.append([*into, word, *rest])
    return steps


def check_use(folder: Path, kind: str, target: Target) -> None:
    """Raise UsageError if the folder has wheels of another kind, python or platform: pip would mix them up."""
    note = folder / NOTE
    if not note.exists():
        if folder.is_dir() and any(folder.glob("torch-*.whl")):
            raise UsageError(f"--wheelhouse {folder} has wheels of unknown origin: give a new or an empty folder")
        return
    old = json.loads(note.read_text(encoding="utf-8"))
    new = {"kind": kind, "python": target.python, "platform": target.platform}
    different = [f"{key} {old.get(key)}, not {value}" for key, value in new.items() if old.get(key) != value]
    if different:
        raise UsageError(f"--wheelhouse {folder} is for {', '.join(different)}: give each build a folder of its own")


def _newest(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime)
    if not found:
        raise BootstrapError(f"pip left no {pattern} in {folder}: see its output above")
    return found[-1]
