"""From runs to figures: closed forms, another library's bootstrap, and what may not be compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")
from phalanx.report.analyse import stats  # noqa: E402
from phalanx.report.analyse.analysis import Options, analyse  # noqa: E402
from phalanx.report.analyse.recommendation import recommended, verdict  # noqa: E402
from phalanx.report.model import Forecast, Input, Line, Point, RunData, Size, Stat, Window, Work  # noqa: E402
from phalanx.report.show.charts import charts_of  # noqa: E402

WORK = Work("train.py", parameters=1000, gradient_bytes=4000, batch_size=8, dataset=1600, precision="fp32")


def run(ranks=1, epochs=(), steps=0, seconds=0.1, samples=None, label="ddp", work=WORK, nodes=1, **more):
    """`steps` an epoch, in two epochs' time if there are no epochs."""
    count = steps * max(2, len(epochs))
    rows = [(n + 1, n // steps, seconds, seconds / 10, 8 * ranks if samples is None else samples) for n in range(count)]
    name = f"{label}-{nodes}-{ranks}-{len(more)}"
    values = {"path": Path(name), "run_id": name, "device": "cpu", **more}
    return RunData(
        label=label, size=Size(nodes, ranks), work=work, baseline=label.endswith("(baseline)"),
        epochs=np.array(list(enumerate(epochs)), dtype=float).reshape(-1, 2),
        steps=np.array(rows, dtype=float).reshape(-1, 5), **values,
    )  # fmt: skip


def only_line(runs, **options):
    (group,) = analyse(runs, [], Options(**options)).groups
    (line,) = group.lines
    return line, group


def test_a_mean_and_its_range_are_scipys():
    scipy = pytest.importorskip("scipy.stats")
    values = np.random.default_rng(5).gamma(20, 0.5, 30)
    ours = stats.of_means([values], 0).stat()
    theirs = scipy.bootstrap((values,), np.mean, method="percentile", n_resamples=9999, rng=1).confidence_interval
    width = theirs.high - theirs.low
    assert ours.value == pytest.approx(values.mean())
    assert (ours.low, ours.high) == pytest.approx(tuple(theirs), abs=width / 8)


def test_the_range_of_throughput_covers_the_truth_as_often_as_it_says():
    """Steps that aren't independent: an autoregressive series of known mean, 200 times."""
    generator, hits = np.random.default_rng(0), 0
    for number in range(200):
        noise = generator.normal(size=600)
        for index in range(1, 600):
            noise[index] += 0.5 * noise[index - 1]
        seconds = 0.1 * np.exp(0.05 * noise)
        truth = 8 / (0.1 * np.exp(0.05**2 / (1 - 0.25) / 2))
        found = stats.of_ratios([(np.full(600, 8.0), seconds)], number).stat()
        hits += found.low <= truth <= found.high
    assert 0.88 <= hits / 200 <= 0.99


def test_repeats_that_differ_widen_the_range():
    steady = [np.full(20, 10.0)]
    repeats = [np.full(20, 9.0), np.full(20, 10.0), np.full(20, 11.0)]
    one, three = stats.of_means(steady, 0).stat(), stats.of_means(repeats, 0).stat()
    assert (one.low, one.high) == (10, 10)
    assert (three.value, three.low, three.high) == (10, 9, 11)


def test_the_same_runs_give_the_same_report():
    runs = [run(ranks, [9, *np.random.default_rng(ranks).gamma(9, 1, 5)]) for ranks in (1, 2)]
    assert analyse(runs, [], Options()).groups == analyse(runs, [], Options()).groups


def test_throughput_counts_slow_steps_and_the_step_is_the_usual_one():
    one = run(2, steps=50)
    one.steps[60:70, 2] = 1.1  # ten of the 50 that remain
    line, _ = only_line([one])
    (point,) = line.points
    assert point.step.value == pytest.approx(0.1)
    assert point.throughput.value == pytest.approx(50 * 16 / (40 * 0.1 + 10 * 1.1))
    assert point.wait.value == pytest.approx((50 * 0.01) / (40 * 0.1 + 10 * 1.1))


def test_few_epochs_leave_it_to_steps_and_say_so():
    runs = [run(1, [30, 20.0], 100, 0.2), run(2, [20, 10.0], 50, 0.25)]
    line, group = only_line(runs)
    assert line.of == "sample"
    assert line.points[1].speedup.value == pytest.approx((16 / 0.25) / (8 / 0.2))
    assert "fewer than 3 epochs" in "; ".join(group.notes)


def test_steps_alone_carry_a_report():
    line, _ = only_line([run(1, steps=50, seconds=0.2), run(4, steps=50, seconds=0.25)], epochs=10)
    one, four = line.points
    assert four.speedup.value == pytest.approx((32 / 0.25) / (8 / 0.2))
    assert four.efficiency.value == pytest.approx(0.8)
    assert one.seconds_to_epochs.value == pytest.approx(10 * 1600 / (8 / 0.2))
    assert four.device_hours.value == pytest.approx(4 * 10 * 1600 / (32 / 0.25) / 3600)


def test_weak_runs_with_epochs_of_equal_length_are_compared_by_samples():
    runs = [run(1, [9, 8, 8, 8], 50, 0.2, scaling="weak"), run(2, [9, 4, 4, 4], 25, 0.25, scaling="weak")]
    line, group = only_line(runs)
    assert (line.scaling, line.of) == ("weak", "sample")
    assert line.points[1].efficiency.value == pytest.approx((16 / 0.25) / (8 / 0.2) / 2)
    assert "the same samples at all sizes" in "; ".join(group.notes)


def test_runs_of_a_single_epoch_are_shown_raw_only_together():
    together = analyse([run(1, [9.0]), run(2, [5.0])], [], Options())
    assert [point.epoch.value for point in together.groups[0].lines[0].points] == [9, 5]
    assert "warm-up is in its times" in together.warnings[0]
    mixed = analyse([run(1, [9.0, 8.0]), run(2, [5.0])], [], Options())
    assert [point.size.ranks for point in mixed.groups[0].lines[0].points] == [1]
    assert "ddp on 1x2: nothing remains without the warm-up" in mixed.warnings[0]


def test_what_warm_up_takes_is_in_the_inputs():
    one = run(1, [9.0, 8.0, 8.0])
    found = analyse([one], [Input(one.path, "run", "1 rank")], Options(warmup_epochs=2))
    assert found.inputs[0].left_out == ("epochs 0 to 1: warm-up",)


def test_a_batch_a_rank_or_over_all_ranks_makes_a_curve_a_mixture_two():
    same = [run(ranks, [9, 8, 8]) for ranks in (1, 2, 4)]
    total = [run(ranks, [9, 8, 8], work=replace(WORK, batch_size=32 // ranks)) for ranks in (1, 2, 4)]
    mixed = [*same, *(run(ranks, [9, 8, 8], work=replace(WORK, batch_size=16)) for ranks in (1, 2))]
    sizes = [
        [[point.size.ranks for point in group.lines[0].points] for group in analyse(runs, [], Options()).groups]
        for runs in (same, total, mixed)
    ]
    assert sizes == [[[1, 2, 4]], [[1, 2, 4]], [[1, 2, 4], [1, 2]]]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"work": replace(WORK, dataset=3200)}, "samples an epoch 1600 and 3200"),
        ({"work": replace(WORK, precision="bf16")}, "precision fp32 and bf16"),
        ({"device": "cuda:0 (NVIDIA H100)"}, "on cpu and NVIDIA H100"),
        ({"scaling": "weak"}, "strong and weak scaling"),
        ({"work": Work("other.py")}, "not recorded as the same"),
    ],
)
def test_what_makes_another_workload(other, said):
    found = analyse([run(1, [9, 8, 8]), run(2, [9, 4, 4], **other)], [], Options())
    assert len(found.groups) == 2
    assert all(point.speedup is None for group in found.groups for line in group.lines for point in line.points)
    assert said in found.warnings[0]


def test_gpus_of_one_kind_are_one_kind_whatever_their_index():
    runs = [run(ranks, [9, 8, 8], device=f"cuda:{ranks} (NVIDIA H100)") for ranks in (1, 2)]
    assert len(analyse(runs, [], Options()).groups) == 1


def test_one_curve_of_several_scripts_or_launchers_is_noted():
    runs = [run(1, [9, 8, 8]), run(1, [9, 8, 8], launcher="srun"), run(2, [9, 4, 4], launcher="torchrun")]
    runs[1] = replace(runs[1], work=replace(WORK, name="copy.py"))
    runs[0] = replace(runs[0], launcher="torchrun")
    (group,) = analyse(runs, [], Options()).groups
    assert "ddp: runs of several scripts together: copy.py, train.py" in group.notes
    assert "ddp on 1x1: runs of several launchers together: srun, torchrun" in group.notes


def test_a_baseline_that_tells_nothing_joins_the_only_workload_with_a_note():
    hand = run(2, [9, 5, 5, 5], label="ddp (baseline)", work=Work("hand.py"), device=None)
    (group,) = analyse([run(2, [9, 6, 6, 6]), hand], [], Options()).groups
    assert group.comparisons[0].ratio.value == pytest.approx(1.2)
    assert "hand.py doesn't record what it trains" in group.notes[0]
    other = run(2, [9, 6, 6, 6], work=replace(WORK, parameters=5))
    groups = analyse([run(2, [9, 6, 6, 6]), other, hand], [], Options()).groups
    assert [group.comparisons for group in groups] == [(), (), ()]


def test_a_baseline_of_another_size_is_not_compared():
    hand = run(4, [9, 5, 5, 5], label="ddp (baseline)")
    assert analyse([run(2, [9, 6, 6, 6]), hand], [], Options()).groups[0].comparisons == ()


def test_energy_and_the_profiled_window():
    window = Window(2.0, 1.2, 0.6, 0.2)
    one = replace(run(2, [9, 8, 8], 40), energy=1000.0, samples=500.0, gpu_utilisation=80.0, window=window)
    (point,) = only_line([one])[0].points
    assert point.energy_per_sample.value == 2
    assert (point.communication.value, point.exposed.value) == (0.3, 0.1)
    assert point.gpu_utilisation.value == 80


# --- words


def point(ranks, efficiency, low=None, high=None):
    def stat(value):
        return Stat(value, value, value, 1)

    spread = Stat(efficiency, low, high, 9) if low else stat(efficiency)
    return Point(Size(1, ranks), 1, speedup=stat(efficiency * ranks), efficiency=spread)


def line(*points, forecast=None):
    return Line("ddp", "strong", points[0].size, points, forecast=forecast)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (line(point(1, 1), point(2, 0.9)), "1x2, the largest that was run, is worth it: 1.80 times the speed of 1x1"),
        (line(point(1, 1), point(2, 19.0)), "Run 1x1 again: 1x2 has 38.0 times the speed of 1x1 with 2"),
        (line(point(1, 1), point(2, 0.9), point(4, 0.5)), "Stay at 1x2: 1x4 is not worth it: 2.00 times the speed"),
        (line(point(1, 1), point(2, 0.71, 0.6, 0.8)), "its spread is 60–80%, too near to be sure"),
        (line(point(1, 1)), "Only 1x1 has times to compare"),
        (line(point(1, 1), point(2, 0.9), forecast=Forecast(of="epoch", most=Size(1, 8))),
         "The forecast keeps 70% up to 1x8."),
        (line(point(1, 1), point(2, 0.9), forecast=Forecast(of="epoch", most=Size(1, 2))),
         "falls below 70% beyond that"),
        (line(point(1, 1), point(2, 0.9), forecast=Forecast(most=Size(1, 8))),
         "The forecast is of steps alone: what whole"),
    ],
)  # fmt: skip
def test_the_verdict(found, said):
    assert said in verdict(found, 0.7)


