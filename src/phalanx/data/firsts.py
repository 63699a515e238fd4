"""What a stream yields first, by which it shows whether ranks and workers see the same items before these are split.

A stream that asks `get_worker_info()` for its number is split already. So a copy of it is tried: told to be the only
split, it must yield the same items on all ranks, unless it also splits by the rank.
"""

from __future__ import annotations

import copy
import warnings
import zlib
from itertools import islice
from typing import Any

from ..errors import DataError

ROWS = ("unsplit", "split", "tried", "tried_next")  # fingerprints that each worker notes, 0 where it has none
_EMPTY = 1 << 40  # the fingerprint of nothing, where there might have been an item
_NEXT = 3  # items after the first one that a trial looks at
_MANY, _LARGE = 10_000, 1 << 20  # items of a container, bytes of a tensor or array


def fingerprint(item: Any) -> int:
    """A number above 0 that equal items share, in any process."""
    return zlib.crc32(repr(_plain(item)).encode()) + 1


def _plain(item: Any) -> Any:
    """What of an item has the same repr everywhere; its beginning is enough."""
    if isinstance(item, (str, bytes, int, float, bool, type(None))):
        return item[:256] if isinstance(item, (str, bytes)) else item
    if isinstance(item, dict):
        return [(_plain(key), _plain(value)) for key, value in islice(item.items(), 16)]
    if isinstance(item, (list, tuple)):
        return [_plain(part) for part in item[:16]]
    if callable(getattr(item, "flatten", None)) and hasattr(item, "shape"):  # tensors and arrays
        return [tuple(item.shape), item.flatten()[:16].tolist()]
    return type(item).__qualname__


def is_used_up(dataset: Any) -> bool:
    """Whether it holds an iterator, file or socket, of which each item can be read once only."""
    return any(hasattr(value, "__next__") or hasattr(value, "recv") for value in _attributes(dataset).values())


def _attributes(dataset: Any) -> dict[str, Any]:
    return getattr(dataset, "__dict__", {})


class Trial:
    """A copy of a dataset, made before its iteration begins, so that trying it uses up nothing."""

    def __init__(self, dataset: Any) -> None:
        self.dataset: Any = None  # where there can't be a copy
        try:
            self.dataset = copy.deepcopy(dataset, _shared(dataset))
        except Exception:  # of a lock, a connection, a class that forbids it
            return

    def beginning(self) -> tuple[int, int]:
        """Fingerprints of the first item, and of those that follow it; (0, 0) where nobody can tell."""
        if self.dataset is None:
            return 0, 0
        try:
            items = iter(self.dataset)
            first = [fingerprint(item) for item in islice(items, 1)]
            follow = [fingerprint(item) for item in islice(items, _NEXT)]
        except Exception:  # the real one fails too, or differs from its copy
            return 0, 0
        return (first[0], fingerprint(follow)) if first else (_EMPTY, _EMPTY)


def _shared(dataset: Any) -> dict[int, Any]:
    """For deepcopy: attributes that would take long to copy, which are shared or copied one level deep."""
    memo: dict[int, Any] = {}
    for value in _attributes(dataset).values():
        if getattr(value, "nbytes", 0) > _LARGE:
            memo[id(value)] = value
        elif isinstance(value, (list, tuple, set, dict)) and len(value) > _MANY:
            memo[id(value)] = copy.copy(value)
    return memo


def check_firsts(name: str, firsts: list[list[int]], declared: bool) -> None:
    """Compare what ranks and workers met first; `firsts` has each rank's `SplitDataset.firsts`, flattened.

    Raises DataError if a stream differs between them before it is split: items would be lost.
    """
    if declared:
        return
    workers = len(firsts[0]) // len(ROWS)
    met = {
        row: [value for mine in firsts for value in mine[at * workers : (at + 1) * workers] if value]
        for at, row in enumerate(ROWS)
    }
    if len(set(met["unsplit"])) > 1:
        raise DataError(
            f"{name} yields other items on other ranks or workers before it is split, so it seems to split them "
            "itself (by the rank, or in worker_init_fn) or to shuffle without a seed, and items would be lost: use "
            "phalanx.shard() or torch's get_worker_info() in __iter__, or say by an attribute: splits_itself = True (it"
            " does, over workers too) or splits_itself = False (all see the same items)"
        )
    if len(met["split"]) > 1 and len(set(met["split"])) == 1:
        warnings.warn(
            f"{name} asks get_worker_info() for id and num_workers, but all ranks and workers begin with the same item:"
            " if it doesn't split by them, items are repeated; set splits_itself = False to have it split",
            stacklevel=2,
        )
    # Rank 0's worker 0 met its first item with the random numbers of the trial.
    _check_tried(name, met, repeats=firsts[0][workers] == firsts[0][2 * workers])


def _check_tried(name: str, met: dict[str, list[int]], repeats: bool) -> None:
    """Of a stream that asks `get_worker_info()`."""
    if len(set(met["tried"])) > 1 and repeats:
        raise DataError(
            f"{name} splits by get_worker_info(), which counts over all ranks' workers in a prepared loader, and "
            "yields other items on other ranks even if it is told to be the only worker: it seems to split by the "
            "rank too, and items would be lost. Leave the rank out or use phalanx.shard() in __iter__; or say by an "
            "attribute: splits_itself = True (it splits over ranks and workers, and get_worker_info() gives a rank's "
            'own workers) or splits_itself = "worker_info" (it splits by get_worker_info() alone, and the rank '
            "decides something else, such as random numbers)"
        )
    if len(set(met["tried"])) > 1 or len(set(met["tried_next"])) > 1:
        warnings.warn(
            f"{name} asks get_worker_info() for id and num_workers, and what it yields depends on the rank or on "
            "random numbers that nobody seeds: if it also splits by the rank, or shuffles before it splits, items "
            "are lost. Give its shuffle a seed and leave the rank to get_worker_info(); "
            'splits_itself = "worker_info" says that it is right as it is',
            stacklevel=3,
        )
