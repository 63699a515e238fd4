"""The progress bar of the main rank, on a terminal; elsewhere nothing is drawn."""

from __future__ import annotations

import sys
import time
from typing import Any

_EVERY = 0.1  # seconds between drawings at least, so that a step costs a comparison
_SHARE = 250  # drawing may take one part in so many of the time: it is 1 ms of CPU, and more on a slow terminal


class Progress:
    """One line that is drawn over; no thread, so that forked loader workers inherit no lock."""

    def __init__(self, shown: bool) -> None:
        self._shown = shown and sys.stderr.isatty()
        self._bar: Any = None
        self._task: Any = None
        self._due = 0.0
        self._done = 0

    def start(self, title: str, total: int | None, done: int = 0) -> None:
        """A bar for `total` steps (None: unknown)."""
        if not self._shown:
            return
        try:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        except ImportError:  # an image's may be too old, or missing: no training ends for want of a bar
            self._shown = False
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        console = Console(stderr=True)
        # What is printed meanwhile goes above the bar, unless stdout is no terminal: a file must get it.
        above = sys.stdout.isatty()
        self._bar = Progress(*columns, console=console, auto_refresh=False, transient=True, redirect_stdout=above)
        self._bar.start()
        console.show_cursor()  # a rank that is killed could not bring it back
        self._task = self._bar.add_task(title, total=total, completed=done)
        self._bar.refresh()
        self._done = done

    def advance(self) -> None:
        """One step more."""
        if self._bar is None:
            return
        self._done += 1
        now = time.monotonic()
        if now >= self._due:
            self._bar.update(self._task, completed=self._done)
            self._bar.refresh()
            self._due = now + max(_EVERY, _SHARE * (time.monotonic() - now))

    def stop(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)
            self._bar.stop()
            self._bar = None
