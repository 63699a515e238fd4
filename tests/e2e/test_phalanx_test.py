"""`phalanx test` with real ranks, in a project of a user's own with strict markers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from .test_engine_launchers import MPI
from .tools import start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

PROJECT = '[pytest]\naddopts = --strict-markers --strict-config -m "not hpc"\nfilterwarnings = error\n'
HEAD = """\
import os, signal, time
import pytest
pytestmark = [pytest.mark.hpc, pytest.mark.torch_dist]
RANK = os.environ.get("RANK")
def test_first():
    print("words of rank", RANK)
"""
# What the tests of a file do, by its name.
FILES = {
    "good": "def test_ranks(): assert RANK in '01'\n@pytest.mark.xfail\ndef test_known(): assert 0\n",
    "bad": "def test_one(): assert RANK != '1', 'seven'\ndef test_after(): pass\n",
    "killed": "def test_dies():\n    if RANK == '1': os.kill(os.getpid(), signal.SIGKILL)\n    time.sleep(60)\n",
    "waits": "def test_alone():\n    assert RANK != '1', 'eight'\n    time.sleep(60)\ndef test_never(): pass\n",
    "hangs": "def test_hangs(): time.sleep(60)\n",
    "differs": "if RANK == '1':\n    def test_more(): pass\n",
    "broken": "import nowhere_to_be_found\n",
}


@dataclass
class Done:
    code: int
    out: str
    err: str
    work: Path


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """All at once, each in a project of its own: most of the time they wait."""
    started = {name: _start(tmp_path_factory.mktemp(name), name) for name in (*FILES, "none")}
    ended = {}
    for name, (process, work) in started.items():
        out, err = process.communicate(timeout=150)
        ended[name] = Done(process.returncode, out, err, work)
    return ended


def _start(work: Path, name: str) -> tuple[subprocess.Popen[str], Path]:
    (work / "pytest.ini").write_text(PROJECT)
    (work / "test_it.py").write_text(HEAD + FILES[name] if name in FILES else "def test_plain(): pass\n")
    leave = ("PHALANX_", "OMP_", "SLURM_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(leave)}
    environ |= {"XDG_CONFIG_HOME": str(work / "xdg"), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environ |= {"COLUMNS": "200"}
    limit = "6" if name in ("hangs", "waits") else "100"
    words = ["test", "-m", "torch_dist", "--test-timeout", limit, "--local", "--junit", "all.xml", "--", "-rA"]
    process = subprocess.Popen(
        [sys.executable, "-m", "phalanx", *words],
        cwd=work,
        env=environ,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    return process, work


def suites(work: Path) -> dict[str, dict[str, str]]:
    """Each worker's testsuite, as `tests failures errors skipped`."""
    root = ElementTree.parse(work / "all.xml").getroot()
    return {str(suite.get("name")).split(" on ")[0]: dict(suite.attrib) for suite in root}


def test_all_workers_run_and_one_line_says_so(done: Any) -> None:
    ended = done["good"]
    assert ended.code == 0, ended.err
    assert "torch_dist: 2 workers: 2 passed, 1 xfailed in" in ended.err
    assert "words of rank 0" in ended.out
    assert "words of rank 1" not in ended.out
    (log,) = ended.work.glob("logs_torchrun/*/rank-1.log")
    assert "words of rank 1" in log.read_text()
    assert {name: suite["tests"] for name, suite in suites(ended.work).items()} == {
        "torch_dist rank 0": "3",
        "torch_dist rank 1": "3",
    }


def test_nothing_but_the_run_directory_and_its_links_is_left(done: Any) -> None:
    names = {path.name for path in done["good"].work.iterdir()}
    assert names - {"__pycache__"} == {"pytest.ini", "test_it.py", "runs", "logs_torchrun", "all.xml"}


def test_a_failure_on_one_worker_alone_fails_the_run_with_its_log(done: Any) -> None:
    ended = done["bad"]
    assert ended.code == 1
    verdict = ended.err.partition("torch_dist: FAILED")[2]
    assert "1 failed: test_it.py::test_one" in verdict
    assert "AssertionError: seven" in verdict
    assert "rank 0 on" in verdict
    assert "3 passed" in verdict  # rank 0, also of what came after
    assert {name: suite["failures"] for name, suite in suites(ended.work).items()} == {
        "torch_dist rank 0": "0",
        "torch_dist rank 1": "1",
    }


