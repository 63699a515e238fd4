"""Why a job failed, as `phalanx status` tells it from what the job's script has left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.schedulers.slurm import outcome
from phalanx.schedulers.slurm.jobs import OurJob
from phalanx.schedulers.slurm.states import JobState

SAID = {"v": 1, "start": 100.0, "lines": ["rank 1 on node2 was killed by SIGSEGV"], "rank": 1, "host": "node2"}


@pytest.fixture
def job(tmp_path: Path) -> OurJob:
    """Job 71 has failed; its output file is one that a later job has written into."""
    (tmp_path / "jobs").mkdir()
    (tmp_path / "job.sh").write_text(f"#!/bin/bash\n#SBATCH --output={tmp_path}/train.log\n\nexit 1\n")
    (tmp_path / "train.log").write_text("srun: error: node1: task 0: Killed\n")
    return OurJob("71", tmp_path, "train", 90.0, state=JobState("71", "71", "FAILED", exit_code=139, hosts="node[1-2]"))


def test_a_script_that_did_not_begin_is_told_with_the_files_that_the_node_may_not_see(job: OurJob) -> None:
    failed = outcome.failure(job)
    assert failed is not None
    assert "did not begin on node1" in failed.lines[0]
    assert f"{job.run_dir}/train.log" in failed.lines[0]
    assert "set run_root" in failed.lines[1]


@pytest.mark.parametrize(("start", "rank"), [("90\n100\n", 1), ("90\n100\n200\n", 0)])
def test_the_scripts_own_verdict_on_its_last_start_counts(job: OurJob, start: str, rank: int) -> None:
    (job.run_dir / "jobs/71.start").write_text(start)
    (job.run_dir / "jobs/71.exit").write_text("139\n")
    (job.run_dir / "jobs/71.verdict").write_text(json.dumps(SAID))
    failed = outcome.failure(job)
    assert failed is not None
    assert failed.culprit is not None
    assert failed.culprit.rank == rank


@pytest.mark.parametrize("text", ["", "[]", "{", '{"start": 100.0, "lines": []}', '{"start": 100.0, "lines": 3}'])
def test_a_broken_verdict_is_passed_over(job: OurJob, text: str) -> None:
    (job.run_dir / "jobs/71.start").write_text("100\n")
    (job.run_dir / "jobs/71.exit").write_text("139\n")
    (job.run_dir / "jobs/71.verdict").write_text(text)
    failed = outcome.failure(job)
    assert failed is not None
    assert failed.culprit is not None
    assert failed.culprit.rank == 0
