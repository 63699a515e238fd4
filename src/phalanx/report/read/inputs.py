"""What a report is asked to read: run directories, folders of them, CSV files, folders of those, a series' name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...errors import UsageError, did_you_mean
from ...rundir import run_dirs_of_series
from ..model import Input, RunData
from .csvs import read_tables
from .csvtable import read_table
from .runs import is_run, read_run

_DEFAULTS = ("scalability-metrics",)  # beside the run root
_DEPTH = 6  # of folders that are looked into
_NOT_INTO = ("checkpoints", "logs", "errors", "records", "tests", "rendezvous")


@dataclass
class Found:
    """What lies where the words point: run directories, and CSV files by the word they were found under."""

    runs: list[Path] = field(default_factory=list)
    csvs: dict[Path, list[Path]] = field(default_factory=dict)
    others: list[Input] = field(default_factory=list)


def gather(
    words: Sequence[str], root: Path, scaling: str = "strong", ranks_a_node: int | None = None
) -> tuple[list[RunData], list[Input]]:
    """The runs that `words` mean, each once, and what was used of everything that was looked at.

    `root` is the run root, which series are looked up in; `scaling` and `ranks_a_node` those of inputs that don't tell.
    Raises UsageError for a word that is nothing.
    """
    found = discover(words, root)
    runs, inputs = _unlike([read_run(path, scaling) for path in found.runs])
    for folder, paths in found.csvs.items():
        more, looked_at = read_tables([read_table(path) for path in paths], folder, runs, ranks_a_node)
        runs += [replace(run, scaling=scaling) for run in more]
        inputs += looked_at
    return runs, [*inputs, *found.others]


def _unlike(read: Sequence[tuple[RunData | None, Input]]) -> tuple[list[RunData], list[Input]]:
    """Each run once: a copy of one is left out, and two runs of one id are both used, and said so."""
    first: dict[str, RunData] = {}
    whole: dict[tuple[object, ...], RunData] = {}  # by origin: of a run and its copies, the one that has most
    for run, _ in read:
        if run is not None and (run.origin not in whole or _length(run) > _length(whole[run.origin])):
            whole[run.origin] = run
    runs, inputs = [], []
    for run, looked_at in read:
        if run is not None and run is not whole[run.origin]:
            inputs.append(replace(looked_at, used="", left_out=(f"a copy of {whole[run.origin].path}",)))
            continue
        if run is not None:
            other = first.setdefault(run.run_id, run)
            if other is not run:
                note = f"{other.path} has the same id, but is another run: both are used"
                looked_at = replace(looked_at, notes=(*looked_at.notes, note))
            runs.append(run)
        inputs.append(looked_at)
    return runs, inputs


def _length(run: RunData) -> int:
    return len(run.epochs) + len(run.steps) + len(run.allreduce)


def discover(words: Sequence[str], root: Path) -> Found:
    """Without words: the run root and ./scalability-metrics, as far as they exist."""
    found = Found()
    for word in words or [str(path) for path in (root, *map(Path, _DEFAULTS)) if path.is_dir()]:
        path = Path(word).expanduser()
        if path.exists():
            _look(path, found)
        elif members := run_dirs_of_series(root, word):
            found.runs += members
        else:
            raise UsageError(f"{word}: {_nothing(word, root)}")
    found.runs = list({path.resolve(): path for path in reversed(found.runs)}.values())[::-1]
    return found


def _nothing(word: str, root: Path) -> str:
    names = sorted(entry.name for entry in _entries(root))
    return (
        "no run directory, folder or CSV file of that name, and no series in "
        f"{root}: name one of them, or a run's folder there.{did_you_mean(word, names)}"
    )


def _look(path: Path, found: Found) -> None:
    if path.is_file() and path.suffix.lower() != ".csv":
        found.others.append(Input(path, "?", "", ("neither a run directory nor a CSV file",)))
        return
    csvs = [path] if path.is_file() else _walk(path, found)
    if csvs:
        home = path.parent if path.is_file() else path
        known = {other.resolve() for paths in found.csvs.values() for other in paths}
        found.csvs.setdefault(home.resolve(), []).extend(csv for csv in csvs if csv.resolve() not in known)


def _walk(folder: Path, found: Found, depth: int = _DEPTH) -> list[Path]:
    """Run directories below a folder go into `found`; the result are its CSV files. A report's own are no input."""
    entries = _entries(folder)
    names = {entry.name for entry in entries}
    if "records" in names and is_run(folder):
        found.runs.append(folder)
    elif {"summary.md", "points.csv"} <= names:
        return []
    inside = is_run(folder) or (folder / "plan.json").exists()
    if inside and not is_run(folder):
        found.runs.append(folder)  # it never began, which is said
    csvs = [] if inside else [Path(entry.path) for entry in entries if entry.name.lower().endswith(".csv")]
    for entry in entries if depth else ():
        if entry.is_dir() and entry.name not in _NOT_INTO:
            csvs += _walk(Path(entry.path), found, depth - 1)
    return csvs


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted((entry for entry in entries if entry.name[0] != "."), key=lambda entry: entry.name)
    except OSError:
        return []
