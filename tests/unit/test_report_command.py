"""`phalanx report` from the command line to its files, on times whose answers are known in closed form."""

from __future__ import annotations

import csv
import json
import os
import sys

import pytest

from phalanx.cli.main import main
from phalanx.records import Workload

from .report_world import write_csv, write_run

pytest.importorskip("numpy")
pytest.importorskip("matplotlib")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", {**os.environ, "XDG_CONFIG_HOME": str(tmp_path / "config"), "COLUMNS": "100"})
    # Plots and the page have tests of their own, and cost a second each.
    monkeypatch.setattr("phalanx.report.command.find_spec", lambda name: None)
    return tmp_path


def report(*words):
    return main(["report", *map(str, words)])


def points(folder="scalability-report"):
    with open(f"{folder}/points.csv", newline="") as file:
        return list(csv.DictReader(file))


def scale_1(folder):
    """One node [50, 10, 10, 10] s, two nodes [26, 6, 6, 6] s."""
    for nodes, times in ((1, [50, 10, 10, 10]), (2, [26, 6, 6, 6])):
        write_csv(
            folder / f"epochtime_ddp_{nodes}N.csv", [("ddp", nodes, epoch, time) for epoch, time in enumerate(times)]
        )


def test_the_warm_up_epoch_is_left_out_and_said_so(here, capsys):
    scale_1(here / "scalability-metrics" / "epoch-time")
    assert report() == 0
    one, two = points()
    assert float(one["epoch_s"]) == 10
    assert float(two["epoch_s"]) == 6
    assert float(two["speedup"]) == pytest.approx(10 / 6)
    assert float(two["efficiency"]) == pytest.approx(10 / 12)
    assert two["base"] == "1 node"
    out = capsys.readouterr().out
    assert "the first epoch of each run left out as warm-up" in out
    assert "1.67" in out


def test_raw_times_on_request_and_said_so(here, capsys):
    scale_1(here / "times")
    assert report("times", "--warmup-epochs", "0") == 0
    assert float(points()[1]["speedup"]) == pytest.approx(80 / 44)
    assert "raw: no warm-up epoch left out" in capsys.readouterr().out


def test_nan_and_empty_inputs_are_named_and_the_order_is_numeric(here, capsys):
    write_csv(
        here / "m" / "times.csv", [("ddp", 1, 0, 100), ("ddp", 2, 0, "NaN"), ("ddp", 4, 0, 30), ("ddp", 16, 0, 10)]
    )
    (here / "m" / "empty.csv").write_text("")
    assert report("m") == 0
    assert [(row["nodes"], float(row["epoch_s"])) for row in points()] == [("1", 100), ("4", 30), ("16", 10)]
    out, err = capsys.readouterr()
    assert "Read: 1 input of 2" in out
    assert "empty.csv" in err
    assert "times.csv" in err
    assert "warning" in err
    assert "warm-up is in its times" in err


def test_nothing_but_nan_is_an_error_and_leaves_no_files(here, capsys):
    write_csv(here / "times.csv", [("ddp", 1, 0, "NaN"), ("ddp", 2, 0, "nan")])
    assert report("times.csv") == 2
    assert "times.csv" in capsys.readouterr().err
    assert os.listdir(here) == ["times.csv"]


def test_an_older_report_survives_a_failed_one(here):
    scale_1(here / "times")
    assert report("times", "--out", "r") == 0
    before = {name: (here / "r" / name).read_bytes() for name in os.listdir("r")}
    (here / "bad.csv").write_text("name,nodes,epoch_id,time\n")
    assert report("bad.csv", "--out", "r") == 2
    assert {name: (here / "r" / name).read_bytes() for name in os.listdir("r")} == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "nowhere"),
        (["--warmup-epochs", "two"], "--warmup-epochs two: expected a whole number"),
        (["--warmup-epochs=-1"], "expected a whole number from 0"),
        (["--efficiency", "70"], "--efficiency 70: expected a number above 0 and up to 1"),
        (["--epochs", "0"], "--epochs 0"),
        (["--out", "file.txt"], "there is a file of that name"),
        (["--out", "a", "--plot-dir", "b"], "are the same option"),
        ([], "expected run directories"),
    ],
)
def test_words_that_cannot_be_meant(here, capsys, words, said):
    (here / "file.txt").write_text("")
    assert report(*words) == 2
    assert said in capsys.readouterr().err


def test_run_directories_strong_scaling(here):
    for ranks, epoch in ((1, 8.0), (2, 5.0), (4, 4.0)):
        write_run(here / "runs" / "train" / f"r{ranks}", [20.0, epoch, epoch, epoch], ranks)
    assert report() == 0
    assert [row["size"] for row in points()] == ["1x1", "1x2", "1x4"]
    assert [float(row["efficiency"]) for row in points()] == pytest.approx([1, 0.8, 0.5])
    # 100 epochs of 4 s on 4 devices
    assert float(points()[2]["to_epochs_s"]) == pytest.approx(400)
    assert float(points()[2]["device_hours"]) == pytest.approx(400 * 4 / 3600)


def test_weak_scaling_counts_the_work_that_grows(here):
    for ranks, epoch in ((1, 8.0), (2, 10.0)):
        work = Workload(1000, 4000, 8, 1, 800 * ranks, "fp32")
        write_run(here / "runs" / "train" / f"r{ranks}", [20.0, epoch, epoch, epoch], ranks, work=work, scaling="weak")
    assert report() == 0
    two = points()[1]
    assert float(two["efficiency"]) == pytest.approx(0.8)
    assert float(two["speedup"]) == pytest.approx(1.6)


