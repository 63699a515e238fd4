"""What a tracker is: a copy of the metrics elsewhere, kept by the main rank. The records stay the source.

A new one is one file with a subclass, and a line in the registry.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Tracker:
    """Made on the main rank only, when the run starts."""

    def start(self, run_dir: Path, settings: Mapping[str, Any]) -> None:
        """The run begins; `settings` are all of its settings. Where `dry_run` is among them and true, what comes is no
        training's and is to be marked so."""

    def resumed(self, step: int) -> None:
        """The run goes on from `step`: what an earlier one logged after it is void. Called at most once."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Metrics at `step`."""

    def close(self) -> None:
        """The run is over."""
