"""PNG and SVG files of the report's charts, for papers: what the page shows, on paper.

Without pyplot and without touching rcParams, so that a program that imports us keeps its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ...registry import require
from ..model import Analysis, Group
from .chart_values import Chart, Curve, Lines, Mark, Rows
from .charts import charts_of
from .html import short
from .palette import LIGHT, MARKERS, PARTS, Look, looks

_DPI = 200
_PAGE_ONLY = ("memory_device", "memory_host", "gpu_utilisation", "forecast_efficiency")  # a drawing takes 0.15 s
_WIDE, _BELOW = 4.6, 0.5  # inches: a column of a paper, and what lies under an axis
_ABOVE = {"stack": 0.7, "bars": 0.3, "dots": 0.3}  # title, and legend
_NAME = 32  # letters of a name
_MAIN = ("speedup", "efficiency", "epoch_time")  # of workloads after the first, of which there may be many
_MOST_DRAWN = 6  # workloads
_INK, _SOFT, _GRID = "#1b2430", "#566070", "#e2e6ea"
_SHAPES = dict(zip(MARKERS, "osD^P*X", strict=True))
_OTHER = Look(6, "circle")
# In Agg's own font: names in other scripts than it has are drawn as boxes, as the page does without fonts.
_STYLE = {
    "font.family": ["DejaVu Sans"],
    "font.size": 8.5,
    "axes.edgecolor": "#aab2bd",
    "axes.linewidth": 0.8,
    "text.color": _INK,
    "axes.labelcolor": _SOFT,
    "xtick.color": _SOFT,
    "ytick.color": _SOFT,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "phalanx",  # the same file for the same numbers
    "text.parse_math": False,  # a name may have dollars
}


def write(analysis: Analysis, out: Path) -> list[Path]:
    """Write `<chart>.png` and `<chart>.svg` into the folder `out`, with the group's number where there are several;
    returns their paths."""
    matplotlib = require("matplotlib", "report")
    out.mkdir(parents=True, exist_ok=True)
    own = looks(analysis.groups)
    written: list[Path] = []
    with matplotlib.rc_context(_STYLE):
        for index, group in enumerate(analysis.groups[:_MOST_DRAWN]):
            prefix = f"{index + 1}-{_file_name(group)}-" if len(analysis.groups) > 1 else ""
            for chart in charts_of(group, analysis):
                if chart.key in _MAIN or (index == 0 and chart.key not in _PAGE_ONLY):
                    written += _save(_figure(chart, own), out / f"{prefix}{chart.key}")
    return written


def _file_name(group: Group) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", group.title.partition(":")[0]).strip("-")[:30] or "workload"


def _save(figure: Any, stem: Path) -> list[Path]:
    paths = [stem.with_name(f"{stem.name}.png"), stem.with_name(f"{stem.name}.svg")]
    figure.savefig(paths[0], dpi=_DPI, pil_kwargs={"compress_level": 2})
    figure.savefig(paths[1], metadata={"Date": None})
    return paths


def _figure(chart: Chart, own: dict[str, Look]) -> Any:
    figures = require("matplotlib.figure", "report")
    tall = _tall(chart)
    figure = figures.Figure(figsize=(_WIDE, tall))
    axes = figure.add_axes(_box(chart, tall))
    # Not the axes' own title, whose place is looked for in every drawing.
    figure.text(0.12 / _WIDE, 1 - 0.08 / tall, short(chart.title, 60), color=_INK, size=9.5, weight="bold", va="top")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    if isinstance(chart, Rows):
        _draw_rows(axes, chart, own)
    else:
        _draw_lines(axes, chart, own)
    return figure


def _tall(chart: Chart) -> float:
    return _ABOVE[chart.kind] + _BELOW + 0.22 * (chart.places[-1] + 1) if isinstance(chart, Rows) else 3.1


def _box(chart: Chart, tall: float) -> tuple[float, float, float, float]:
    """Where the axes lie (left, bottom, width, height, as shares). Reckoned, since a layout engine takes most of a
    drawing's time."""
    letters = max(len(_row_name(words)) for words, _ in chart.rows) if isinstance(chart, Rows) else 0
    left = 0.15 + 0.072 * letters if letters else 0.62
    above = _ABOVE[chart.kind] if isinstance(chart, Rows) else 0.3
    return (left / _WIDE, _BELOW / tall, (_WIDE - left - 0.15) / _WIDE, (tall - _BELOW - above) / tall)


# --- curves


def _draw_lines(axes: Any, chart: Lines, own: dict[str, Look]) -> None:
    forecast = any(curve.kind == "forecast" for curve in chart.curves)
    for curve in chart.curves:
        _draw_curve(axes, curve, own.get(curve.label, _OTHER), forecast)
    axes.grid(axis="y", color=_GRID, linewidth=0.7)
    axes.set_xticks([place for place, _ in chart.x_ticks], [words for _, words in chart.x_ticks])
    axes.set_xlabel(chart.x_title)
    axes.set_ylabel(chart.y_title)
    if chart.log:
        axes.set_yscale("log", subs=[])
        axes.set_yticks([value for value, _ in chart.y_ticks], [words for _, words in chart.y_ticks])
    axes.set_ylim(chart.y_range)
    axes.legend(frameon=False, fontsize=7.5, handlelength=2.4, labelcolor=_INK)


