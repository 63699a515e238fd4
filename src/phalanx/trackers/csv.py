"""Metrics in `metrics.csv` in the run directory, one value a line: step, name, value."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..rundir import opener
from .base import Tracker


class Csv(Tracker):
    def start(self, run_dir: Path, settings: Mapping[str, Any]) -> None:
        path = run_dir / ("metrics.dry.csv" if settings.get("dry_run") else "metrics.csv")
        fresh = not path.exists()
        self._file = open(path, "a", newline="", encoding="utf-8", opener=opener)  # noqa: SIM115
        self._writer = csv.writer(self._file)
        if fresh:
            self._writer.writerow(["step", "name", "value"])

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._writer.writerows([step, name, value] for name, value in values.items())
        self._file.flush()

    def close(self) -> None:
        self._file.close()
