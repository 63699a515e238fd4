"""Which tests each of several calls of pytest would run: `python -m tests.collected '["-m", "gpu"]' …` prints JSON.

One process for all, since the first collection imports everything and takes nearly all of the time.
"""

from __future__ import annotations

import contextlib
import json
import sys

import pytest


class _Noted:
    """What a collection selected, and the files that said themselves that they can't run here."""

    def __init__(self) -> None:
        self.tests: list[str] = []
        self.skipped: list[str] = []
        self.failed: list[str] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            (self.skipped if report.skipped else self.failed).append(report.nodeid)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.tests = [item.nodeid for item in session.items]


def _collect(arguments: list[str]) -> dict[str, list[str]]:
    noted = _Noted()
    with contextlib.redirect_stdout(sys.stderr):
        pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *arguments], [noted])
    return vars(noted)


if __name__ == "__main__":
    print(json.dumps([_collect(json.loads(words)) for words in sys.argv[1:]]))
