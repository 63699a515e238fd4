"""The report's page in a real browser: what it shows is what was analysed, whoever reads it and however."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from phalanx.report.show.chart_values import Rows
from phalanx.report.show.charts import charts_of
from phalanx.report.show.palette import contrast
from tests import report_fixture as fixture

from .conftest import Opened

Open = Callable[..., Opened]


def test_a_full_report_shows_the_numbers_of_the_analysis(usual: Opened) -> None:
    """Speedups and times by their closed form, drawn where log2 of the ranks is."""
    ideal, *measured = sorted(usual.traces("speedup"), key=lambda trace: trace["kind"])
    assert ideal["x"] == [2, 3, 4, 5]
    assert ideal["y"] == [1, 2, 4, 8]
    assert {trace["name"] for trace in measured} == {"ddp", "ddp (baseline)", "horovod"}
    for trace in measured:
        label = trace["name"]
        one = fixture.seconds_of_step(1, label)
        assert trace["x"] == [2, 3, 4, 5]
        assert trace["y"] == pytest.approx([one / fixture.seconds_of_step(n, label) for n in (1, 2, 4, 8)], rel=1e-6)
    for trace in usual.traces("epoch_time"):
        seconds = [fixture.seconds_of_step(n, trace["name"]) * fixture.STEPS for n in (1, 2, 4, 8)]
        assert trace["y"] == pytest.approx(seconds, rel=1e-6)
        assert trace["error_y"]["array"] == pytest.approx([0.048 * value for value in seconds], rel=1e-4)
        assert trace["error_y"]["arrayminus"] == pytest.approx([0.04 * value for value in seconds], rel=1e-4)


def test_every_chart_that_has_data_is_drawn_with_units(usual: Opened) -> None:
    analysis = fixture.analysis()
    charts = charts_of(analysis.groups[0], analysis)
    titles = usual.js(
        "[...document.querySelectorAll('[data-chart]')].map(div => [div.layout.xaxis.title.text, "
        "div.layout.yaxis.title.text, div.querySelectorAll('svg').length, div.getAttribute('aria-label')])"
    )
    assert len(titles) == len(charts) == 16
    units = {"epoch_time": "(s)", "step_time": "(ms)", "throughput": "(samples/s)", "speedup": "(against 1x4)"}
    units |= {"efficiency": "(%)", "energy": "(MJ)", "energy_per_sample": "(mJ)", "memory_device": "(GiB)"}
    units |= {
        "forecast": "(ms)",
        "forecast_epoch": "(s, log scale)",
        "device_hours": "(device-hours)",
        "gpu_utilisation": "(&#37;)",
    }
    for chart, (x, y, drawn, spoken) in zip(charts, titles, strict=True):
        assert drawn > 0
        assert chart.title in spoken
        assert units.get(chart.key, "").replace("%", "&#37;").removesuffix(")") in y, chart.key
        assert isinstance(chart, Rows) or ("log scale" in y) == chart.log
        assert x


def test_the_forecast_has_its_band(usual: Opened) -> None:
    traces = usual.traces("forecast")
    assert [trace["kind"] for trace in traces].count("band") == 2
    line = next(trace for trace in traces if trace["name"] == "ddp, forecast")
    expected = [1000 * fixture.seconds_of_step(2**power) for power in range(7)]
    assert line["y"] == pytest.approx(expected, rel=1e-6)
    band = next(trace for trace in traces if trace["kind"] == "band")
    high = [value * (1 + 0.012 * 2 ** (0.6 * power)) for power, value in enumerate(expected)]
    assert band["y"][:7] == pytest.approx(high, rel=1e-5)
    assert max(band["x"]) == math.log2(256)


def test_two_sizes_with_the_same_ranks_are_two_points(open_report: Open) -> None:
    """1x4 and 2x2 stand side by side, and the line goes through one of them only."""
    report = open_report(fixture.analysis(fixture.two_of_a_size()))
    traces = {trace["kind"]: trace for trace in report.traces("speedup")}
    assert len(traces["measured"]["x"]) == 4
    assert traces["measured"]["x"] == sorted(set(traces["measured"]["x"]))
    assert len(traces["aside"]["x"]) == 1
    assert traces["aside"]["mode"] == "markers"
    gap = traces["aside"]["x"][0] - traces["measured"]["x"][2]
    assert 0.2 < gap < 0.5
    ticks = report.js("document.querySelector('[data-chart]').layout.xaxis.ticktext")
    assert ticks == ["1x1", "1x2", "1x4", "2x2", "2x4"]


COLUMN = """(title) => {
    const table = document.querySelector("#group0 .pin table");
    const head = [...table.tHead.rows[0].cells].find((cell) => cell.innerText.trim().startsWith(title));
    const cells = [...table.tBodies[0].rows].map((row) => row.cells[head.cellIndex].innerText);
    return [head.getAttribute("aria-sort"), cells];
}"""


def test_tables_sort_by_number_both_ways_by_mouse_and_keyboard(open_report: Open) -> None:
    """1, 2, 16: not 1, 16, 2."""
    report = open_report(fixture.analysis(fixture.group(lines=(fixture.line("ddp", (16, 1, 2)),), comparisons=())))
    assert report.js(COLUMN, "Size") == [None, ["16x4", "1x4", "2x4"]]
    button = report.tab.locator("#group0 .pin th", has_text="Size").locator("button")
    button.click()
    assert report.js(COLUMN, "Size") == ["ascending", ["1x4", "2x4", "16x4"]]
    button.focus()
    report.tab.keyboard.press("Enter")
    assert report.js(COLUMN, "Size") == ["descending", ["16x4", "2x4", "1x4"]]
    report.tab.locator("#group0 .pin th", has_text="Throughput").locator("button").click()
    assert report.js(COLUMN, "Size") == [None, ["1x4", "2x4", "16x4"]]


def test_what_is_not_known_sorts_last(open_report: Open) -> None:
    report = open_report(fixture.analysis())
    for expected in ("ascending", "descending"):
        report.tab.locator("#group0 .pin th", has_text="Exposed").locator("button").click()
        order, cells = report.js(COLUMN, "Exposed")
        assert order == expected
        assert cells[-4:] == ["–"] * 4  # the baseline has no profile


CONTRASTS = """() => {
    const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
    const behind = (element) => {
        for (let at = element; at; at = at.parentElement) {
            const colour = rgb(getComputedStyle(at).backgroundColor);
            if (colour.length === 3 || colour[3] > 0.99) return colour.slice(0, 3);
        }
        return [255, 255, 255];
    };
    const found = [];
    const all = "h1,h2,h3,h4,p,li,td,th,dt,dd,a,span,button,figcaption,caption,text";
    for (const element of document.querySelectorAll(all)) {
        if (!element.innerText?.trim() && !element.textContent.trim()) continue;
        if (element.closest(".skip, noscript, .bars")) continue;
        const style = getComputedStyle(element);
        const colour = element instanceof SVGElement ? style.fill : style.color;
        found.push([element.textContent.trim().slice(0, 30), rgb(colour).slice(0, 3), behind(element)]);
    }
    return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_are_readable(open_report: Open, scheme: str) -> None:
    """All text has the contrast that WCAG 2 asks for, 4.5, on what lies behind it."""
    report = open_report(fixture.analysis(), scheme=scheme)
    report.draw_all()
    found = report.js(CONTRASTS)
    assert len(found) > 300
    assert len([text for text, _, _ in found if text == "nodes x ranks per node"]) > 5  # axes too
    background = report.js("getComputedStyle(document.body).backgroundColor")
    assert (sum(int(part) for part in background[4:-1].split(",")) > 382) == (scheme == "light")
    weak = {text: (ink, paper) for text, ink, paper in found if contrast(_hex(ink), _hex(paper)) < 4.5}
    assert weak == {}


def _hex(colour: list[float]) -> str:
    return "#" + "".join(f"{round(part):02x}" for part in colour)


def test_the_toggle_changes_page_and_plots_and_is_kept(open_report: Open) -> None:
    report = open_report(fixture.analysis())
    ask = "[getComputedStyle(document.body).backgroundColor, document.querySelector('[data-chart]').layout.font.color]"
    light = report.js(ask)
    button = report.tab.locator("#theme")
    assert button.get_attribute("aria-pressed") == "false"
    button.click()
    dark = report.js(ask)
    assert button.get_attribute("aria-pressed") == "true"
    assert light[0] != dark[0]
    assert light[1] != dark[1]
    report.tab.reload()
    report.tab.wait_for_selector("html[data-state=drawn]", state="attached")
    assert report.js(ask) == dark
    report.requests.pop()  # the second load of itself
    button.click()
    assert report.js(ask) == light


def test_it_follows_the_system_until_one_chooses(open_report: Open) -> None:
    report = open_report(fixture.analysis())
    ask = "document.querySelector('[data-chart]').layout.font.color"
    light = report.js(ask)
    report.tab.emulate_media(color_scheme="dark")
    report.tab.wait_for_selector("#theme[aria-pressed=true]")
    assert report.js(ask) != light


@pytest.mark.parametrize("analysis", [fixture.analysis(), fixture.hostile()], ids=["usual", "hostile"])
def test_a_phone_needs_no_sideways_scrolling(open_report: Open, analysis: Any) -> None:
    report = open_report(analysis, width=375, touch=True)
    report.draw_all()
    assert report.js("document.documentElement.scrollWidth") == 375
    scrolls = "[...document.querySelectorAll('.scroll')].filter(box => box.scrollWidth > box.clientWidth).length"
    assert report.js(scrolls) > 0  # tables do, each inside
    wide = "[...document.querySelectorAll('.plot .svg-container')].map(plot => plot.getBoundingClientRect().right)"
    assert max(report.js(wide)) <= 375
    small = (
        "[...document.querySelectorAll('main p, main td, main li')].map(e => parseFloat(getComputedStyle(e).fontSize))"
    )
    assert min(report.js(small)) >= 12


def test_hostile_names_are_only_words(open_report: Open) -> None:
    """Shown as they are; nothing runs, and nothing is asked of a network: the fixture looks."""
    report = open_report(fixture.hostile())
    report.draw_all()
    report.tab.wait_for_timeout(100)
    first, second, link, template, _, _ = fixture.HOSTILE
    text = report.js("document.querySelector('main').innerText")
    for name in (first, second, link, template):
        assert name in text
    assert report.js("document.querySelectorAll('img, main a, svg a, [onerror], [onload]').length") == 0
    assert report.tab.title() == first
    legend = report.js("[...document.querySelectorAll('[data-chart] .legendtext')].map(item => item.textContent)")
    assert template in legend
    assert "\u202e" not in report.js("document.documentElement.innerHTML")


def test_hovering_tells_all_of_a_point(usual: Opened) -> None:
    usual.tab.locator("[data-chart='0'] .trace.scatter").nth(2).locator(".point").nth(1).hover(force=True)
    usual.tab.wait_for_selector(".hovertext", state="attached")
    lines = usual.js("[...document.querySelectorAll('.hovertext tspan.line')].map(line => line.textContent)")
    # (0.208 + 0.0076) / (0.104 + 0.0152) = 1.809
    assert lines == ["horovod 2x4", "1.81 times (1.74–1.90)", "3 runs"]


def test_one_point_has_numbers_and_nothing_to_compare(open_report: Open) -> None:
    report = open_report(fixture.analysis(fixture.one_point()))
    text = report.js("document.querySelector('main').innerText")
    assert "nothing to compare" in text
    assert "204 ms" in text  # 0.8 s / 4 + 4 ms
    assert report.js("[...document.querySelectorAll('[data-chart]')].length") == 1  # what a step is spent on


def test_strategies_at_one_size_are_bars_beside_each_other(open_report: Open) -> None:
    lines = tuple(fixture.line(label, (1,)) for label in ("ddp", "horovod"))
    report = open_report(fixture.analysis(fixture.group(lines=lines, comparisons=())))
    report.draw_all()
    (trace,) = report.traces("step_time")
    assert trace["type"] == "bar"
    assert trace["x"] == pytest.approx(
        [1000 * fixture.seconds_of_step(1, label) for label in ("ddp", "horovod")], rel=1e-6
    )


def test_a_refused_forecast_says_why(open_report: Open) -> None:
    report = open_report(fixture.analysis(fixture.refused()))
    assert "2 free terms and 2 points" in report.js("document.querySelector('.refused').innerText")
    keys = "JSON.parse(document.getElementById('charts').textContent).charts.map(chart => chart.key)"
    assert {"forecast", "forecast_efficiency"}.isdisjoint(report.js(keys))


def test_an_empty_analysis_is_a_page_too(open_report: Open) -> None:
    report = open_report(replace(fixture.analysis(), groups=()))
    assert "nothing to measure" in report.js("document.querySelector('main').innerText")


def test_headings_and_names_for_those_who_hear_the_page(usual: Opened) -> None:
    levels = usual.js("[...document.querySelectorAll('h1,h2,h3,h4')].map(head => Number(head.tagName[1]))")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    named = "[...document.querySelectorAll('[role=img],button,section,nav')].map(e => e.ariaLabel || e.textContent)"
    assert all(name.strip() for name in usual.js(named))
    assert usual.js("document.documentElement.lang") == "en"
    links = usual.js("[...document.querySelectorAll('a')].filter(a => !document.querySelector(a.getAttribute('href')))")
    assert links == []
