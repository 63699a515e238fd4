"""What a cluster left on the machine: it should be nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path


@contextmanager
def namespaces(folder: Path) -> Iterator[set[int]]:
    """The network namespaces of a running cluster. Held open, so that the kernel gives their numbers to no others."""
    with ExitStack() as held:
        numbers = set()
        for init in folder.glob("run/*.init"):
            with suppress(OSError):  # a node that is down
                space = os.open(f"/proc/{init.read_text().split()[0]}/ns/net", os.O_RDONLY)
                held.callback(os.close, space)
                numbers.add(os.fstat(space).st_ino)
        yield numbers - {os.stat("/proc/self/ns/net").st_ino}


def of(folder: Path, spaces: set[int], before: set[Path], patience: float = 10) -> list[str]:
    """Processes, mounts and files of the cluster in `folder`; `before`: strays of earlier ones.

    The kernel may take a moment to end them all.
    """
    limit = time.monotonic() + patience
    while True:
        files = [path for path in {folder, *strays()} - before if path.exists()]
        found = [*processes(spaces), *_mounts(folder), *map(str, files)]
        if not found or time.monotonic() > limit:
            return found
        time.sleep(0.1)


def strays() -> set[Path]:
    """What programs on the nodes put into the machine's /tmp although TMPDIR says where."""
    return set(Path("/tmp").glob("ompi.node*"))


def processes(spaces: set[int]) -> list[str]:
    """Whatever runs in one of the network namespaces."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.stat(entry / "ns/net").st_ino in spaces:
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.append(f"process {entry.name}: {words}")
    return found


def _mounts(folder: Path) -> list[str]:
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return [f"mount {line}" for line in lines if f"{folder}/" in line]
