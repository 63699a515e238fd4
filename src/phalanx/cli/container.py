"""`phalanx container`: images for ranks, pulled or built once, before any job."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from ..config import JobConfig, load_config
from ..containers import definition, images, prepare, probe
from ..errors import PlanError, UsageError, did_you_mean
from ..planning.facts import gather
from ..planning.planner import make_plan
from ..planning.program import Program
from .env import split_extras
from .options import Scanned, scan

HELP = """\
usage: phalanx container pull URI [FILE]
       phalanx container prepare [IMAGE] [--wheelhouse DIR]
       phalanx container build DEFINITION [FILE]
       phalanx container definition [--from BASE] [--with EXTRA...] [--requirements FILE] [--out FILE]

pull makes one .sif file of docker://HOST/NAME:TAG (or oras://, library://), so that ranks never pull.
prepare puts what the API needs beside torch into the folder IMAGE.phalanx, by the image's own pip; ranks
find it there. Scripts without the API need nothing.
build makes one from a definition file, which definition writes for you to edit: on a base whose own
torch is kept, with Phalanx, your requirements and extras such as horovod.

      --from BASE        nvidia, pytorch, rocm, an image's name or address, or a .sif file (default: nvidia)
      --with EXTRA…      as env create has it: Phalanx's extras and packages, horovod among them
      --requirements FILE  a pip requirements file
      --out FILE         where the definition goes; unset: stdout
      --wheelhouse DIR   install from a folder of wheels, without network
      --args=WORD,…      more options for the runtime's own pull or build, such as --args=--no-https; for
                         prepare, pip's
  -c, --config FILE      settings file: container.image, .packages, .binds, .cache, .tmp, .executable, …
  -h, --help             show this help"""

_VALUED = ("from", "requirements", "out", "args", "wheelhouse")
_ACTIONS = ("pull", "prepare", "build", "definition")


def main(argv: Sequence[str]) -> int:
    """`argv` without `container`; the result is the exit code."""
    action, rest = (argv[0], list(argv[1:])) if argv else ("", [])
    if action in ("-h", "--help"):
        print(HELP)
        return 0
    if action not in _ACTIONS:
        said = f"unknown action {action!r}" if action else "no action given"
        raise UsageError(f"{said}: expected one of {', '.join(_ACTIONS)}.{did_you_mean(action, _ACTIONS)}")
    rest, extras = split_extras(rest) if action == "definition" else (rest, [])
    extras = [word for words in extras for word in re.split(r",(?![<>=!~])", words) if word]
    scanned, words = _scan(rest)
    if "help" in scanned.flags:
        print(HELP)
        return 0
    if action == "definition":
        if words:
            raise UsageError(f"unknown word {words[0]!r}: an image is --from {words[0]}, and extras follow --with")
        return _definition(scanned, extras)
    config = load_config(scanned.files, scanned.overrides, os.environ).config
    if action == "prepare":
        return _prepare(words, scanned, config)
    if not 1 <= len(words) <= 2:
        raise UsageError(f"expected phalanx container {action} {'URI' if action == 'pull' else 'DEFINITION'} [FILE]")
    return _make(action, words, config, _list(scanned.values.get("args")))


def _scan(argv: list[str]) -> tuple[Scanned, list[str]]:
    """Options may stand before and after the words."""
    words: list[str] = []
    scanned = scan(argv, script=True, valued=_VALUED)
    while scanned.script is not None:
        words.append(scanned.script)
        after = scan(scanned.args, script=True, valued=_VALUED)
        scanned = Scanned(
            scanned.files + after.files,
            scanned.overrides + after.overrides,
            scanned.flags | after.flags,
            {**scanned.values, **after.values},
            after.script,
            after.args,
        )
    return scanned, words


def _list(text: str | None) -> list[str]:
    return [word for word in (text or "").split(",") if word]


def _make(action: str, words: list[str], config: JobConfig, more: list[str]) -> int:
    runtime = "singularity" if config.runtime == "singularity" else "apptainer"
    images.warn_of_home(config.container, runtime, os.environ)
    if action == "pull":
        target = Path(words[1] if len(words) > 1 else images.file_name(words[0])).expanduser()
        code = images.pull(words[0], target, config.container, runtime, more)
    else:
        target = Path(words[1] if len(words) > 1 else Path(words[0]).stem + ".sif").expanduser()
        code = images.build(Path(words[0]), target, config.container, runtime, more)
    if code == 0:
        print(target)
    return code


def _prepare(words: list[str], scanned: Scanned, config: JobConfig) -> int:
    if len(words) > 1 or not (words or config.container.image):
        raise UsageError("expected phalanx container prepare IMAGE, or container.image in the settings")
    if words:
        own = config.container.model_copy(update={"image": words[0]})
        config = config.model_copy(update={"container": own})
    runtime = "singularity" if config.runtime == "singularity" else "apptainer"
    # One process that is no rank of anything: what it runs is pip.
    alone = {"runtime": runtime, "nodes": 1, "nproc_per_node": 1, "ntasks": None, "launcher": "python"}
    alone |= {"strategy": "single", "device": "cpu", "backend": None, "dry_run": False}
    plan = make_plan(config.model_copy(update=alone), gather(os.environ), Program(None, ("true",)))
    probe.check(plan)
    images.require(config.container.executable or runtime)
    made = prepare.prepare(plan, scanned.values.get("wheelhouse"), _list(scanned.values.get("args")))
    if made is None:
        print("nothing is missing in it", file=sys.stderr)
    else:
        print(made)
    return 0


def _definition(scanned: Scanned, extras: list[str]) -> int:
    requirements = scanned.values.get("requirements")
    if requirements is not None and not Path(requirements).is_file():
        raise PlanError(f"--requirements {requirements!r}: there is no such file")
    if requirements is not None and ".env" in (Path(requirements).name, Path(requirements).resolve().name):
        raise PlanError("--requirements .env: that file holds secrets, which must not go into an image")
    base = scanned.values.get("from", "nvidia")
    text = definition.text(base, extras, requirements)
    if "horovod" in extras and "-runtime" in definition.bootstrap_of(base)[1]:
        devel = definition.bootstrap_of(base)[1].replace("-runtime", "-devel")
        print(
            f"warning: an image for running has no nvcc, with which Horovod is built: --from {devel}", file=sys.stderr
        )
    out = scanned.values.get("out")
    if out is None:
        print(text, end="")
    elif Path(out).exists():
        raise PlanError(f"{out} exists and is left as it is: give another --out FILE")
    else:
        try:
            Path(out).write_text(text, encoding="utf-8")
        except OSError as error:
            raise PlanError(f"--out {out}: cannot be written: {error.strerror}; choose another file") from None
        print(out)
    return 0
