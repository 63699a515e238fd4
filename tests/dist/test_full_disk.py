"""What fails beside the training: trackers, checkpoints and parts of the run's end, on a full disk above all."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from phalanx import registry
from phalanx.checkpoint import store
from phalanx.errors import CheckpointError
from phalanx.records import Exit, Metric, Step, read_records
from phalanx.trackers.base import Tracker
from phalanx.trackers.csv import Csv
from tests.dist.harness import run_ranks

pytestmark = pytest.mark.slow


class Failing(Tracker):
    """Fails at the call that it is named after."""

    call = ""

    def _fail(self, call: str) -> None:
        if type(self).call == call:
            raise RuntimeError(f"the server of {call} is gone")

    def start(self, run_dir: Path, settings: Mapping[str, Any]) -> None:
        self._fail("start")

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._fail("log")

    def close(self) -> None:
        self._fail("close")


class FullCsv(Csv):
    """Its file stands for a disk that is full."""

    def start(self, run_dir: Path, settings: Mapping[str, Any]) -> None:
        (run_dir / "metrics.csv").symlink_to("/dev/full")
        super().start(run_dir, settings)


def trained(tracker: type[Tracker]) -> tuple[list[str], str]:
    """The warnings, and the run directory."""
    registry.load = lambda kind, table, name: tracker if kind == "tracker" else load(kind, table, name)
    with phalanx.init(name="net", progress=False, trackers=["csv"]) as run:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        data = DataLoader(TensorDataset(torch.ones(8, 2)), 2)
        model, optimizer, loader = run.prepare(model, optimizer, data)
        for (x,) in run.steps(loader):
            run.backward(model(x).mean())
            optimizer.step()
            run.log({"loss": 1.0})
    log = (run.run_dir / "logs" / "0.log").read_text()
    return [line for line in log.splitlines() if "WARNING" in line], str(run.run_dir)


load = registry.load


def all_trackers() -> list[Any]:
    kinds: list[type[Tracker]] = [FullCsv]
    kinds += [type(f"Failing{call}", (Failing,), {"call": call}) for call in ("start", "log", "close")]
    return [trained(kind) for kind in kinds]


def test_a_tracker_that_fails_is_one_warning(tmp_path: Path) -> None:
    for warnings, run_dir in run_ranks(all_trackers, 2, folder=tmp_path)[0]:
        (warning,) = warnings
        assert "tracker csv failed" in warning
        assert "No space left on device" in warning or "is gone" in warning
        records = read_records(run_dir)
        assert [len([r for r in records if isinstance(r, kind)]) for kind in (Step, Metric, Exit)] == [4, 2, 2]
        assert {r.exception for r in records if isinstance(r, Exit)} == {""}


def full_while_saving(rank: int) -> list[str]:
    """What `save` says while files can't grow on one rank, and which checkpoints are then there."""
    with phalanx.init(name="full", progress=False) as run:
        model = nn.Linear(1000, 20)
        run.prepare(model, torch.optim.AdamW(model.parameters()))
        said = []
        for step, size in enumerate((100, 20_000)):
            run.save()
            run._session.step = step + 1
            limit = resource.getrlimit(resource.RLIMIT_FSIZE)
            if run.rank == rank:
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, limit[1]))
            try:
                run.save()
            except CheckpointError as error:
                said.append(str(error))
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
            run.reduce(1.0)
            said += [path.name for path in store.steps(run.run_dir / "checkpoints") if store.defect(path) is None]
            said += [name for name in os.listdir(run.run_dir / "checkpoints") if "part" in name]
        said.append(str(run.save()))
        return said


@pytest.mark.parametrize("rank", [0, 1])
def test_a_checkpoint_that_one_rank_cannot_write_is_an_error_on_all(tmp_path: Path, rank: int) -> None:
    for said in run_ranks(full_while_saving, 2, rank, folder=tmp_path, timeout=60):
        small, first, large, second, again, last = said
        for error, step in ((small, 1), (large, 2)):
            assert f"cannot write the checkpoint {tmp_path}" in error
            assert f"checkpoints/{step}: " in error
            assert f"on rank {rank}: " in error
            assert "MiB left" in error
        assert "File too large" in small
        assert [first, second, again] == ["0", "1", "0"]
        assert last.endswith("/2")


def failing_end(what: str) -> str:
    """A part of the end that fails on rank 0."""
    run = phalanx.init(name="end", progress=False)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    if run.is_main:
        setattr(
            run._session.measure if what == "measure" else run._session.progress,
            "close" if what == "measure" else "stop",
            fail,
        )
    try:
        run.close()
    except OSError as error:
        return f"{run.run_dir} {error.strerror}"
    return f"{run.run_dir} fine"


@pytest.mark.parametrize("what", ["measure", "progress"])
def test_all_of_the_end_happens_though_a_part_fails(tmp_path: Path, what: str) -> None:
    first, second = run_ranks(failing_end, 2, what, folder=tmp_path, timeout=60)
    assert second.endswith("fine")
    run_dir, _, said = first.partition(" ")
    assert said == "No space left on device"
    exits = [record.exception for record in read_records(run_dir) if isinstance(record, Exit)]
    assert len(exits) == 2
    assert "No space left" in exits[0]
    assert exits[1] == ""
