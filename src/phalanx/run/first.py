"""`run.main_first()`: one rank goes first, as downloads and caches want it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from ..rank.topology import Topology
from ..strategies.comm import Comm

NAME = "run.main_first()"


@contextmanager
def main_first(comm: Comm, topology: Topology, local: bool) -> Iterator[None]:
    """Rank 0 (or each node's first rank) runs what is inside, then all others do; see `Run.main_first`."""
    around = comm.apart
    if not around:  # inside another one the ranks are apart already, and can't meet
        comm.meet(NAME.replace("()", "(local=True)") if local else NAME, math.inf)
    turn = comm.turn()
    first = topology.local_rank == 0 if local else comm.rank == 0
    group = f"node {topology.node_rank}" if local else "all"
    comm.apart = NAME
    try:
        if turn is not None and not first:
            turn.wait_for_first(group)
        yield
    except BaseException as error:
        if turn is not None:
            turn.fail(NAME, error)
        raise
    finally:
        comm.apart = around
    if turn is not None and first:
        turn.first_is_through(group)
    if turn is not None and not around:
        turn.wait_for_all()
