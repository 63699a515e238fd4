"""`report.html`: one page that needs nothing else, not even a network."""

from __future__ import annotations

import base64
import hashlib
import html
from importlib.resources import files
from pathlib import Path
from string import Template

from ..analyse.recommendation import recommended, verdict
from ..model import Analysis, Forecast, Group, Line, Point, Stat
from ..text import count, digits, percent, ratio, time
from . import page_tables as tables
from .charts import charts_of
from .html import attribute, json_for_script, short, text
from .page_charts import Drawing
from .palette import LIGHT, Look, looks

_MOST_DRAWN = 12  # groups with plots: a report of hundreds of workloads has tables for the others
_FEW = 8  # warnings shown before one asks for the rest


def write(analysis: Analysis, out: Path) -> Path:
    """Write `report.html` into the folder `out`, and return its path."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "report.html"
    path.write_bytes(render(analysis).encode("utf-8", "replace"))
    return path


def render(analysis: Analysis) -> str:
    """The page's text. Scripts are named by their hashes in its policy, so that no other can run, whatever is in it."""
    plotly, script = _asset("plotly-basic.min.js"), _asset("page.js")
    own = looks(analysis.groups)
    drawing = Drawing(own)
    sections = [_group(index, group, analysis, drawing) for index, group in enumerate(analysis.groups)]
    return Template(_asset("page.html")).substitute(
        hashes=" ".join(_hash(code) for code in (plotly, script)),
        title=_plain(analysis.title),
        css=_asset("page.css"),
        lead=_lead(analysis),
        kind=' class="large"' if len(analysis.groups) > 3 or len(analysis.inputs) > 200 else "",
        nav=_nav(analysis),
        main="\n".join([_verdicts(analysis, own), _warnings(analysis), *sections, _inputs(analysis)]),
        foot=_foot(analysis),
        charts=json_for_script(drawing.values()),
        plotly=plotly,
        script=script,
    )


