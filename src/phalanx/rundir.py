"""The run directory, in which the two halves meet: where things lie, and how one is made or found.

<run root>/<name>/<id>/  config.yaml origins.json plan.json job.sh source.json
                         logs/ errors/ records/ checkpoints/ report/

Its mode (`run_mode`) says who may look into it. Folders and files of ours are as open as the folder they lie in,
whatever the umask would allow; what the run directory gives to a group, no rank's umask takes away.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import PlanError

_STAMP = "%Y%m%d-%H%M%S"
DRY = "DRY_RUN"  # a file that marks the directory of a dry run: it is none to go on with
DRY_CHECKPOINTS = ".dry-checkpoints"
PER_RANK_LIMIT = 64  # above so many ranks, logs are one file a node


def check_name(name: str) -> None:
    """Raise PlanError for what can't be the name of a run's folder."""
    if not name or name in {".", ".."} or "/" in name or not name.isprintable() or len(os.fsencode(name)) > 200:
        raise PlanError(
            f"run name {name!r} cannot be a folder's name: use printable text without '/', and not '.' or '..' (name=…)"
        )


def new_run_dir(root: str | Path, name: str, mode: int = 0o700) -> Path:
    """Make `<root>/<name>/<UTC time>-<random>`, which no other launch has; return its absolute path."""
    check_name(name)
    stamp = time.strftime(_STAMP, time.gmtime())
    path = Path(root).expanduser().absolute() / name / f"{stamp}-{secrets.token_hex(2)}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700)
        path.chmod(mode)
    except FileExistsError:
        if not path.is_dir():
            raise PlanError(f"cannot make {path}: a file is in the way; choose another run_root") from None
        return new_run_dir(root, name, mode)  # two launches drew one id in one second
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
    try:
        return (run_dir / DRY).exists()
    except PermissionError:  # another user's run under a run root that is shared
        return False


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
    make_folder(path.parent)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with open(part, "w", encoding="utf-8", opener=opener) as file:
        file.write(text)
    part.replace(path)


def make_folder(path: Path) -> None:
    """A folder as open as the one around it, if it isn't there yet."""
    if not path.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=path.parent.stat().st_mode & 0o777, exist_ok=True)


def opener(path: str | os.PathLike[str], flags: int) -> int:
    """For `open`: a new file is as open as its folder."""
    return os.open(path, flags, Path(path).parent.stat().st_mode & 0o666)


def share(run_dir: Path) -> int:
    """From here on, this process's umask takes nothing away that the run directory gives; returns the old one."""
    with suppress(OSError):
        mode = run_dir.stat().st_mode & 0o777
        old = os.umask(0o077)
        os.umask(old & ~mode)
        return old
    return os.umask(os.umask(0o077))


@contextmanager
def shared(run_dir: Path) -> Iterator[None]:
    """The same within a `with`."""
    old = share(run_dir)
    try:
        yield
    finally:
        os.umask(old)
