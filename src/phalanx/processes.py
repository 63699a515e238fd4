"""Which process: known from another one on the same host, on another host, and of another boot."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """A process of some host; `started` tells it from a later one with the same number. `boot` and
    `space` (the kernel's boot and the namespace in which the number counts) tell hosts and
    containers of one name apart; empty: not known."""

    host: str
    pid: int
    started: str
    boot: str = ""
    space: str = ""

    @property
    def here(self) -> bool:
        """Whether its number means a process here."""
        mine = this_place()
        known = all(a == b or not (a and b) for a, b in zip((self.boot, self.space), mine[1:], strict=True))
        return self.host == mine[0] and known

    @property
    def alive(self) -> bool:
        """Whether it is there, for one of this place."""
        return started(self.pid) == self.started


def this_place() -> tuple[str, str, str]:
    """Host, boot and process namespace."""
    boot = space = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - the text is no path
    return platform.node(), boot, space


def this_process() -> Process:
    host, boot, space = this_place()
    return Process(host, os.getpid(), started(os.getpid()) or "", boot, space)


def started(pid: int) -> str | None:
    """When a process began, as the system counts; None if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    except OSError:
        if Path("/proc/self").exists():
            return None
    answer = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return answer.stdout.strip() or None


def of_launch(launch: str) -> list[int]:
    """The processes here that a launch has started and that are still there, as far as we may see
    them."""
    word = f"PHALANX_LAUNCH_ID={launch}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if word in (folder / "environ").read_bytes().split(b"\0") and started(int(folder.name)):
                found.append(int(folder.name))
    return sorted(found)


def above() -> list[str]:
    """The command lines of this process's parents, the nearest first, as far as the system tells."""
    found, pid = [], os.getppid()
    with suppress(OSError, ValueError, IndexError):
        while pid > 1:
            folder = Path(f"/proc/{pid}")
            found.append(folder.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            pid = int(folder.joinpath("stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    return found
