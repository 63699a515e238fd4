"""One JUnit file of all workers': a testsuite each, with rank and host in its name."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

from ..errors import PlanError
from .results import FOLDER, Launch, Worker


def merge(launches: Iterable[Launch], target: Path) -> None:
    """Write `target`. A worker that left no file of its own is there as one error, so that no reader takes it for well.

    Raises PlanError if it can't be written.
    """
    root = ElementTree.Element("testsuites", name="phalanx test")
    for launch in launches:
        for worker in launch.workers:
            root.extend(_suites(launch, worker))
    for name in ("tests", "failures", "errors", "skipped"):
        root.set(name, str(sum(int(suite.get(name, 0)) for suite in root)))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        ElementTree.ElementTree(root).write(target, encoding="utf-8", xml_declaration=True)
    except OSError as error:
        raise PlanError(f"--junit {target} can't be written: {error.strerror}") from None


def _suites(launch: Launch, worker: Worker) -> list[ElementTree.Element]:
    name = f"{launch.marker} {worker.who}"
    try:
        found = ElementTree.parse(launch.run_dir / FOLDER / f"{worker.rank}.xml").getroot()
    except (OSError, ElementTree.ParseError):
        return [_died(launch, worker, name)]
    suites = [found] if found.tag == "testsuite" else found.findall("testsuite")
    for suite in suites:
        suite.set("name", name)
    return suites


def _died(launch: Launch, worker: Worker, name: str) -> ElementTree.Element:
    suite = ElementTree.Element("testsuite", name=name, tests="1", failures="0", errors="1", skipped="0")
    case = ElementTree.SubElement(suite, "testcase", classname=name, name=worker.during or "start")
    why = "; ".join(launch.reason) or "the worker ended before its results were written"
    ElementTree.SubElement(case, "error", message=why)
    return suite
