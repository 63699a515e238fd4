"""Epoch-time, GPU-energy and computation files as itwinai writes them, and with what goes wrong in them."""

from __future__ import annotations

import pytest

pytest.importorskip("numpy")
from phalanx.report.read.inputs import gather

from .report_world import write_csv, write_run

GPU = "sample_idx,utilization,power,local_rank,node_idx,num_global_gpus,strategy,probing_interval"
COMPUTATION = (
    ",name,node_id,self_cuda_time_total,cuda_time_total,cuda_time_total_str,calls,strategy,num_gpus,global_rank"
)


def read(folder):
    return gather([str(folder)], folder / "runs")


def left_out(inputs, name):
    return next("; ".join(item.left_out) for item in inputs if item.path.name == name)


def test_columns_in_any_order_with_an_index_and_more_of_them(tmp_path):
    write_csv(tmp_path / "t.csv", [(0, 12.5, 0, "extra", 2, "horovod"), (1, 10, 1, "", 2, "horovod")],
              header=",time,epoch_id,other,nodes,name")  # fmt: skip
    (run,), inputs = read(tmp_path)
    assert (run.label, run.size.nodes, run.size.ranks) == ("horovod", 2, None)
    assert run.epochs.tolist() == [[0, 12.5], [1, 10]]
    assert inputs[0].used == "2 epochs: horovod on 2 nodes"


def test_floats_quotes_a_byte_order_mark_and_semicolons(tmp_path):
    (tmp_path / "t.csv").write_text(
        '\ufeff"name";"nodes";"epoch_id";"time"\n"ddp";"1.0";"0.0";"3.5"\n', encoding="utf-8"
    )
    (run,), _ = read(tmp_path)
    assert (run.label, run.epochs.tolist()) == ("ddp", [[0, 3.5]])


WORKERS = "epoch_id,time,name,workers\n0,9.5,ddp,8\n1,4.5,ddp,8\n"


@pytest.mark.parametrize(
    "text",
    [
        WORKERS.encode(),
        WORKERS.replace(",", " , ").upper().replace("DDP", "ddp").encode("utf-8-sig"),
        WORKERS.replace(",", ";").replace("\n", "\r\n").encode("utf-16"),
        WORKERS.replace(",", "\t").replace("workers", "World Size").replace("epoch_id", "Epoch ID").encode(),
        b"workers,name,,time,epoch_id\n8,ddp,0,9.5,0\n8.0,ddp,1,4.5,1\n",
        b"name,nodes,epoch_id,time,workers\nddp,,0,9.5,8\nddp,nan,1,4.5,8\n",
        b"name,workers,world_size,epoch_id,time\nddp,8,,0,9.5\nddp,,8,1,4.5\n",
        b"name,workers,num_workers,epoch_id,time\nddp,8,nan,0,9.5\nddp,NaN,8.0,1,4.5\n",
    ],
    ids=[
        "as written",
        "spaces, upper case, a mark",
        "Excel's",
        "tabs, other words",
        "other order",
        "nodes empty",
        "one of two empty",
        "one of two nan",
    ],
)
def test_files_that_tell_ranks_and_no_nodes(tmp_path, text):
    (tmp_path / "t.csv").write_bytes(text)
    (run,), inputs = read(tmp_path)
    assert (run.label, run.size.nodes, run.size.ranks, run.size.text) == ("ddp", 0, 8, "8 ranks")
    assert run.epochs.tolist() == [[0, 9.5], [1, 4.5]]
    assert inputs[0].used == "2 epochs: ddp on 8 ranks"


