"""Which source a run was started from: the commit and what was changed since."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from ..errors import PlanError
from ..rundir import write_atomic

DIFF_LIMIT = 1 << 20  # characters; a larger diff is cut off, and `truncated` says so
_OURS = Path(__file__).resolve().parents[1] / "testing"  # its script runs what the current folder holds


def save_source(script: Path, run_dir: Path) -> None:
    """Write source.json; without git or a repository its values are null."""
    folder = Path.cwd() if script.resolve().parent == _OURS else script.resolve().parent
    commit = _git(folder, "rev-parse", "HEAD")
    diff = _git(folder, "diff", "HEAD") if commit else None
    source = {
        "v": 1,
        "script": str(script.resolve()),
        "commit": commit.strip() if commit else None,
        "diff": diff[:DIFF_LIMIT] if diff is not None else None,
        "truncated": diff is not None and len(diff) > DIFF_LIMIT,
    }
    write_atomic(run_dir / "source.json", json.dumps(source, indent=1))


def tracked(folder: Path) -> tuple[Path, list[str]]:
    """The top of the repository around `folder`, and the files that git tracks there. Raises PlanError if none."""
    top = (_git(folder, "rev-parse", "--show-toplevel") or "").rstrip("\n")
    names = _git(folder, "ls-files", "-z", "--full-name", "--", ":/") if top else None
    if not names:
        raise PlanError(f"snapshot=true copies the files that git tracks, and {folder} has none: git add, or unset it")
    return Path(top), [name for name in names.split("\0") if name]


def save_snapshot(folder: Path, run_dir: Path) -> None:
    """Copy the tracked files around `folder`, as they are now, into `snapshot/`; `workdir` is the copy of `folder`."""
    top, names = tracked(folder)
    target = run_dir / "snapshot"
    for name in names:
        source = top / name
        if source.is_symlink() or source.is_file():  # one that was deleted since is not in the tree either
            copy = target / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy, follow_symlinks=False)
    here = target / folder.resolve().relative_to(top.resolve())
    here.mkdir(parents=True, exist_ok=True)
    (run_dir / "workdir").symlink_to(here)


def _git(folder: Path, *arguments: str) -> str | None:
    """git's answer, or None: a run doesn't fail because its source can't be named."""
    try:
        answer = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.decode(errors="replace")
