"""One file of records as arrays and dictionaries, with a fast way for the lines of steps, which are nearly all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from ..records import VERSION
from .model import Numbers

_PREFIX = b'{"v": %d, "kind": "step", "time": ' % VERSION
_LABELS = (_PREFIX, b', "step": ', b', "epoch": ', b', "seconds": ', b', "wait": ', b', "samples": ', b"}")
_COLUMNS = 6


def read_lines(path: Path) -> tuple[Numbers, list[dict[str, Any]], int]:
    """Steps (step, epoch, seconds, wait, samples) in order, the other records, and how many lines were no records."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError:
        return np.empty((0, 5)), [], 1
    ours = [line for line in lines if line.startswith(_PREFIX) and line.endswith(b"}")]
    fast = _fast(ours)
    slow = lines if fast is None else [line for line in lines if not (line.startswith(_PREFIX) and line.endswith(b"}"))]
    steps, others, bad = [np.empty((0, 5)) if fast is None else fast], [], 0
    for line in filter(None, slow):
        record = _parse(line)
        if record is None:
            bad += 1
        elif record["kind"] == "step":
            steps.append(_row(record))
        else:
            others.append(record)
    return np.concatenate(steps), others, bad


def _fast(lines: list[bytes]) -> Numbers | None:
    """The numbers of lines that are to the letter as our writer makes them; None if any isn't."""
    if not lines:
        return np.empty((0, 5))
    text = b"\n".join(lines)
    for label in _LABELS:
        if text.count(label) != len(lines):
            return None
        text = text.replace(label, b" ")
    if text.translate(None, b"0123456789.+-e \n"):
        return None
    numbers: Numbers = np.fromstring(text.decode(), sep=" ")
    return numbers.reshape(-1, _COLUMNS)[:, 1:] if len(numbers) == _COLUMNS * len(lines) else None


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("kind"), str) else None


def _row(record: dict[str, Any]) -> Numbers:
    names = ("step", "epoch", "seconds", "wait", "samples")
    try:
        return np.array([[float(record[name]) for name in names]])
    except (KeyError, TypeError, ValueError):
        return np.empty((0, 5))
