"""DataLoaders shared out over ranks: order, position, seeds, and the same number of batches everywhere."""

from __future__ import annotations

from .batch import count, move, zero_rows
from .groups import Group, Micro, Peers
from .iterable import shard
from .loader import PreparedLoader, prepare_loader

__all__ = [
    "Group",
    "Micro",
    "Peers",
    "PreparedLoader",
    "count",
    "move",
    "prepare_loader",
    "shard",
    "zero_rows",
]
