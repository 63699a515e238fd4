"""The report as summary.md."""

from __future__ import annotations

from collections.abc import Sequence

from ..analyse.recommendation import verdict
from ..model import Analysis, Comparison, Forecast, Group, Line
from ..text import between, digits, percent, time
from .summary import OF, Column, a_or_an, basis, columns, how, three


def markdown(analysis: Analysis) -> str:
    """The report as a page of text; plots lie beside it."""
    parts = [f"# {analysis.title}", *(_markdown_group(group, analysis) for group in analysis.groups)]
    if analysis.warnings:
        parts.append("## Warnings\n\n" + "\n".join(f"- {warning}" for warning in analysis.warnings))
    parts += [_markdown_inputs(analysis), f"## How it was computed\n\n{basis(analysis)}"]
    return "\n\n".join(parts) + "\n"


def _markdown_group(group: Group, analysis: Analysis) -> str:
    parts = [f"## {group.title}"]
    for line in group.lines:
        parts.append(f"### {line.label}, {line.scaling} scaling")
        parts += [] if line.baseline else [line.verdict or verdict(line, analysis.efficiency_wanted)]
        parts.append(_markdown_table(columns(line.points, line.scaling)))
        if len(line.points) > 1:
            parts.append(f"Speedup and efficiency are of {OF.get(line.of, line.of)}, against {line.base.text}.")
        costs = _markdown_costs(line, analysis)
        parts += [costs] if costs else []
        forecasts = [] if line.baseline else [line.forecast, line.step_forecast]
        parts += [_markdown_forecast(forecast) for forecast in forecasts if forecast]
    if group.comparisons:
        parts.append("### With Phalanx and by hand\n\n" + "\n".join(f"- {_comparison(c)}" for c in group.comparisons))
    if group.notes:
        parts.append("\n".join(f"- {note}" for note in group.notes))
    return "\n\n".join(parts)


def _markdown_table(found: Sequence[Column]) -> str:
    head = "| " + " | ".join(column.title for column in found) + " |"
    rule = "|---|" + "---:|" * (len(found) - 1)
    rows = ["| " + " | ".join(cells) + " |" for cells in zip(*(column.cells for column in found), strict=True)]
    return "\n".join([head, rule, *rows])


def _markdown_costs(line: Line, analysis: Analysis) -> str:
    rows = [
        f"- {point.size.text}: {time(point.seconds_to_epochs.value)}"
        + (f", {digits(point.device_hours.value)} device-hours" if point.device_hours else "")
        for point in line.points
        if point.seconds_to_epochs
    ]
    return f"To {analysis.epochs_wanted} epochs:\n\n" + "\n".join(rows) if rows else ""


def _markdown_forecast(forecast: Forecast) -> str:
    if forecast.refused:
        return f"No forecast: {forecast.refused}"
    terms = [
        f"- {term.name}: {digits(term.value)} {term.unit} ({term.source}"
        + (f", ± {digits(term.high_error)}" if term.high_error is not None else "")
        + ")"
        for term in forecast.terms
    ]
    curve = [
        f"| {nodes} | {ranks or '–'} | {time(seconds)} | {time(low)} to {time(high)} | {percent(efficiency)} |"
        for nodes, ranks, seconds, low, high, efficiency in forecast.curve
    ]
    table = "\n".join([f"| nodes | ranks | {forecast.of} | band | efficiency |", "|---:|---:|---:|---:|---:|", *curve])
    error = f"; at the measured sizes it is off by {percent(forecast.error)}" if forecast.error is not None else ""
    if forecast.left_out_error is not None:
        error += f", at a size that is left out of the fit by up to {percent(forecast.left_out_error)}"
    warnings = [f"- warning: {warning}" for warning in forecast.warnings]
    return "\n\n".join(
        part for part in (f"Forecast of {forecast.of}s{error}:", "\n".join(terms), table, "\n".join(warnings)) if part
    )


def _markdown_inputs(analysis: Analysis) -> str:
    lines = ["## Inputs", ""]
    for item in analysis.inputs[:200]:
        left = f"; left out: {'; '.join(item.left_out)}" if item.left_out else ""
        notes = f"; note: {'; '.join(item.notes)}" if item.notes else ""
        lines.append(f"- `{item.path}` ({item.kind}): {item.used or 'nothing used'}{left}{notes}")
    if len(analysis.inputs) > 200:
        lines.append(f"- … and {len(analysis.inputs) - 200} more, see inputs.csv")
    return "\n".join(lines)


def _comparison(item: Comparison) -> str:
    spread = f", 95%: {between(item.ratio, three)}" if item.ratio.count > 1 else ", a single value each"
    return (
        f"{item.label} beside {item.against}, {item.size.text}: {a_or_an(item.of)} takes {how(item)} "
        f"({item.ratio.value:.3f} times{spread})."
    )
