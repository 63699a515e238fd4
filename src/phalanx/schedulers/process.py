"""The launcher as a child process: stderr passes through, signals are passed on, nobody is left behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from ..errors import PlanError
from .keeper import Keeper, heed_termination

KEPT = 64 * 1024  # bytes of stderr that are kept for the verdict
PATIENCE = 5.0  # seconds between the polite and the final signal to processes without a launcher
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LINUX = sys.platform.startswith("linux")


@dataclass(frozen=True)
class Ended:
    """How the launcher ended: subprocess's return code, its last stderr, the signal that we passed on."""

    returncode: int
    stderr: str
    signal: int | None


def run(words: Sequence[str], environment: Mapping[str, str]) -> Ended:
    """Start `words` and wait for the end of it and of all that it started.

    The child has a session of its own: a terminal's Ctrl-C reaches us alone and is passed on once.
    Raises PlanError only if nothing was started.
    """
    relay = _Relay()
    if _LINUX:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with _forwarding() as forward:
        try:
            process = subprocess.Popen(
                words,
                env=dict(environment),
                stdout=relay.write_end if _one_stream() else None,
                stderr=relay.write_end,
                start_new_session=True,
                preexec_fn=_die_with_parent if _LINUX else None,
            )
        except OSError as error:
            raise PlanError(f"cannot start {words[0]}: {error.strerror or error}") from None
        finally:
            os.close(relay.write_end)
        keeper = Keeper(process.pid)
        relay.start()
        forward.to(process)
        returncode = process.wait()
        keeper.done()
        if _LINUX and returncode != 0:
            _end_orphans()
        tail = relay.finish()
    return Ended(returncode, tail, forward.first)


def _one_stream() -> bool:
    """Whether our stdout and stderr are one file or terminal: then the relay takes both, since lines of the
    two would otherwise overtake each other."""
    try:
        return os.path.sameopenfile(1, 2)
    except OSError:  # one of them is closed
        return False


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _die_with_parent() -> None:
    """Runs in the child before exec: if we are killed outright, the launcher is told to stop."""
    heed_termination()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class _Forward:
    """A signal handler that passes signals on to a child, also those that came before it was there."""

    def __init__(self) -> None:
        self.first: int | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        self.first = self.first or number
        if self._process is not None:
            self._process.send_signal(number)

    def to(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        if self.first is not None:
            process.send_signal(self.first)


@contextmanager
def _forwarding() -> Iterator[_Forward]:
    """Signals that end a program go to the child while this lasts; ignored ones (nohup) stay ignored."""
    forward = _Forward()
    names = [name for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    numbers = [number for name in names if signal.getsignal(number := getattr(signal, name)) != signal.SIG_IGN]
    before = {number: signal.signal(number, forward) for number in numbers}
    try:
        yield forward
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Relay:
    """Copies the child's stderr to ours byte for byte and keeps its end.

    Where ours is a terminal the child gets one too, since progress bars are drawn for terminals only.
    """

    def __init__(self) -> None:
        self._tail = bytearray()
        self._thread = threading.Thread(target=self._copy, daemon=True)
        if os.name == "posix" and os.isatty(2):
            self._read_end, self.write_end = _terminal()
        else:
            self._read_end, self.write_end = os.pipe()

    def start(self) -> None:
        self._thread.start()

    def finish(self) -> str:
        """What was last seen. A process that keeps stderr open is not waited for."""
        self._thread.join(timeout=2)
        return bytes(self._tail).decode(errors="replace")

    def _copy(self) -> None:
        # A signal that this thread got would not wake the one that waits for the child (it may, after SIGCONT).
        if os.name == "posix":
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
        while chunk := self._read():
            self._tail += chunk
            del self._tail[:-KEPT]
            with suppress(OSError):  # our reader may be gone; the child's end still matters
                _write_all(2, chunk)

    def _read(self) -> bytes:
        try:
            return os.read(self._read_end, 65536)
        except OSError:  # a terminal whose other side is closed
            return b""


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _terminal() -> tuple[int, int]:
    """A pseudo-terminal of our terminal's size that changes no byte; it follows changes of size."""
    import fcntl
    import pty
    import termios
    import tty

    read_end, write_end = pty.openpty()
    tty.setraw(write_end)

    def resize(*_: object) -> None:
        with suppress(OSError):
            size = fcntl.ioctl(2, termios.TIOCGWINSZ, bytes(8))
            fcntl.ioctl(read_end, termios.TIOCSWINSZ, size)

    resize()
    signal.signal(signal.SIGWINCH, resize)
    return read_end, write_end


def _end_orphans() -> None:
    """End what a dead launcher left: such processes have become our own children (we are a subreaper)."""
    told: set[int] = set()
    start = time.monotonic()
    while children := _children():
        waited = time.monotonic() - start
        if waited > 2 * PATIENCE:
            return
        for pid in children:
            if pid not in told or waited > PATIENCE:
                _signal(pid, signal.SIGTERM if waited <= PATIENCE else signal.SIGKILL)
                told.add(pid)
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.05)


def _signal(pid: int, number: int) -> None:
    with suppress(OSError):
        os.kill(pid, number)


def _children(proc: Path = Path("/proc")) -> list[int]:
    """Processes whose parent we are."""
    found = []
    for stat in proc.glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            parent = int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
            if parent == os.getpid():
                found.append(int(stat.parent.name))
    return found
