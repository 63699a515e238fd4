"""`phalanx test` as jobs on two nodes of the real cluster, and the gate of a release that stands on it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.containers import image
from tests.e2e.test_phalanx_test import BY_HAND

from .conftest import PHALANX, Cluster, User

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[2]
SIZE = ("-N", "2", "--nproc", "2", "--cpus-per-task", "2", "-t", "10", "device=cpu")
ONE_EACH = (*SIZE[:3], "1", *SIZE[4:])  # DeepSpeed's import alone takes seconds of each worker
END = ("--submit", "--wait", "--junit", "all.xml", "--")
ON_RANK_3 = """\
import os
import pytest
pytestmark = [pytest.mark.hpc, pytest.mark.torch_dist]
def test_first(): pass
def test_last():
    assert os.environ["RANK"] != "3", "seven"
"""
ON_ALL = ON_RANK_3.replace('os.environ["RANK"] != "3", "seven"', 'os.environ["WORLD_SIZE"] == "4"')
# The project's own tests, by each kind's own launcher; and a failure on one worker alone.
SUITES: dict[str, tuple[str, ...]] = {
    "torchrun": ("-m", "hpc and torch_dist", *SIZE, *END, str(ROOT / "tests/hpc")),
    "srun": ("-m", "deepspeed_dist", *ONE_EACH, *END, str(ROOT / "tests/hpc"), "-k", "place or 2"),
    "mpirun": ("-m", "horovod_dist", *SIZE, *END, str(ROOT / "tests/hpc")),
    "rank3": ("-m", "torch_dist", "--launcher", "srun", *SIZE, *END, "test_it.py"),
}


@dataclass
class Done:
    code: int
    out: str
    err: str
    work: Path

    @property
    def verdict(self) -> str:
        found = re.search(r"^\w+_dist: (FAILED: )?\d+ workers.*", self.err, re.MULTILINE | re.DOTALL)
        return found[0] if found else ""


@pytest.fixture(scope="module")
def done(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """All jobs at once; those of the gate are in a container."""
    home = tmp_path_factory.mktemp("suites")
    started: dict[str, Callable[[], Done]] = {
        name: _suite(cluster, home, name, words) for name, words in SUITES.items()
    }
    if image.missing() is None:
        sif = image.make(home)
        started["yes"] = _gate(cluster, home, "yes", ON_ALL, sif, "torchrun")
        started["no"] = _gate(cluster, home, "no", ON_RANK_3, sif, "srun")
    return {name: wait() for name, wait in started.items()}


def _suite(cluster: Cluster, home: Path, name: str, words: tuple[str, ...]) -> Callable[[], Done]:
    user = User(cluster, home, name)
    (user.work / "test_it.py").write_text(ON_RANK_3)
    return _start(user, *PHALANX, "test", *words)


def _gate(cluster: Cluster, home: Path, name: str, test: str, sif: Path, launcher: str) -> Callable[[], Done]:
    """`tools/release` in a checkout whose version is to be released."""
    user = User(cluster, home, name)
    user.environment |= {"PATH": image.path(), "PHALANX": " ".join(PHALANX)}
    (user.work / "test_it.py").write_text(test)
    (user.work / "job.yaml").write_text(image.settings(Path("built.sif")))
    (user.work / "it.def").write_text(f"Bootstrap: localimage\nFrom: {sif}\n")
    for words in (
        ("init", "-q"),
        ("add", "test_it.py"),
        ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qmx"),
    ):
        subprocess.run(["git", *words], cwd=user.work, check=True)
    more = ("-m", "torch_dist", "--launcher", launcher, "-c", "job.yaml", *SIZE, *END, "test_it.py")
    return _start(user, "bash", ROOT / "tools/release", "v0.1.0", "it.def", "built.sif", *more)


def _start(user: User, *words: Any) -> Callable[[], Done]:
    process = subprocess.Popen(
        user.command(*words),
        cwd=user.work,
        env=user.environment,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )

    def wait() -> Done:
        out, err = process.communicate(timeout=600)
        return Done(process.returncode, out, err, user.work)

    return wait


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("torchrun", "torch_dist: 4 workers: 4 passed in"),
        ("srun", "deepspeed_dist: 2 workers: 2 passed in"),
        ("mpirun", "horovod_dist: 4 workers: 3 passed in"),
    ],
)
def test_the_projects_own_tests_pass_on_two_nodes(done: Any, name: str, expected: str) -> None:
    ended = done[name]
    assert ended.code == 0, ended.out + ended.err
    assert expected in ended.verdict
    assert re.search(r"\d passed", ended.out)  # the main worker's own words, from the job's output
    root = ElementTree.parse(ended.work / "all.xml").getroot()
    suites = [str(suite.get("name")).split() for suite in root]
    ranks = [str(rank) for rank in range(len(suites))]
    assert [suite[2] for suite in suites] == ranks
    half = len(suites) // 2
    first, second = ({suite[4] for suite in part} for part in (suites[:half], suites[half:]))
    assert (len(first), len(second), len(first | second)) == (1, 1, 2)
    (logs,) = (ended.work / f"logs_{name}").iterdir()
    assert logs.name == ended.out.split()[0]  # the job's id
    assert [path.name for path in sorted(logs.iterdir())] == [f"rank-{rank}.log" for rank in ranks[1:]]


def test_a_failure_on_one_worker_of_another_node_fails_the_run_and_shows_its_log(done: Any) -> None:
    ended = done["rank3"]
    assert ended.code == 1
    assert re.search(r"rank 3 on node\d: 1 failed: test_it.py::test_last", ended.verdict)
    assert "AssertionError: seven" in ended.verdict
    assert "ranks 0 to 2: 2 passed" in ended.verdict
    (log,) = ended.work.glob("logs_srun/*/rank-3.log")
    assert "AssertionError: seven" in log.read_text()


def tags(work: Path) -> list[str]:
    return subprocess.run(["git", "tag"], cwd=work, capture_output=True, text=True, check=True).stdout.split()


def test_a_release_whose_tests_pass_in_its_image_is_tagged(done: Any) -> None:
    image.skip_or_pass()
    ended = done["yes"]
    assert ended.code == 0, ended.out + ended.err
    assert "torch_dist: 4 workers: 2 passed" in ended.err
    assert "release gate: yes" in ended.out
    assert (ended.work / "built.sif").stat().st_size > 1000
    assert tags(ended.work) == ["v0.1.0"]
    (plan,) = ended.work.glob("runs/test-torch_dist/*/plan.json")
    assert '"runtime": "apptainer"' in plan.read_text()


def test_a_release_with_a_test_that_fails_on_one_worker_is_not_tagged(done: Any) -> None:
    image.skip_or_pass()
    ended = done["no"]
    assert ended.code == 1
    assert re.search(r"rank 3 on node\d: 1 failed", ended.err)
    assert "release gate: NO: the tests failed in the image" in ended.err
    assert tags(ended.work) == []


@pytest.mark.parametrize(
    ("tag", "change", "reason"),
    [("v9.9", "", "set the version"), ("v0.1.0", "more", "files differ"), ("a b", "", "no name for a tag")],
)
def test_the_gate_says_no_before_it_builds_anything(tmp_path: Path, tag: str, change: str, reason: str) -> None:
    (tmp_path / "a").write_text("")
    for words in (("init", "-q"), ("add", "a"), ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qmx")):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    (tmp_path / "a").write_text(change)
    words = ["env", f"PHALANX={sys.executable} -m phalanx", "bash", str(ROOT / "tools/release"), tag, "x.def", "x.sif"]
    ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 1
    assert reason in ended.stderr


def test_ranks_that_srun_started_by_hand_find_each_other(user: User) -> None:
    (user.work / "test_it.py").write_text(BY_HAND)
    words = [sys.executable, "-m", "pytest", "-q", "-p", "phalanx.testing.plugin", "-m", "torch_dist", "test_it.py"]
    done = user.shell("srun", "-N2", "--ntasks-per-node=1", "-t5", *words, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("1 passed") == 2
