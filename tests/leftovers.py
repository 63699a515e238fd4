"""Processes that a test started and left behind: found by a variable that all of the suite's processes inherit."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

MARK = "TESTS_OF_PROCESS"
# Helpers of Python's and torch's own in the tests' process: they end with it.
_OURS = re.compile(rb"multiprocessing\.(forkserver|resource_tracker|spawn)|_inductor/compile_worker")


def found(mark: str, patience: float = 0.0) -> dict[int, str]:
    """Number and words of each process with that mark, its test in front, that is still there after `patience` s."""
    limit = time.monotonic() + patience
    while True:
        there = {pid: words for pid in _processes() if (words := _words(pid, f"{MARK}={mark}".encode()))}
        if not there or time.monotonic() > limit:
            return there
        time.sleep(0.1)


def end(mark: str, patience: float) -> list[str]:
    """End them; the result names each."""
    left = found(mark, patience)
    for pid in left:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    return [f"{pid}: {words}" for pid, words in left.items()]


def _processes() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdecimal() and int(entry) != os.getpid()]


def _words(pid: int, mark: bytes) -> str:
    with suppress(OSError):
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").strip()
        if mark in environ and words and not _OURS.search(words):
            test = next(
                (entry.partition(b"=")[2] for entry in environ if entry.startswith(b"PYTEST_CURRENT_TEST=")), b""
            )
            return (test + b" left " + words).decode(errors="replace")
    return ""
