"""Models of an epoch's time, for runs that have no more: what is divided, what isn't, and what grows with the size."""

from __future__ import annotations

import math

import numpy as np

from ..model import Line, Size, Stat, Term
from ..text import count
from .fit import Fit, Model, Observation, Row, extent
from .nonnegative import determined
from .step_models import Refusal, sigma

STRONG = ("what ranks share among them", "what stays the same", "what grows with each doubling")


def epoch_model(line: Line) -> Model:
    """`a/n + b + c log2(n)` under strong scaling, `b + c log2(n)` under weak; n is relative to the smallest.

    Raises Refusal.
    """
    whole = all(point.size.ranks for point in line.points)  # else nodes are all that can be compared
    known: list[tuple[Size, Stat]] = [
        (point.size if whole else Size(point.size.nodes, None), point.epoch)
        for point in line.points
        if point.epoch is not None
    ]
    weak, first = line.scaling == "weak", min(extent(size) for size, _ in known)
    columns: Row = lambda size: row_of(extent(size) / first, weak)  # noqa: E731
    found = tuple(Observation(tuple(columns(size)), stat.value, sigma(stat), size) for size, stat in known)
    names = STRONG[1:] if weak else STRONG
    if not determined(np.array([item.row for item in found])):
        raise Refusal(
            f"{count(len(found), 'size')} with epoch times can't tell {len(names)} terms of an epoch apart "
            f"({', '.join(names)}): run more sizes"
        )
    fit = Fit(columns, found)
    terms = [
        Term(name, float(weight), "s an epoch", "fitted", float(error))
        for name, weight, error in zip(names, fit.weights, fit.errors(), strict=True)
    ]
    return Model(
        of="epoch",
        fits=(fit,),
        measured=tuple((size, stat.value) for size, stat in known),
        terms=tuple(terms),
        warnings=(
            "steps were not recorded: this is a model of whole epochs, which knows nothing of what they are made of",
        ),
        share=(lambda size: 1.0) if weak else (lambda size: first / extent(size)),
        network=any(size.nodes > 1 for size, _ in known),
        largest=max(extent(size) for size, _ in known),
    )


def row_of(times: float, weak: bool) -> list[float]:
    return [1.0, math.log2(times)] if weak else [1 / times, 1.0, math.log2(times)]
