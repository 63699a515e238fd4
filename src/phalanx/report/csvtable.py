"""CSV files as rows, and which kind they are: their columns tell. Their order, an index before them and further columns
don't matter."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

KINDS: Mapping[str, frozenset[str]] = {
    "epoch times": frozenset({"name", "nodes", "epoch_id", "time"}),
    "GPU energy": frozenset({"utilization", "power", "num_global_gpus", "strategy", "probing_interval"}),
    "computation": frozenset({"name", "self_cuda_time_total", "strategy", "num_gpus", "global_rank"}),
}
_FEW = 5


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
        text = path.read_text(encoding="utf-8-sig", errors="replace")
    except OSError as error:
        return Table(path, reason=f"cannot be read: {error.strerror}")
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        return Table(path, reason="empty")
    try:
        rows = list(csv.reader(lines, delimiter=";" if lines[0].count(";") > lines[0].count(",") else ","))
    except csv.Error as error:
        return Table(path, reason=f"no CSV file: {error}")
    header = [name.strip() for name in rows[0]]
    kind = next((kind for kind, names in KINDS.items() if names <= set(header)), None)
    if kind is None:
        return Table(path, reason=f"its columns are {few(header)}: expected {_expected()}")
    if len(rows) == 1:
        return Table(path, kind, reason="no rows below its header")
    return Table(path, kind, [_named(header, row) for row in rows[1:]])


def _named(header: Sequence[str], row: Sequence[str]) -> dict[str, str]:
    """Nothing of a row with more fields than the header has, as decimal commas make them."""
    return {} if any(row[len(header) :]) else dict(zip(header, row, strict=False))


def _expected() -> str:
    return " or ".join(", ".join(sorted(names)) for names in KINDS.values())


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
