"""The report in words, on the terminal; what its tables show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..analyse.recommendation import verdict
from ..model import Analysis, Comparison, Forecast, Group, Input, Line, Point, Stat
from ..text import WARM_UP_IS_IN, between, count, digits, percent, ratio, unit_of_energies, unit_of_times

_INPUTS = 10  # that are listed in words; inputs.csv has all
OF = {"epoch": "epoch times", "sample": "times a sample, in steps", "step": "step times"}


@dataclass(frozen=True)
class Column:
    """One column of a table: the first columns are the last to go where there is little room."""

    title: str
    cells: tuple[str, ...]
    keep: int  # rank: 0 always stays


def columns(points: Sequence[Point], scaling: str) -> list[Column]:
    """What is known of these points, in the order of the table."""
    scaled = "scaled speedup" if scaling == "weak" else "speedup"
    found = [
        Column("size", tuple(point.size.text for point in points), 0),
        Column("runs", tuple(str(point.runs) for point in points), 5),
        _times("epoch", [point.epoch for point in points], 1),
        _times("step", [point.step for point in points], 4),
        _figures("samples/s", [point.throughput for point in points], 3),
        Column(scaled, tuple(ratio(point.speedup.value) if point.speedup else "" for point in points), 1),
        Column("95%", tuple(between(point.speedup) if point.speedup else "" for point in points), 2),
        _shares("efficiency", [point.efficiency for point in points], 0),
        _shares("data wait", [point.wait for point in points], 6),
        _shares("comm.", [point.communication for point in points], 7),
        _shares("exposed", [point.exposed for point in points], 8),
        Column("GPU use", tuple(f"{p.gpu_utilisation.value:.0f}%" if p.gpu_utilisation else "" for p in points), 9),
        _energies("energy", [point.energy for point in points], 10),
        _figures("memory MiB", [_one(point.peak_device or None) for point in points], 12),
        _figures("device-h", [point.device_hours for point in points], 11),
    ]
    return [column for column in found if any(column.cells)]


def _one(value: float | None) -> Stat | None:
    return None if value is None else Stat(value, value, value, 1)


def _figures(title: str, stats: Sequence[Stat | None], keep: int) -> Column:
    return Column(title, tuple(digits(stat.value) if stat else "" for stat in stats), keep)


def _shares(title: str, stats: Sequence[Stat | None], keep: int) -> Column:
    return Column(title, tuple(percent(stat.value) if stat else "" for stat in stats), keep)


def _times(title: str, stats: Sequence[Stat | None], keep: int) -> Column:
    size, unit = unit_of_times([stat.value for stat in stats if stat])
    return Column(f"{title} {unit}", tuple(digits(stat.value / size) if stat else "" for stat in stats), keep)


def _energies(title: str, stats: Sequence[Stat | None], keep: int) -> Column:
    size, unit = unit_of_energies([stat.value for stat in stats if stat])
    return Column(f"{title} {unit}", tuple(digits(stat.value / size) if stat else "" for stat in stats), keep)


# --- on the terminal


def terminal(analysis: Analysis, width: int) -> str:
    """The summary at a terminal of `width` columns."""
    parts = []
    for group in analysis.groups:
        parts.append(_headline(group, width))
        parts += [_terminal_line(line, group, analysis, width) for line in group.lines]
        parts += [_compared(items) for items in _by_pair(group.comparisons)]
        parts.append("\n".join(_wrapped(f"note: {note}", width) for note in group.notes))
    parts.append("\n".join(_wrapped(text, width) for text in (basis(analysis), _read(analysis))))
    return "\n\n".join(part for part in parts if part)


def _headline(group: Group, width: int) -> str:
    title = _wrapped(group.title, width)
    return f"{title}\n{'─' * min(width, max(map(len, title.splitlines())))}"


def _terminal_line(line: Line, group: Group, analysis: Analysis, width: int) -> str:
    shown = _fitting(columns(line.points, line.scaling), width - 2)
    words = [f"{line.label}, {line.scaling} scaling{_against(line)}", *_aligned(shown)]
    if not line.baseline:  # nobody asks whether more of a baseline are worth it
        words.append(_wrapped(line.verdict or verdict(line, analysis.efficiency_wanted), width, "  → ", "    "))
        words += [_wrapped(text, width, "    ", "    ") for text in _of_forecast(line.forecast)]
    return "\n".join(words)


def _of_forecast(forecast: Forecast | None) -> list[str]:
    """Why there is none, or what makes it doubtful."""
    if forecast is None:
        return []
    return [f"No forecast: {forecast.refused}"] if forecast.refused else [f"Forecast: {w}" for w in forecast.warnings]


def _against(line: Line) -> str:
    if len(line.points) < 2:
        return ""
    return f"; speedup of {OF.get(line.of, line.of)} against {line.base.text}"


def _fitting(found: list[Column], width: int) -> list[Column]:
    """As many of the columns as have room, the least needed left out."""
    while _width(found) > width and (least := max(found, key=lambda column: column.keep)).keep:
        found = [column for column in found if column is not least]
    return found


def _width(found: Sequence[Column]) -> int:
    return sum(max(map(len, (column.title, *column.cells))) for column in found) + 2 * (len(found) - 1)


def _aligned(found: Sequence[Column]) -> list[str]:
    """Title and rows; numbers to the right."""
    rows = [tuple(column.title for column in found), *zip(*(column.cells for column in found), strict=True)]
    widths = [max(len(row[index]) for row in rows) for index in range(len(found))]
    lines = []
    for row in rows:
        first, *others = zip(row, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(text.rjust(width) for text, width in others)]
        lines.append(f"  {'  '.join(cells)}".rstrip())
    return lines


def _wrapped(text: str, width: int, first: str = "", then: str = "  ") -> str:
    """Plain wrapping: textwrap breaks at hyphens and inside paths."""
    lines, room = [first], max(40, width)
    empty = True
    for word in text.split():
        if not empty and len(lines[-1]) + 1 + len(word) > room:
            lines.append(then)
            empty = True
        lines[-1] += word if empty else f" {word}"
        empty = False
    return "\n".join(lines)


def _by_pair(items: Sequence[Comparison]) -> list[list[Comparison]]:
    pairs: dict[tuple[str, str, str], list[Comparison]] = {}
    for item in items:
        pairs.setdefault((item.label, item.against, item.of), []).append(item)
    return list(pairs.values())


def _compared(items: Sequence[Comparison]) -> str:
    """One label beside its baseline, a size a row."""
    first = items[0]
    shown = [
        Column("size", tuple(item.size.text for item in items), 0),
        Column("ratio", tuple(three(item.ratio.value) for item in items), 0),
        Column("95%", tuple(between(item.ratio, three) for item in items), 0),
        Column("", tuple(how(item) for item in items), 0),
    ]
    return "\n".join([f"{first.label} beside {first.against}: time of {a_or_an(first.of)}", *_aligned(shown)])


def how(item: Comparison) -> str:
    more = (item.ratio.value - 1) * 100
    return f"{abs(more):.1f}% {'longer' if more > 0 else 'shorter'}" if abs(more) >= 0.05 else "as long"


def a_or_an(of: str) -> str:
    return f"{'an' if of == 'epoch' else 'a'} {of}"


def _several(number: int, what: str) -> str:
    """`epoch`, `3 epochs`: after "the first"."""
    return what if number == 1 else count(number, what)


def three(value: float) -> str:
    return f"{value:.3f}"


def basis(analysis: Analysis) -> str:
    """What was left out of the figures, and how the spread is meant."""
    warm = (
        f"the first {_several(analysis.warmup_epochs, 'epoch')} of each run left out as warm-up"
        if analysis.warmup_epochs
        else "raw: no warm-up epoch left out"
    )
    if any(WARM_UP_IS_IN in warning for warning in analysis.warnings):
        warm += ", but where a warning says otherwise"
    return f"Epochs: {warm}. Ranges are the middle 95% of a bootstrap over runs, and over epochs or steps within each."


def _read(analysis: Analysis) -> str:
    used = sum(bool(item.used) for item in analysis.inputs)
    return (
        f"Read: {count(used, 'input')} of {len(analysis.inputs):,}; inputs.csv says what was used of each, and why not."
    )


def troubles(analysis: Analysis) -> list[str]:
    """Warnings, one each: of the analysis, then of inputs of which something was left out."""
    marked = [item for item in analysis.inputs if _reasons(item)]
    lines = [*analysis.warnings, *(f"{item.path}: {'; '.join(_reasons(item))}" for item in marked[:_INPUTS])]
    if len(marked) > _INPUTS:
        lines.append(f"… and {len(marked) - _INPUTS} more inputs, see inputs.csv")
    return lines


def _reasons(item: Input) -> list[str]:
    """Why something was left out, and notes; warm-up and profiled windows aside: that is as it should be."""
    expected = ("warm-up", "profiled")
    return [reason for reason in (*item.left_out, *item.notes) if not any(word in reason for word in expected)]
