"""examples/strategies on two nodes: each command of its README, in an allocation and as batch jobs."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import tutorial

from .conftest import Cluster, User

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
INTERACTIVE, BATCH = "In an allocation", "As batch jobs"
MARK = "=== next command ==="


@pytest.fixture
def user(user: User) -> User:
    """In a copy of the folder, with the commands of this Python's environment."""
    tutorial.copy_to(user.work)
    user.environment |= {"PATH": f"{Path(sys.executable).parent}:{user.environment['PATH']}", "OMP_NUM_THREADS": "1"}
    return user


def weights_are_the_readmes(output: str, command: str) -> None:
    """One result, of four ranks on two nodes, with the strategy that the command names."""
    (result,) = tutorial.results(output)
    expected = tutorial.shown()
    assert (result["strategy"], result["ranks"], result["nodes"]) == (tutorial.strategy_of(command), "4", "2")
    assert float(result["checksum"]) == pytest.approx(float(expected["checksum"]), rel=1e-4)
    assert float(result["accuracy"]) == pytest.approx(float(expected["accuracy"]), abs=0.011)


def test_each_command_in_an_allocation_trains_over_both_nodes(user: User) -> None:
    allocate, *steps = tutorial.commands(INTERACTIVE)
    assert allocate.startswith("salloc ")
    for command in steps:
        tutorial.skip_without_engine(command)
    shell = "\n".join(f"echo '{MARK}'\n{command} || exit" for command in steps)
    done = user.shell("bash", "-c", f'{allocate} bash -c "$1"', "bash", shell, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    before, *outputs = done.stdout.split(f"{MARK}\n")
    assert before == ""
    for command, output in zip(steps, outputs, strict=True):
        weights_are_the_readmes(output, command)


def test_each_command_for_batch_jobs_does_what_the_readme_says(user: User, slurm: Cluster) -> None:
    preview, save, submit, unsaved, series, status = tutorial.commands(BATCH)
    for engine in tutorial.ENGINES:
        tutorial.skip_without_engine(engine)
    scripts = user.work / "slurm-scripts"

    def run(command: str) -> str:
        done = user.shell("bash", "-c", command)
        assert done.returncode == 0, done.stderr
        return done.stdout

    shown = run(preview)
    assert shown.startswith("#!/bin/bash\n#SBATCH ")
    assert list(user.work.glob("*/")) == []
    assert run(save) == ""
    assert (scripts / "strategies.sh").read_text() == shown
    assert slurm.ctl("squeue", "-h") == ""

    def jobs() -> Iterator[tuple[str, str]]:
        """Numbers of submitted jobs, with their strategies."""
        for command in (submit, unsaved):
            (job,) = run(command).split()
            yield job, tutorial.strategy_of(command).replace("auto", "ddp")
        assert [path.name for path in scripts.iterdir()] == ["strategies.sh"]
        yield from zip(run(series).split(), ("ddp", "horovod", "deepspeed"), strict=True)

    for job, strategy in list(jobs()):
        ended = slurm.wait(job, timeout=600)
        (path,) = (user.work / "logs").glob(f"*-{job}.out")
        assert (ended["JobState"], ended["ExitCode"], ended["NumNodes"]) == ("COMPLETED", "0:0", "2"), path.read_text()
        weights_are_the_readmes(path.read_text(), f"train.py -s {strategy}")
    assert len(re.findall("COMPLETED", run(status))) == 5
