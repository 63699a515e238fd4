"""A real Slurm cluster of Linux namespaces, one for the session; see `cluster`, the script beside this file."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from . import traces

SCRIPT = Path(__file__).with_name("cluster")
PHALANX = [sys.executable, "-m", "phalanx"]
NODES, GPUS = 4, 2
_MISSING = pytest.StashKey[list[str]]()
_SKIPPED = "no Slurm cluster: this machine lacks"
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")


class Cluster:
    """`slurm("cut", "node2")` runs the script; `user` is a login node's shell."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.scratch = folder / "scratch"  # each node's own disk: the others can't see it
        self.environment = {**os.environ, "CLUSTER_DIR": str(folder)}

    def __call__(self, *words: Any, check: bool = True, timeout: float = 120, **more: Any) -> str:
        """stdout of `cluster WORDS…`; stderr apart, since srun says there that a job waits."""
        done = self.run(*words, timeout=timeout, **more)
        if check and done.returncode:
            raise RuntimeError(f"{words}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def run(
        self, *words: Any, timeout: float = 120, env: dict[str, str] | None = None, **more: Any
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(SCRIPT), *map(str, words)],
            env={**self.environment, **(env or {})},
            timeout=timeout,
            text=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            **more,
        )

    def ctl(self, *words: Any, **more: Any) -> str:
        return self("exec", "ctl", *words, **more)

    def job(self, job: str) -> dict[str, str]:
        """What scontrol says of a job (JobState, Restarts, NodeList, ExitCode, …)."""
        said = self.ctl("scontrol", "-o", "show", "job", job)
        return dict(word.split("=", 1) for word in said.split() if "=" in word)

    def wait(self, job: str, *states: str, timeout: float = 120) -> dict[str, str]:
        """Until the job is in one of `states`, or has ended. (`sbatch --wait` looks every 30 s only.)"""
        limit = time.monotonic() + timeout
        while True:
            said = self.job(job)
            if said["JobState"] in (states or _ENDED):
                return said
            assert time.monotonic() < limit, f"job {job} is {said['JobState']} ({said.get('Reason')})"
            time.sleep(0.2)

    def mend(self, timeout: float = 90) -> None:
        """All nodes up, connected and idle, whatever a test did to them."""
        self.ctl("scancel", "-u", "root", check=False)
        for number in range(1, NODES + 1):
            self("heal", f"node{number}", check=False)
            self("boot", f"node{number}", check=False)  # says no if it runs
        for node in self.ctl("sinfo", "-h", "-N", "-p", "main", "-t", "down", "-o", "%N").split():
            self("slurmd", node, "stop")  # registers at once when it starts; Slurm itself looks a minute later
            self("slurmd", node, "start")
        limit = time.monotonic() + timeout
        while set(self.ctl("sinfo", "-h", "-N", "-o", "%T").split()) != {"idle"}:
            assert time.monotonic() < limit, self.ctl("sinfo", "-N", "-l")
            time.sleep(0.2)