def test_nodes_by_ranks_are_points_of_their_own(here):
    for nodes, ranks, epoch in ((1, 4, 6.0), (2, 4, 7.0), (1, 1, 20.0)):
        write_run(here / "runs" / "train" / f"r{nodes}-{ranks}", [9.0, epoch, epoch], ranks, nodes)
    assert report() == 0
    assert [(row["size"], float(row["epoch_s"])) for row in points()] == [("1x1", 20), ("1x4", 6), ("2x2", 7)]


def test_other_workloads_are_never_one_curve(here, capsys):
    for name, parameters, epoch in (("small", 1000, 4.0), ("large", 9000, 40.0)):
        for ranks in (1, 2):
            work = Workload(parameters, 4 * parameters, 8, 1, 800, "fp32")
            write_run(here / "runs" / name / f"{name}{ranks}", [9.0, epoch / ranks, epoch / ranks], ranks, work=work)
    assert report() == 0
    assert len({row["workload"] for row in points()}) == 2
    assert [float(row["speedup"]) for row in points()] == pytest.approx([1, 2, 1, 2])
    assert "workload" in capsys.readouterr().err


def test_one_size_has_no_speedup_and_says_so(here, capsys):
    write_run(here / "runs" / "train" / "only", [9.0, 4.0, 4.0], 2)
    assert report() == 0
    (row,) = points()
    assert row["size"] == "1x2"
    assert "Only 1x2" in capsys.readouterr().out


def test_a_baseline_is_compared_at_equal_size(here, capsys):
    write_run(here / "runs" / "hand" / "h2", [9.0, 5.0, 5.0, 5.0], 2, api="epoch-timer", only=[0], script="hand.py")
    write_run(here / "runs" / "train" / "t2", [9.0, 5.1, 5.1, 5.1], 2)
    write_run(here / "runs" / "train" / "t4", [9.0, 3.0, 3.0, 3.0], 4)
    assert report() == 0
    with open("scalability-report/comparisons.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["label"], row["against"], row["size"], row["of"]) == ("ddp", "ddp (baseline)", "1x2", "epoch")
    assert float(row["ratio"]) == pytest.approx(1.02)
    assert "2.0% longer" in capsys.readouterr().out


def test_json_holds_the_figures_and_no_warnings_mix_in(here, capsys):
    scale_1(here / "times")
    assert report("times", "--json", "--title", "Mine") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["title"] == "Mine"
    line = found["groups"][0]["lines"][0]
    assert [point["size"]["nodes"] for point in line["points"]] == [1, 2]
    assert line["points"][1]["speedup"]["value"] == pytest.approx(10 / 6)
    assert all(os.path.exists(path) for path in found["files"])


def test_options_of_itwinai_are_aliases(here):
    scale_1(here / "metrics")
    assert report("--log-dir", "metrics", "--plot-dir", "plots", "--experiment-name", "exp") == 0
    with open("plots/summary.md") as file:
        assert file.readline() == "# exp\n"


def test_a_series_by_its_name(here):
    for ranks in (1, 2, 4):
        run = write_run(here / "runs" / f"s-ddp-1x{ranks}" / "id", [9.0, 8.0 / ranks, 8.0 / ranks], ranks)
        (run / "jobs").mkdir()
        (run / "jobs" / "1.json").write_text(json.dumps({"series": "s" if ranks < 4 else "other"}))
    assert report("s") == 0
    assert [row["size"] for row in points()] == ["1x1", "1x2"]


def test_the_epochs_table_is_an_input_again(here):
    scale_1(here / "times")
    assert report("times", "--out", "one") == 0
    assert report("one/epochs.csv", "--out", "two") == 0
    assert [float(row["epoch_s"]) for row in points("two")] == [10, 6]


def test_without_the_extra_the_error_names_it(here, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    scale_1(here / "times")
    assert report("times") == 2
    assert "pip install 'phalanx[report]'" in capsys.readouterr().err


def test_weak_for_inputs_that_do_not_tell(here):
    scale_1(here / "times")
    assert report("times", "--scaling", "weak") == 0
    assert [row["scaling"] for row in points()] == ["weak", "weak"]
    assert float(points()[1]["speedup"]) == pytest.approx(2 * 10 / 6)


def test_a_report_is_no_input_of_the_next(here):
    scale_1(here / "times")
    assert report("times", "--out", "times/report") == 0
    assert report("times", "--out", "again") == 0
    assert [row["runs"] for row in points("again")] == ["1", "1"]


def test_ranks_of_unknown_nodes_are_the_axis_and_an_option_tells_the_nodes(here, capsys):
    rows = [(epoch, seconds, "ddp", ranks) for ranks, seconds in ((4, 20), (8, 11)) for epoch in range(3)]
    write_csv(here / "t.csv", rows, header="epoch_id,time,name,workers")
    assert report("t.csv") == 0
    assert "how many nodes these ranks were on isn't told: --ranks-per-node N" in capsys.readouterr().out
    assert [(row["size"], row["nodes"], row["ranks"]) for row in points()] == [
        ("4 ranks", "", "4"),
        ("8 ranks", "", "8"),
    ]
    assert report("t.csv", "--ranks-per-node", "4") == 0
    assert [(row["size"], row["nodes"], row["ranks"]) for row in points()] == [("1x4", "1", "4"), ("2x4", "2", "8")]
    assert report("t.csv", "--ranks-per-node", "0") == 2
    assert "--ranks-per-node 0: expected a whole number from 1" in capsys.readouterr().err
