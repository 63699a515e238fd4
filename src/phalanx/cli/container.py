"""`phalanx container`: images for ranks, pulled or built once, before any job."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ..config import JobConfig, load_config
from ..containers import images
from ..errors import PlanError, UsageError, did_you_mean
from .options import Scanned, scan

HELP = """\
usage: phalanx container pull URI [FILE]
       phalanx container build DEFINITION [FILE]
       phalanx container definition [--from BASE] [--with EXTRA]... [--requirements FILE] [--out FILE]

pull makes one .sif file of docker://HOST/NAME:TAG (or oras://, library://), so that ranks never pull.
build makes one from a definition file, which definition writes for you to edit: on a base whose own
torch is kept, with Phalanx, your requirements and extras such as horovod.

      --from BASE        nvidia, pytorch, rocm, or an image's name (default: nvidia)
      --with EXTRA,…     packages, horovod among them
      --requirements FILE  a pip requirements file
      --out FILE         where the definition goes; unset: stdout
      --args=WORD,…      more options for the runtime's own pull or build, such as --args=--no-https
  -c, --config FILE      settings file: container.cache, container.tmp, container.executable, runtime
  -h, --help             show this help"""

_VALUED = ("from", "with", "requirements", "out", "args")
_ACTIONS = ("pull", "build", "definition")


def main(argv: Sequence[str]) -> int:
    """`argv` without `container`; the result is the exit code."""
    action, rest = (argv[0], list(argv[1:])) if argv else ("", [])
    if action in ("-h", "--help"):
        print(HELP)
        return 0
    if action not in _ACTIONS:
        said = f"unknown action {action!r}" if action else "no action given"
        raise UsageError(f"{said}: expected one of {', '.join(_ACTIONS)}.{did_you_mean(action, _ACTIONS)}")
    scanned, words = _scan(rest)
    if "help" in scanned.flags:
        print(HELP)
        return 0
    if action == "definition":
        return _definition(scanned)
    config = load_config(scanned.files, scanned.overrides, os.environ).config
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


def _definition(scanned: Scanned) -> int:
    requirements = scanned.values.get("requirements")
    if requirements is not None and not Path(requirements).is_file():
        raise PlanError(f"--requirements {requirements!r}: there is no such file")
    if requirements is not None and Path(requirements).name == ".env":
        raise PlanError("--requirements .env: that file holds secrets, which must not go into an image")
    root = Path(__file__).resolve().parents[3]
    checkout = root if (root / "pyproject.toml").is_file() else None
    extras = _list(scanned.values.get("with"))
    text = images.definition(scanned.values.get("from", "nvidia"), extras, requirements, checkout)
    out = scanned.values.get("out")
    if out is None:
        print(text, end="")
    elif Path(out).exists():
        raise PlanError(f"{out} exists and is left as it is: give another --out FILE")
    else:
        Path(out).write_text(text, encoding="utf-8")
        print(out)
    return 0