class User:
    """Someone on the login node, in a folder of their own, without settings of the machine's user."""

    def __init__(self, cluster: Cluster, home: Path, name: str) -> None:
        self.cluster = cluster
        self.work = home / name
        self.work.mkdir(parents=True)
        (home / "home").mkdir(exist_ok=True)
        leave = ("PHALANX_", "SLURM", "SBATCH_", "SALLOC_", "SQUEUE_", "SINFO_", "OMP", "PMI", "MASTER_", "XDG_")
        self.environment = {name: text for name, text in os.environ.items() if not name.startswith(leave)}
        self.environment |= {
            "CLUSTER_DIR": str(cluster.folder),
            "HOME": str(home / "home"),
            "TMPDIR": str(cluster.scratch),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",  # Open MPI asks root twice
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }

    def shell(self, *words: Any, timeout: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run words as they are on the login node."""
        return subprocess.run(
            self.command(*words),
            cwd=self.work,
            env={**self.environment, **environment},
            timeout=timeout,
            text=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
        )

    def command(self, *words: Any) -> list[str]:
        return ["bash", str(SCRIPT), "exec", "ctl", *map(str, words)]

    def phalanx(self, *words: Any, timeout: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
        return self.shell(*PHALANX, *words, timeout=timeout, **environment)

    @staticmethod
    def here(words: Sequence[Any]) -> list[str]:
        """The same words, with this Python instead of `python3`."""
        return [sys.executable if word == "python3" else str(word) for word in words]

    def submit(self, *words: Any, **environment: str) -> str:
        """`phalanx submit`: the job id, which must be the last line."""
        done = self.phalanx("submit", "--time", "5", "device=cpu", *words, **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[-1]

    def run_dir(self, name: str) -> Path:
        """That of the launch; a script that begins a second run has made others beside it."""
        kept = ("jobs", "plan.json")  # of jobs, and of `phalanx run`
        folders = (self.work / "runs" / name).iterdir()
        (found,) = (path for path in folders if any((path / entry).exists() for entry in kept))
        return found

    def output(self, name: str) -> str:
        return "".join(path.read_text() for path in sorted(self.run_dir(name).glob("slurm-*.out")))


def missing(*options: str) -> str | None:
    """Why there can be no cluster here."""
    if os.geteuid():
        return "root (each node is a set of namespaces)"
    done = subprocess.run(["bash", str(SCRIPT), "missing", "--mpi", *options], capture_output=True, text=True)
    absent = (done.stdout + done.stderr).split()
    if absent:
        return f"{', '.join(absent)} (Debian: make slurm-packages)"
    links = "ip link add br0 type bridge && ip link add end0 type veth peer name end1"
    words = ["unshare", "--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "sh", "-c", links]
    done = subprocess.run(words, capture_output=True, text=True)
    return f"namespaces with networks ({done.stderr.strip()})" if done.returncode else None


@contextmanager
def cluster_of(folder: Path, nodes: int, *options: Any) -> Iterator[Cluster]:
    """A cluster in `folder`, ended on leaving; nothing of it may be left then.

    Raises RuntimeError if it doesn't come up.
    """
    cluster, before = Cluster(folder), traces.strays()
    with ExitStack() as after:
        after.callback(shutil.rmtree, folder, ignore_errors=True)
        cluster("up", "-n", nodes, "--gpus", GPUS, "--private", cluster.scratch, *options)
        after.callback(cluster, "down")
        yield cluster
        spaces = after.enter_context(traces.namespaces(folder))
        cluster("down")
        assert traces.of(folder, spaces, before) == []


def _for_the_session(request: pytest.FixtureRequest, *options: str) -> Iterator[Cluster]:
    lacks = missing(*options)
    if lacks:
        request.config.stash.setdefault(_MISSING, []).append(lacks)
        pytest.skip(f"{_SKIPPED} {lacks}")
    # A short path: sockets in it have at most 108 letters.
    with cluster_of(Path(tempfile.mkdtemp(prefix="phx-")), NODES, *options) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Four nodes with two devices each, without accounting."""
    yield from _for_the_session(request)


@pytest.fixture(scope="session")
def accounting(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A second cluster, with slurmdbd, so that sacct works."""
    yield from _for_the_session(request, "--db")


@pytest.fixture
def slurm(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with no job on it, before and after."""
    yield cluster
    cluster.ctl("scancel", "-u", "root", check=False)


@pytest.fixture
def user(slurm: Cluster, tmp_path: Path) -> User:
    return User(slurm, tmp_path, "work")


@pytest.fixture
def fragile(slurm: Cluster) -> Iterator[Cluster]:
    """The cluster for a test that breaks nodes or cables."""
    slurm.mend()
    yield slurm
    slurm.mend()


@pytest.hookimpl(tryfirst=True)  # before -m is looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == SCRIPT.parent:
            item.add_marker(pytest.mark.slurm)
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> Iterator[None]:
    """Below all else, as skips must be loud: how much wasn't proved, and what is missing. And where the time goes."""
    yield
    took: Counter[str] = Counter()
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        if "tests/slurm/" in getattr(report, "nodeid", ""):
            took[report.nodeid] += getattr(report, "duration", 0)
    slow = [f"{seconds:6.1f} s  {name}" for name, seconds in took.most_common(10) if seconds > 10]
    lacks = ", ".join(dict.fromkeys(config.stash.get(_MISSING, [])))
    if slow or lacks:
        terminalreporter.section(f"Slurm: {sum(took.values()):.0f} s", red=bool(lacks))
    for line in slow:
        terminalreporter.line(line)
    if lacks:
        count = sum(_SKIPPED in str(report.longrepr) for report in terminalreporter.stats.get("skipped", []))
        terminalreporter.line(f"{count} tests NOT RUN on a real Slurm cluster: this machine lacks {lacks}", red=True)
