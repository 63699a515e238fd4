"""What becomes known of a checkpoint after it was written: whether it was the end of its epoch."""

from __future__ import annotations

import json
from pathlib import Path

from ..rundir import write_atomic
from .store import MARKER


def set_ended(path: Path, ended: bool) -> None:
    """Note it in the marker. One rank calls it; a checkpoint that is gone by now needs no note."""
    try:
        marker = json.loads((path / MARKER).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    write_atomic(path / MARKER, json.dumps({**marker, "epoch_ended": ended}, indent=1))


def ended(path: Path) -> bool | None:
    """What was noted; None if nothing was."""
    try:
        marker = json.loads((path / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    noted = marker.get("epoch_ended")
    return None if noted is None else bool(noted)
