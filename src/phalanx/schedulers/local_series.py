"""Runs the members of a series one after the other: on this machine, or over parts of an allocation."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ..config import Loaded
from ..errors import PhalanxError
from ..planning.plan import LaunchPlan
from ..rundir import discard
from . import local, local_notes
from .local_notes import Note
from .slurm.outcome import duration


@dataclass(frozen=True)
class Planned:
    """A member before its start; `run_dir` is that of one that is run once more."""

    plan: LaunchPlan
    loaded: Loaded
    run_dir: Path | None = None


@dataclass
class _Member:
    planned: Planned
    run_dir: Path
    note: Note

    def now(self, **changes: object) -> None:
        self.note = replace(self.note, **changes)  # type: ignore[arg-type]
        self.note.write(self.run_dir)

    @property
    def well(self) -> bool:
        return self.note.code == 0 and not self.note.stopped


def run(planned: Sequence[Planned], series: str, hint: str = "") -> int:
    """Run all of them; the exit code is that of the first that failed, and 128 + N if signal N ended the series.

    `hint` are words that commands on this series need (`--run-root DIR`). Raises PhalanxError before anything is
    written when one of them can't work.
    """
    for one in planned:
        local.check(one.plan)
    members = _prepare(planned, series)
    print(
        f"series {series}: {_runs(len(members))}, one after the other; phalanx status {series}{hint} shows them, "
        f"phalanx cancel {series}{hint} ends them",
        file=sys.stderr,
    )
    started = time.monotonic()
    with _terminated_as_interrupted():
        stopped = _run_all(members)
    for line in _summary(members, hint, time.monotonic() - started):
        print(line, file=sys.stderr)
    return stopped or next((member.note.code or 1 for member in members if not member.well), 0)


def _prepare(planned: Sequence[Planned], series: str) -> list[_Member]:
    """A run directory with its note for each, so that those that wait are known too."""
    members: list[_Member] = []
    try:
        for one in planned:
            run_dir = one.run_dir or local.prepare(one.plan, one.loaded)
            note = local_notes.of_launch(one.plan, series)
            members.append(_Member(one, run_dir, note))
            (run_dir / local_notes.CANCEL).unlink(missing_ok=True)
            note.write(run_dir)
    except BaseException:
        for member in members:
            if member.planned.run_dir is None:
                discard(member.run_dir)
        raise
    return members


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """A signal that comes between two members ends the series as Ctrl-C does."""
    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    numbers = [number for name in names if signal.getsignal(number := getattr(signal, name)) != signal.SIG_IGN]
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run_all(members: list[_Member]) -> int:
    """0, or the exit code of a series that was stopped: what has not run by then is noted as cancelled."""
    code = 0
    try:
        for number, member in enumerate(members, 1):
            if not local_notes.is_cancelled(member.run_dir):
                print(f"[{number}/{len(members)}] {member.note.name}", file=sys.stderr, flush=True)
                code = _run_one(member)
            if code:
                break
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    for member in members:
        if member.note.ended is None:
            member.now(ended=time.time(), stopped=True)
    return code


def _run_one(member: _Member) -> int:
    """Run it to its end, whatever that is. 128 + N if signal N came that was meant for the series: one that `phalanx
    cancel` sent for this member alone isn't."""
    member.now(began=time.time())
    try:
        outcome = local.launch(member.planned.plan, member.planned.loaded, member.run_dir)
    except PhalanxError as error:
        outcome = local.Outcome(member.run_dir, error.exit_code, (str(error),))
    for line in outcome.lines:
        print(line, file=sys.stderr)
    ended = {"ended": time.time(), "code": outcome.code, "stopped": outcome.signal is not None}
    member.now(**ended, lines=outcome.lines, culprit=outcome.culprit)
    meant = outcome.signal if not local_notes.is_cancelled(member.run_dir) else None
    return 128 + meant if meant else 0


def _summary(members: list[_Member], hint: str, seconds: float) -> Iterator[str]:
    """How it went, what to do about those that didn't end well, and the report."""
    series = members[0].note.series
    yield f"series {series}: {sum(one.well for one in members)} of {_runs(len(members))} completed, {duration(seconds)}"
    failed = [member for member in members if not member.well and not member.note.stopped]
    for member in failed:
        yield f"  failed: {member.note.name}: {member.note.lines[0] if member.note.lines else ''}"
    stopped = [member.note.name for member in members if member.note.stopped]
    if stopped:
        yield f"  not run to the end: {', '.join(stopped)}"
    if failed or stopped:
        yield f"to run only {'those' if len(failed) + len(stopped) > 1 else 'that'} again: phalanx retry {series}{hint}"
    if len(failed) + len(stopped) < len(members):
        yield f"the report: phalanx report {series}{hint}"


def _runs(count: int) -> str:
    return f"{count} run{'s' * (count > 1)}"
