"""The progress bar, and what is printed while it is drawn."""

import io
import logging
import sys

import pytest

from phalanx.run.progress import Progress
from phalanx.run.setup import _Terminal


class Terminal(io.StringIO):
    def isatty(self):
        return True


def streams(monkeypatch, stdout=io.StringIO, stderr=Terminal):
    """New stdout and stderr; by default stdout is a file, and stderr a terminal."""
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "stdout", stdout())
    monkeypatch.setattr(sys, "stderr", stderr())
    return sys.stdout, sys.stderr


def draw(shown=True, log=None):
    progress = Progress(shown)
    progress.start("epoch 4", 3)
    for step in range(3):
        print(f"step {step}")
        if log is not None:
            log.handle(logging.makeLogRecord({"msg": "a line of the log"}))
        progress.advance()
    progress.stop()


def test_a_file_gets_all_that_is_printed_to_it(monkeypatch):
    stdout, stderr = streams(monkeypatch)
    draw()
    assert stdout.getvalue() == "step 0\nstep 1\nstep 2\n"
    assert "epoch 4" in stderr.getvalue()
    assert "3/3" in stderr.getvalue()
    assert (sys.stdout, sys.stderr) == (stdout, stderr)


def test_lines_go_above_the_bar_on_a_terminal(monkeypatch):
    """Each begins a line of its own, once what the bar had drawn there is erased."""
    stdout, stderr = streams(monkeypatch, stdout=Terminal)
    draw(log=_Terminal())
    assert stdout.getvalue() == ""
    shown = stderr.getvalue()
    for text in ("step 0", "step 1", "step 2"):
        assert f"\x1b[2K{text}\n" in shown
    assert shown.count("\x1b[2Ka line of the log\n") == 3


def test_the_cursor_stays_visible_as_a_killed_rank_could_not_bring_it_back(monkeypatch):
    _, stderr = streams(monkeypatch)
    progress = Progress(True)
    progress.start("epoch 0", 2)
    progress.advance()
    shown = stderr.getvalue()
    progress.stop()
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l")


@pytest.mark.parametrize("shown", [True, False])
def test_nothing_is_drawn_into_a_file_or_by_other_ranks(monkeypatch, shown):
    _, stderr = streams(monkeypatch, stderr=io.StringIO if shown else Terminal)
    draw(shown=shown)
    assert stderr.getvalue() == ""


@pytest.mark.parametrize("module", ["rich.console", "rich.progress"])
def test_without_rich_there_is_no_bar_and_the_training_goes_on(monkeypatch, module):
    """Images have pydantic and PyYAML more often than rich, or an old one; jobs draw no bar, and don't need it."""
    stdout, _ = streams(monkeypatch)
    monkeypatch.setitem(sys.modules, module, None)
    draw()
    assert stdout.getvalue() == "step 0\nstep 1\nstep 2\n"
