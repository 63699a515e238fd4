"""Whether the holder of a run directory may still run: only its host or its cluster can say that it
doesn't."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from ..processes import of_launch
from .holder import Holder, silence
from .slurmjob import why_unfinished

_KEEPER = 50.0  # seconds within which a launch whose command was killed is ended by the shell beside it
_PAUSE = 0.2


def why_held(holder: Holder, me: Holder, run_dir: Path) -> str | None:
    """Words on why the claim stands against `me`; None if its holder is gone, or `me` goes on where
    it was."""
    if _inherits(holder, me):
        return None
    if holder.process is not None and holder.process.here:
        if holder.process.alive:
            return "its process is there"
        return _leftovers(holder.launch)
    if holder.job is not None:
        return why_unfinished(holder.job, holder.since, silence(run_dir))
    if holder.process is None:
        return "nothing tells whether it has ended"
    return _other_place(holder.process.host, me.host)


def _inherits(holder: Holder, me: Holder) -> bool:
    """The same claim or process, a restart of its job, the job after it in a chain, or a launch
    within the job itself."""
    if holder.token == me.token or (holder.process is not None and holder.process == me.process):
        return True
    if holder.job is None or me.job is None:
        return False
    if holder.job.same(me.job):
        within = holder.process is None and me.process is not None and me.job.restart == holder.job.restart
        return me.job.restart > holder.job.restart or within
    return holder.job.cluster == me.job.cluster and holder.job.number == me.after


def _leftovers(launch: str | None) -> str | None:
    """A command that was killed outright leaves ranks behind for a while: they are waited for."""
    end, said = time.monotonic() + _KEEPER, False
    while launch and (left := of_launch(launch)):
        words = f"processes of its launch still run here (pid {', '.join(map(str, left))})"
        if time.monotonic() > end:
            return words
        if not said:
            print(f"the attempt before this one was killed, and {words}: waiting for their end", file=sys.stderr)
            said = True
        time.sleep(_PAUSE)
    return None


def _other_place(host: str, here: str) -> str:
    if host == here:
        return f"it began on a host named {host} before that was restarted, in another container, or on another machine"
    return f"only host {host} can tell whether it has ended"
