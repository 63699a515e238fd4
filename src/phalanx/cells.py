"""Which launcher starts which strategy, on one node or several; and why the other cells don't exist.

The table drives the refusals of the command, the tests and the docs.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

from .errors import PlanError
from .registry import LAUNCHERS, STRATEGIES

_ALL = frozenset(STRATEGIES)
_NODES = {"one": False, "several": True}

# (launchers, strategies, nodes, why not): the first row that matches a cell refuses it.
_REFUSALS: tuple[tuple[frozenset[str], frozenset[str], tuple[str, ...], str], ...] = (
    (frozenset(LAUNCHERS), frozenset({"single"}), ("several",), "strategy single is one process on one node"),
    (frozenset({"python"}), _ALL, ("several",), "python starts one process on one node"),
    (
        frozenset({"horovodrun"}),
        _ALL - {"horovod"},
        ("one", "several"),
        "horovodrun sets up Horovod's own communication, not torch.distributed's",
    ),
    (frozenset({"horovodrun"}), _ALL, ("several",), "horovodrun needs ssh to reach other nodes"),
    (
        frozenset({"ray"}),
        frozenset({"single"}),
        ("one",),
        "Ray Train starts groups of workers, not one process",
    ),
)

Cell = tuple[str, str, bool]


def _reason(launcher: str, strategy: str, nodes: str) -> str | None:
    for launchers, strategies, where, reason in _REFUSALS:
        if launcher in launchers and strategy in strategies and nodes in where:
            return reason
    return None


TABLE: Mapping[Cell, str | None] = {
    (launcher, strategy, _NODES[nodes]): _reason(launcher, strategy, nodes)
    for launcher, strategy, nodes in product(LAUNCHERS, STRATEGIES, _NODES)
}
"""(launcher, strategy, several nodes?) → None where it works, else the reason why not."""

# What is tried, in this order, when a cell doesn't exist.
_PREFERENCE = ("torchrun", "srun", "python")


def refusal(launcher: str, strategy: str, nodes: int, processes: int) -> str | None:
    """Why this cell can't hold that many processes, or None if it can."""
    if strategy == "single" and processes > 1:
        return f"strategy single is one process, and {processes} were asked for"
    if launcher == "python" and processes > 1:
        return f"launcher python starts one process, and {processes} were asked for"
    return TABLE[launcher, strategy, nodes > 1]


def nearest(launcher: str, strategy: str, nodes: int, processes: int) -> Cell:
    """The cell that works and differs least: the same launcher or strategy where possible."""
    strategies = (strategy, "ddp")
    launchers = (launcher, *_PREFERENCE)
    for candidate in product(strategies, launchers):
        if refusal(candidate[1], candidate[0], nodes, processes) is None:
            return candidate[1], candidate[0], nodes > 1
    raise AssertionError("torchrun starts ddp everywhere")


def check(launcher: str, strategy: str, nodes: int, processes: int) -> None:
    """Refuse a cell that doesn't exist.

    Raises PlanError with the reason and the nearest cell that works.
    """
    reason = refusal(launcher, strategy, nodes, processes)
    if reason is not None:
        near = nearest(launcher, strategy, nodes, processes)
        raise PlanError(
            f"launcher {launcher} with strategy {strategy} on {nodes} node{'s' * (nodes > 1)}: {reason}. "
            f"The nearest that works: --launcher {near[0]} --strategy {near[1]}"
        )
