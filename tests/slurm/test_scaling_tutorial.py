"""examples/scaling on several nodes: each command of its README, in an allocation and as batch jobs; the report on all.

The network is small, the images are real JPEG files.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from phalanx.records import Start, read_records
from tests.e2e import scaling_tutorial as tutorial
from tests.e2e.tutorial import ENGINES, skip_without_engine

from .conftest import Cluster, User

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STRATEGIES = ("ddp", "horovod", "deepspeed")


@pytest.fixture
def user(user: User) -> User:
    """In a copy of the folder with images, and with the commands of this Python's environment."""
    tutorial.copy_to(user.work)
    user.environment |= {"PATH": f"{Path(sys.executable).parent}:{user.environment['PATH']}", "OMP_NUM_THREADS": "1"}
    for command in tutorial.commands(tutorial.DATA):
        run(user, command)
    return user


def run(user: User, command: str, timeout: float = 120) -> str:
    done = user.shell("bash", "-c", command, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_each_command_for_several_nodes_and_the_report_on_them(user: User, slurm: Cluster) -> None:
    for engine in ENGINES:
        skip_without_engine(engine)
    show, save, single, runall, sizes, status = tutorial.commands(tutorial.BATCH)
    shown = run(user, show)
    assert shown.startswith("#!/bin/bash\n#SBATCH ")
    assert run(user, save) == ""
    assert (user.work / "slurm-scripts/scaling-phalanx.sh").read_text() == shown
    assert slurm.ctl("squeue", "-h") == ""

    # All at once: nodes claim more CPUs than there are.
    jobs = {command: run(user, command).split() for command in (single, runall, sizes)}
    assert [len(ids) for ids in jobs.values()] == [1, 6, 2]
    allocate, scaling_test = tutorial.commands(tutorial.ALLOCATION)
    assert allocate.startswith("salloc ")
    done = user.shell("bash", "-c", f'{allocate} bash -c "$1"', "bash", scaling_test, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 runs completed" in done.stderr

    names = []
    for job in (job for ids in jobs.values() for job in ids):
        ended = slurm.wait(job, timeout=400)
        (path,) = (user.work / "logs").glob(f"*-{job}.out")
        text = path.read_text()
        assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), text
        losses = tutorial.losses(text)
        assert losses[-1] < losses[0] / 2, text  # it learns to tell the images apart
        names.append((ended["JobName"], ended["NumNodes"]))
    assert names == [
        ("my_job", "2"),
        *((f"scaling-phalanx-{name}-2x1", "2") for name in STRATEGIES),
        *((f"scaling-baseline-{name}-2x1", "2") for name in STRATEGIES),
        ("scaling-phalanx-ddp-1x1", "1"),
        ("scaling-phalanx-ddp-2x1", "2"),
    ]
    assert len(re.findall("COMPLETED", run(user, status))) >= 9
    sizes_recorded(user)
    report(user)


def sizes_recorded(user: User) -> None:
    """What the ranks themselves say of where they ran: hosts, and Slurm's number of nodes."""
    names = ("scaling-phalanx-horovod-2x1", "scaling-baseline-horovod-2x1", "train-ddp-2x1")
    for (run_dir,) in (tutorial.run_dirs(user.work / "runs")[name] for name in names):
        starts = [record for record in read_records(run_dir) if isinstance(record, Start)]
        assert {(record.num_nodes, record.world_size) for record in starts} == {(2, 2)}
        assert len({record.host for record in starts}) == len(starts) == (1 if "baseline" in run_dir.parent.name else 2)


def report(user: User) -> None:
    (command,) = tutorial.commands(tutorial.REPORT)
    said = run(user, command)
    made = user.work / "scalability-report"
    assert (made / "report.html").exists()
    points = tutorial.table(made, "points.csv")
    assert len({row["workload"] for row in points}) == 1, said
    sizes = {(row["label"], row["size"]): int(row["runs"]) for row in points}
    assert sizes == {
        **{(name, "2x1"): 1 for name in STRATEGIES},
        **{(f"{name} (baseline)", "2x1"): 1 for name in STRATEGIES},
        ("ddp", "2x1"): 4,  # my_job, runall, scaling-test, and in the allocation
        ("ddp", "1x1"): 2,
    }
    compared = {(row["label"], row["against"]): float(row["ratio"]) for row in tutorial.table(made, "comparisons.csv")}
    assert set(compared) == {(name, f"{name} (baseline)") for name in STRATEGIES}
    runs = tutorial.run_dirs(user.work / "runs")
    ours, theirs = (tutorial.warm_epoch(runs[f"scaling-{name}-horovod-2x1"][0]) for name in ("phalanx", "baseline"))
    assert compared["horovod", "horovod (baseline)"] == pytest.approx(ours / theirs, rel=1e-3)
