"""Charts of rows: strategies at one size, what a step is spent on, and baselines."""

from __future__ import annotations

from ..model import Group, Line, Point
from ..text import percent
from .chart_values import Mark, Part, Quantity, Rows, drawable, mark_of, runs_of, unit_of, words_of


def side_by_side(group: Group, quantity: Quantity) -> Rows | None:
    """All labels at the one size that there is."""
    stats = [drawable(quantity.pick(line.points[0])) for line in group.lines]
    scale, unit = unit_of(quantity.unit, [stat.value for stat in stats if stat])
    marks = tuple(
        mark_of(0, stat, scale, (line.label, words_of(stat, scale, unit), runs_of(line.points[0]))) if stat else None
        for line, stat in zip(group.lines, stats, strict=True)
    )
    if not any(marks):
        return None
    rows = tuple((line.label, line.label) for line in group.lines)
    title = f"{quantity.title} at {group.lines[0].points[0].size.text}"
    part = Part(quantity.title, "", marks)
    return Rows(quantity.key, title, f"{quantity.title} ({unit})", "bars", rows, (part,), quantity.caption)


def breakdown(group: Group) -> Rows | None:
    """What a step is spent on, as far as it is known."""
    points = [(line, point) for line in group.lines for point in line.points if _shares(point)]
    if not points:
        return None
    shares = [_shares(point) for _, point in points]
    names = {
        "rest": "compute",
        "exposed": "exposed communication",
        "wait": "waiting: data, host",
        "unknown": "not profiled",
    }
    parts = [
        Part(
            name,
            role,
            tuple(_share(line, point, name, shares[index].get(role)) for index, (line, point) in enumerate(points)),
        )
        for role, name in names.items()
        if any(own.get(role) for own in shares)
    ]
    rows = tuple((f"{line.label} {point.size.text}", line.label) for line, point in points)
    caption = "Of the profiled window, where there is one; else the wait for data in all steps."
    return Rows("breakdown", "What a step is spent on", "share of a step (%)", "stack", rows, tuple(parts), caption)


def _shares(point: Point) -> dict[str, float]:
    """Parts of one whole: the profiled window, or else all steps."""
    wait, compute, exposed = drawable(point.wait), drawable(point.compute), drawable(point.exposed)
    if compute and exposed:
        rest = max(0.0, 1 - compute.value - exposed.value)
        return {"rest": compute.value, "exposed": exposed.value, "wait": rest}
    return {"wait": wait.value, "unknown": 1 - wait.value} if wait else {}


def _share(line: Line, point: Point, name: str, share: float | None) -> Mark | None:
    if share is None:
        return None
    return Mark(share * 100, share * 100, None, None, (f"{line.label} {point.size.text}", f"{name} {percent(share)}"))


def near_one(value: float) -> str:
    """`1.004`: a percent is much here."""
    return f"{value:.3f}"


def comparison(group: Group) -> Rows | None:
    """Time with the API relative to a hand-written script's."""
    found = [(item, stat) for item in group.comparisons if (stat := drawable(item.ratio))]
    if not found:
        return None
    rows = tuple((f"{item.label} {item.size.text}", item.label) for item, _ in found)
    marks = tuple(
        mark_of(0, stat, 1, (text, f"against {item.against}", words_of(stat, 1, "times", near_one)))
        for (item, stat), (text, _) in zip(found, rows, strict=True)
    )
    what = " and ".join(sorted({f"{item.of} time" for item, _ in found}))
    title = "Against hand-written baselines"
    caption = "Right of 1 is slower than the hand-written script."
    return Rows(
        "baselines", title, f"{what}, relative to the baseline", "dots", rows, (Part(what, "", marks),), caption, 1.0
    )
