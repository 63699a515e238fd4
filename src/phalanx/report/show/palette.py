"""How curves look, on the page and in plots alike: colours that colour-blind readers tell apart by their lightness too,
with a contrast of 3 and more on their background, and a marker each, so that colour alone says nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..model import Group

BASELINE = " (baseline)"
# Blue and vermilion are Okabe and Ito's. The last is a grey, for what is no curve.
LIGHT = ("#0072b2", "#d55e00", "#00553f", "#cf6aa6", "#3a1a86", "#6b3a00", "#5f6b76")
DARK = ("#56b4e9", "#ff8f4a", "#b8f5d8", "#ff4f9a", "#9d7bff", "#ffe14d", "#b0bac4")
_CURVES = len(LIGHT) - 1
MARKERS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "x")
# Parts of a step: waiting, exposed communication, the rest, and what nobody measured.
PARTS = {"wait": 5, "exposed": 1, "rest": 0, "unknown": 6}
BACKGROUND = {"light": "#ffffff", "dark": "#161b22"}


@dataclass(frozen=True)
class Look:
    """`colour` is an index into LIGHT and DARK; a hand-written script has its strategy's, hollow and dashed."""

    colour: int
    marker: str
    hollow: bool = False


def looks(groups: Sequence[Group]) -> dict[str, Look]:
    """One look a label, the same in all groups."""
    labels = sorted({line.label for group in groups for line in group.lines})
    names = sorted({label.removesuffix(BASELINE) for label in labels})
    found = {}
    for label in labels:
        index = names.index(label.removesuffix(BASELINE))
        found[label] = Look(index % _CURVES, MARKERS[index % len(MARKERS)], label.endswith(BASELINE))
    return found


def contrast(one: str, other: str) -> float:
    """Of two colours `#rrggbb`, after WCAG 2: 1 to 21."""
    high, low = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
