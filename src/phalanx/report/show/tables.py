"""Every number of a report as CSV files: full precision, SI units in the columns' names, empty where not known."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from ..model import Analysis, Group, Line, Point, RunData, Stat
from .markdown import markdown

_UNITS = {
    "epoch": "epoch_s",
    "step": "step_s",
    "throughput": "samples_per_s",
    "gpu_utilisation": "gpu_utilisation_percent",
    "energy": "energy_J",
    "energy_per_sample": "energy_per_sample_J",
    "peak_device": "peak_device_MiB",
    "peak_host": "peak_host_MiB",
    "seconds_to_epochs": "to_epochs_s",
    "wait": "data_wait_share",
    "communication": "communication_share",
    "exposed": "exposed_share",
}
_PLAIN = ("peak_device", "peak_host")  # figures without a spread
_FIGURES = tuple(item.name for item in fields(Point) if item.name not in ("size", "runs"))


def write(analysis: Analysis, out: Path) -> list[Path]:
    """points, runs, epochs, comparisons, forecast and inputs as CSV, and summary.md; returns their paths."""
    tables = {
        "points": [_point(group, line, point) for group, line, point in _points(analysis)],
        "runs": [_run(run) for run in analysis.runs],
        "epochs": [row for run in analysis.runs for row in _epochs(run)],
        "comparisons": [row for group in analysis.groups for row in _comparisons(group)],
        "forecast": [row for group in analysis.groups for line in group.lines for row in _forecast(group, line)],
        "inputs": [
            {
                "path": item.path,
                "kind": item.kind,
                "used": item.used,
                "left_out": "; ".join(item.left_out),
                "notes": "; ".join(item.notes),
            }
            for item in analysis.inputs
        ],
    }
    paths = [_csv(out / f"{name}.csv", rows) for name, rows in tables.items() if rows]
    summary = out / "summary.md"
    summary.write_text(markdown(analysis), encoding="utf-8")
    return [*paths, summary]


def _csv(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows({key: _cell(value) for key, value in row.items()} for row in rows)
    return path


def _cell(value: Any) -> Any:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    if isinstance(value, float):
        return f"{value:.9g}"
    return int(value) if isinstance(value, bool) else value


def _points(analysis: Analysis) -> Iterable[tuple[Group, Line, Point]]:
    return ((group, line, point) for group in analysis.groups for line in group.lines for point in line.points)


def _point(group: Group, line: Line, point: Point) -> dict[str, Any]:
    row: dict[str, Any] = {
        "workload": group.title,
        "label": line.label,
        "scaling": line.scaling,
        "size": point.size.text,
        "nodes": point.size.nodes or None,
        "ranks": point.size.ranks,
        "runs": point.runs,
        "base": line.base.text,
        "speedup_of": line.of,
    }
    for name in _FIGURES:
        row |= _spread(_UNITS.get(name, name), getattr(point, name), plain=name in _PLAIN)
    return row


def _spread(name: str, stat: Stat | float | None, plain: bool = False) -> dict[str, Any]:
    if plain:
        return {name: stat}
    assert not isinstance(stat, float)
    value = (stat.value, stat.low, stat.high, stat.count) if stat else (None,) * 4
    return dict(zip((name, f"{name}_low", f"{name}_high", f"{name}_count"), value, strict=True))


def _run(run: RunData) -> dict[str, Any]:
    seconds = run.steps[:, 2]
    middle = np.percentile(seconds, (5, 50, 95)) if len(seconds) else (None, None, None)
    work, window = run.work, run.window
    return {
        "run": run.run_id,
        "path": run.path,
        "label": run.label,
        "nodes": run.size.nodes or None,
        "ranks": run.size.ranks,
        "scaling": run.scaling,
        "launcher": run.launcher,
        "device": run.device,
        "name": work.name,
        "parameters": work.parameters,
        "gradient_bytes": work.gradient_bytes,
        "batch_size": work.batch_size,
        "accumulate": work.accumulate,
        "dataset": work.dataset,
        "precision": work.precision,
        "epochs": len(run.epochs),
        "steps": len(seconds),
        "step_s_p5": _number(middle[0]),
        "step_s_median": _number(middle[1]),
        "step_s_p95": _number(middle[2]),
        "window_step_s": window and window.seconds,
        "window_compute_s": window and window.compute,
        "window_communication_s": window and window.communication,
        "window_exposed_s": window and window.exposed,
        "gpu_utilisation_percent": run.gpu_utilisation,
        "energy_J": run.energy,
        "samples": run.samples,
        "peak_device_MiB": run.peak_device,
        "peak_host_MiB": run.peak_host,
    }


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _epochs(run: RunData) -> Iterable[dict[str, Any]]:
    """The names that epoch-time files have: the file is an input again."""
    for epoch, seconds in run.epochs:
        yield {
            "name": run.label,
            "nodes": run.size.nodes or None,
            "ranks": run.size.ranks,
            "run": run.run_id,
            "epoch_id": int(epoch),
            "time": float(seconds),
        }


def _comparisons(group: Group) -> Iterable[dict[str, Any]]:
    for item in group.comparisons:
        yield {
            "workload": group.title,
            "label": item.label,
            "against": item.against,
            "size": item.size.text,
            "of": item.of,
            **_spread("ratio", item.ratio),
        }


def _forecast(group: Group, line: Line) -> Iterable[dict[str, Any]]:
    forecasts = [forecast for forecast in (line.forecast, line.step_forecast) if forecast]
    rows = ((forecast.of, *row) for forecast in forecasts for row in forecast.curve)
    for of, nodes, ranks, seconds, low, high, efficiency in rows:
        yield {
            "workload": group.title,
            "label": line.label,
            "nodes": nodes or None,
            "ranks": ranks,
            "of": of,
            "time_s": seconds,
            "time_s_low": low,
            "time_s_high": high,
            "efficiency": efficiency,
        }