def _asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _hash(code: str) -> str:
    digest = hashlib.sha256(code.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _plain(words: str) -> str:
    """Without markup of ours, for a title."""
    return attribute(short(words, 200))


def _lead(analysis: Analysis) -> str:
    sizes = {point.size for group in analysis.groups for line in group.lines for point in line.points}
    runs = sum(point.runs for group in analysis.groups for line in group.lines for point in line.points)
    parts = [count(runs, "run"), count(len(sizes), "size"), count(len(analysis.groups), "workload")]
    return " · ".join(parts)


def _nav(analysis: Analysis) -> str:
    names = [group.title.partition(":")[0] for group in analysis.groups]
    links = [("verdict", "Verdict"), *((f"group{i}", short(name, 30)) for i, name in enumerate(names[:_MOST_DRAWN]))]
    links += [("inputs", "Inputs"), ("settings", "Settings")]
    return f'<nav aria-label="Sections">{"".join(f"<a href=#{key}>{text(name)}</a>" for key, name in links)}</nav>'


# --- the top


def _verdicts(analysis: Analysis, own: dict[str, Look]) -> str:
    parts = ['<section id="verdict" aria-labelledby="h-verdict">', '<h2 id="h-verdict">Is it worth it?</h2>']
    if not analysis.groups:
        parts.append("<p>There was nothing to measure: the table of inputs says why.</p>")
    for group in analysis.groups:
        if len(analysis.groups) > 1:
            parts.append(f"<h3>{text(group.title)}</h3>")
        head = "h4" if len(analysis.groups) > 1 else "h3"
        cards = "".join(_card(line, analysis, own[line.label], head) for line in group.lines)
        parts.append(f'<div class="cards">{cards}</div>')
    return "\n".join([*parts, "</section>"])


def _card(line: Line, analysis: Analysis, look: Look, head: str) -> str:
    sentence = line.verdict or verdict(line, analysis.efficiency_wanted)
    figures = "".join(
        f"<div><dt>{html.escape(what)}</dt><dd>{value}</dd></div>" for what, value in _headline(line, analysis)
    )
    return (
        f'<article class="card" style="--look: var(--c{look.colour}, {LIGHT[look.colour]})">'
        f'<{head}><span class="swatch{" hollow" * look.hollow}"></span>{text(line.label, 80)}</{head}>'
        f'<dl class="figures">{figures}</dl><p>{text(sentence, 1000)}</p></article>'
    )


def _headline(line: Line, analysis: Analysis) -> list[tuple[str, str]]:
    """The size to take against the smallest; or how long the only one took."""
    point = recommended(line, analysis.efficiency_wanted)
    where = f"at {point.size.text}"
    if len(line.points) > 1 and point.speedup and point.efficiency:
        found = [
            (f"speedup {where}", f"{ratio(point.speedup.value)}×"),
            ("efficiency", percent(point.efficiency.value)),
        ]
        return [*found, *_times(point, "")[:1]]
    return _times(point, where)


def _times(point: Point, where: str) -> list[tuple[str, str]]:
    found: list[tuple[str, Stat | None]] = [(f"an epoch {where}", point.epoch), (f"a step {where}", point.step)]
    shown = [(what.strip(), time(stat.value)) for what, stat in found if stat]
    if point.throughput:
        shown.append(("samples a second", digits(point.throughput.value)))
    return shown


def _warnings(analysis: Analysis) -> str:
    if not analysis.warnings:
        return ""
    items = [f"<li>{text(warning, 1000)}</li>" for warning in analysis.warnings]
    rest = f"<details><summary>{len(items) - _FEW} more</summary><ul>{''.join(items[_FEW:])}</ul></details>"
    return (
        '<section class="warnings" id="warnings" aria-labelledby="h-warnings">'
        f'<h2 id="h-warnings">{count(len(items), "warning")}</h2><ul>{"".join(items[:_FEW])}</ul>'
        f"{rest if len(items) > _FEW else ''}</section>"
    )


# --- one workload


def _group(index: int, group: Group, analysis: Analysis, drawing: Drawing) -> str:
    parts = [
        f'<section id="group{index}" aria-labelledby="h-group{index}">',
        f'<h2 id="h-group{index}">{text(group.title)}</h2>',
    ]
    if group.notes:
        parts.append(f'<ul class="notes">{"".join(f"<li>{text(note)}</li>" for note in group.notes)}</ul>')
    if sum(len(line.points) for line in group.lines) == 1:
        parts.append(
            "<p>One size of one strategy: these are its numbers, and there is nothing to compare them with.</p>"
        )
    drawn = charts_of(group, analysis) if index < _MOST_DRAWN else []
    figures = [drawing.figure(chart) for chart in drawn]
    if figures:
        parts.append(f'<div class="plots">{"".join(figures)}</div>')
        parts.append("<noscript><p>The plots need JavaScript; the tables hold all their numbers.</p></noscript>")
    parts += [_forecast(line, analysis) for line in group.lines if line.forecast]
    if group.comparisons:
        parts.append(f"<h3>Against hand-written baselines</h3>{tables.comparisons(group)}")
    parts.append(f"<h3>All points</h3>{tables.points(group, analysis)}</section>")
    return "\n".join(parts)


def _forecast(line: Line, analysis: Analysis) -> str:
    forecast = line.forecast
    assert forecast is not None
    if forecast.refused:
        head = f"<h3>No forecast for {text(line.label, 80)}</h3>"
        return f'<div class="box refused">{head}<p>{text(forecast.refused, 1000)}</p></div>'
    warnings = "".join(f"<li>{text(warning)}</li>" for warning in forecast.warnings)
    return (
        f"<h3>Forecast for {text(line.label, 80)}</h3><p>{text(_keeps(forecast, analysis))}</p>"
        f"{f'<p>{text(_keeps(line.step_forecast, analysis))}</p>' if line.step_forecast else ''}"
        f"{f'<ul class=notes>{warnings}</ul>' if warnings else ''}{tables.terms(line, forecast)}"
    )


def _keeps(forecast: Forecast, analysis: Analysis) -> str:
    wanted = percent(analysis.efficiency_wanted)
    kept = f"keep an efficiency of {wanted} up to {forecast.most.text}" if forecast.most else f"keep {wanted} nowhere"
    most = f"{'Epochs' if forecast.of == 'epoch' else 'Steps alone'} {kept}."
    error = "" if forecast.error is None else f" Error at the measured points: {percent(forecast.error)}."
    return most + error


# --- the end


def _inputs(analysis: Analysis) -> str:
    used = sum(bool(item.used) for item in analysis.inputs)
    said = f"{count(len(analysis.inputs), 'input')}, {used} used."
    return (
        f'<section id="inputs" aria-labelledby="h-inputs"><h2 id="h-inputs">Inputs</h2><p>{said}</p>'
        f"{tables.inputs(analysis.inputs) if analysis.inputs else ''}</section>"
    )


def _foot(analysis: Analysis) -> str:
    rows = [
        ("Warm-up left out", _warm_up(analysis)),
        ("Spread", "the middle 95% of a bootstrap over runs, epochs and stretches of steps; one observation has none"),
        ("Sizes", "nodes x ranks per node, spaced by log2 of ranks; the same ranks on other nodes are another size"),
        ("Efficiency wanted", percent(analysis.efficiency_wanted)),
        ("Cost", f"of {count(analysis.epochs_wanted, 'epoch')}"),
        *((str(key), str(value)) for key, value in analysis.meta.items()),
    ]
    items = "".join(f"<dt>{text(key)}</dt><dd>{text(value)}</dd>" for key, value in rows)
    head = '<section id="settings" aria-labelledby="h-settings"><h2 id="h-settings">Settings</h2>'
    return f"{head}<dl>{items}</dl></section>"


def _warm_up(analysis: Analysis) -> str:
    if not analysis.warmup_epochs:
        return "nothing"
    epochs, steps = count(analysis.warmup_epochs, "epoch"), count(analysis.warmup_steps, "step")
    return f"{epochs} at the beginning of each run; of runs with no more epochs, {steps}"
