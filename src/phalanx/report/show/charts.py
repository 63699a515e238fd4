"""What is drawn of an analysis, whoever draws it: the page and the plots for papers show the same charts."""

from __future__ import annotations

from ..model import Analysis, Group
from .chart_lines import efficiency, forecast_efficiency, forecast_time, over_sizes, speedup
from .chart_rows import breakdown, comparison, side_by_side
from .chart_values import Chart, Quantity, sizes_of


def charts_of(group: Group, analysis: Analysis) -> list[Chart]:
    """All charts that there is data for."""
    sizes = sizes_of(group.lines)
    several: list[Chart | None] = []
    if len(sizes) > 1:
        several = [over_sizes(group, quantity) for quantity in _quantities(analysis)]
    elif len(group.lines) > 1:
        several = [side_by_side(group, quantity) for quantity in _quantities(analysis)]
    found = [speedup(group), efficiency(group, analysis), *several[:3], breakdown(group)]
    found += [
        forecast_time(group, "step"),
        forecast_time(group, "epoch"),
        forecast_efficiency(group, analysis),
        comparison(group),
        *several[3:],
    ]
    return [chart for chart in found if chart is not None]


def _quantities(analysis: Analysis) -> tuple[Quantity, ...]:
    spread = "Bars span the middle 95% of a bootstrap."
    return (
        Quantity("epoch_time", "Epoch time", "s", lambda point: point.epoch, spread, True),
        Quantity("step_time", "Step time", "s", lambda point: point.step, "Slowest rank of each step. " + spread, True),
        Quantity("throughput", "Throughput", "samples/s", lambda point: point.throughput, "All ranks together.", True),
        Quantity(
            "device_hours",
            f"Cost of {analysis.epochs_wanted} epochs",
            "device-hours",
            lambda point: point.device_hours,
            "Time to that many epochs times devices.",
        ),
        Quantity("gpu_utilisation", "GPU utilisation", "%", lambda point: point.gpu_utilisation, "Mean, by NVML."),
        Quantity("energy", "Energy of a run", "J", lambda point: point.energy, "All GPUs, by NVML."),
        Quantity("energy_per_sample", "Energy per sample", "J", lambda point: point.energy_per_sample),
        Quantity("memory_device", "Peak GPU memory", "GiB", lambda point: _gib(point.peak_device), _FULLEST),
        Quantity("memory_host", "Peak host memory", "GiB", lambda point: _gib(point.peak_host), _FULLEST),
    )


_FULLEST = "Of the rank that has most."


def _gib(mib: float | None) -> float | None:
    return None if mib is None else mib / 1024
