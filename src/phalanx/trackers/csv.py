"""Metrics in `metrics.csv` in the run directory, one value a line: step, name, value.

What the run does again after a resume stands there once, as in the records.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..rundir import opener
from .base import Tracker

_HEADER = ["step", "name", "value"]


class Csv(Tracker):
    def start(self, run_dir: Path, settings: Mapping[str, Any]) -> None:
        self._path = run_dir / ("metrics.dry.csv" if settings.get("dry_run") else "metrics.csv")
        self._earlier: list[list[str]] = []  # rows of earlier attempts, which stand first
        fresh = not self._path.exists()
        if self._path.is_file():
            self._earlier = self._rows()
            self._keep(lambda row: True)
        else:
            self._open()
        if fresh:
            self._writer.writerow(_HEADER)

    def _open(self) -> None:
        self._file = open(self._path, "a", newline="", encoding="utf-8", opener=opener)  # noqa: SIM115
        self._writer = csv.writer(self._file)

    def _rows(self) -> list[list[str]]:
        """Whole ones: the last may have been cut off with its writer."""
        with self._path.open(newline="", encoding="utf-8") as file:
            return [row for row in csv.reader(file) if len(row) == 3 and row[0].isdecimal()]

    def _keep(self, wanted: Callable[[list[str]], bool]) -> None:
        """Write the file anew, with those of the earlier rows, and open it."""
        own = self._rows()[len(self._earlier) :]
        self._earlier = [row for row in self._earlier if wanted(row)]
        self._keys = {(row[0], row[1]) for row in self._earlier}
        part = self._path.with_name(f".{self._path.name}.part")
        with open(part, "w", newline="", encoding="utf-8", opener=opener) as file:
            csv.writer(file).writerows([_HEADER, *self._earlier, *own])
        part.replace(self._path)
        if hasattr(self, "_file"):
            self._file.close()
        self._open()

    def resumed(self, step: int) -> None:
        if self._earlier:
            self._keep(lambda row: int(row[0]) <= step)

    def log(self, values: Mapping[str, float], step: int) -> None:
        if self._earlier:
            again = {(str(step), name) for name in values} & self._keys
            if again:
                self._keep(lambda row: (row[0], row[1]) not in again)
        self._writer.writerows([step, name, value] for name, value in values.items())
        self._file.flush()

    def close(self) -> None:
        self._file.close()
