"""A file of lines that outlives a full disk: what the disk does not take waits in memory, and no line is torn."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Lock

from .rundir import opener

MOST = 1 << 18  # bytes that wait; later lines are lost


class LineFile:
    """Appends whole lines, one `write` each. Its one writer may have several threads.

    A failing disk raises nothing here: it is said once when it begins, and what came of it at the end.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = opener(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._lock = Lock()
        self._waiting = b""  # begins inside a line, if the disk took a part of it
        self._lost = 0
        self._troubled = False

    def write(self, line: bytes) -> None:
        with self._lock:
            if not self._waiting:
                self._waiting = self._append(line)
                return
            self._waiting = self._append(self._waiting)
            if len(self._waiting) + len(line) > MOST:
                self._lost += 1
            elif self._waiting:
                self._waiting += line
            else:
                self._waiting = self._append(line)

    def _append(self, data: bytes) -> bytes:
        """What the disk did not take."""
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            self._trouble(error)
        return data

    def sync(self) -> None:
        """To the disk. Some file systems tell only now that they are full."""
        try:
            os.fsync(self._file)
        except OSError as error:
            self._trouble(error)

    def close(self) -> None:
        with self._lock:
            if self._waiting:
                self._waiting = self._append(self._waiting)
            self.sync()
            try:
                os.close(self._file)
            except OSError as error:
                self._trouble(error)
            if self._troubled:
                self._sum_up()

    def _trouble(self, error: OSError) -> None:
        if not self._troubled:
            self._troubled = True
            _warn(
                f"cannot write the records {self._path}: {error.strerror}. Training goes on, and they are "
                f"tried again with each new one; free some space (up to {MOST >> 10} KiB wait in memory)"
            )

    def _sum_up(self) -> None:
        missing = self._lost + self._waiting.count(b"\n")
        if missing:
            _warn(f"{missing} records could not be written to {self._path}: reports will lack them")
        else:
            _warn(f"the disk has taken all records of {self._path} in the end, but failed meanwhile")


def _warn(text: str) -> None:
    import logging  # the login half reads records, and starts faster without it

    logging.getLogger("phalanx").warning("%s", text)