def test_a_refused_forecast_adds_nothing():
    found = line(point(1, 1), point(2, 0.9), forecast=Forecast(refused="too few points"))
    assert "forecast" not in verdict(found, 0.7)


def test_strategies_at_one_size_are_compared_with_each_other():
    runs = [replace(run(2, [9, seconds, seconds, seconds]), label=label)
            for label, seconds in (("ddp", 8.0), ("deepspeed", 10.0), ("horovod", 9.0))]  # fmt: skip
    (group,) = analyse(runs, [], Options()).groups
    assert group.notes[0] == "at 1x2 ddp is fastest: 8.00 s an epoch, horovod 9.00 s (+12%), deepspeed 10.0 s (+25%)"


def test_strategies_that_are_as_fast_are_said_to_be():
    runs = [replace(run(2, [9, seconds, seconds, seconds]), label=label)
            for label, seconds in (("ddp", 8.0), ("deepspeed", 10.0), ("horovod", 8.001))]  # fmt: skip
    (group,) = analyse(runs, [], Options()).groups
    assert group.notes[0] == "at 1x2 ddp and horovod are fastest: 8.00 s an epoch, deepspeed 10.0 s (+25%)"


def test_one_process_alone_is_not_told_to_run_more_sizes():
    """`phalanx run` takes the strategy single for one process, and ddp for several."""
    runs = [replace(run(1, [9, 8, 8, 8]), label="single"), run(2, [9, 4, 4, 4]), run(4, [9, 2, 2, 2])]
    lines = {line.label: line for line in analyse(runs, [], Options()).groups[0].lines}
    assert lines["single"].verdict.endswith("to see what more are worth, run another on 1x1 too.")
    assert lines["single"].forecast is None