def test_nodes_of_ranks_follow_from_what_lies_beside_or_from_the_option(tmp_path):
    write_csv(
        tmp_path / "t.csv", [(0, 9, "ddp", 8), (0, 8, "ddp", 4), (0, 8, "ddp", 2)], header="epoch_id,time,name,workers"
    )
    write_csv(tmp_path / "old.csv", [("horovod", 2, 0, 9)])
    runs, _ = gather([str(tmp_path)], tmp_path / "runs", ranks_a_node=4)
    assert sorted((run.size.text, run.size.nodes) for run in runs) == [("1x2", 1), ("1x4", 1), ("2x4", 2), ("2x4", 2)]
    root = metrics(tmp_path / "beside", computation=False)  # GPU files: 4 a node
    for table in root.glob("*/epoch-time/*.csv"):
        nodes = int(table.stem[-2])
        write_csv(table, [(0, 99, "torch-ddp", 4 * nodes), (1, 20.0, "torch-ddp", 4 * nodes)],
                  header="epoch_id,time,name,workers")  # fmt: skip
    runs, _ = read(root)
    assert sorted((run.size.text, run.gpu_utilisation) for run in runs) == [("1x4", 70), ("2x4", 70)]


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ("epoch_id,time,name", "its columns are epoch_id, time, name: nodes or ranks missing; expected epoch_id, name, "
                               "time, and nodes or ranks (also called workers)"),
        ("time,name,workers", "its columns are time, name, ranks: epoch_id missing; expected epoch_id, name"),
        ("epoch_id,seconds,name", "time and nodes or ranks missing"),
    ],
)  # fmt: skip
def test_columns_that_are_missing_are_named(tmp_path, header, said):
    write_csv(tmp_path / "t.csv", [(0, 9, "ddp")], header=header)
    runs, inputs = read(tmp_path)
    assert runs == []
    assert said in left_out(inputs, "t.csv")


def test_ranks_that_are_none_are_named(tmp_path):
    rows = [(0, 9, "ddp", 0), (0, 9, "ddp", -4), (0, 9, "ddp", 2.5), (0, 9, "ddp", ""), (0, 9, "ddp", 2)]
    write_csv(tmp_path / "t.csv", rows, header="epoch_id,time,name,workers")
    (run,), inputs = read(tmp_path)
    assert run.size.ranks == 2
    said = "line 2, line 3, line 4, line 5: not a whole row, or a number of nodes or ranks that isn't one"
    assert said in left_out(inputs, "t.csv")


def test_a_copy_without_nodes_of_what_records_tell_is_no_repeat(tmp_path):
    write_run(tmp_path / "runs" / "t" / "a", [9.25, 8.5], ranks=2, nodes=1)
    write_csv(tmp_path / "t.csv", [(0, 9.25, "ddp", 2), (1, 8.5, "ddp", 2)], header="epoch_id,time,name,workers")
    runs, inputs = read(tmp_path)
    assert len(runs) == 1
    assert "the same times as in" in left_out(inputs, "t.csv")


def test_rows_that_cannot_be_used_are_named(tmp_path):
    rows = [("ddp", 1, 0, 9), ("ddp", -1, 0, 9), ("ddp", "unk", 1, 9), ("ddp", 1, 1, "nan"), ("ddp", 1, 2, -4),
            ("ddp", 1, 3, 8), ("ddp", 1, 3, 8), ("ddp", 1)]  # fmt: skip
    write_csv(tmp_path / "t.csv", rows)
    (run,), inputs = read(tmp_path)
    assert run.epochs.tolist() == [[0, 9], [3, 8]]
    said = left_out(inputs, "t.csv")
    assert "line 3, line 4, line 9: not a whole row, or a number of nodes or ranks that isn't one" in said
    assert "line 5 (ddp, 1 node, epoch 1): its time is not a number" in said
    assert "line 6: a time that isn't above zero: a clock ran backwards" in said
    assert "ddp on 1 node: 1 row twice" in said


def test_epochs_that_begin_anew_are_another_run(tmp_path):
    write_csv(tmp_path / "t.csv", [("ddp", 1, 0, 9), ("ddp", 1, 1, 8), ("ddp", 1, 0, 9.5), ("ddp", 1, 1, 8.5)])
    runs, _ = read(tmp_path)
    assert [run.epochs[:, 1].tolist() for run in runs] == [[9, 8], [9.5, 8.5]]
    assert len({run.run_id for run in runs}) == 2


def test_a_copy_of_a_file_is_no_repeat(tmp_path):
    for name in ("a", "b"):
        write_csv(tmp_path / name / "t.csv", [("ddp", 1, 0, 9), ("ddp", 1, 1, 8)])
    runs, inputs = read(tmp_path)
    assert len(runs) == 1
    assert "the same times as in" in inputs[1].left_out[0]


