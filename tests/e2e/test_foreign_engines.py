"""Scripts written for Horovod and DeepSpeed, without the API, under launchers of one machine that can start them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.dist.engines import needs
from tests.e2e import tutorial
from tests.e2e.tools import phalanx

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]
FOREIGN = Path(__file__).parent / "foreign"
HOROVOD, DEEPSPEED = FOREIGN / "hvd_plain.py", FOREIGN / "ds_plain.py"
# Two steps from 0 towards 2; the mean of x² over 0 … 7 is 17.5, so that each leaves 1 - 0.01 · 2 · 17.5 of the way.
WEIGHT = 2 * (1 - 0.65**2)


def answer(output: str) -> dict[str, Any]:
    """The one line of JSON that rank 0 prints, whatever launchers put around it."""
    lines = [line for text in tutorial.streams(output) for line in text.splitlines()]
    (found,) = [json.loads(line) for line in lines if line.startswith('{"size"')]
    said: dict[str, Any] = found
    return said


@pytest.mark.parametrize("launcher", [pytest.param(name, marks=needs("horovod")) for name in ("horovodrun", "mpirun")])
def test_a_script_written_for_horovod_trains(work: Path, monkeypatch: pytest.MonkeyPatch, launcher: str) -> None:
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):  # Open MPI asks root twice
        monkeypatch.setenv(name, "1")
    done = phalanx("--nproc", "2", "-s", "horovod", "--launcher", launcher, str(HOROVOD), "--lr", "a b")
    assert done.returncode == 0, done.stderr
    said = answer(done.stdout)
    assert (said["size"], said["arguments"]) == (2, ["--lr", "a b"])
    assert said["weights"] == [pytest.approx(WEIGHT)] * 2
    assert said["places"] == [[0, 0, 2, 0, 1], [1, 1, 2, 0, 1]]


@pytest.mark.parametrize(
    ("launcher", "said_ranks"),
    # DeepSpeed's own launcher says --local_rank, as its users know it; torchrun doesn't.
    [
        pytest.param("torchrun", [-1, -1], marks=needs("deepspeed")),
        pytest.param("deepspeed", [0, 1], marks=needs("deepspeed")),
    ],
)
def test_a_script_written_for_deepspeed_trains(work: Path, launcher: str, said_ranks: list[int]) -> None:
    words = ("--nproc", "2", "-s", "deepspeed", "--launcher", launcher)
    done = phalanx(*words, str(DEEPSPEED), "--deepspeed", "--steps", "2")
    assert done.returncode == 0, done.stderr
    said = answer(done.stdout)
    assert said["size"] == 2
    assert said["ranks"] == [[said_ranks[rank], rank, pytest.approx(WEIGHT)] for rank in (0, 1)]
