"""Run directories as a report reads them: against `read_records`, and with what goes wrong in them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest

np = pytest.importorskip("numpy")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from phalanx.records import (  # noqa: E402
    _STEP_LINE,
    AllReduce,
    Epoch,
    Gpu,
    Profile,
    RecordWriter,
    Resume,
    Start,
    Step,
    Workload,
    parse,
    read_records,
)
from phalanx.report.read.inputs import gather  # noqa: E402
from phalanx.report.read.runs import read_run  # noqa: E402
from phalanx.report.read.steplines import COLUMNS, parse_lines  # noqa: E402

from .report_world import write_run  # noqa: E402

_SECONDS = st.floats(allow_nan=False, allow_infinity=False, width=32)


@st.composite
def step_lines(draw):
    numbers = draw(st.tuples(st.floats(0, 1e9), st.integers(0, 10**7), st.integers(0, 999), _SECONDS, _SECONDS,
                             st.integers(0, 10**6)))  # fmt: skip
    return _STEP_LINE % numbers


@st.composite
def files(draw):
    """Our own lines, other kinds, and lines that were cut or changed anywhere."""
    lines = draw(st.lists(step_lines(), max_size=8))
    whole = b"".join(lines) + draw(
        st.sampled_from([b"", b'{"v": 1, "kind": "epoch", "time": 1.0, "epoch": 0, "step": 3, "seconds": 2}\n'])
    )
    for _ in range(draw(st.integers(0, 3))):
        where = draw(st.integers(0, len(whole)))
        junk = draw(
            st.sampled_from([b"", b"\n", b"0", b"-", b".", b"e", b"9", b",", b"}", b'"', b"\xff", b"NaN", b" "])
        )
        gone = draw(st.integers(0, 3))
        whole = whole[:where] + junk + whole[where + gone :]
    return whole[: draw(st.integers(0, len(whole)))] if draw(st.booleans()) else whole


def _known(steps):
    """Rows in an order of their own, as text: NaN is itself, and -0 is 0. A line without a time gets the present."""
    return sorted(repr([0.0 if row[0] > 1e9 else row[0], *row[1:]]) for row in (steps + 0.0).tolist())


def _sound(record):
    """None for a record whose counts are no counts, or whose seconds are no number."""
    counts = ("step", "epoch", "samples")
    values = [(name, getattr(record, name)) for name in (*counts, "seconds", "wait", "time") if hasattr(record, name)]
    sound = [isinstance(v, int) and 0 <= v < 2**63 if n in counts else isinstance(v, (int, float)) for n, v in values]
    return record if all(sound) else None


@given(files())
@settings(max_examples=150, deadline=None)
def test_the_fast_way_reads_what_the_json_parser_reads(data):
    expected = [_sound(parse(line.decode("utf-8", "replace"), 3, 1)) for line in data.split(b"\n")]
    steps = np.array([[float(getattr(r, name)) for name in COLUMNS] for r in expected if isinstance(r, Step)])
    found = parse_lines(data, 3, 1)
    assert _known(found.steps) == _known(steps.reshape(-1, len(COLUMNS)))
    others = [replace(r, time=0.0) for r in expected if r is not None and not isinstance(r, Step)]
    assert [replace(r, time=0.0) for r in found.others] == others
    assert found.bad == sum(1 for line, r in zip(data.split(b"\n"), expected, strict=True) if line and r is None)


@st.composite
def attempts(draw):
    """Each attempt's ranks and steps, and the step that it resumed from."""
    ranks = draw(st.integers(1, 3))
    found, last = [], 0
    for number in range(draw(st.integers(1, 3))):
        resumed = draw(st.integers(0, last)) if number and draw(st.booleans()) else None
        first = (resumed or 0) + 1
        last = max(last, first + draw(st.integers(0, 5)) - 1)
        found.append((resumed, range(first, last + 1)))
    return ranks, found


