"""The page's charts: their places in HTML, and their values as JSON for page.js."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .chart_values import Chart, Curve, Lines, Mark, Part, Rows
from .html import attribute, clean, short, text
from .palette import DARK, LIGHT, PARTS, Look

Order = dict[str, int]  # a label's place among the looks
_NAME = 34  # letters of a name in a plot


class Drawing:
    """Collects the charts of a page."""

    def __init__(self, own: Mapping[str, Look]) -> None:
        self._looks = list(own.values())
        self._order = {label: index for index, label in enumerate(own)}
        self._charts: list[dict[str, Any]] = []

    def figure(self, chart: Chart) -> str:
        """The place of one more chart."""
        self._charts.append(_rows(chart, self._order) if isinstance(chart, Rows) else _lines(chart, self._order))
        caption = f"{text(chart.title)}<span>{text(chart.caption) if chart.caption else ''}</span>"
        return (
            f'<figure><figcaption>{caption}</figcaption><div class="plot" style="--tall: {_tall(chart)}px" role="img" '
            f'data-chart="{len(self._charts) - 1}" aria-label="{attribute(_spoken(chart))}"></div></figure>'
        )

    def values(self) -> dict[str, Any]:
        """All that page.js draws from."""
        looks = [vars(look) for look in self._looks]
        return {"palette": {"light": LIGHT, "dark": DARK}, "looks": looks, "charts": self._charts}


def _tall(chart: Chart) -> int:
    """Pixels: with room for rows, and for a legend of many long names."""
    if isinstance(chart, Rows):
        return 110 + round(26 * (chart.places[-1] + 1))
    long = any(len(curve.name) > 16 for curve in chart.curves)
    return 360 + (18 * max(0, len(chart.curves) - 4) if long else 0)


def _spoken(chart: Chart) -> str:
    """What a chart shows, in words, for those who don't see it."""
    if isinstance(chart, Rows):
        marks = [mark for part in chart.parts for mark in part.marks if mark]
    else:
        marks = [mark for curve in chart.curves if curve.kind in ("measured", "aside") for mark in curve.marks]
    return f"{chart.title}. {'; '.join(' '.join(mark.text[:2]) for mark in marks)}. All numbers are in the tables."


def _lines(chart: Lines, order: Order) -> dict[str, Any]:
    forecast = any(curve.kind == "forecast" for curve in chart.curves)
    return {**vars(chart), "forecast": forecast, "curves": [_curve(curve, order) for curve in chart.curves]}


def _curve(curve: Curve, order: Order) -> dict[str, Any]:
    return {
        "name": _named(curve.name),
        "kind": curve.kind,
        "look": order.get(curve.label) if curve.label else None,
        "x": [mark.x for mark in curve.marks],
        **_values(curve.marks, "y"),
    }


def _named(words: str) -> str:
    return short(clean(words), _NAME)


def _rows(chart: Rows, order: Order) -> dict[str, Any]:
    rows = [
        {"text": clean(words), "look": order.get(label), "at": place}
        for (words, label), place in zip(chart.rows, chart.places, strict=True)
    ]
    return {**vars(chart), "rows": rows, "parts": [_part(part) for part in chart.parts]}


def _part(part: Part) -> dict[str, Any]:
    return {"name": _named(part.name), "colour": PARTS.get(part.role), **_values(part.marks, "x")}


def _values(marks: Sequence[Mark | None], name: str) -> dict[str, Any]:
    return {
        name: [mark.y if mark else None for mark in marks],
        "low": [mark.low if mark else None for mark in marks],
        "high": [mark.high if mark else None for mark in marks],
        "text": [[short(clean(words), 80) for words in mark.text] if mark else [] for mark in marks],
    }
