"""CSV files as rows, and which kind they are: their columns tell. Their order, an index before them and further columns
don't matter."""

from __future__ import annotations

import codecs
import csv
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_SIZES = frozenset({"nodes", "ranks"})  # of which epoch times need one
KINDS: Mapping[str, frozenset[str]] = {
    "epoch times": frozenset({"name", "epoch_id", "time"}),
    "GPU energy": frozenset({"utilization", "power", "num_global_gpus", "strategy", "probing_interval"}),
    "computation": frozenset({"name", "self_cuda_time_total", "strategy", "num_gpus", "global_rank"}),
}
_OTHER_NAMES = {"workers": "ranks", "num_workers": "ranks", "world_size": "ranks", "num_nodes": "nodes"}
DIFFERS = "\0differs"  # marks a row of which two columns contradict each other
_FEW = 5
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


@dataclass
class Table:
    """A file's rows, by column name; `reason` says why there are none."""

    path: Path
    kind: str = "?"
    rows: list[dict[str, str]] = field(default_factory=list)
    reason: str = ""


def read_table(path: Path) -> Table:
    """The rows of one file, if it is one of ours."""
    try:
        content = path.read_bytes()
    except OSError as error:
        return Table(path, reason=f"cannot be read: {error.strerror}")
    encoding = "utf-16" if content.startswith(_UTF16) else "utf-8-sig"
    lines = [line for line in content.decode(encoding, "replace").splitlines() if line.strip()]
    if not lines:
        return Table(path, reason="empty")
    try:
        rows = list(csv.reader(lines, delimiter=max(",;\t", key=lines[0].count), skipinitialspace=True))
    except csv.Error as error:
        return Table(path, reason=f"no CSV file: {error}")
    header = [_column(name) for name in rows[0]]
    kind = next((kind for kind, names in KINDS.items() if names <= set(header)), None)
    if kind is None or (kind == "epoch times" and not _SIZES & set(header)):
        return Table(path, reason=f"its columns are {few(header)}: {_lacking(set(header))}")
    if len(rows) == 1:
        return Table(path, kind, reason="no rows below its header")
    return Table(path, kind, [_named(header, row) for row in rows[1:]])


def _named(header: Sequence[str], row: Sequence[str]) -> dict[str, str]:
    """Nothing of a row with more fields than the header has, as decimal commas make them."""
    values = [value.strip() for value in row]
    if any(values[len(header) :]):
        return {}
    named: dict[str, str] = {}
    for name, value in zip(header, values, strict=False):
        if _told(value) or name not in named:  # of two columns alike, the one that tells
            named[name] = value
    return {**named, DIFFERS: ""} if _differs(header, values) else named


def _differs(header: Sequence[str], values: Sequence[str]) -> bool:
    """Whether two columns of one meaning, such as `workers` and `world_size`, tell different numbers."""
    if len(set(header)) == len(header):
        return False
    said: dict[str, set[float | str]] = {}
    for name, value in zip(header, values, strict=False):
        if _told(value):
            said.setdefault(name, set()).add(value if (told := number(value)) is None else told)
    return any(len(said[name]) > 1 for name in _SIZES & said.keys())


def _told(value: str) -> bool:
    return bool(value) and value.lower() != "nan"


def _column(name: str) -> str:
    """`Epoch ID` is `epoch_id`, and ranks have several names."""
    found = re.sub(r"[\s-]+", "_", name.strip().lower())
    return _OTHER_NAMES.get(found, found)


def _lacking(header: set[str]) -> str:
    """What a file would need to be of the kind that it is nearest to; of all kinds, if it is near to none."""
    nearest = max(KINDS, key=lambda kind: len(KINDS[kind] & header) / len(KINDS[kind]))
    if nearest != "epoch times" or len(KINDS[nearest] & header) < 2:
        return f"expected {' or '.join(_needed(kind) for kind in KINDS)}"
    missing = [*sorted(KINDS[nearest] - header), *([] if _SIZES & header else ["nodes or ranks"])]
    return f"{' and '.join(missing)} missing; expected {_needed(nearest)}"


def _needed(kind: str) -> str:
    names = ", ".join(sorted(KINDS[kind]))
    return f"{names}, and nodes or ranks (also called workers)" if kind == "epoch times" else names


def few(words: Sequence[str]) -> str:
    return ", ".join(words if len(words) <= _FEW else [*words[:_FEW], f"and {len(words) - _FEW} more"])


def whole(text: str | None) -> int | None:
    """`4` and, as pandas writes columns with gaps, `4.0`."""
    found = number(text)
    return int(found) if found is not None and math.isfinite(found) and found == int(found) else None


def number(text: str | None) -> float | None:
    try:
        return float(text) if text is not None else None
    except ValueError:
        return None
