"""Ends a launch whose command was killed outright, whatever signals its processes ignore."""

from __future__ import annotations

import signal
import subprocess
from contextlib import suppress

PATIENCE = (
    45  # seconds from the polite signal, which the kernel sends, to the final one: as long as agents and srun take
)

# A line on its stdin says that the launch ended; without one, its writer is gone. It looks each second, so that it
# isn't there longer than the launch, and signals no group that took over the number.
_WATCH = """
read -r _ && exit
for _ in $(seq "$2"); do kill -s 0 -- "-$1" 2>/dev/null || exit; sleep 1; done
kill -s KILL -- "-$1" 2>/dev/null
"""


class Keeper:
    """Watches a process group until `done`. Where no process can be made, the launch goes on without."""

    def __init__(self, group: int) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        words = ["sh", "-c", _WATCH, "phalanx-keeper", str(group), str(PATIENCE)]
        with suppress(OSError):
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )

    def done(self) -> None:
        """The launch has ended."""
        if self._process is not None:
            with suppress(OSError):
                self._process.communicate(b"\n")


def heed_termination() -> None:
    """In a child before exec: the kernel's word that we are gone must not be ignored because our caller ignored it."""
    if signal.getsignal(signal.SIGTERM) == signal.SIG_IGN:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
