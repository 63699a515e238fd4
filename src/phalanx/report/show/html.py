"""Pieces of HTML. Whatever a user named passes through `text`."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
_LONG = 400


def text(words: object, most: int = _LONG) -> str:
    """Words of anyone's as HTML: nothing in them is markup, turns the direction of what follows, or fills the page."""
    return f"<bdi>{html.escape(short(clean(words), most))}</bdi>"


def attribute(words: object) -> str:
    """The same for a quoted attribute."""
    return html.escape(short(clean(words), 2000))


def clean(words: object) -> str:
    """Without control characters, halves of letters, and marks that turn the direction of text."""
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", str(words))


def short(words: str, most: int) -> str:
    """With the middle left out of long ones: beginnings are often alike."""
    if len(words) <= most:
        return words
    end = most // 3
    return f"{words[: most - end - 1]}…{words[-end:]}"


def json_for_script(value: Any) -> str:
    """JSON that can stand in a script element, with null for what is no number."""
    words = json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))
    return words.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


@dataclass(frozen=True)
class Cell:
    """`html` as shown; `value`, for numbers, is what they are sorted by."""

    html: str
    value: float | None = None


@dataclass(frozen=True)
class Column:
    title: str
    unit: str = ""
    words: bool = False  # text rather than numbers
    wide: bool = False


def table(caption: str, columns: Sequence[Column], rows: Iterable[Sequence[Cell]], pin: bool = False) -> str:
    """A table that scrolls by itself and can be sorted. Rows begin with their head: with `pin` it stays in view."""
    head = "".join(map(_head, columns))
    body = "\n".join(
        "<tr>"
        + "".join(_cell(cell, column, index) for index, (cell, column) in enumerate(zip(row, columns, strict=True)))
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll{" pin" * pin}" tabindex="0" role="region" aria-label="{attribute(caption)}">'
        f"<table><caption>{html.escape(clean(caption))}</caption><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )


def _head(column: Column) -> str:
    """page.js makes a button of what is in it."""
    return f'<th scope="col" data-sort{_class(column)}><span>{html.escape(column.title)}</span>{_unit(column)}</th>'


def _class(column: Column) -> str:
    names = ["words"] * column.words + ["wide"] * column.wide
    return f' class="{" ".join(names)}"' if names else ""


def _unit(column: Column) -> str:
    return f' <span class="unit">{html.escape(column.unit)}</span>' if column.unit else ""


def _cell(cell: Cell, column: Column, index: int) -> str:
    raw = ""
    if not column.words:
        raw = (
            f' data-value="{cell.value:.9g}"'
            if cell.value is not None and math.isfinite(cell.value)
            else ' data-value=""'
        )
    if index == 0:
        return f'<th scope="row"{_class(column)}{raw}>{cell.html}</th>'
    return f"<td{_class(column)}{raw}>{cell.html}</td>"
