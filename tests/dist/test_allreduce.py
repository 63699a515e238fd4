"""The all-reduce benchmark: against a plain loop, and as what the report reads."""

from __future__ import annotations

import re
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

import phalanx
from phalanx.errors import PlanError, UsageError
from phalanx.report.read.runs import read_run
from phalanx.run import allreduce
from tests.dist.harness import run_ranks


def _benchmark() -> None:
    allreduce.SECONDS = 0.02
    allreduce.main(1)


def test_the_report_reads_what_it_wrote(tmp_path: Path) -> None:
    run_ranks(_benchmark, 2, folder=tmp_path)
    (folder,) = tmp_path.glob("runs/*/*")
    run, looked_at = read_run(folder)
    assert run is not None
    assert run.allreduce[:, 0].tolist() == [1024, 4096, 16384, 65536, 262144, 1048576]
    assert (run.allreduce[:, 1] > 0).all()
    assert (run.allreduce[:, 2] >= 5).all()
    assert "6 sizes of an all-reduce" in looked_at.used
    assert (run.size.nodes, run.size.ranks) == (1, 2)
    records = (folder / "records" / "0.1.jsonl").read_text()
    assert set(re.findall(r'"backend": "(\w+)"', records)) == {"gloo"}


def _beside_a_plain_loop(size: int) -> list[float]:
    allreduce.SECONDS = 0.05
    with phalanx.init() as run:
        ratios = []
        for _ in range(5):
            mine = allreduce.measure(run, size).seconds
            tensor, times = torch.zeros(size // 4), []
            for _ in range(10):
                dist.barrier()
                begin = time.perf_counter()
                dist.all_reduce(tensor)
                times.append(time.perf_counter() - begin)
            ratios.append(mine / float(np.median(times)))
        return ratios


def test_it_takes_what_a_plain_loop_takes(tmp_path: Path) -> None:
    """4 MiB, where starting one is nothing; the machine is busy, so within a factor of two."""
    ratios = run_ranks(_beside_a_plain_loop, 2, 2**22, folder=tmp_path)[0]
    assert 0.5 < np.median(ratios) < 2


def _broken() -> str:
    with phalanx.init() as run:
        dist.all_reduce = lambda tensor: tensor  # loses what the others sent
        try:
            allreduce.measure(run, 1024)
        except PlanError as error:
            return str(error)
    return ""


def test_sums_that_are_wrong_are_no_benchmark(tmp_path: Path) -> None:
    (first, _) = run_ranks(_broken, 2, folder=tmp_path)
    assert "an all-reduce of ones over 2 ranks gave 1 to 1" in first


def _alone() -> str:
    try:
        allreduce.main(1)
    except UsageError as error:
        return str(error)
    return ""


def test_one_rank_is_refused(tmp_path: Path) -> None:
    assert (
        "needs 2 ranks at least, and here is 1: phalanx allreduce --nproc 2" in run_ranks(_alone, 1, folder=tmp_path)[0]
    )
