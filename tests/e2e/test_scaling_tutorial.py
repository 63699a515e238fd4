"""examples/scaling on one machine: each command of its README, as a user types it, and the report at the end.

Commands for several nodes are in tests/slurm/test_scaling_tutorial.py.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from phalanx.records import Epoch, Start, Step, read_records
from tests.e2e import scaling_tutorial as tutorial
from tests.e2e.tutorial import skip_without_engine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SMALL = yaml.safe_load((tutorial.FOLDER / "config/small.yaml").read_text())
IMAGES = 4 * 64  # what make_images.py makes unless told otherwise


def run(command: str, folder: Path) -> str:
    done = subprocess.run(
        ["timeout", "--kill-after=5", "200", "bash", "-c", command],  # also a hang must end all ranks
        cwd=folder,
        env=tutorial.environment(folder / "home"),
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, (command, done.stdout)
    return done.stdout


def test_each_command_on_one_machine_and_the_report_that_compares_them(tmp_path: Path) -> None:
    tutorial.copy_to(tmp_path)
    make, use = tutorial.commands(tutorial.DATA)
    assert run(make, tmp_path) == f"{IMAGES} images of 4 classes in images\n"
    run(use, tmp_path)
    one_by_one, series = tutorial.commands(tutorial.HERE)[:4], tutorial.commands(tutorial.HERE)[4:]
    assert all("--mode scaling-test" in command for command in series)
    for command in one_by_one:
        skip_without_engine(command)
        losses = tutorial.losses(run(command, tmp_path))
        assert losses[-1] < losses[0] / 2, command  # it learns to tell the images apart
    for command in series:
        assert "2 of 2 runs completed" in run(command, tmp_path)
    runs, elsewhere = (tutorial.run_dirs(tmp_path / name) for name in ("runs", "scalability-metrics"))
    assert list(runs) == ["baseline-ddp-1x1", "baseline-ddp-1x2", "phalanx-ddp-1x1", "phalanx-ddp-1x2", "train"]
    assert list(elsewhere) == ["ddp_trainer", "deepspeed_trainer", "horovod_trainer"]
    for (run_dir,) in (runs["train"], runs["phalanx-ddp-1x1"], elsewhere["ddp_trainer"]):
        epochs = [record for record in read_records(run_dir) if isinstance(record, Epoch) and record.rank == 0]
        assert [record.epoch for record in epochs] == list(range(SMALL["epochs"]))
    for name, ranks in (("phalanx-ddp-1x1", 1), ("phalanx-ddp-1x2", 2)):
        steps = [record for record in read_records(runs[name][0]) if isinstance(record, Step)]
        assert sum(record.samples for record in steps) == IMAGES * SMALL["epochs"]
        assert len(steps) == IMAGES * SMALL["epochs"] / SMALL["batch_size"]  # of all ranks
        assert {record.rank for record in steps} == set(range(ranks))
    report(tmp_path, runs)


@pytest.mark.parametrize("engine", ["ddp", "deepspeed", "horovod"])
def test_a_script_by_hand_without_a_launcher_is_one_process(tmp_path: Path, engine: str) -> None:
    skip_without_engine(engine)
    tutorial.copy_to(tmp_path)
    for command in tutorial.commands(tutorial.DATA):
        run(command, tmp_path)
    said = run(
        f"python {engine}_trainer.py -c config/base.yaml -c config/{engine}.yaml --log-int 42 --epochs 1 --verbose",
        tmp_path,
    )
    assert "\nlog_int: 42\n" in said
    assert len(tutorial.losses(said)) == 2  # of step 0, and the last one's
    ((made,),) = tutorial.run_dirs(tmp_path / "scalability-metrics").values()
    (start,) = (record for record in read_records(made) if isinstance(record, Start))
    assert (start.world_size, start.num_nodes) == (1, 1)


def test_one_of_several_processes_that_can_not_meet_is_told_how_to_be_started(tmp_path: Path) -> None:
    """As under srun or mpirun by hand."""
    tutorial.copy_to(tmp_path)
    alone = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
             "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}  # fmt: skip
    done = subprocess.run(["python", "ddp_trainer.py", "-c", "config/small.yaml"], cwd=tmp_path, text=True,
                          env=tutorial.environment(tmp_path) | alone, capture_output=True)  # fmt: skip
    assert done.returncode == 1
    assert "this is process 1 of 2" in done.stderr
    assert "start the script by torchrun, by the engine's own launcher, or by phalanx run" in done.stderr


def report(folder: Path, runs: dict[str, list[Path]]) -> None:
    """One workload, on whose curves the scripts by hand stand beside the one with Phalanx."""
    (command,) = tutorial.commands(tutorial.REPORT)
    said = run(command, folder)
    made = folder / "scalability-report"
    assert (made / "report.html").stat().st_size > 100_000
    points = tutorial.table(made, "points.csv")
    assert len({row["workload"] for row in points}) == 1, said
    sizes = {(row["label"], row["size"]) for row in points}
    by_hand = {(f"{name} (baseline)", "1x2") for name in ("ddp", "horovod", "deepspeed")}
    assert sizes == {("ddp", "1x1"), ("ddp", "1x2"), ("ddp (baseline)", "1x1"), *by_hand}
    (alone,) = (row for row in tutorial.table(made, "comparisons.csv") if row["size"] == "1x1")
    ours, theirs = (tutorial.warm_epoch(runs[f"{name}-ddp-1x1"][0]) for name in ("phalanx", "baseline"))
    assert float(alone["ratio"]) == pytest.approx(ours / theirs, rel=1e-3)
    assert "ddp beside ddp (baseline)" in said
