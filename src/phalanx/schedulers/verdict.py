"""Who failed first: from the ranks' own error files, else from the launcher's report."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# A rank doesn't die of these because another rank failed; of an abort or a broken connection it may.
_OWN_DEATHS = tuple(
    int(getattr(signal, name)) for name in ("SIGKILL", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE") if hasattr(signal, name)
)
_BROKEN = re.compile(r"gloo|nccl|connection (reset|closed|refused)|broken pipe|socket", re.IGNORECASE)
_REPORTED = re.compile(
    r"host +: (?P<host>\S+)\s+rank +: (?P<rank>\d+) \(local_rank: \d+\)\s+exitcode +: (?P<code>-?\d+) \(pid"
)


@dataclass(frozen=True)
class Culprit:
    """The rank that failed first (None: before it knew its rank); `exit_code` is as a shell shows it."""

    rank: int | None
    host: str
    what: str
    exit_code: int
    error_file: Path | None = None

    @property
    def who(self) -> str:
        return "a rank" if self.rank is None else f"rank {self.rank}"


def find(run_dir: Path, since: float, returncode: int, stderr: str, host: str, launcher: str) -> Culprit | None:
    """The culprit of a failed attempt that began at Unix time `since`; None when no rank is known to have
    failed (the launcher itself did). Error files of earlier attempts don't count."""
    written = _first_error_file(run_dir, since)
    if launcher == "python":
        return written or _died(0, host, returncode)
    reported = _reported(stderr, host)
    killed = [culprit for culprit in reported if culprit.exit_code - 128 in _OWN_DEATHS]
    if killed:
        return killed[0]
    ended = [culprit for culprit in reported if culprit.exit_code != 128 + signal.SIGTERM]  # the launcher's own way
    silent = [culprit for culprit in ended if not _left_words(run_dir, culprit.rank, since)]
    if written is not None and silent and _BROKEN.search(written.what):
        return silent[0]  # it aborted or left by os._exit, and the others only lost their connection to it
    return written or (reported[0] if reported else None)


def _first_error_file(run_dir: Path, since: float) -> Culprit | None:
    errors = [(path, error) for path in run_dir.glob("errors/*.json") if (error := _read(path))]
    current = [(path, error) for path, error in errors if error["time"] >= since]
    if not current:
        return None
    path, error = min(current, key=lambda item: float(item[1]["time"]))
    return Culprit(error["rank"], error["host"], f"failed: {error['exception']}", int(error["exit_code"]), path)


def _left_words(run_dir: Path, rank: int | None, since: float) -> bool:
    error = _read(run_dir / "errors" / f"{rank}.json")
    return error is not None and error["time"] >= since


def _read(path: Path) -> dict[str, Any] | None:
    """An error file; None if its writer was killed over it."""
    try:
        error = json.loads(path.read_text(encoding="utf-8"))
        return error if {"rank", "host", "time", "exception", "exit_code"} <= set(error) else None
    except (OSError, ValueError, TypeError):
        return None


def _reported(stderr: str, here: str) -> list[Culprit]:
    """Ranks in torchrun's last report. It lists its root cause last; here it comes first. An agent that
    meets on loopback calls its host localhost."""
    report = stderr.rpartition("ChildFailedError")[2]
    hits = list(_REPORTED.finditer(report))[::-1]
    hosts = [here if hit["host"] in ("localhost", "127.0.0.1") else hit["host"] for hit in hits]
    return [_died(int(hit["rank"]), host, int(hit["code"])) for hit, host in zip(hits, hosts, strict=True)]


def _died(rank: int, host: str, returncode: int) -> Culprit:
    """A rank that left no words: all that is known is how its process ended."""
    if returncode >= 0:
        return Culprit(rank, host, f"ended with exit code {returncode}", returncode)
    name = signal_name(-returncode)
    hint = " (often: out of memory)" if name == "SIGKILL" else ""
    return Culprit(rank, host, f"was killed by {name}{hint}", 128 - returncode)


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; `signal 40` for those without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
