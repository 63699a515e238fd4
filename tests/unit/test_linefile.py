"""Records on a disk that fills up, as the kernel has it: writes that are cut short, and then refused."""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from phalanx import linefile
from phalanx.linefile import LineFile
from phalanx.records import Metric, RecordWriter, read_records


@contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """The kernel takes what fits and refuses the rest, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("phalanx"), "propagate", True)
    return caplog


def test_what_a_full_disk_did_not_take_follows_when_it_can(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    writer = RecordWriter(tmp_path, 0, 1)
    with files_end_at(1000):
        for step in range(50):
            writer.write(Metric(step, 0, {"loss": step / 2}))
            writer.step(step, 0, 0.5, 0.1, 4)
        writer.sync()
        (path,) = (tmp_path / "records").iterdir()
        assert path.stat().st_size == 1000
        assert len(read_records(tmp_path)) == len(path.read_bytes().splitlines()) - 1  # the cut one is passed over
    writer.write(Metric(50, 0, {"loss": 25.0}))
    writer.close()
    metrics = [r for r in read_records(tmp_path) if isinstance(r, Metric)]
    assert [(m.step, m.values["loss"]) for m in metrics] == [(step, step / 2) for step in range(51)]
    assert len(path.read_bytes().splitlines()) == 101
    begin, end = said.messages
    assert str(path) in begin
    assert os.strerror(27) in begin
    assert "in the end" in end


def test_a_disk_that_stays_full_costs_the_newest_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(linefile, "MOST", 100)
    file = LineFile(tmp_path / "lines")
    file.write(b"first\n")
    with files_end_at(9):
        for number in range(30):
            file.write(b"number %03d\n" % number)
        file.close()
    assert (tmp_path / "lines").read_bytes() == b"first\nnum"
    assert said.messages[-1].startswith("30 records could not be written")
    assert len(said.messages) == 2


def test_the_device_that_is_always_full(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    file = LineFile(Path("/dev/full"))
    file.write(b"line\n")
    file.close()
    assert "No space left on device" in said.messages[0]
    assert said.messages[-1].startswith("1 records could not")
