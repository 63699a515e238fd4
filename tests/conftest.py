"""What all tests rely on: an environment and signals that don't depend on who started them."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.testing.plugin import asks_for_ranks

from . import environment, leftovers

_RANKS = pytest.StashKey[bool]()
_LEFT = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Before anything is collected, since libraries look once. Where each rank of a launch runs the tests, the launch's
    variables are what they are about."""
    config.stash[_RANKS] = asks_for_ranks(config)
    if config.stash[_RANKS]:
        return
    tempfile.gettempdir()  # looked up now, so that the tests' own folders are where TMPDIR says
    folder = tempfile.TemporaryDirectory(prefix="phalanx-tests-")
    config.add_cleanup(folder.cleanup)
    _replace(environment.known(os.environ, Path(folder.name)) | {leftovers.MARK: str(os.getpid())})
    _heed_signals()


def _replace(environ: dict[str, str]) -> None:
    for name in os.environ.keys() - environ.keys():
        del os.environ[name]
    os.environ.update(environ)


def _heed_signals() -> None:
    """A suite in the background may ignore Ctrl-C and others, and so would all that it starts. SIGHUP stays as it is:
    one that nohup started, and its processes, must not end with the terminal."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) is signal.SIG_IGN:
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default)


@pytest.fixture(autouse=True)
def _own_environment(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test begins with the same variables, whatever the one before set, and sees GPUs only if it is for them."""
    if request.config.stash[_RANKS]:
        yield
        return
    before = dict(os.environ)
    if request.node.get_closest_marker("gpu") is None:
        _replace({name: text for name, text in before.items() if name not in environment.OTHER_GPUS})
        os.environ.update(environment.NO_GPUS)
    try:
        yield
    finally:
        with contextlib.suppress(KeyError):
            before["PYTEST_CURRENT_TEST"] = os.environ["PYTEST_CURRENT_TEST"]
        _replace(before)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Processes that tests left are ended, and fail the run."""
    if session.config.stash[_RANKS] or not Path("/proc/self/environ").exists():
        return
    left = session.config.stash[_LEFT] = leftovers.end(str(os.getpid()), patience=10)
    if left and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in config.stash.get(_LEFT, []):
        terminalreporter.line(f"a process was left, and is ended now: {line}", red=True)
