"""One file of records as arrays and dictionaries, with a fast way for the lines of steps, which are nearly all."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from ..records import VERSION
from .model import Numbers

_PREFIX = b'{"v": %d, "kind": "step", "time": ' % VERSION
_LABELS = (_PREFIX, b', "step": ', b', "epoch": ', b', "seconds": ', b', "wait": ', b', "samples": ', b"}")
_COLUMNS = 6
# Our own writer's line, to the letter; others are left to the JSON parser.
_LINE = re.compile(
    re.escape(_PREFIX)
    + rb'[\d.]+, "step": \d+, "epoch": \d+, "seconds": [-+.\de]+, "wait": [-+.\de]+, "samples": \d+\}'
)


def read_lines(path: Path) -> tuple[Numbers, list[dict[str, Any]], int]:
    """Steps (step, epoch, seconds, wait, samples) in order, the other records, and how many lines were no records."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError:
        return np.empty((0, 5)), [], 1
    fast = [line for line in lines if _LINE.fullmatch(line)]
    slow = [line for line in lines if line and not line.startswith(_PREFIX)]
    if len(fast) + len(slow) < sum(map(bool, lines)):
        slow += [line for line in lines if line.startswith(_PREFIX) and not _LINE.fullmatch(line)]
    steps, others, bad = [_fast(fast)], [], 0
    for line in slow:
        record = _parse(line)
        if record is None:
            bad += 1
        elif record["kind"] == "step":
            steps.append(_row(record))
        else:
            others.append(record)
    return np.concatenate(steps), others, bad


def _fast(lines: list[bytes]) -> Numbers:
    """The numbers of lines that `_LINE` matches."""
    if not lines:
        return np.empty((0, 5))
    text = b"\n".join(lines)
    for label in _LABELS:
        text = text.replace(label, b" ")
    numbers = np.fromstring(text.decode("ascii"), sep=" ")
    return numbers.reshape(-1, _COLUMNS)[:, 1:]


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