def test_a_verdict_of_steps_says_so():
    runs = [run(ranks, [9, 8 / ranks], 60) for ranks in (1, 2)]
    (line,) = analyse(runs, [], Options()).groups[0].lines
    assert line.of == "sample"
    assert "in steps alone" in line.verdict


def test_weak_runs_whose_samples_grow_otherwise_are_not_said_to_have_the_same():
    runs = [replace(run(ranks, [9, 8, 8, 8], 60, work=replace(WORK, dataset=dataset)), scaling="weak")
            for ranks, dataset in ((1, 1000), (2, 1500))]  # fmt: skip
    (note, *_) = analyse(runs, [], Options()).groups[0].notes
    assert note == "ddp: its epochs have samples that do not grow as sizes do, so that times a sample are compared"


def test_nodes_alone_beside_ranks_alone_are_told_what_joins_them():
    runs = [replace(run(1, [9, 8, 8]), size=size, work=Work("x")) for size in (Size(1, None), Size(0, 4))]
    assert "--ranks-per-node N says" in analyse(runs, [], Options()).warnings[0]


def test_steps_of_the_warm_up_beside_steps_after_it_are_warned_of():
    short = run(2, [9], 100)
    found = analyse([run(1, [9, 8], 100), replace(short, steps=short.steps[:100])], [], Options())
    assert any("ddp on 1x2: too few steps come after the warm-up" in warning for warning in found.warnings)