def test_other_files_are_named_with_what_was_expected(tmp_path):
    write_csv(tmp_path / "loss.csv", [(1, 2)], header="step,loss")
    (tmp_path / "empty.csv").write_text("\n")
    write_csv(tmp_path / "head.csv", [])
    runs, inputs = read(tmp_path)
    assert runs == []
    assert "its columns are step, loss: expected epoch_id, name, time, and nodes or ranks" in left_out(
        inputs, "loss.csv"
    )
    assert left_out(inputs, "empty.csv") == "empty"
    assert left_out(inputs, "head.csv") == "no rows below its header"


def metrics(root, gpu=True, computation=True):
    """Two sizes of 4 GPUs a node under itwinai's folders: 400 W and 300 W for 3 samples, a second apart."""
    for nodes, time, watts in ((1, 20.0, 400), (2, 12.0, 300)):
        run = root / f"run{nodes}"
        gpus = nodes * 4
        write_csv(run / "epoch-time" / f"epochtime_torch-ddp_{nodes}N.csv",
                  [("torch-ddp", nodes, 0, 99), ("torch-ddp", nodes, 1, time)])  # fmt: skip
        if gpu:
            write_csv(run / "gpu-energy-data" / f"ddp_{gpus}.csv",
                      [(index, 50 + 20 * index, watts, rank % 4, rank // 4, gpus, "ddp", 1)
                       for index in range(3) for rank in range(gpus)], header=GPU)  # fmt: skip
        if computation:
            for rank in range(gpus):
                write_csv(run / "computation-data" / f"ddp_{gpus}_{rank}.csv",
                          [(0, "aten::mm", -1, 6e6, 6e6, "6s", 10, "ddp", gpus, rank, 10.0),
                           (1, "nccl:all_reduce", -1, 2e6, 2e6, "2s", 5, "ddp", gpus, rank, 10.0),
                           (2, "cudaLaunchKernel", -1, 0, 0, "0", 5, "ddp", gpus, rank, 10.0)],
                          header=COMPUTATION + ",profiling_time")  # fmt: skip
    return root


def test_the_three_kinds_of_an_experiment_are_joined(tmp_path):
    runs, inputs = read(metrics(tmp_path / "scalability-metrics"))
    one, two = sorted(runs, key=lambda run: run.size)
    assert (one.size.text, two.size.text) == ("1x4", "2x4")
    assert (one.energy, two.energy) == (400 * 3 * 4, 300 * 3 * 8)  # joules
    assert one.gpu_utilisation == pytest.approx(70)
    assert (one.window.compute / one.window.seconds, one.window.communication / one.window.seconds) == (0.6, 0.2)
    assert all(item.used for item in inputs)


def test_gpus_a_node_without_gpu_files(tmp_path):
    """Computation files tell GPUs only: one number of GPUs a node fits all sizes, or they are left out."""
    runs, _ = read(metrics(tmp_path / "fits", gpu=False))
    assert sorted(run.size.text for run in runs) == ["1x4", "2x4"]
    broken = metrics(tmp_path / "broken", gpu=False)
    (broken / "run1" / "computation-data" / "ddp_4_0.csv").rename(broken / "run1" / "computation-data" / "x.csv")
    text = (broken / "run1" / "computation-data" / "x.csv").read_text().replace("ddp,4,0", "ddp,3,0")
    (broken / "run1" / "computation-data" / "x.csv").write_text(text)
    runs, inputs = read(broken)
    assert {run.size.ranks for run in runs} == {None}
    assert "how many GPUs a node has isn't known" in left_out(inputs, "x.csv")


def test_computation_without_its_duration_is_a_share_of_kernel_time(tmp_path):
    write_csv(tmp_path / "epoch-time" / "e.csv", [("ddp", 1, 0, 9), ("ddp", 1, 1, 8)])
    write_csv(tmp_path / "communication-data" / "ddp_4_0.csv",
              [(0, "aten::mm", -1, 6e6, 6e6, "", 1, "ddp", 4, 0),
               (1, "nccl:all_reduce", -1, 2e6, 2e6, "", 1, "ddp", 4, 0)],
              header=COMPUTATION)  # fmt: skip
    (run,), inputs = read(tmp_path)
    assert run.window.communication / run.window.seconds == pytest.approx(0.25)
    assert "no profiling_time" in "; ".join(note for item in inputs for note in item.notes)


def test_gpu_files_of_one_run_and_of_repeats(tmp_path):
    """100 W and a second for each of 5 samples: 500 J a GPU, 2 kJ a node of four, 4 kJ of two nodes; 12 kJ at 300 W."""
    times = [("ddp", gpus // 4, e, 8 / gpus) for gpus in (4, 8) for e in range(3)]

    def samples(nodes, watts=100):
        return [(i, 50, watts, rank, node, 8, "ddp", 1) for i in range(5) for node in nodes for rank in range(4)]

    files = {"a_node": [samples([0]), samples([1])], "repeats": [samples([0, 1]), samples([0, 1], 300)],
             "half": [samples([1])]}  # fmt: skip
    notes = {}
    for name, energy in {"a_node": 4000, "repeats": 8000, "half": 2000}.items():
        write_csv(tmp_path / name / "epoch-time" / "t.csv", times)
        for index, rows in enumerate(files[name]):
            write_csv(tmp_path / name / "gpu-energy-data" / f"ddp_8_{index}.csv", rows, header=GPU)
        runs, inputs = gather([str(tmp_path / name)], tmp_path / "runs", ranks_a_node=4)
        assert [(run.size.text, run.energy) for run in runs] == [("1x4", None), ("2x4", energy)]
        notes[name] = [note for item in inputs for note in item.notes if "GPUs:" in note]
    assert notes == {
        "a_node": [],
        "repeats": ["ddp on 8 GPUs: 2 files of the same GPUs: the mean of their figures"],
        "half": ["ddp on 8 GPUs: samples of 4 of them only, and its energy is theirs"],
    }


@pytest.mark.parametrize("power", ["nan", "[N/A]", "inf", ""])
def test_the_energy_of_samples_without_power_is_not_known(tmp_path, power):
    rows = [(i, 80, power if i == 1 else 100, 0, 0, 1, "ddp", 1) for i in range(4)]
    write_csv(tmp_path / "gpu-energy-data" / "ddp_1.csv", rows, header=GPU)
    (run,), inputs = read(tmp_path)
    assert (run.gpu_utilisation, run.energy) == (80, None)
    assert "ddp on 1 GPU: 1 sample without power, so that its energy isn't known" in inputs[0].notes


def test_gpu_files_alone_are_points_without_times(tmp_path):
    write_csv(tmp_path / "gpu-energy-data" / "ddp_4.csv", [(0, 80, 100, 0, 0, 4, "ddp", 2)], header=GPU)
    (run,), _ = read(tmp_path)
    assert (run.size.text, run.energy, run.gpu_utilisation) == ("1x4", 200, 80)


def test_cut_rows_and_a_file_that_is_no_csv(tmp_path):
    write_csv(tmp_path / "gpu-energy-data" / "ddp_4.csv", [(0, 80, 100, 0, 0, 4, "ddp", 2), (1, 80)], header=GPU)
    write_csv(tmp_path / "computation-data" / "c.csv", [(0, "aten::mm")], header=COMPUTATION)
    (tmp_path / "blob.csv").write_bytes(b"name,nodes,epoch_id,time\n" + b"x" * 200_000)
    (run,), inputs = read(tmp_path)
    assert run.energy == 200
    assert "no CSV file: field larger than field limit" in left_out(inputs, "blob.csv")


def test_a_file_that_repeats_a_runs_records_is_no_repeat(tmp_path):
    """EpochTimer writes both, if asked."""
    write_run(tmp_path / "hand" / "id", [9.25, 8.1], api="epoch-timer", only=[0], ranks=2)
    write_csv(tmp_path / "times.csv", [("ddp", 1, 0, 9.25), ("ddp", 1, 1, 8.1)])
    runs, inputs = read(tmp_path)
    assert [run.label for run in runs] == ["ddp (baseline)"]
    assert "the same times as in" in left_out(inputs, "times.csv")


def test_another_time_of_an_epoch_is_no_run_and_repeats_may_lie_in_any_order(tmp_path):
    lines = ["name,nodes,epoch_id,time", "ddp,1,0,9", "ddp,1,0,8", "ddp,1,1,5", "ddp,1,1,6", "ddp,2,0,4", "ddp,2,1,3"]
    (tmp_path / "t.csv").write_text("\n".join([*lines, "ddp,2,1,3.5"]) + "\n")
    runs, (item,) = read(tmp_path)
    times = {(run.size.nodes, run.run_id): run.epochs.tolist() for run in runs}
    assert sorted(times.values()) == [[[0, 4], [1, 3]], [[0, 8], [1, 6]], [[0, 9], [1, 5]]]
    assert "ddp on 2 nodes: another time of epoch 1" in item.left_out


def test_times_and_nodes_that_cannot_be(tmp_path):
    rows = [("ddp", 1, 0, 5), ("ddp", 1, 1, "1e300"), ("ddp", 2, 0, "1e-300"), ("ddp", "1e30", 0, 5)]
    write_csv(tmp_path / "t.csv", rows, header="name,nodes,epoch_id,time")
    (run,), (item,) = read(tmp_path)
    assert run.epochs.tolist() == [[0, 5]]
    assert "lines 3, 4" in "; ".join(item.left_out) or "line 3, line 4" in "; ".join(item.left_out)
    assert "line 5: not a whole row, or a number of nodes or ranks that isn't one" in item.left_out


def test_rows_with_more_fields_than_the_header_are_no_rows(tmp_path):
    """As decimal commas make them."""
    (tmp_path / "t.csv").write_text("name,nodes,epoch_id,time\nddp,1,0,10,5\nddp,1,1,9\nddp,1,2,8,\n")
    (run,), (item,) = read(tmp_path)
    assert run.epochs.tolist() == [[1, 9], [2, 8]]
    assert "line 2: not a whole row, or a number of nodes or ranks that isn't one" in item.left_out


def test_sizes_that_contradict_themselves_are_left_out(tmp_path):
    write_csv(tmp_path / "more.csv", [("ddp", 8, 4, 0, 5), ("ddp", 1, 4, 0, 5), ("ddp", 1, 4, 1, 5)],
              header="name,nodes,workers,epoch_id,time")  # fmt: skip
    write_csv(tmp_path / "two.csv", [("fsdp", 4, 8, 0, 5), ("fsdp", 4, 4.0, 0, 6)],
              header="name,workers,world_size,epoch_id,time")  # fmt: skip
    runs, inputs = read(tmp_path)
    assert [(run.label, run.size.text, len(run.epochs)) for run in runs] == [("ddp", "1x4", 2), ("fsdp", "1x4", 1)]
    assert left_out(inputs, "more.csv") == "line 2 (8 and 4): more nodes than ranks"
    assert left_out(inputs, "two.csv") == "line 2: columns of one meaning tell different numbers"


def test_nodes_follow_from_rows_that_tell_both(tmp_path):
    write_csv(tmp_path / "a.csv", [("ddp", 1, 4, 0, 5)], header="name,nodes,workers,epoch_id,time")
    write_csv(tmp_path / "b.csv", [("ddp", 8, 0, 3)], header="name,workers,epoch_id,time")
    runs, inputs = read(tmp_path)
    assert [run.size.text for run in runs] == ["1x4", "2x4"]
    assert [(item.path.name, item.notes) for item in inputs] == [
        ("a.csv", ()),
        ("b.csv", ("4 ranks a node, as rows tell that have both",)),
    ]


def test_a_repeated_run_keeps_the_times_that_it_shares_with_the_first(tmp_path):
    """Whole seconds are equal often; a row that is there twice makes no run."""
    first, again = [(0, 20), (1, 10), (2, 10)], [(0, 20), (1, 11), (2, 10)]
    write_csv(tmp_path / "t.csv", [("ddp", 1, *row) for row in [*first, *again, (2, 10)]])
    runs, inputs = read(tmp_path)
    assert [run.epochs.tolist() for run in runs] == [[list(row) for row in rows] for rows in (first, again)]
    assert left_out(inputs, "t.csv") == "ddp on 1 node: 1 row twice"


def test_names_bring_no_control_characters_into_a_report(tmp_path):
    (tmp_path / "t.csv").write_text('name,nodes,epoch_id,time\n"d\x1b[31mp\x07",1,0,5\n')
    write_run(tmp_path / "r", [5, 4], strategy="f\x1b[2J\nsdp", script="t\r.py")
    one, two = read(tmp_path)[0]
    assert (one.label, one.work.name) == ("f\ufffd[2J\ufffdsdp", "t\ufffd.py")
    assert two.label == "d\ufffd[31mp\ufffd"
