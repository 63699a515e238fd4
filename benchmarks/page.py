"""How soon the report's page answers, in a headless Chromium: of a usual report and of one over 1,000 runs.

python benchmarks/page.py [--repeats 5]
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests import report_fixture  # noqa: E402
from tests.browser.conftest import FLAGS  # noqa: E402

from phalanx.report.model import Analysis, Input  # noqa: E402
from phalanx.report.show import page  # noqa: E402

# "ready": tables and buttons answer, and no script is left to load; "drawn": the plots in view are there too.
MARKS = "['ready', 'drawn'].map(name => performance.getEntriesByName(name)[0].startTime)"


def large() -> Analysis:
    """1,000 inputs in ten workloads."""
    groups = [report_fixture.group(f"workload {number}") for number in range(10)]
    inputs = tuple(
        Input(
            Path(f"runs/resnet152-ddp-1x4/20260101-000000-{number:04x}"),
            "run",
            "64 ranks, 20 epochs",
            ("epoch 0: NaN",),
        )
        for number in range(1000)
    )
    return replace(report_fixture.analysis(*groups), inputs=inputs)


def times(browser: Any, path: Path) -> tuple[float, float, float]:
    """Milliseconds from navigation to each mark, and CPU of the page's main thread until all in view is drawn."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    tab = context.new_page()
    session = context.new_cdp_session(tab)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    tab.goto(path.as_uri())
    tab.wait_for_selector("html[data-state=drawn]", state="attached")
    metrics = {item["name"]: item["value"] for item in session.send("Performance.getMetrics")["metrics"]}
    ready, drawn = tab.evaluate(MARKS)
    context.close()
    return ready, drawn, 1000 * metrics["TaskDuration"]


def measure(repeats: int) -> dict[str, dict[str, float]]:
    """Medians in milliseconds and sizes in MB; empty without a Chromium."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        return {}
    from playwright.sync_api import sync_playwright

    found = {}
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        for name, analysis in (("usual", report_fixture.analysis()), ("1,000 runs", large())):
            path = page.write(analysis, Path(folder) / name)
            columns = zip(*(times(browser, path) for _ in range(repeats)), strict=True)
            medians = dict(zip(("ready_ms", "drawn_ms", "cpu_ms"), map(statistics.median, columns), strict=True))
            found[name] = {"megabytes": path.stat().st_size / 1e6, **medians}
        browser.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    print(json.dumps(measure(parser.parse_args().repeats)))


if __name__ == "__main__":
    main()
