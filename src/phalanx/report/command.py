"""One report from the words of a command line: read, analyse, write everything or nothing."""

from __future__ import annotations

import gc
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime, timezone
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import DataError, UsageError
from .analyse.analysis import Options, analyse
from .model import Analysis, Input, RunData
from .read.inputs import gather
from .show import summary, tables
from .text import shown

__all__ = ["Made", "Options", "make"]
_REASONS = 8  # that an error tells


@dataclass(frozen=True)
class Made:
    """What a report says, and the files that it consists of."""

    analysis: Analysis
    files: tuple[Path, ...]

    @property
    def warnings(self) -> list[str]:
        return [shown(line) for line in summary.troubles(self.analysis)]

    def summary(self, width: int) -> str:
        """For a terminal of `width` columns."""
        page = next((path for path in self.files if path.name == "report.html"), self.files[0])
        text = f"{summary.terminal(self.analysis, width)}\n\nreport  {page}"
        return "\n".join(map(shown, text.split("\n")))

    def as_dict(self) -> dict[str, Any]:
        """For programs: the analysis without the single steps and epochs, which records and epochs.csv have."""
        found: dict[str, Any] = _plain(self.analysis, leave=("runs",))
        return {**found, "files": [str(path) for path in self.files]}


def make(
    words: Sequence[str],
    root: Path,
    options: Options,
    out: Path,
    scaling: str = "strong",
    ranks_a_node: int | None = None,
) -> Made:
    """Read what `words` mean (see inputs.py), and write the report into `out`, or nothing at all. `scaling` and
    `ranks_a_node` are those of inputs that don't record them.

    Raises UsageError for a word that is nothing, and DataError if nothing that was found can be used.
    """
    with _without_collection():
        runs, looked_at = gather(words, root, scaling, ranks_a_node)
        _check_usable(runs, looked_at, words)
        analysis = analyse(runs, looked_at, options, meta=_meta())
        _check_measured(analysis, runs, options)
        return Made(analysis, tuple(_write(analysis, out)))


@contextmanager
def _without_collection() -> Iterator[None]:
    """What is made here is kept, and looking through it for garbage would be a twentieth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _meta() -> dict[str, Any]:
    return {"version": __version__, "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")}


def _check_usable(runs: Sequence[RunData], looked_at: Sequence[Input], words: Sequence[str]) -> None:
    if runs:
        return
    where = ", ".join(words) or "./runs and ./scalability-metrics"
    if not looked_at:
        raise UsageError(
            f"no runs in {where}: expected run directories (phalanx run makes them), or CSV files with the columns "
            "name, epoch_id, time, and nodes or ranks"
        )
    raise DataError(
        f"nothing in {where} can be used for a report; expected at least one run with a whole epoch or a few steps:\n"
        f"{_reasons(looked_at)}"
    )


def _check_measured(analysis: Analysis, runs: Sequence[RunData], options: Options) -> None:
    points = [point for group in analysis.groups for line in group.lines for point in line.points]
    if any(point.epoch or point.step or point.throughput for point in points):
        return
    benchmarks = any(len(run.allreduce) for run in runs)
    if benchmarks and not points:
        raise DataError(
            "these are all-reduce benchmarks alone, which a forecast uses: name your training runs beside them"
        )
    hint = "" if not options.warmup_epochs else "; --warmup-epochs 0 takes the warm-up in"
    raise DataError(f"no epoch and no step has a time that can be used{hint}:\n{_reasons(analysis.inputs)}")


def _reasons(looked_at: Sequence[Input]) -> str:
    lines = [f"  {item.path}: {'; '.join(item.left_out) or 'no times'}" for item in looked_at]
    more = [f"  … and {len(lines) - _REASONS} more"] if len(lines) > _REASONS else []
    return "\n".join([*lines[:_REASONS], *more])


def _write(analysis: Analysis, out: Path) -> list[Path]:
    """All files appear together: a report that can't be finished leaves an older one as it was."""
    out = out.absolute()
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        part.mkdir(parents=True)
        written = tables.write(analysis, part)
        for name in ("show.plots", "show.page"):
            if find_spec(f"phalanx.report.{name}"):
                made = import_module(f"phalanx.report.{name}").write(analysis, part)
                written += [made] if isinstance(made, Path) else made
        return [_moved(path, part, out) for path in written]
    except OSError as error:
        raise UsageError(f"--out {out}: cannot be written: {error.strerror or error}; choose another folder") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _moved(path: Path, part: Path, out: Path) -> Path:
    target = out / path.relative_to(part)
    target.parent.mkdir(parents=True, exist_ok=True)
    return path.replace(target)


def _plain(value: Any, leave: Iterable[str] = ()) -> Any:
    """Dataclasses as dictionaries, without what JSON can't hold."""
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: _plain(getattr(value, item.name)) for item in fields(value) if item.name not in leave}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, (str, int, bool)) or value is None else str(value)
