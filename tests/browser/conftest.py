"""One headless Chromium for all tests of the report's page."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from phalanx.report.model import Analysis
from phalanx.report.show import page as report_page
from tests import report_fixture

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="package")
def chromium() -> Iterator[Any]:
    """A browser with an empty profile, as Debian installs it; gone before other tests fork this process."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("no Chromium on this machine: make browser-packages installs it on Debian, as root")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make .venv/.dev")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield browser
        browser.close()


@dataclass
class Opened:
    """A report in the browser, with all that it said and asked for."""

    tab: Any
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def js(self, code: str, argument: Any = None) -> Any:
        return self.tab.evaluate(code, argument)

    def draw_all(self) -> None:
        """Plots out of view too: printing needs them."""
        self.js("dispatchEvent(new Event('beforeprint'))")

    def traces(self, key: str) -> list[dict[str, Any]]:
        """What plotly holds of the first chart of that key."""
        code = """(key) => {
            const charts = JSON.parse(document.getElementById("charts").textContent).charts;
            const div = document.querySelector(`[data-chart="${charts.findIndex((chart) => chart.key === key)}"]`);
            return div.data.map(({name, x, y, type, mode, meta, error_y, error_x}) =>
                ({name, x, y, type, mode, kind: meta.kind, error_y, error_x}));
        }"""
        return list(self.js(code, key))


def _open(chromium: Any, path: Path, width: int = 1280, scheme: str = "light", touch: bool = False) -> Opened:
    context = chromium.new_context(viewport={"width": width, "height": 812}, color_scheme=scheme, has_touch=touch)
    report = Opened(context.new_page())
    report.tab.on("console", lambda message: report.complaints.append(message.text))
    report.tab.on("pageerror", lambda error: report.complaints.append(str(error)))
    report.tab.on("dialog", lambda dialog: (report.complaints.append(dialog.message), dialog.dismiss()))
    report.tab.on("request", lambda request: report.requests.append(request.url))
    report.tab.goto(path.as_uri())
    report.tab.wait_for_selector("html[data-state=drawn]", state="attached")
    return report


def _close(report: Opened) -> None:
    """A page has nothing to complain of, and asks for nothing but itself."""
    report.tab.context.close()
    assert report.complaints == []
    assert len([url for url in report.requests if not url.startswith(("data:", "blob:"))]) == 1, report.requests


@pytest.fixture
def open_report(chromium: Any, tmp_path: Path) -> Iterator[Callable[..., Opened]]:
    """`open_report(analysis, width=375, scheme="dark")`; at the end, all pages must have been silent."""
    opened: list[Opened] = []

    def open_one(analysis: Analysis, **how: Any) -> Opened:
        opened.append(_open(chromium, report_page.write(analysis, tmp_path / str(len(opened))), **how))
        return opened[-1]

    yield open_one
    for report in opened:
        _close(report)


@pytest.fixture(scope="package")
def usual(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    """A full report with all its plots drawn, for tests that only look."""
    report = _open(chromium, report_page.write(report_fixture.analysis(), tmp_path_factory.mktemp("usual")))
    report.draw_all()
    yield report
    _close(report)
