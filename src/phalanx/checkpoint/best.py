"""The best checkpoints by a value that the script logs: it stands in their markers, so that it outlives the run."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from . import store

log = logging.getLogger("phalanx")


@dataclass
class Monitor:
    """Rank 0's, which alone logs.

    A checkpoint gets the newest value that was logged since the one before it. One without gets the first value that is
    logged before the next step: then the script saves before it evaluates.
    """

    root: Path
    name: str
    mode: str  # "min" or "max"
    keep: int
    logged: bool = False
    _fresh: float | None = None
    _bare: Path | None = None  # the newest checkpoint, if it has no value

    def note(self, values: Mapping[str, float], step: int) -> None:
        """The script has logged `values`; `step` steps are done."""
        if self.name not in values:
            return
        self.logged, self._fresh = True, float(values[self.name])
        if self._bare is not None and self._bare.name == str(step):
            try:
                store.amend(self._bare, self._said(self._fresh))
                self._fresh = self._bare = None
            except (OSError, ValueError) as error:
                log.warning("cannot write %s=%g into %s: %s", self.name, values[self.name], self._bare, error)

    def facts(self, step: int) -> dict[str, object]:
        """For the marker of a checkpoint that is about to be committed, perhaps in another one's place."""
        value = self._fresh if self._fresh is not None else store.value(self.root / str(step), self.name)
        return {} if value is None else self._said(value)

    def _said(self, value: float) -> dict[str, object]:
        return {"monitor": {self.name: value}, "mode": self.mode}

    def committed(self, path: Path) -> None:
        """This is now the newest one, or the one that was loaded."""
        self._fresh = None
        self._bare = path if path.parent == self.root and store.value(path, self.name) is None else None

    def best(self) -> list[Path]:
        """Best first; of equal ones the earlier. NaN is never among them."""
        values = [(store.value(path, self.name), path) for path in reversed(store.steps(self.root))]
        known = [(value, path) for value, path in values if value is not None and not math.isnan(value)]
        known.sort(key=lambda pair: pair[0] if self.mode == "min" else -pair[0])
        return [path for _, path in known]

    def spared(self) -> list[Path]:
        """Those that are not pruned."""
        return self.best()[: self.keep]
