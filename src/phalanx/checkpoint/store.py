"""Checkpoint directories: written aside, committed by a marker and a rename, pruned to the newest few.

checkpoints/<step>/  .metadata *.distcp   tensors, by torch.distributed.checkpoint
                     state.pt             what is no tensor
                     COMMIT               written last: the files' sizes, and checksums of the small ones
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ..rundir import make_folder, write_atomic

MARKER = "COMMIT"
VERSION = 1
_SMALL = (".metadata", "state.pt")  # read whole at loading, so a checksum is cheap


def staging(root: Path, step: int) -> Path:
    """Where a checkpoint is written before it is committed."""
    return root / f".{step}.part"


def begin(root: Path, step: int) -> Path:
    """An empty staging folder. One rank calls it, the others wait."""
    part = staging(root, step)
    shutil.rmtree(part, ignore_errors=True)
    make_folder(root)
    make_folder(part)
    return part


def commit(root: Path, step: int, facts: dict[str, object]) -> Path:
    """Mark the staged checkpoint as whole and give it its name. One rank calls it, after all have written."""
    part, final = staging(root, step), root / str(step)
    files = sorted(path for path in part.iterdir() if path.is_file())
    mode = part.stat().st_mode & 0o666  # torch's writers know the umask only
    for path in files:
        path.chmod(mode)
        _sync(path)
    marker = {
        "v": VERSION,
        "step": step,
        **facts,
        "sizes": {path.name: path.stat().st_size for path in files},
        "crc32": {name: zlib.crc32((part / name).read_bytes()) for name in _SMALL},
    }
    write_atomic(part / MARKER, json.dumps(marker, indent=1))
    _sync(part / MARKER)
    if final.exists():  # this step was saved before: never a moment without either
        old = root / f".{step}.old"
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
        try:
            part.rename(final)
        except OSError:
            old.rename(final)
            raise
        shutil.rmtree(old, ignore_errors=True)
    else:
        part.rename(final)
    _sync(root)
    return final


def set_aside(root: Path, step: int) -> list[str]:
    """Put checkpoints of later steps out of the way: the run went back behind them, and its new ones are to be the
    newest. They stay, as `<step>.left`. One rank calls it; the result are their steps."""
    later = [path for path in steps(root) if int(path.name) > step]
    for path in later:
        left = path.with_name(f"{path.name}.left")
        shutil.rmtree(left, ignore_errors=True)
        path.rename(left)
    return [path.name for path in reversed(later)]


def abandon(root: Path, step: int) -> None:
    """Nothing is left of a checkpoint that could not be written: its disk may be full. One rank calls it."""
    shutil.rmtree(staging(root, step), ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def prune(root: Path, keep: int, spared: Collection[Path] = ()) -> None:
    """Delete all but the newest `keep` and the spared ones, and what was never committed. One rank calls it."""
    for path in steps(root)[keep:]:
        if path not in spared:
            shutil.rmtree(path, ignore_errors=True)
    for path in (*root.glob(".*.part"), *root.glob(".*.old")):
        shutil.rmtree(path, ignore_errors=True)


def steps(root: Path) -> list[Path]:
    """Committed and broken checkpoints alike, newest first."""
    found = [path for path in root.glob("*") if path.is_dir() and path.name.isdecimal()]
    return sorted(found, key=lambda path: int(path.name), reverse=True)


def marker_of(path: Path) -> dict[str, Any]:
    """What a checkpoint's marker says; nothing, if it can't be read."""
    try:
        said = json.loads((path / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def value(path: Path, name: str) -> float | None:
    """The value that a checkpoint was saved with, if it was."""
    values = marker_of(path).get("monitor")
    found = values.get(name) if isinstance(values, dict) else None
    return float(found) if isinstance(found, int | float) else None


def amend(path: Path, facts: dict[str, object]) -> None:
    """Put more into a marker. One rank calls it."""
    said = json.loads((path / MARKER).read_text(encoding="utf-8"))
    write_atomic(path / MARKER, json.dumps({**said, **facts}, indent=1))


def defect(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None if it is whole."""
    try:
        marker = json.loads((path / MARKER).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"no {MARKER} marker: it was never finished"
    except (OSError, ValueError) as error:
        return f"its {MARKER} marker cannot be read: {error}"
    try:
        if marker["v"] != VERSION:
            return f"its format is {marker['v']}, expected {VERSION}"
        for name, size in marker["sizes"].items():
            if (there := (path / name).stat().st_size) != size:
                return f"{name} has {there} bytes, expected {size}"
        for name, crc in marker["crc32"].items():
            if zlib.crc32((path / name).read_bytes()) != crc:
                return f"{name} does not match its checksum"
    except OSError as error:
        return str(error)
    except (KeyError, TypeError, AttributeError):
        return f"its {MARKER} marker is not one of ours"
    return None
