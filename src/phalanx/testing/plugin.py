"""The pytest plugin: markers of distributed tests, of which those marked `hpc` run only when asked for.

Ranks that srun or mpirun started as `python -m pytest` get the variables by which torch.distributed finds the others.
pytest loads it wherever Phalanx is installed, so it imports nothing heavy and changes nothing else.
"""

from __future__ import annotations

import os
import re

import pytest

from ..errors import TopologyError

MARKERS = {
    "hpc": "needs several processes or a cluster; deselected unless -m names it or one of the markers below",
    "torch_dist": "runs on every worker of a torch.distributed launch (phalanx test -m torch_dist)",
    "deepspeed_dist": "runs on every worker of a DeepSpeed launch (phalanx test -m deepspeed_dist)",
    "horovod_dist": "runs on every worker of a Horovod launch (phalanx test -m horovod_dist)",
    "ray_dist": "runs on every worker of a Ray cluster (phalanx test -m ray_dist)",
}
_ASKED = re.compile(rf"(?<!not )\b({'|'.join(MARKERS)})\b")
_LEFT_OUT = pytest.StashKey[int]()
_FOR_RANKS = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    for name, text in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {text}")
    if asks_for_ranks(config):
        from ..rank.gloo_end import let_gloo_finish_at_exit
        from .by_hand import variables

        let_gloo_finish_at_exit()
        try:
            os.environ.update(variables())
        except TopologyError as error:
            raise pytest.UsageError(str(error)) from None


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


def pytest_collection_finish(session: pytest.Session) -> None:
    found = (item.get_closest_marker(name) for item in session.items for name in MARKERS)
    session.config.stash[_FOR_RANKS] = any(found)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.stash.get(_FOR_RANKS, False) and not config.option.collectonly:
        from .by_hand import advice

        said = advice(config.getoption("markexpr"))
        if said:
            terminalreporter.line(said)
    count = config.stash.get(_LEFT_OUT, 0)
    if count:
        terminalreporter.line(f"{count} tests marked hpc were left out: phalanx test runs them on every worker")