def test_the_size_to_take_is_the_last_that_is_worth_it():
    assert recommended(line(point(1, 1), point(2, 0.9), point(4, 0.5)), 0.7).size.ranks == 2
    assert recommended(line(point(1, 1), point(2, 0.5), point(4, 0.9)), 0.7).size.ranks == 1


@pytest.mark.parametrize(
    ("sizes", "take", "said"),
    [
        # Efficient enough, and slower all the same.
        ({(1, 8): 4.0, (1, 9): 4.2}, (1, 8), "Stay at 1x8: 1x9 is not worth it: 0.95 times the speed"),
        ({(1, 1): 9.0, (1, 4): 2.5, (1, 5): 2.5}, (1, 4), "an efficiency of 72%, and no faster than 1x4."),
        # The same ranks on other nodes are one amount: the fastest of them, and never for slower ones.
        ({(1, 4): 4.0, (2, 2): 5.0, (4, 1): 6.0}, (1, 4), "Stay at 1x4: 4x1 is not worth it: 0.67 times the speed of "
         "1x4 with as many ranks"),
        ({(1, 4): 4.0, (2, 2): 5.0, (2, 4): 2.2}, (2, 4), "2x4, the largest that was run, is worth it: 1.82 times"),
        ({(1, 4): 4.0, (2, 2): 3.5, (4, 1): 6.0}, (2, 2), "2x2 is worth it: 1.14 times the speed of 1x4 with as many"),
        ({(1, 1): 4.0, (4096, 8): 3.0}, (1, 1), "1.33 times the speed of 1x1 with 32,768 times the ranks"),
    ],
)  # fmt: skip
def test_a_size_that_is_slower_is_never_the_one_to_take(sizes, take, said):
    runs = [replace(run(2, [9, seconds, seconds, seconds]), size=Size(nodes, nodes * per))
            for (nodes, per), seconds in sizes.items()]  # fmt: skip
    (found,) = analyse(runs, [], Options()).groups[0].lines
    assert recommended(found, 0.7).size == Size(take[0], take[0] * take[1])
    assert said in found.verdict


