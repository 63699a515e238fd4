"""`phalanx site`: profiles of clusters, shipped or written from what a cluster says of itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import PlanError, UsageError, did_you_mean
from ..sites import shipped
from .options import scan

HELP = """\
usage: phalanx site init [--out FILE] [--node]
       phalanx site list
       phalanx site show NAME

init asks the cluster (sinfo, scontrol, sacctmgr) and writes a commented site profile; list and show are
for the profiles that come with phalanx.

      --out FILE         where to write; `-` is stdout. Unset: ~/.config/phalanx/site.yaml
      --node             also look at one compute node, by a job step of a minute at most
  -h, --help             show this help

A profile holds what a cluster needs, so that a project's own file needn't: export PHALANX_SITE=FILE or NAME."""


def main(argv: Sequence[str]) -> int:
    """`argv` without `site`; the result is the exit code."""
    scanned = scan(argv, script=True, flags=("node",), valued=("out",))
    after = scan(scanned.args, script=scanned.script == "show", flags=("node",), valued=("out",))
    if "help" in scanned.flags | after.flags:
        print(HELP)
        return 0
    if scanned.script == "init":
        return _init({**scanned.values, **after.values}.get("out"), "node" in scanned.flags | after.flags)
    if scanned.script == "list":
        for name, path in shipped().items():
            print(f"{name:<10} {path.read_text(encoding='utf-8').splitlines()[0].lstrip('# ')}")
        return 0
    if scanned.script == "show" and after.script is not None:
        print(_shipped(after.script).read_text(encoding="utf-8"), end="")
        return 0
    raise UsageError("expected phalanx site init, list or show NAME; see phalanx site --help")


def _shipped(name: str) -> Path:
    known = shipped()
    if name not in known:
        raise UsageError(f"no profile {name!r}: expected one of {', '.join(known)}.{did_you_mean(name, known)}")
    return known[name]


def _init(out: str | None, node: bool) -> int:
    from ..schedulers.slurm.site_profile import look, profile

    path = Path(out).expanduser() if out else _default_path()
    if out != "-" and path.exists():
        raise PlanError(f"{path} exists and is left as it is: give another --out FILE, or move it away")
    text = profile(look(os.environ, node))
    if out == "-":
        print(text, end="")
        return 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanError(f"cannot write {path}: {error.strerror}; give another --out FILE") from None
    print(path)
    print(f"correct it, then: export PHALANX_SITE={path.absolute()}", file=sys.stderr)
    return 0


def _default_path() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME", "")
    return Path(base if Path(base).is_absolute() else Path.home() / ".config", "phalanx", "site.yaml")
