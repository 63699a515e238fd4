"""One attempt at a time in a run directory: whoever starts ranks there claims it first.

`claims/<n>.json` says who does, and `claims/<n>.released` that they have ended; the highest number
counts. A claim is taken by making the next number's file exclusively, so of several claimants one
wins, also where a file system shows them old listings: no file is ever changed, moved or removed,
so what was read of a number stays true. An unreleased claim gives way only if its holder is gone
for certain (`held.py`), never because it is old.

Standard library only: the batch script of a job claims too (`__main__.py`).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import PlanError
from ..rundir import make_folder, opener, shared
from .held import why_held
from .holder import Holder, Job, decoded, job_around, last_sign, of_this_process
from .slurmjob import cluster_name

FOLDER = "claims"
_READS = 40  # looks at a claim whose text isn't there yet, on file systems without hard links
_PAUSE = 0.05  # seconds between them


class InUseError(PlanError):
    """Another attempt runs in the run directory, or may."""


@dataclass(frozen=True)
class Claim:
    """The run directory is ours until `release`."""

    folder: Path
    number: int

    @property
    def released(self) -> Path:
        """The file whose presence says that the holder has ended."""
        return self.folder / f"{self.number}.released"

    def release(self) -> None:
        """A full disk must not turn a training that ended well into an error: the holder's end
        tells too."""
        with suppress(OSError), shared(self.folder.parent):
            os.close(opener(self.released, os.O_WRONLY | os.O_CREAT))


def take(run_dir: Path, me: Holder, take_over: bool = False) -> Claim:
    """Claim a run directory. `take_over`: also from a holder that may still run, by the user's
    word.

    Raises InUseError that names who runs there, PlanError where the directory can't be written.
    """
    try:
        with shared(run_dir):
            return _take(run_dir, me, take_over)
    except OSError as error:
        raise PlanError(f"cannot claim the run directory {run_dir}: {error.strerror}") from None


def _take(run_dir: Path, me: Holder, take_over: bool) -> Claim:
    folder = run_dir / FOLDER
    make_folder(folder)
    number = _newest(folder)
    while True:
        holder = _holder(folder, number)
        reason = None if take_over or holder is None else why_held(holder, me, run_dir)
        if holder is not None and reason is not None:
            raise InUseError(_refusal(run_dir, holder, reason))
        if _create(folder, number + 1, me):
            return Claim(folder, number + 1)
        number, take_over = _newest(folder, number + 1), False  # the user's word was about another holder


@contextmanager
def claimed(run_dir: Path, me: Holder, take_over: bool = False) -> Iterator[Claim]:
    """The run directory is ours in between."""
    claim = take(run_dir, me, take_over)
    try:
        yield claim
    finally:
        claim.release()


def check(run_dir: Path, take_over: bool = False) -> None:
    """Whether a launch to come may run there. Raises InUseError if another attempt does;
    `take_over` ends its claim."""
    me = of_this_process()
    if take_over:
        take(run_dir, me, take_over=True).release()
        return
    holder = current(run_dir)
    reason = why_held(holder, me, run_dir) if holder is not None else None
    if holder is not None and reason is not None:
        raise InUseError(_refusal(run_dir, holder, reason))


def current(run_dir: Path) -> Holder | None:
    """Who holds a run directory, be they gone or not; None if nobody does."""
    return _holder(run_dir / FOLDER, _newest(run_dir / FOLDER))


def first(run_dir: Path) -> Holder | None:
    """Who began a run, be they gone or not."""
    path = run_dir / FOLDER / "1.json"
    return decoded(lambda: path.read_text(encoding="utf-8"), 1, 0.0) if path.exists() else None


def _newest(folder: Path, known: int = 0) -> int:
    """The highest number, 0 if there is none. A listing may be old; asking for a name isn't."""
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        numbers = [name.removesuffix(".json") for entry in entries if (name := entry.name).endswith(".json")]
        known = max([known, *(int(number) for number in numbers if number.isdecimal())])
    while (folder / f"{known + 1}.json").exists():
        known += 1
    return known


def _holder(folder: Path, number: int) -> Holder | None:
    if number == 0 or (folder / f"{number}.released").exists():
        return None
    path = folder / f"{number}.json"
    return decoded(lambda: path.read_text(encoding="utf-8"), _READS, _PAUSE)


def _create(folder: Path, number: int, me: Holder) -> bool:
    """Make the claim's file with its text, unless it is there."""
    path, draft = folder / f"{number}.json", folder / f".{secrets.token_hex(8)}.draft"
    text = me.encoded()
    with open(draft, "x", encoding="utf-8", opener=opener) as file:
        file.write(text)
    try:
        os.link(draft, path)
    except FileExistsError:
        return draft.stat().st_nlink == 2  # NFS may have lost its first answer, and been asked twice
    except OSError:  # no hard links there
        return _create_exclusively(path, text)
    finally:
        draft.unlink(missing_ok=True)
    return True


def _create_exclusively(path: Path, text: str) -> bool:
    try:
        with open(path, "x", encoding="utf-8", opener=opener) as file:
            file.write(text)
    except FileExistsError:
        return False
    return True


def _refusal(run_dir: Path, holder: Holder, reason: str) -> str:
    return (
        f"{run_dir} is in use: {holder.who()}; {last_sign(run_dir)}. Two attempts would overwrite each other's "
        f"checkpoints, and {reason}. Wait for its end, or end it (phalanx cancel {run_dir.name}); if it is gone for "
        "certain, --take-over (of phalanx run, submit and retry) starts all the same"
    )


__all__ = [
    "Claim",
    "Holder",
    "InUseError",
    "Job",
    "check",
    "claimed",
    "cluster_name",
    "current",
    "first",
    "job_around",
    "last_sign",
    "of_this_process",
    "take",
]
