"""examples/scaling: its README's commands, its modules, and what its runs leave."""

from __future__ import annotations

import csv
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from statistics import fmean
from types import ModuleType

from phalanx.records import Epoch, read_records

from . import tutorial

FOLDER = Path(__file__).parents[2] / "examples/scaling"
TEXT = (FOLDER / "README.md").read_text(encoding="utf-8")
DATA, HERE, ALLOCATION, BATCH, REPORT = (
    "Data", "On one machine", "In an allocation", "As batch jobs", "The report",
)  # fmt: skip
TRAINERS = ("train.py", "ddp_trainer.py", "horovod_trainer.py", "deepspeed_trainer.py")
_MODULES = ("data", "model", "options", "make_images", "slurm")


def commands(section: str) -> list[str]:
    return tutorial.commands(section, TEXT)


def copy_to(folder: Path) -> None:
    shutil.copytree(FOLDER, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "runs", "images"))


@contextmanager
def modules(*names: str, folder: Path = FOLDER) -> Iterator[Sequence[ModuleType]]:
    """Modules of the folder, as its scripts import them; their names are free again afterwards."""
    before = sys.dont_write_bytecode
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True
    try:
        yield [import_module(name) for name in names]
    finally:
        sys.dont_write_bytecode = before
        sys.path.remove(str(folder))
        for name in _MODULES:
            sys.modules.pop(name, None)


def losses(output: str) -> list[float]:
    """Of the steps that were printed, and the last one's."""
    pattern = r"(?:, loss|loss of the last step) ([\d.]+)"
    return [float(number) for text in tutorial.streams(output) for number in re.findall(pattern, text)]


def warm_epoch(run_dir: Path) -> float:
    """Seconds of an epoch but the first; one is as long as its slowest rank says."""
    longest: dict[int, float] = {}
    for record in read_records(run_dir):
        if isinstance(record, Epoch) and record.epoch > 0:
            longest[record.epoch] = max(record.seconds, longest.get(record.epoch, 0.0))
    return fmean(longest.values())


def table(folder: Path, name: str) -> list[dict[str, str]]:
    with (folder / name).open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def environment(home: Path) -> dict[str, str]:
    return tutorial.environment(home) | {"PYTHONDONTWRITEBYTECODE": "1", "DS_ACCELERATOR": "cpu"}


def run_dirs(root: Path) -> dict[str, list[Path]]:
    """Run directories by the run's name."""
    return {name: sorted(p for p in (root / name).iterdir() if p.is_dir()) for name in sorted(os.listdir(root))}
