"""Which launcher starts which strategy, in a virtual environment or a container, on one node or several; and why the
other cells don't exist.

The table drives the refusals of the command, the tests and the page docs/cells.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import NamedTuple

from ..errors import PlanError
from ..registry import LAUNCHERS, STRATEGIES

RUNTIMES = ("venv", "container")
NODES = ("one", "several")

_ANY = frozenset({*LAUNCHERS, *STRATEGIES})
_SINGLE, _HOROVOD = frozenset({"single"}), frozenset({"horovod"})


class Cell(NamedTuple):
    """One way of starting a run. `nodes` is `one` or `several`."""

    launcher: str
    strategy: str
    runtime: str
    nodes: str


class _Refusal(NamedTuple):
    launchers: frozenset[str]
    strategies: frozenset[str]
    nodes: tuple[str, ...]
    reason: str


# The first that matches a cell refuses it. No runtime is refused: inside an image every launcher does what it does
# outside, as long as the image has it.
_REFUSALS = (
    _Refusal(_ANY, _SINGLE, ("several",), "strategy single is one process on one node"),
    _Refusal(frozenset({"python"}), _ANY, ("several",), "python starts one process on one node"),
    _Refusal(
        frozenset({"horovodrun"}),
        _ANY - _HOROVOD,
        NODES,
        "horovodrun sets up Horovod's own communication, not torch.distributed's",
    ),
    _Refusal(frozenset({"horovodrun"}), _ANY, ("several",), "horovodrun needs ssh to reach other nodes"),
    _Refusal(
        frozenset({"torchrun"}),
        _HOROVOD,
        NODES,
        "torchrun cannot start Horovod, whose ranks find each other by MPI or by Horovod's own rendezvous",
    ),
    _Refusal(
        frozenset({"deepspeed"}),
        _HOROVOD,
        NODES,
        "deepspeed cannot start Horovod, whose ranks find each other by MPI or by Horovod's own rendezvous",
    ),
    _Refusal(frozenset({"ray"}), _HOROVOD, NODES, "Ray Train has no Horovod any more"),
    _Refusal(frozenset({"ray"}), _SINGLE, NODES, "Ray Train starts groups of workers, not one process"),
)


def _reason(cell: Cell) -> str | None:
    for refusal in _REFUSALS:
        if cell.launcher in refusal.launchers and cell.strategy in refusal.strategies and cell.nodes in refusal.nodes:
            return refusal.reason
    return None


TABLE: Mapping[Cell, str | None] = {
    cell: _reason(cell) for cell in (Cell(*words) for words in product(LAUNCHERS, STRATEGIES, RUNTIMES, NODES))
}
"""None where a cell works, else the reason why not."""

# What is tried, in this order, when a cell doesn't exist.
_PREFERENCE = ("torchrun", "horovodrun", "srun", "python")


def cell(launcher: str, strategy: str, runtime: str, nodes: int) -> Cell:
    """The cell of a plan: its `runtime` may be any container's name."""
    return Cell(launcher, strategy, "venv" if runtime == "venv" else "container", NODES[nodes > 1])


def refusal(at: Cell, processes: int) -> str | None:
    """Why this cell can't hold that many processes, or None if it can."""
    if at.strategy == "single" and processes > 1:
        return f"strategy single is one process, and {processes} were asked for"
    if at.launcher == "python" and processes > 1:
        return f"launcher python starts one process, and {processes} were asked for"
    return TABLE[at]


def nearest(at: Cell, processes: int) -> Cell:
    """The cell that works and differs least: the same launcher or strategy where possible."""
    for strategy, launcher in product((at.strategy, "ddp"), (at.launcher, *_PREFERENCE)):
        candidate = at._replace(launcher=launcher, strategy=strategy)
        if refusal(candidate, processes) is None:
            return candidate
    raise AssertionError("torchrun starts ddp everywhere")


def check(at: Cell, nodes: int, processes: int) -> None:
    """Refuse a cell that doesn't exist.

    Raises PlanError with the reason and the nearest cell that works.
    """
    reason = refusal(at, processes)
    if reason is not None:
        near = nearest(at, processes)
        raise PlanError(
            f"launcher {at.launcher} with strategy {at.strategy} on {nodes} node{'s' * (nodes > 1)}: {reason}. "
            f"The nearest that works: --launcher {near.launcher} --strategy {near.strategy}"
        )


def default_launcher(strategy: str, nodes: int, processes: int) -> str:
    """What `launcher: auto` means."""
    if strategy == "horovod":
        return "srun" if nodes > 1 else "horovodrun"
    return "torchrun" if processes > 1 else "python"
