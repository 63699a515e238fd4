"""The report's page as text: safe, whole, small. How it looks and works in a browser: tests/browser."""

from __future__ import annotations

import html.parser
import json
import math
import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.report.model import Input, Line, Point, Size, Stat
from phalanx.report.show import page
from phalanx.report.show.charts import charts_of
from phalanx.report.show.html import json_for_script, short, text
from phalanx.report.show.palette import BACKGROUND, DARK, LIGHT, PARTS, contrast, looks
from tests import report_fixture as fixture

ROOT = Path(__file__).resolve().parents[2]


class Reader(html.parser.HTMLParser):
    """Elements and their attributes, as a parser sees them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def read(words: str) -> list[tuple[str, dict[str, str | None]]]:
    reader = Reader()
    reader.feed(words)
    return reader.found


def without_plotly(words: str) -> str:
    bundle = (ROOT / "src/phalanx/report/show/assets/plotly-basic.min.js").read_text(encoding="utf-8")
    assert bundle in words
    return words.replace(bundle, "")


def charts_in(words: str) -> list[dict[str, Any]]:
    found = re.search(r'<script type="application/json" id="charts">(.*?)</script>', words, re.DOTALL)
    assert found
    return list(json.loads(found[1], parse_constant=pytest.fail)["charts"])


def test_hostile_names_make_no_elements_and_no_attributes() -> None:
    """The same elements as with plain names."""
    tags = {tag for tag, _ in read(without_plotly(page.render(fixture.hostile())))}
    plain = page.render(fixture.analysis(fixture.group(), fixture.refused()))
    assert tags <= {tag for tag, _ in read(without_plotly(plain))}
    for _, attributes in read(without_plotly(page.render(fixture.hostile()))):
        assert not [name for name in attributes if name.startswith("on")]


def test_only_our_own_two_scripts_may_run() -> None:
    words = page.render(fixture.hostile())
    assert words.count("<script") == 3  # and the JSON
    (policy,) = [a["content"] for tag, a in read(words) if tag == "meta" and "http-equiv" in a]
    assert policy is not None
    assert "default-src 'none'" in policy
    assert len(re.findall("'sha256-[A-Za-z0-9+/]{43}='", policy)) == 2
    assert "script-src 'sha256-" in policy


def test_nothing_is_asked_of_a_network() -> None:
    words = without_plotly(page.render(fixture.analysis()))
    for _, attributes in read(words):
        for name in ("src", "href", "action", "data", "poster", "srcset"):
            assert (attributes.get(name) or "#").startswith(("#", "data:")), attributes
    assert "url(" not in words
    assert "@import" not in words


def test_what_is_no_number_is_null() -> None:
    assert json_for_script({"a": [math.nan, math.inf, 1.5, None], "b": "</script>&"}) == (
        '{"a":[null,null,1.5,null],"b":"\\u003c/script\\u003e\\u0026"}'
    )


def test_a_page_of_what_is_no_number() -> None:
    bad = Stat(math.nan, math.nan, math.nan, 3)
    points = (
        fixture.point(1),
        Point(Size(2, 8), 1, epoch=bad, step=bad, speedup=bad, efficiency=bad, wait=bad, energy=bad),
        Point(Size(4, 16), 1, epoch=Stat(3.0, math.nan, math.inf, 2)),
    )
    group = fixture.group(lines=(Line("ddp", "strong", Size(1, 4), points),))
    words = page.render(fixture.analysis(group, inputs=()))
    charts = charts_in(words)
    (epochs,) = [chart for chart in charts if chart["key"] == "epoch_time"]
    assert [curve["x"] for curve in epochs["curves"]] == [[2, 4]]
    assert epochs["curves"][0]["high"][1] is None
    assert not re.search(r"\b(nan|inf|NaN|Infinity)\b", without_plotly(words))


def test_names_are_escaped_once_and_stay_readable() -> None:
    assert text("<b> & \"x'") == "<bdi>&lt;b&gt; &amp; &quot;x&#x27;</bdi>"
    assert text("a\x00b\udc80c\u202ed") == "<bdi>a\ufffdb\ufffdc\ufffdd</bdi>"
    assert short("abcdefghij", 7) == "abcd…ij"
    assert short("abcdefg", 7) == "abcdefg"


def test_the_page_is_written_as_utf8(tmp_path: Path) -> None:
    path = page.write(fixture.hostile(), tmp_path / "new" / "folder")
    assert path == tmp_path / "new" / "folder" / "report.html"
    assert "名前" in path.read_text(encoding="utf-8")


def test_a_thousand_runs_of_many_kinds_fit_in_five_megabytes() -> None:
    """Points are few, inputs many: 100 workloads, of ten runs each with a name of 200 letters."""
    groups = [fixture.group(f"workload {number}") for number in range(100)]
    inputs = [
        Input(
            Path(f"runs/{'x' * 200}/{number}"),
            "run",
            "64 ranks, 20 epochs",
            tuple(f"epoch {e}: NaN" for e in range(99)),
        )
        for number in range(1000)
    ]
    words = page.render(replace(fixture.analysis(*groups), inputs=tuple(inputs)))
    assert len(words.encode()) < 5e6
    other = page.render(fixture.analysis(*[fixture.one_point()] * 1000))
    assert len(other.encode()) < 5e6


def test_charts_without_data_are_left_out() -> None:
    point = fixture.point(1)
    bare = tuple(Point(Size(n, None), 1, epoch=Stat(10.0 / n, 10.0 / n, 10.0 / n, 1)) for n in (1, 2))
    group = fixture.group(lines=(Line("ddp", "strong", Size(1, None), bare),), comparisons=(), axis="nodes")
    assert [chart.key for chart in charts_of(group, fixture.analysis())] == ["epoch_time"]
    assert point.energy is not None
    keys = [chart.key for chart in charts_of(fixture.group(), fixture.analysis())]
    assert "energy" in keys
    assert len(keys) == len(set(keys)) == 16


def test_sizes_of_nodes_only_beside_sizes_with_ranks() -> None:
    points = tuple(
        Point(size, 1, epoch=Stat(9.0, 9.0, 9.0, 1)) for size in (Size(2, None), Size(2, 8), Size(1, None), Size(4, 16))
    )
    group = fixture.group(lines=(Line("ddp", "strong", Size(1, None), points),), axis="nodes", comparisons=())
    (chart,) = charts_of(group, fixture.analysis())
    assert [words for _, words in chart.x_ticks] == ["1 node", "2 nodes", "2x4", "4x4"]  # type: ignore[union-attr]


def test_colours_can_be_told_from_their_background() -> None:
    """WCAG 2 asks for 3 of things that are no text; white on black is 21."""
    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    assert min(contrast(colour, BACKGROUND["light"]) for colour in LIGHT) >= 3
    assert min(contrast(colour, BACKGROUND["dark"]) for colour in DARK) >= 3


# What dichromats see, of linear RGB: Machado, Oliveira and Fernandes (2009), severity 1.
SEEN = {
    "all": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
}


def lab(colour: str, seen: tuple[tuple[float, ...], ...]) -> Any:
    """CIE L*a*b* of a colour as it is seen, under D65."""
    srgb = np.array([int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)])
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    to_xyz = ((0.4124564, 0.3575761, 0.1804375), (0.2126729, 0.7151522, 0.072175), (0.0193339, 0.119192, 0.9503041))
    x, y, z = np.cbrt(np.array(to_xyz) @ np.clip(np.array(seen) @ linear, 0, 1) / np.array([0.95047, 1, 1.08883]))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_colour_blind_readers_tell_curves_apart(palette: tuple[str, ...], seen: str) -> None:
    """A difference of 2 can be seen side by side; 15 is clear at once. Parts of a step lie side by side."""
    for one, other in [*combinations(range(len(palette) - 1), 2), *combinations(PARTS.values(), 2)]:
        difference = np.linalg.norm(lab(palette[one], SEEN[seen]) - lab(palette[other], SEEN[seen]))
        assert difference > 15, (palette[one], palette[other])


def test_a_baseline_looks_like_its_strategy_but_hollow() -> None:
    found = looks([fixture.group()])
    assert found["ddp (baseline)"].colour == found["ddp"].colour != found["horovod"].colour
    assert found["ddp (baseline)"].hollow
    assert not found["ddp"].hollow
    assert found["ddp"].marker != found["horovod"].marker
