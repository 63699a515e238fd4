"""Everything below this process: found, whatever sessions it has made, and ended."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import time
from collections import defaultdict, deque
from contextlib import suppress
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_LINES, _FEW = 15, 5  # of a log that are shown
_CHATTER = re.compile(r"\[?[-\d]+ [:\d,.]+,?(\d+)?\s+(I|INFO|SUCC) |\[state-dump\]")  # all is well, says Ray
_PATIENCE = 10.0  # seconds for the kernel to end what was killed


def adopt_orphans() -> None:
    """From here on, children of a dead child are ours."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_all() -> None:
    """Ray has nothing to save, and takes half a minute to end when it is asked to."""
    limit = time.monotonic() + _PATIENCE
    while time.monotonic() < limit:
        for pid in descendants():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:  # there are none any more
            return
        time.sleep(0.02)


def descendants(proc: Path = Path("/proc")) -> list[int]:
    """Processes below this one that still run."""
    children: dict[int, list[int]] = defaultdict(list)
    for stat in proc.glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            state, parent = stat.read_text(errors="replace").rpartition(")")[2].split()[:2]
            children[int(parent)].append(int(stat.parent.name) if state != "Z" else 0)
    found, waiting = [], deque([os.getpid()])
    while waiting:
        for pid in children[waiting.popleft()]:
            if pid:
                found.append(pid)
                waiting.append(pid)
    return found


def named(name: str) -> set[int]:
    """Processes below this one that run the program `name`."""
    found = set()
    for pid in descendants():
        with suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().strip() == name:
                found.add(pid)
    return found


def last_words(log: Path, temp: Path | None) -> str:
    """What Ray said last, in `log` and in its own logs below `temp`, of which that is kept in `log` too."""
    lines = _last_lines(log, _LINES)
    for path in temp.glob("session_2*/logs/*") if temp is not None else ():
        if path.name in ("gcs_server.out", "gcs_server.err", "raylet.out", "raylet.err"):
            said = _last_lines(path, _FEW)
            lines += [f"--- {path.name}", *said] if said else []
            with log.open("a") as file:
                file.writelines(f"{line}\n" for line in (f"--- {path.name}", *said))
    return "\n".join([f"The last lines of {log}:", *(f"  {line}" for line in lines)]) if lines else f"{log} is empty"


def _last_lines(path: Path, count: int) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 16384))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return [line for line in lines if line.strip() and not _CHATTER.match(line)][-count:]
