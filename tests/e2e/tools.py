"""Starting commands as a user does, with a terminal or without, and looking at what is left."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable
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
    """Run a command to its end."""
    begin = time.monotonic()
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120, **more)
    return Done(ended.returncode, ended.stdout, ended.stderr, time.monotonic() - begin)


def phalanx(*words: str, **more: Any) -> Done:
    """`phalanx run` to its end."""
    return start(*command(*words), **more)


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