def _draw_curve(axes: Any, curve: Curve, look: Look, forecast: bool) -> None:
    x, y = [mark.x for mark in curve.marks], [mark.y for mark in curve.marks]
    colour, name = LIGHT[look.colour], short(_drawable(curve.name), _NAME)
    if curve.kind in ("ideal", "wanted"):
        axes.plot(
            x, y, color=_SOFT, linewidth=1, linestyle=(0, (6, 4) if curve.kind == "ideal" else (1, 2)), label=name
        )
        return
    dashed = "--" if look.hollow else "-"
    if curve.kind == "forecast":
        band = [mark for mark in curve.marks if mark.low is not None]
        axes.fill_between(
            [mark.x for mark in band], [mark.low for mark in band], [mark.high for mark in band],
            color=colour, alpha=0.18, linewidth=0,
        )  # fmt: skip
        axes.plot(x, y, color=colour, linewidth=1.4, linestyle=dashed, label=name)
        return
    hollow = look.hollow or curve.kind == "aside"
    axes.errorbar(
        x,
        y,
        yerr=_errors(curve.marks),
        color=colour,
        linestyle="none" if curve.kind == "aside" or forecast else dashed,
        linewidth=1.5,
        elinewidth=1,
        capsize=2.5,
        marker=_SHAPES[look.marker],
        markersize=5.5,
        markerfacecolor="white" if hollow else colour,
        label=name,
    )


def _errors(marks: Sequence[Mark]) -> list[list[float]] | None:
    if all(mark.low is None for mark in marks):
        return None
    below = [0.0 if mark.low is None else mark.y - mark.low for mark in marks]
    above = [0.0 if mark.high is None else mark.high - mark.y for mark in marks]
    return [below, above]


@cache
def _drawable(words: str) -> str:
    """What the font has: matplotlib warns of other letters."""
    font = require("matplotlib.font_manager", "report")
    known = font.get_font(font.findfont("DejaVu Sans")).get_charmap()
    return "".join(letter if ord(letter) in known and letter.isprintable() else "\N{WHITE SQUARE}" for letter in words)


# --- rows


def _row_name(words: str) -> str:
    return short(_drawable(words), _NAME)


def _draw_rows(axes: Any, chart: Rows, own: dict[str, Look]) -> None:
    places = list(chart.places)
    rows = [own.get(label, _OTHER) for _, label in chart.rows]
    if chart.kind == "dots":
        _draw_dots(axes, chart, rows)
    else:
        _draw_bars(axes, chart, rows)
    axes.set_yticks(places, [_row_name(words) for words, _ in chart.rows])
    axes.set_ylim(places[-1] + 0.6, places[0] - 0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color=_GRID, linewidth=0.7)
    axes.set_xlabel(chart.x_title)
    if chart.kind == "stack":
        axes.set_xlim(0, 100)
        axes.legend(
            frameon=False, fontsize=7.5, ncols=2, loc="lower right", bbox_to_anchor=(1.02, 1.0), labelcolor=_INK
        )


def _draw_dots(axes: Any, chart: Rows, rows: Sequence[Look]) -> None:
    axes.axvline(chart.reference, color=_SOFT, linewidth=1, linestyle=(0, (6, 4)))
    for mark, place, look in zip(chart.parts[0].marks, chart.places, rows, strict=True):
        if mark:
            errors = _errors([mark])
            axes.errorbar(
                mark.y, place, xerr=errors, color=LIGHT[look.colour], ecolor=_SOFT, elinewidth=1, capsize=2.5,
                marker=_SHAPES[look.marker], markersize=5.5,
            )  # fmt: skip


def _draw_bars(axes: Any, chart: Rows, rows: Sequence[Look]) -> None:
    left = [0.0] * len(rows)
    for part in chart.parts:
        widths = [mark.y if mark else 0.0 for mark in part.marks]
        colours = [LIGHT[PARTS[part.role]] if part.role else LIGHT[look.colour] for look in rows]
        bars = axes.barh(
            list(chart.places), widths, 0.7, left=left, color=colours, edgecolor="white", linewidth=0.5, label=part.name
        )
        if chart.kind == "stack":
            shown = [f"{width:.0f}%" if width >= 9 else "" for width in widths]
            axes.bar_label(bars, shown, label_type="center", color="white", fontsize=6.5)
        else:
            errors = [_errors([mark]) if mark else None for mark in part.marks]
            for width, place, error in zip(widths, chart.places, errors, strict=True):
                if error:
                    axes.errorbar(width, place, xerr=error, color=_INK, elinewidth=1, capsize=2.5)
        left = [old + width for old, width in zip(left, widths, strict=True)]
