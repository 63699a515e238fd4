"""Plots for papers: files, their data, and nothing left behind in matplotlib."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from phalanx.report.model import Line, Point, Size, Stat
from phalanx.report.show import plots
from tests import report_fixture as fixture


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return plots.write(fixture.analysis(), tmp_path_factory.mktemp("plots"))


def test_png_and_svg_of_each_chart(drawn: list[Path]) -> None:
    names = {path.name for path in drawn}
    for chart in ("speedup", "efficiency", "epoch_time", "throughput", "breakdown", "forecast", "baselines", "energy"):
        assert {f"{chart}.png", f"{chart}.svg"} <= names
    for path in drawn:
        assert path.stat().st_size > 3000
    png = next(path for path in drawn if path.name == "speedup.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert int.from_bytes(png[16:20], "big") >= 900  # pixels across


def test_an_svg_has_its_words_as_text(drawn: list[Path]) -> None:
    words = "".join(ElementTree.parse(next(p for p in drawn if p.name == "speedup.svg")).getroot().itertext())
    for expected in (
        "Speedup (against 1x4, log scale)",
        "nodes x ranks per node",
        "1x4",
        "8x4",
        "ideal",
        "ddp (baseline)",
    ):
        assert expected in words


def test_points_are_where_they_should_be(tmp_path: Path) -> None:
    """Of 1x1, 1x2, 1x4, 2x2 and 2x4: 2x2 is a point of its own beside the line."""
    from phalanx.report.show.charts import charts_of
    from phalanx.report.show.palette import looks

    group = fixture.two_of_a_size()
    chart = next(chart for chart in charts_of(group, fixture.analysis()) if chart.key == "speedup")
    (axes,) = plots._figure(chart, looks([group])).axes
    lines = {len(line.get_xdata()): line for line in axes.get_lines()}
    assert list(lines[4].get_ydata()) == pytest.approx([1, 2**0.9, 4**0.9, 8**0.8])
    assert list(lines[1].get_ydata()) == pytest.approx([4**0.8])
    assert list(lines[5].get_ydata()) == [1, 2, 4, 4, 8]  # ideal
    assert axes.get_yscale() == "log"


def test_matplotlib_is_left_as_it_was(tmp_path: Path) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    plots.write(fixture.analysis(fixture.one_point()), tmp_path)
    assert dict(matplotlib.rcParams) == before


def test_hostile_names_are_drawn_and_named_safely(tmp_path: Path) -> None:
    """No warning of missing letters, no mathematics, no file outside the folder."""
    points = tuple(
        Point(Size(n, n), 1, wait=Stat(0.1, 0.1, 0.1, 1), epoch=Stat(9 / n, 9 / n, 9 / n, 1)) for n in (1, 2)
    )
    lines = tuple(Line(f"{name} $y$ $", "strong", Size(1, 1), points) for name in fixture.HOSTILE)
    groups = [fixture.group(title, lines=lines, comparisons=()) for title in ("../../x/$y$", "\0/")]
    paths = plots.write(fixture.analysis(*groups), tmp_path / "out")
    assert {path.parent for path in paths} == {tmp_path / "out"}
    assert {path.name for path in paths if path.suffix == ".png"} == {
        "1-x-y-epoch_time.png",
        "1-x-y-breakdown.png",
        "2-workload-epoch_time.png",
    }


def test_the_same_numbers_make_the_same_files(tmp_path: Path) -> None:
    small = fixture.analysis(fixture.one_point())
    one, two = plots.write(small, tmp_path / "1"), plots.write(small, tmp_path / "2")
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in two]


def test_the_package_needs_no_matplotlib_until_it_draws() -> None:
    import subprocess

    code = "import sys, phalanx.report.show.plots, phalanx.report.show.page; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_without_matplotlib_one_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from phalanx.errors import PhalanxError

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PhalanxError, match=r"phalanx\[report\]"):
        plots.write(fixture.analysis(), tmp_path)
