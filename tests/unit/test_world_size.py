"""N processes that each believe to be alone are refused before they train."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.errors import TopologyError
from phalanx.rank.topology import Topology
from phalanx.rank.world_size import check_world_size


def topology(world_size: int, source: str) -> Topology:
    return Topology(0, world_size, 0, world_size, 0, 1, None, None, source)


@pytest.mark.parametrize(
    ("source", "remedy"),
    [
        ("single", "mpirun.executable"),
        ("openmpi", "mpirun.flavor"),
        ("mpich", "srun --mpi=list"),
        ("slurm", "srun_args"),
        ("environment", "WORLD_SIZE"),
    ],
)
def test_the_error_says_what_was_counted_by_whom_and_what_to_change(source: str, remedy: str) -> None:
    with pytest.raises(TopologyError) as raised:
        check_world_size(topology(1, source), {"PHALANX_EXPECTED_WORLD_SIZE": "4"})
    said = str(raised.value)
    for part in ("world size is 1", source, "starts 4 ranks", "train alone", remedy):
        assert part in said


def test_the_expected_number_of_ranks_is_fine_and_so_is_no_expectation() -> None:
    check_world_size(topology(4, "openmpi"), {"PHALANX_EXPECTED_WORLD_SIZE": "4"})
    check_world_size(topology(1, "single"), {})
    check_world_size(topology(1, "single"), {"PHALANX_EXPECTED_WORLD_SIZE": ""})


def test_another_number_than_one_is_not_called_alone() -> None:
    with pytest.raises(TopologyError, match=r"world size is 2 .*starts 4 ranks: ") as raised:
        check_world_size(topology(2, "slurm"), {"PHALANX_EXPECTED_WORLD_SIZE": "4"})
    assert "alone" not in str(raised.value)


def test_a_faulty_expectation_is_named() -> None:
    with pytest.raises(TopologyError, match="PHALANX_EXPECTED_WORLD_SIZE='four'"):
        check_world_size(topology(1, "single"), {"PHALANX_EXPECTED_WORLD_SIZE": "four"})


def test_a_worker_that_is_alone_by_mistake_does_not_run_the_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('trained')")
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    environ |= {"PHALANX_EXPECTED_WORLD_SIZE": "2", "PHALANX_RUN_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "phalanx.worker", str(tmp_path / "train.py")],
        env=environ, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert "starts 2 ranks" in done.stderr
    (report,) = (tmp_path / "errors").iterdir()
    assert not report.stem.isdecimal()  # nobody knows which rank it was
