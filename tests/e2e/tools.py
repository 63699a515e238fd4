"""Starting commands as a user does, with a terminal or without, and looking at what is left."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "phalanx", "run", *words]


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str
    seconds: float


def start(*words: str, **more: Any) -> Done:
    """Run a command to its end, which is this process's at the latest."""
    begin = time.monotonic()
    more = {"preexec_fn": ignoring(), **more}
    ended = subprocess.run(words, capture_output=True, text=True, timeout=240, **more)
    return Done(ended.returncode, ended.stdout, ended.stderr, time.monotonic() - begin)


def phalanx(*words: str, **more: Any) -> Done:
    """`phalanx run` to its end."""
    return start(*command(*words), **more)


_ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
_PR_SET_PDEATHSIG = 1


def ignoring(*numbers: int) -> Callable[[], None]:
    """For a process to be started: it ignores these signals and no other, whatever this one ignores (as a suite below
    nohup does), and doesn't outlive it."""

    def prepare() -> None:
        for number in _ENDING:
            signal.signal(number, signal.SIG_IGN if number in numbers else signal.SIG_DFL)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    return prepare


@contextlib.contextmanager
def started(words: list[str], *ignored: int, **more: Any) -> Iterator[subprocess.Popen[Any]]:
    """A command for as long as this lasts: it is killed if it is still there then."""
    with subprocess.Popen(words, preexec_fn=ignoring(*ignored), **more) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def in_terminal(words: list[str], **more: Any) -> tuple[subprocess.Popen[bytes], int]:
    """Start in a new terminal; returns the process and the terminal's other side."""
    ours, theirs = pty.openpty()
    code = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execvp(sys.argv[1], sys.argv[1:])"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        **more,
    )
    os.close(theirs)
    return process, ours


def read_all(terminal: int, seconds: float = 60) -> str:
    """All that is shown until the terminal's last process has gone."""
    shown = b""
    with contextlib.suppress(OSError):
        while select.select([terminal], [], [], seconds)[0] and (chunk := os.read(terminal, 65536)):
            shown += chunk
    os.close(terminal)
    return shown.decode(errors="replace")


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_for(what: Callable[[], Any], seconds: float = 60.0) -> None:
    limit = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.05)


def run_dirs(work: Path, name: str = "s") -> list[Path]:
    return sorted((work / "runs" / name).iterdir())
