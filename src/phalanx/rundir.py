"""The run directory, in which the two halves meet: where things lie, and how one is made or found.

<run root>/<name>/<id>/  config.yaml origins.json plan.json job.sh source.json
                         logs/ errors/ records/ checkpoints/ report/
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from pathlib import Path

from .errors import PlanError

_STAMP = "%Y%m%d-%H%M%S"
DRY = "DRY_RUN"  # a file that marks the directory of a dry run: it is none to go on with
DRY_CHECKPOINTS = ".dry-checkpoints"
PER_RANK_LIMIT = 64  # above so many ranks, logs are one file a node


def new_run_dir(root: str | Path, name: str) -> Path:
    """Make `<root>/<name>/<UTC time>-<random>`, which no other launch has; return its absolute path."""
    if not name or name in {".", ".."} or "/" in name or "\0" in name:
        raise PlanError(f"run name {name!r} cannot be a folder's name: use one without '/' (name=…)")
    stamp = time.strftime(_STAMP, time.gmtime())
    path = Path(root).expanduser().absolute() / name / f"{stamp}-{secrets.token_hex(2)}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir()
    except FileExistsError:
        if not path.is_dir():
            raise PlanError(f"cannot make {path}: a file is in the way; choose another run_root") from None
        return new_run_dir(root, name)  # two launches drew one id in one second
    except OSError as error:
        raise PlanError(f"cannot make the run directory {path}: {error.strerror}; set run_root=DIR") from None
    return path


def discard(run_dir: Path) -> None:
    """Remove a run directory in which nothing ran, and the folders above it that were made for it alone."""
    shutil.rmtree(run_dir, ignore_errors=True)
    for folder in (run_dir.parent, run_dir.parent.parent):
        try:
            folder.rmdir()
        except OSError:  # others' runs are in it
            return


def mark_dry(run_dir: Path) -> None:
    """Say that what happens in a run directory is a dry run."""
    write_atomic(run_dir / DRY, "one group of each loop: no run to go on with or to report\n")


def is_dry(run_dir: Path) -> bool:
    return (run_dir / DRY).exists()


def find_run_dir(root: str | Path, name: str, target: str) -> Path:
    """The run that `--resume TARGET` means: 'latest' of `name`, a path, an id, or name/id under `root`."""
    base = Path(root).expanduser().absolute()
    there = (path for path in (base / name).glob("*") if path.is_dir() and not is_dry(path))
    runs = sorted(there, key=_start_time)
    if target == "latest":
        if runs:
            return runs[-1]
    else:
        for path in (Path(target).expanduser().absolute(), base / target, base / name / target):
            if path.is_dir() and path != base / name and path != base:
                _refuse_dry(path)
                return path
        elsewhere = sorted(base.glob(f"*/{target}"))
        if elsewhere:
            _refuse_dry(elsewhere[0])
            return elsewhere[0]
    known = ", ".join(path.name for path in runs[-5:]) or "none"
    raise PlanError(f"no run {target!r} to resume in {base / name}: expected 'latest', a path or one of: {known}")


def _refuse_dry(path: Path) -> None:
    if is_dry(path):
        raise PlanError(f"{path} holds a dry run, which keeps no checkpoint: there is nothing to resume")


def _start_time(run_dir: Path) -> str:
    """Ids begin with the time, but for those of jobs that made their own directory: `job-<number>`."""
    if not run_dir.name.startswith("job-"):
        return run_dir.name
    return time.strftime(_STAMP, time.gmtime(run_dir.stat().st_ctime))


def run_dirs_of_series(root: str | Path, name: str) -> list[Path]:
    """The run directories of a series' members, by path; none if there is no such series under `root`.

    Every job, and every member of a local series, leaves a note `jobs/<id>.json` that names its series.
    """
    notes = Path(root).expanduser().absolute().glob("*/*/jobs/*.json")
    return sorted({note.parents[1] for note in notes if _series_of(note) == name})


def _series_of(note: Path) -> str | None:
    import json  # ranks import this module, and have no use for it

    try:
        series = json.loads(note.read_text(encoding="utf-8"))["series"]
    except (OSError, ValueError, KeyError, TypeError):  # no note of ours
        return None
    return series if isinstance(series, str) else None


def next_attempt(run_dir: Path) -> int:
    """1 for the first start in this directory, one more for each restart. Called by rank 0 only."""
    taken = [int(part) for file in run_dir.glob("records/*.jsonl") if (part := file.name.split(".")[-2]).isdigit()]
    return max(taken, default=0) + 1


def log_path(run_dir: Path, rank: int, node_rank: int, world_size: int) -> Path:
    """A rank's log: its own file, or its node's above 64 ranks."""
    name = str(rank) if world_size <= PER_RANK_LIMIT else f"node{node_rank}"
    return run_dir / "logs" / f"{name}.log"


def write_atomic(path: Path, text: str) -> None:
    """Write so that a reader sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