@given(attempts(), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_attempts_are_merged_as_read_records_does(tmp_path_factory, history, every):
    ranks, found = history
    folder = tmp_path_factory.mktemp("run")
    for number, (resumed, steps) in enumerate(found, 1):
        for rank in range(ranks):
            writer = RecordWriter(folder, rank, number)
            writer.write(Start(ranks, rank, 0, "h", 1, "cpu", "ddp", {}, num_nodes=1))
            if resumed is not None:
                writer.write(Resume(resumed, 0, "p"))
            for step in steps:
                writer.step(step, 0, number + rank / 10, 0.25, 4)
                if step % every == 0:
                    writer.write(Epoch(step, step, float(number)))
            writer.close()
    truth = [record for record in read_records(folder) if isinstance(record, Step)]
    slowest = {step: max(r.seconds for r in truth if r.step == step) for step in {r.step for r in truth}}
    run, _ = read_run(folder)
    rows = {} if run is None else {int(row[0]): row[2] for row in run.steps}
    assert rows == pytest.approx(slowest)
    epochs = {r.epoch: r.seconds for r in read_records(folder) if isinstance(r, Epoch)}
    assert run is None or dict(run.epochs.tolist()) == pytest.approx(epochs)


def test_ranks_together(tmp_path):
    for rank, (seconds, wait) in enumerate(((0.5, 0.1), (0.4, 0.3))):
        writer = RecordWriter(tmp_path, rank, 1)
        writer.write(Start(2, rank, rank, f"h{rank}", 1, "cuda:0 (NVIDIA H100)", "fsdp", {}, num_nodes=2))
        writer.step(1, 0, seconds, wait, 16 + rank)
        writer.write(Gpu(10.0, 80.0 + 10 * rank, 1000.0, 500.0))
        writer.write(Profile(5, 2, 2.0, 1.0, 0.6, 0.2 * (rank + 1)))
        writer.close()
    run, looked_at = read_run(tmp_path)
    assert run.steps.tolist() == [[1, 0, 0.5, pytest.approx(0.2), 33]]  # slowest, mean, sum
    assert (run.size.text, run.label) == ("2x1", "fsdp")
    assert (run.gpu_utilisation, run.energy) == (85.0, 1000.0)
    assert (run.window.seconds, run.window.communication, run.window.exposed) == (1.0, 0.3, pytest.approx(0.15))
    assert "2 ranks, 1 step" in looked_at.used
    assert "it runs still, or was killed" in looked_at.notes[0]


def test_profiled_steps_and_their_epoch_are_left_out(tmp_path):
    profile = Profile(step=5, steps=2, seconds=1.0, compute=0.5, communication=0.1, exposed=0.1)
    write_run(tmp_path, [9.0, 8.0, 7.0, 7.0, 7.0], steps=4, profile=profile)
    run, looked_at = read_run(tmp_path)
    assert sorted(set(range(1, 21)) - set(run.steps[:, 0])) == [5, 6]
    assert run.epochs[:, 0].tolist() == [0, 2, 3, 4]
    assert looked_at.left_out == ("steps 5 to 6: profiled", "epoch 1: a profiled window in it")
    assert run.samples == 20 * 8  # of the whole run


def test_what_cannot_be_true_is_left_out_and_named(tmp_path):
    writer = RecordWriter(tmp_path, 0, 1)
    writer.write(Start(1, 0, 0, "h", 1, "cpu", "ddp", {}, num_nodes=1))
    for step, seconds in enumerate((0.1, -0.2, float("nan"), 0.3, 0.3), 1):
        writer.write(Step(step=step, epoch=0, seconds=seconds, wait=0.0, samples=8))
    writer.write(Step(step=5, epoch=0, seconds=0.4, wait=0.0, samples=8))
    writer.write(Epoch(0, 5, -3.0, time=1.0))  # 1970: the clock went back
    writer.close()
    with (tmp_path / "records" / "0.1.jsonl").open("a") as file:
        file.write('{"v": 1, "kind": "step", "tim')
    run, looked_at = read_run(tmp_path)
    assert run.steps[:, [0, 2]].tolist() == [[1, 0.1], [4, 0.3], [5, 0.4]]
    assert len(run.epochs) == 0
    left_out = "; ".join(looked_at.left_out)
    assert "1 line cut off" in left_out
    assert "step 3: not a number" in left_out
    assert "step 2: no time, or less than none: a clock ran backwards" in left_out
    assert "epoch 0: no time, or less than none" in left_out
    assert "1 row of steps that a rank recorded twice" in left_out
    assert "the clock was set back" in "; ".join(looked_at.notes)


def test_missing_ranks_are_named_and_samples_are_of_all(tmp_path):
    write_run(tmp_path, steps=3, ranks=4, only=[0, 2])
    run, looked_at = read_run(tmp_path)
    assert "ranks 1, 3 of 4: no records" in looked_at.notes[0]
    assert run.steps[:, 4].tolist() == [32, 32, 32]


def test_steps_that_not_all_ranks_finished_are_left_out(tmp_path):
    for rank, steps in ((0, 5), (1, 3)):
        writer = RecordWriter(tmp_path, rank, 1)
        writer.write(Start(2, rank, 0, "h", 1, "cpu", "ddp", {}, num_nodes=1))
        for step in range(1, steps + 1):
            writer.step(step, 0, 0.1, 0.0, 4)
        writer.close()
    run, looked_at = read_run(tmp_path)
    assert run.steps[:, 0].tolist() == [1, 2, 3]
    assert "steps 4 to 5: some ranks have no record of it" in looked_at.left_out[0]


def test_a_restart_of_another_size_is_one_point_of_the_newest(tmp_path):
    write_run(tmp_path, [5.0, 5.0], ranks=4, steps=2, ends=False)
    write_run(tmp_path, [9.0, 8.0], ranks=2, steps=2, attempt=2)
    run, looked_at = read_run(tmp_path)
    assert run.size.ranks == 2
    assert run.epochs[:, 1].tolist() == [9.0, 8.0]
    assert "attempt 1: of another number of ranks or strategy (4 under ddp)" in looked_at.left_out[0]


def test_an_epoch_that_was_resumed_inside_is_left_out(tmp_path):
    write_run(tmp_path, [9.0, 8.0], steps=4, ends=False)
    writer = RecordWriter(tmp_path, 0, 2)
    writer.write(Start(1, 0, 0, "host0", 7, "cpu", "ddp", {}, num_nodes=1, time=1_700_000_100.0))
    writer.write(Resume(6, 1, "p"))
    for step, epoch in ((7, 1), (8, 1), (9, 2), (10, 2)):
        writer.step(step, epoch, 0.1, 0.0, 8)
    writer.write(Epoch(1, 8, 2.0))
    writer.write(Epoch(2, 10, 7.0))
    writer.close()
    run, looked_at = read_run(tmp_path)
    assert run.epochs.tolist() == [[0, 9.0], [2, 7.0]]
    assert run.restarts == (6,)
    assert "epoch 1: the run went on from a checkpoint in it" in looked_at.left_out


def test_a_directory_in_which_nothing_ran(tmp_path):
    (tmp_path / "records").mkdir()
    run, looked_at = read_run(tmp_path)
    assert run is None
    assert looked_at.left_out == ("no records: the run never began",)


def test_two_runs_of_one_id_and_a_copy(tmp_path):
    write_run(tmp_path / "a" / "train" / "id", [9.0, 8.0])
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    write_run(tmp_path / "c" / "train" / "id", [9.0, 8.0])
    shutil.copytree(tmp_path / "c" / "train" / "id", tmp_path / "a0" / "cut")
    half = tmp_path / "a0" / "cut" / "records" / "0.1.jsonl"
    half.write_text("".join(half.read_text().splitlines(keepends=True)[:3]))
    runs, inputs = gather([str(tmp_path)], tmp_path / "runs")
    assert [run.path.parts[-3] for run in runs] == ["a", "c"]
    copies = {item.path: item.left_out for item in inputs if item.left_out}
    assert copies == {
        tmp_path / "a0" / "cut": (f"a copy of {tmp_path / 'c' / 'train' / 'id'}",),
        tmp_path / "b" / "train" / "id": (f"a copy of {tmp_path / 'a' / 'train' / 'id'}",),
    }
    assert "has the same id, but is another run: both are used" in inputs[-1].notes[-1]


def test_a_directory_that_is_named_twice_is_read_once(tmp_path):
    write_run(tmp_path / "runs" / "train" / "id", [9.0, 8.0])
    words = [str(tmp_path / "runs"), str(tmp_path / "runs" / "train" / "id")]
    assert len(gather(words, tmp_path / "runs")[0]) == 1


def test_settings_and_plan_tell_the_rest(tmp_path):
    write_run(tmp_path, [9.0], scaling="weak", script="/home/me/project/resnet.py")
    (tmp_path / "plan.json").write_text(json.dumps({"script": "/home/me/resnet.py", "launcher": "srun"}))
    run, _ = read_run(tmp_path)
    assert (run.scaling, run.launcher, run.work.name) == ("weak", "srun", "resnet.py")


def test_a_timer_that_was_told_nothing_leaves_facts_unknown(tmp_path):
    write_run(tmp_path, [9.0], api="epoch-timer", work=Workload(0, 0, 32, 1, None, ""))
    run, _ = read_run(tmp_path)
    work = run.work
    assert (work.parameters, work.batch_size, work.dataset, work.precision) == (None, 32, None, None)
    assert run.baseline
    assert run.label == "ddp (baseline)"


def test_all_reduce_rows_are_rank_zeros(tmp_path):
    for rank in (0, 1):
        writer = RecordWriter(tmp_path, rank, 1)
        writer.write(Start(2, rank, 0, "h", 1, "cpu", "ddp", {}, num_nodes=1))
        writer.write(AllReduce(1024, 0.001 * (rank + 1), 20, "gloo"))
        writer.close()
    run, looked_at = read_run(tmp_path)
    assert run.allreduce.tolist() == [[1024, 0.001, 20]]
    assert "1 size of an all-reduce" in looked_at.used


def test_a_run_that_never_began_is_named(tmp_path):
    write_run(tmp_path / "runs" / "train" / "one", [9.0, 8.0])
    never = tmp_path / "runs" / "train" / "two"
    never.mkdir()
    (never / "plan.json").write_text("{}")
    runs, inputs = gather([str(tmp_path / "runs")], tmp_path / "runs")
    assert [run.run_id for run in runs] == ["one"]
    assert [(item.path.name, item.left_out) for item in inputs if not item.used] == [
        ("two", ("no records: the run never began",))
    ]
