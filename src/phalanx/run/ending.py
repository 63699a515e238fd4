"""The end of a run: each part of it happens, whatever becomes of the others."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..rank.entry import headline
from ..records import Exit
from ..trackers.copies import Copies
from .session import Session

log = logging.getLogger("phalanx")


def end(session: Session, trackers: Copies, seconds: float, failure: BaseException | None) -> None:
    """Trackers and measurements closed, the exit record on the disk, the ranks disconnected.

    Raises what failed first, unless the run had failed before: then that is what counts.
    """
    first: Exception | None = None
    parts: list[Callable[[], None]] = [
        session.progress.stop,
        trackers.close,
        lambda: session.measure.close(session.step, failed=failure is not None),
        lambda: _write_exit(session, seconds, failure or first),
        lambda: session.strategy.teardown(failed=failure is not None),
    ]
    for part in parts:
        try:
            part()
        except Exception as error:
            log.warning("at the end of the run: %s", headline(error))
            first = first or error
    if first is not None and failure is None:
        raise first


def _write_exit(session: Session, seconds: float, failure: BaseException | None) -> None:
    reason = "" if failure is None else headline(failure)
    session.writer.write(Exit(session.step, seconds, reason, session.dry is not None))
    session.writer.close()
    how, why = ("failed", f": {reason}") if reason else ("done", "")
    log.info("rank %d %s after %.1f s, step %d%s", session.comm.rank, how, seconds, session.step, why)