def test_the_verdict_and_what_is_drawn_are_of_epochs_where_their_steps_scale_better():
    """Steps scale ideally, and 0.3 s of each epoch stay: 4.3, 2.3 and 1.3 s, and 0.8 s on eight ranks, which is 67%."""
    runs = [run(ranks, [9] + 3 * [4 / ranks + 0.3], 40 // ranks) for ranks in (1, 2, 4)]
    found = analyse(runs, [], Options())
    (group,) = found.groups
    (line,) = group.lines
    assert line.verdict.endswith("an efficiency of 83%. The forecast falls below 70% beyond that.")
    assert (line.forecast.of, line.step_forecast.of) == ("epoch", "step")
    charts = {chart.key: chart for chart in charts_of(group, found)}
    drawn = {curve.kind: {mark.x: mark.y for mark in curve.marks} for curve in charts["forecast_efficiency"].curves}
    assert list(drawn["measured"].values()) == pytest.approx([100, 100 * 4.3 / 2.3 / 2, 100 * 4.3 / 1.3 / 4])
    for x, y in drawn["measured"].items():
        assert drawn["forecast"][x] == pytest.approx(y, abs=1e-6)
    times = {curve.kind: [mark.y for mark in curve.marks] for curve in charts["forecast_epoch"].curves}
    assert times["measured"] == pytest.approx([4300, 2300, 1300])  # ms
    assert times["forecast"][:3] == pytest.approx([4300, 2300, 1300])
    steps = {curve.kind: [mark.y for mark in curve.marks] for curve in charts["forecast"].curves}
    assert steps["measured"] == pytest.approx([100, 100, 100])


def test_an_all_reduce_benchmark_is_no_workload_whatever_it_records():
    """The GPUs' use is recorded in any run."""
    benchmark = replace(
        run(4, work=Work("allreduce.py")), allreduce=np.array([(1024, 0.001, 20)]), gpu_utilisation=50.0
    )
    trainings = [run(ranks, [9] + 3 * [4 / ranks], 40 // ranks) for ranks in (1, 2, 4)]
    found = analyse([*trainings, benchmark], [Input(benchmark.path, "run", "1 size of an all-reduce")], Options())
    assert [line.label for group in found.groups for line in group.lines] == ["ddp"]
    assert not any("allreduce" in text for group in found.groups for text in (group.title, *group.notes))
    assert found.warnings == ()
    assert [item.path for item in found.inputs] == [benchmark.path]
    assert list(found.runs) == trainings
