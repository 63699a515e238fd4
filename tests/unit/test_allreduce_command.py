"""`phalanx allreduce`: what it hands to `phalanx run` or `phalanx submit`, and what it refuses."""

from __future__ import annotations

import pytest

from phalanx.cli import allreduce
from phalanx.cli.main import main

SCRIPT = str(allreduce.SCRIPT)


@pytest.fixture
def started(monkeypatch):
    """The words that either command got."""
    found = {}
    for name in ("run", "submit"):
        monkeypatch.setattr(f"phalanx.cli.{name}.main", lambda words, name=name: found.update({name: words}) or 0)
    return found


@pytest.mark.parametrize(
    ("words", "command", "expected"),
    [
        (["--nproc", "4"], "run", ["--nproc", "4", "--", SCRIPT, "256"]),
        (["--max-mib=64", "-j", "2x4", "--local"], "run", ["-j", "2x4", "--local", "--", SCRIPT, "64"]),
        (["--submit", "-N", "2", "--max-mib", "8", "--wait"], "submit", ["-N", "2", "--wait", "--", SCRIPT, "8"]),
        (["--preview", "-N", "2"], "submit", ["--preview", "-N", "2", "--", SCRIPT, "256"]),
    ],
)
def test_a_launch_like_any_other(started, words, command, expected):
    assert main(["allreduce", *words]) == 0
    assert started == {command: expected}


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["train.py"], "unexpected 'train.py'"),
        (["--max-mib", "0"], "--max-mib '0': expected a number of MiB from 1"),
        (["--max-mib=1G"], "--max-mib '1G': expected a number of MiB from 1"),
        (["--nprocs", "2"], "unknown option '--nprocs'"),
    ],
)
def test_what_is_refused(started, capsys, words, error):
    assert main(["allreduce", *words]) == 2
    assert error in capsys.readouterr().err
    assert not started


def test_help(capsys):
    assert main(["allreduce", "--help"]) == 0
    assert "--max-mib" in capsys.readouterr().out
