"""The pytest plugin: markers of distributed tests, of which those marked `hpc` run only when asked for.

pytest loads it wherever Phalanx is installed, so it imports nothing heavy and changes nothing else.
"""

from __future__ import annotations

import re

import pytest

MARKERS = {
    "hpc": "needs several processes or a cluster; deselected unless -m names it or one of the markers below",
    "torch_dist": "runs on every worker of a torch.distributed launch (phalanx test -m torch_dist)",
    "deepspeed_dist": "runs on every worker of a DeepSpeed launch (phalanx test -m deepspeed_dist)",
    "horovod_dist": "runs on every worker of a Horovod launch (phalanx test -m horovod_dist)",
    "ray_dist": "runs on every worker of a Ray cluster (phalanx test -m ray_dist)",
}
_ASKED = re.compile(rf"\b({'|'.join(MARKERS)})\b")
_LEFT_OUT = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    for name, text in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {text}")


def asks_for_ranks(config: pytest.Config) -> bool:
    """Whether -m names `hpc` or a kind of distributed tests."""
    return _ASKED.search(config.getoption("markexpr", "") or "") is not None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if asks_for_ranks(config):
        return
    left_out = [item for item in items if item.get_closest_marker("hpc")]
    if left_out:
        items[:] = [item for item in items if not item.get_closest_marker("hpc")]
        config.hook.pytest_deselected(items=left_out)
        config.stash[_LEFT_OUT] = len(left_out)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    count = config.stash.get(_LEFT_OUT, 0)
    if count:
        terminalreporter.line(f"{count} tests marked hpc were left out: phalanx test runs them on every worker")
