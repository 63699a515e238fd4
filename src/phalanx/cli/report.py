"""`phalanx generate-scalability-report`: what runs recorded, as a page, plots, tables and a verdict."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from ..errors import UsageError
from ..registry import require
from ..rundir import run_dirs_of_series
from .jobs import Wanted, read

HELP = """\
usage: phalanx generate-scalability-report [RUNS]... [--out DIR] [options]
       phalanx report [RUNS]...                                 the same

How epoch and step times, throughput, efficiency, energy and cost change with the number of ranks: whether
more are worth it. RUNS are run directories, folders of them, CSV files with epoch times (name,nodes,epoch_id,time,
or workers in place of nodes), folders of those, or the name of a series. Without any, the run root (./runs) and
./scalability-metrics are read.

      --out DIR           where report.html, plots, tables and summary.md go (scalability-report)
      --warmup-epochs N   epochs at the beginning of each run that are left out (1; 0: raw)
      --warmup-steps N    the same for steps, where there are no epochs to spare (10)
      --epochs N          time and device-hours to so many epochs (100)
      --efficiency E      the least that makes a size worth it, 0 to 1 (0.7)
      --scaling weak      what CSV files and others that don't tell are of (strong)
      --ranks-per-node N  of CSV files that tell ranks or nodes only (sizes are then ranks or nodes alone)
      --title TEXT        the report's title
      --json              all figures on stdout as JSON, instead of the summary
      --run-root DIR      where run directories are (the setting run_root)
  -c, --config FILE       settings file that says so
  -h, --help              this help

--log-dir DIR is one more of RUNS, --plot-dir is --out, and --experiment-name is a series to read and the title."""

_VALUED = ("out", "plot-dir", "log-dir", "experiment-name", "warmup-epochs", "warmup-steps", "epochs", "efficiency",
           "ranks-per-node", "title")  # fmt: skip
_EXTRA = "report"
_T = TypeVar("_T", int, float)


def main(argv: Sequence[str]) -> int:
    """`argv` without the command's name; the result is the exit code."""
    wanted = read(argv, flags=("json",), valued=_VALUED)
    values = wanted.scanned.values
    if "help" in wanted.scanned.flags:
        print(HELP)
        return 0
    options, out, a_node = _options(values), _out(values), _ranks_a_node(values)
    for package in ("numpy", "matplotlib"):
        require(package, _EXTRA)
    report = import_module("phalanx.report.command")
    words, scaling = _words(wanted, values), wanted.config.scaling
    made = report.make(words, wanted.root, report.Options(**options), out, scaling, a_node)
    for line in made.warnings:
        print(f"warning: {line}", file=sys.stderr)
    if "json" in wanted.scanned.flags:
        print(json.dumps(made.as_dict(), indent=1))
    else:
        print(made.summary(shutil.get_terminal_size((100, 24)).columns))
    return 0


def _words(wanted: Wanted, values: Mapping[str, str]) -> list[str]:
    """What is to be read; an experiment's name is a series', or the report's title alone."""
    words = [*wanted.targets, *([values["log-dir"]] if "log-dir" in values else [])]
    experiment = values.get("experiment-name", "")
    return [*words, experiment] if experiment and run_dirs_of_series(wanted.root, experiment) else words


def _options(values: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "warmup_epochs": _number(values, "warmup-epochs", 1, int, "a whole number from 0", lambda n: n >= 0),
        "warmup_steps": _number(values, "warmup-steps", 10, int, "a whole number from 0", lambda n: n >= 0),
        "epochs": _number(values, "epochs", 100, int, "a whole number from 1", lambda n: n >= 1),
        "efficiency": _number(
            values, "efficiency", 0.7, float, "a number above 0 and up to 1, such as 0.7", lambda e: 0 < e <= 1
        ),
    }
    title = values.get("title", values.get("experiment-name"))
    return {**found, **({"title": title} if title else {})}


def _ranks_a_node(values: Mapping[str, str]) -> int | None:
    if "ranks-per-node" not in values:
        return None
    return _number(values, "ranks-per-node", 1, int, "a whole number from 1", lambda n: n >= 1)


def _number(
    values: Mapping[str, str],
    name: str,
    default: _T,
    convert: Callable[[str], _T],
    expected: str,
    fits: Callable[[_T], bool],
) -> _T:
    text = values.get(name)
    if text is None:
        return default
    try:
        number = convert(text)
    except ValueError:
        number = convert("-1")
    if not math.isfinite(number) or not fits(number):
        raise UsageError(f"--{name} {text}: expected {expected}")
    return number


def _out(values: Mapping[str, str]) -> Path:
    """Where the report goes; a folder that can't be one is refused before anything is read."""
    if {"out", "plot-dir"} <= set(values) and values["out"] != values["plot-dir"]:
        raise UsageError(f"--out {values['out']} and --plot-dir {values['plot-dir']} are the same option: give one")
    text = values.get("out", values.get("plot-dir", "scalability-report"))
    if not text:
        raise UsageError("--out has no value: expected a folder for the report, such as scalability-report")
    path = Path(text).expanduser()
    if path.exists() and not path.is_dir():
        raise UsageError(f"--out {text}: expected a folder, but there is a file of that name: choose another")
    if (path / "records").is_dir():
        raise UsageError(f"--out {text}: this is a run directory; choose another folder, such as {path / 'report'}")
    return path
