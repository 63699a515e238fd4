"""A scaling test on one machine and the report on it, as a user starts both."""

import csv
import json
import os
import re
import sys

import pytest

from tests.e2e.tools import phalanx, start

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.slow

SCRIPT = """
import sys, time, torch, phalanx
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.randn(256, 8), torch.randn(256, 1))
with phalanx.init(progress=False) as run:
    model = torch.nn.Linear(8, 1)
    model, optimizer, train = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(data, 8))
    for epoch in run.epochs(3):
        for x, y in run.steps(train):
            time.sleep(0.01)
            run.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
"""
BY_HAND = """
import time, phalanx
timer = phalanx.EpochTimer("ddp", dataset=256, batch_size=8, parameters=9, precision="fp32")
for epoch in timer.epochs(4):
    time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The series' runs, one by hand, and the report with all its files."""
    folder = tmp_path_factory.mktemp("scaling")
    (folder / "train.py").write_text(SCRIPT)
    (folder / "hand.py").write_text(BY_HAND)
    more = {"cwd": folder, "env": {**os.environ, "OMP_NUM_THREADS": "1"}}
    words = ["--mode", "scaling-test", "--strategies", "ddp", "--scalability-nproc", "1,2", "measure.profile_steps=3"]
    done = phalanx(*words, "train.py", **more)
    assert done.returncode == 0, done.stderr
    assert phalanx("--nproc", "2", "hand.py", **more).returncode == 0
    return folder


@pytest.fixture(scope="module")
def report(folder):
    done = start(sys.executable, "-m", "phalanx", "report", cwd=folder)
    assert done.returncode == 0, done.stderr
    return done


def rows(folder, name):
    with open(folder / "scalability-report" / name, newline="") as file:
        return list(csv.DictReader(file))


def test_the_series_is_a_line_of_two_sizes(folder, report):
    one, two = (row for row in rows(folder, "points.csv") if row["label"] == "ddp")
    assert (one["size"], two["size"]) == ("1x1", "1x2")
    assert float(one["step_s"]) >= 0.01
    # 32 and 16 steps an epoch of 10 ms and more; a busy machine may slow down either
    assert 1.2 < float(two["speedup"]) < 4
    assert float(two["communication_share"]) > float(one["communication_share"])
    assert one["workload"].startswith(
        "hand.py, train.py: 9 parameters, 8 samples a rank and step, 256 samples an epoch"
    )


def test_the_script_by_hand_stands_beside_it(folder, report):
    (row,) = rows(folder, "comparisons.csv")
    assert (row["label"], row["against"], row["size"]) == ("ddp", "ddp (baseline)", "1x2")
    assert "ddp beside ddp (baseline)" in report.stdout


def test_no_warning_about_what_is_as_it_should_be(report):
    assert "warning" not in report.stderr


def test_the_page_and_plots_are_there(folder, report):
    names = os.listdir(folder / "scalability-report")
    assert {"report.html", "summary.md", "points.csv", "inputs.csv"} <= set(names)
    assert any(name.endswith(".png") for name in names)
    assert any(name.endswith(".svg") for name in names)
    assert str(folder / "scalability-report" / "report.html") in report.stdout


def test_records_beside_the_figures_agree(folder, report):
    """The table's epoch is what the log of the run says, from the records by hand."""
    (run,) = (path for path in (folder / "runs").glob("*ddp-1x2*/*") if path.is_dir())
    seconds: dict[int, list[float]] = {}
    for rank in (0, 1):
        for text in (run / "records" / f"{rank}.1.jsonl").read_text().splitlines():
            record = json.loads(text)
            if record["kind"] == "epoch":
                seconds.setdefault(record["epoch"], []).append(record["seconds"])
    two = next(row for row in rows(folder, "points.csv") if row["label"] == "ddp" and row["size"] == "1x2")
    assert float(two["epoch_s"]) == pytest.approx((max(seconds[1]) + max(seconds[2])) / 2)
    assert re.search(r"1x2 +1 ", report.stdout)
