"""The run's trackers, none of which may harm the training: one that fails is left out from then on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from .. import registry
from .base import Tracker

log = logging.getLogger("phalanx")


class Copies:
    """Gives all metrics to each tracker that works. The records are the source, so nothing is lost without one."""

    def __init__(self, names: Iterable[str], run_dir: Path, settings: Callable[[], Mapping[str, Any]]) -> None:
        self._trackers: dict[str, Tracker] = {}
        self._resumed = False
        for name in names:
            try:
                tracker = registry.load("tracker", registry.TRACKERS, name)()
                self._trackers[name] = tracker
                tracker.start(run_dir, settings())
            except Exception as error:
                self._drop(name, "start", error)

    def resumed(self, step: int) -> None:
        """Of several resumes in one start the first counts, as in the records: later ones look at a checkpoint only."""
        if self._resumed:
            return
        self._resumed = True
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.resumed(step)
            except Exception as error:
                self._drop(name, "resumed", error)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.log(values, step)
            except Exception as error:
                self._drop(name, "log", error)

    def close(self) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.close()
            except Exception as error:
                _warn(name, "close", error)
        self._trackers.clear()

    def _drop(self, name: str, call: str, error: Exception) -> None:
        _warn(name, call, error)
        tracker = self._trackers.pop(name, None)
        try:
            if tracker is not None:
                tracker.close()
        except Exception:  # it has failed already, and that was said
            pass


def _warn(name: str, call: str, error: Exception) -> None:
    cause = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    log.warning(
        "tracker %s failed at its %s() and is left out from now on: %s. Training goes on; the records have all "
        "metrics", name, call, cause,
    )  # fmt: skip
