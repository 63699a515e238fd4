"""A real Slurm cluster of Linux namespaces, one for the session; see `cluster`, the script beside this file."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("cluster")
PHALANX = [sys.executable, "-m", "phalanx"]
NODES, GPUS = 4, 2
_MISSING = pytest.StashKey[str]()
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")


class Cluster:
    """`slurm("cut", "node2")` runs the script; `user` is a login node's shell."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "CLUSTER_DIR": str(folder), "OMP_NUM_THREADS": "1"}

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


class User:
    """Someone on the login node, in a folder of their own, without settings of the machine's user."""

    def __init__(self, cluster: Cluster, home: Path, name: str) -> None:
        self.cluster = cluster
        self.work = home / name
        self.work.mkdir(parents=True)
        leave = ("PHALANX_", "SLURM_", "SBATCH_", "OMP_")
        self.environment = {name: text for name, text in os.environ.items() if not name.startswith(leave)}
        self.environment |= {
            "CLUSTER_DIR": str(cluster.folder),
            "XDG_CONFIG_HOME": str(home / "xdg"),
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
        (found,) = (path for path in (self.work / "runs" / name).iterdir())
        return found

    def output(self, name: str) -> str:
        return "".join(path.read_text() for path in sorted(self.run_dir(name).glob("slurm-*.out")))


def _missing(*more: str) -> str | None:
    """Why there can be no cluster here."""
    if os.geteuid():
        return "root (each node is a set of namespaces)"
    programs = ("slurmctld", "slurmd", "munged", "ip", "unshare", "nsenter", "mpirun", *more)
    absent = [name for name in programs if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]
    return f"{', '.join(absent)} (Debian: make slurm-packages)" if absent else None


def _cluster(request: pytest.FixtureRequest, *options: Any) -> Iterator[Cluster]:
    missing = _missing(*(["slurmdbd", "mariadbd"] if "--db" in options else []))
    if missing:
        request.config.stash[_MISSING] = missing
        pytest.skip(f"no Slurm cluster: this machine lacks {missing}")
    folder = Path(tempfile.mkdtemp(prefix="phx-"))  # short: sockets in it have at most 108 letters
    cluster = Cluster(folder)
    try:
        up = cluster.run("up", "-n", NODES, "--gpus", GPUS, *options)
        if up.returncode:
            request.config.stash[_MISSING] = f"namespaces or devices: {up.stderr.strip()}"
            pytest.skip(f"no Slurm cluster: {up.stderr.strip()}")
        yield cluster
    finally:
        cluster("down")
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Four nodes with two devices each, without accounting."""
    yield from _cluster(request)


@pytest.fixture(scope="session")
def accounting(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A second cluster, with slurmdbd, so that sacct works."""
    yield from _cluster(request, "--db")


@pytest.fixture
def slurm(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with no job on it, before and after."""
    yield cluster
    cluster.ctl("scancel", "-u", "root", check=False)


@pytest.fixture
def user(slurm: Cluster, tmp_path: Path) -> User:
    return User(slurm, tmp_path, "work")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Skips must be loud: what wasn't proved, and what is missing."""
    if _MISSING in config.stash:
        terminalreporter.section("Slurm", red=True)
        terminalreporter.line(f"NOT TESTED on a real Slurm cluster: this machine lacks {config.stash[_MISSING]}")
