"""Faults that the search has found and nobody has mended yet: it passes over the places where they show.

Each has a case that shows it. A test fails once that one is right: then its line here goes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.search.cases import Case
from tests.search.ranks import Place


@dataclass(frozen=True)
class Open:
    what: str
    covers: Callable[[Case, Place], bool]
    case: Case
    place: Place


def _zero(place: Place) -> bool:
    return place.strategy.startswith("deepspeed")


def _moved_by_zeros(case: Case, place: Place) -> bool:
    if "conditional" not in case.parts or case.optimizer in ("sgd", "adagrad"):
        return False
    return _zero(place) or place.size > 1


OPEN = [
    Open(
        "ZeRO's stages 2 and 3 hang where a parameter is reached on some ranks only",
        lambda case, place: "conditional" in case.parts and place.strategy in ("deepspeed-2", "deepspeed-3"),
        Case(parts=("conditional",), size=8),
        Place("deepspeed-2", 2),
    ),
    Open(
        "DDP's own error where it looks for unused parameters and two forwards have one backward pass",
        lambda case, place: place.strategy == "ddp" and "conditional" in case.parts and case.pair == "zip",
        Case(parts=("conditional",), batch=1, pair="zip"),
        Place("ddp", 1),
    ),
    Open(
        "fsdp reduces unequally: parameters of two types, a frozen first layer, one that a rank doesn't reach",
        lambda case, place: place.strategy == "fsdp" and {"conditional", "double", "frozen"} <= set(case.parts),
        Case(parts=("conditional", "double", "frozen"), size=8),
        Place("fsdp", 2),
    ),
    Open(
        "a parameter that nobody's samples reach has a gradient of zeros in place of none, and is decayed",
        _moved_by_zeros,
        Case(parts=("conditional",), size=4, batch=1, optimizer="adamw"),
        Place("deepspeed-0", 1),
    ),
]


def passed_over(case: Case, place: Place) -> bool:
    return any(fault.covers(case, place) for fault in OPEN)