def test_a_worker_that_dies_by_a_signal_is_named_with_its_test(done: Any) -> None:
    ended = done["killed"]
    assert ended.code == 128 + 9
    verdict = ended.err.partition("torch_dist: FAILED")[2]
    assert "died in test_it.py::test_dies (rank 1" in verdict
    assert "SIGKILL" in verdict
    assert suites(ended.work)["torch_dist rank 1"]["errors"] == "1"


def test_others_that_wait_for_a_failed_worker_dont_wait_for_ever(done: Any) -> None:
    ended = done["waits"]
    assert ended.code == 1
    assert "rank 1" in ended.err.partition("torch_dist: FAILED")[2]
    assert "AssertionError: eight" in ended.err


def test_a_test_that_hangs_shows_where(done: Any) -> None:
    ended = done["hangs"]
    assert ended.code == 1
    verdict = ended.err.partition("torch_dist: FAILED")[2]
    assert "test_it.py::test_hangs took more than 6 s" in verdict
    assert "def test_hangs(): time.sleep(60)" in verdict


def test_workers_that_collect_other_tests_are_said(done: Any) -> None:
    ended = done["differs"]
    assert ended.code == 1
    assert "rank 0 collected other tests than rank 1" in ended.err
    assert "test_it.py::test_more" in ended.err


def test_a_file_that_cant_be_imported_fails_all_with_pytests_code(done: Any) -> None:
    ended = done["broken"]
    assert ended.code == pytest.ExitCode.INTERRUPTED
    assert "all workers: 1 error: test_it.py" in ended.err
    assert "nowhere_to_be_found" in ended.err


def test_no_test_with_the_marker_is_an_error_of_its_own(done: Any) -> None:
    ended = done["none"]
    assert ended.code == pytest.ExitCode.NO_TESTS_COLLECTED
    assert "no test has marker 'torch_dist'" in ended.err


def test_plain_pytest_leaves_hpc_tests_out_and_says_how_they_run(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(HEAD + "def test_more(): pass\n")
    (tmp_path / "test_plain.py").write_text("def test_plain(): pass\n")
    words = (
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "phalanx.testing.plugin",
        "--strict-markers",
        "-p",
        "no:cacheprovider",
    )
    plain = start(*words, cwd=tmp_path)
    assert "1 passed, 2 deselected" in plain.stdout
    assert "2 tests marked hpc were left out: phalanx test runs them on every worker" in plain.stdout
    for markers in ("hpc", "torch_dist"):
        assert "2 passed, 1 deselected" in start(*words, "-m", markers, cwd=tmp_path).stdout


BY_HAND = """\
import pytest, torch
import torch.distributed as dist
pytestmark = pytest.mark.torch_dist
def test_sum():
    dist.init_process_group("gloo")
    value = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(value)
    dist.destroy_process_group()
    assert value.item() == 3
"""


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed")
def test_ranks_that_mpirun_started_by_hand_find_each_other(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(BY_HAND)
    words = ["mpirun", "--oversubscribe", "-np", "2", sys.executable, "-m", "pytest", "-q", "-m", "torch_dist"]
    done = start(*words, "-p", "phalanx.testing.plugin", "test_it.py", cwd=tmp_path, env={**os.environ, **MPI})
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("1 passed") == 2


def test_tests_for_ranks_in_one_process_name_the_command(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("import pytest\n@pytest.mark.torch_dist\ndef test_it(): pass\n")
    words = [sys.executable, "-m", "pytest", "-p", "phalanx.testing.plugin", "-q", "test_it.py"]
    advice = "ran in one process: `phalanx test -m 'torch_dist'`"
    assert advice in start(*words, "-m", "torch_dist", cwd=tmp_path).stdout
    done = start(*words, "-m", "torch_dist", cwd=tmp_path, env={**os.environ, "RANK": "1"})
    assert done.returncode == 4
    assert "RANK=1 but WORLD_SIZE is not set" in done.stderr
    alone = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    done = start(*words, "-m", "torch_dist", cwd=tmp_path, env={**os.environ, **alone})
    assert "2 ranks, but MASTER_PORT unknown: `phalanx test" in done.stdout
    (tmp_path / "test_it.py").write_text("def test_it(): pass\n")
    assert "phalanx test" not in start(*words, "-m", "not torch_dist", cwd=tmp_path).stdout
