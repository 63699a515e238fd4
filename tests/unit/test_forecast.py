"""The forecast against steps of known terms: what it finds again, what it refuses, and how often its band is right."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose

from phalanx.report.analyse.forecast import forecast, forecasts
from phalanx.report.analyse.nonnegative import determined, solve
from phalanx.report.model import Forecast, Line, Point, RunData, Size, Stat, Work

COMPUTE, WITHIN, BETWEEN, INNER, OUTER = 0.1, 0.001, 0.004, 0.002, 0.01  # seconds
GRADIENTS = 400_000_000  # bytes


def truth(size: Size, compute: float = COMPUTE, between: float = BETWEEN, outer: float = OUTER) -> float:
    """A step by the model's own formula."""
    assert size.ranks is not None
    traffic = 2 * (size.ranks - 1) / size.ranks
    latency = WITHIN * math.log2(size.ranks / size.nodes) + between * math.log2(size.nodes)
    return compute + latency + traffic * (INNER if size.nodes == 1 else outer)


def on(*nodes: int, each: int = 4) -> list[Size]:
    return [Size(count, count * each) for count in nodes]


HERE = [Size(1, 1), Size(1, 2), Size(1, 4)]


def exactly(value: float) -> Stat:
    return Stat(value, value, value, 100)


def line(sizes: list[Size], steps: list[float], noise: float = 0.0, **of_points: list[Stat]) -> Line:
    points = []
    for index, (size, step) in enumerate(zip(sizes, steps, strict=True)):
        more = {name: stats[index] for name, stats in of_points.items()}
        points.append(
            Point(size, 1, step=Stat(step, step - 1.96 * noise * step, step + 1.96 * noise * step, 100), **more)
        )
    return Line("ddp", "strong", sizes[0], tuple(points))


def run(size: Size, batch: int | None = None, rows: list[tuple[float, float, float]] | None = None) -> RunData:
    work = Work("train.py", parameters=1, gradient_bytes=GRADIENTS, batch_size=batch)
    found = {} if rows is None else {"allreduce": np.array(rows)}
    return RunData(Path("r"), "r", "ddp", size, work, device="cpu", **found)  # type: ignore[arg-type]


def benchmark(size: Size, latency: float, bandwidth: float) -> RunData:
    """All-reduces by the textbook's formula: seconds a doubling, bytes a second."""
    assert size.ranks is not None
    traffic = 2 * (size.ranks - 1) / size.ranks
    sizes = [2**power for power in range(10, 30, 2)]
    return run(size, rows=[(b, latency * math.log2(size.ranks) + traffic * b / bandwidth, 10.0) for b in sizes])


def made(sizes: list[Size], **more: list[Stat]) -> Forecast:
    return forecast(line(sizes, [truth(size) for size in sizes], **more), [], [], 0.7)


def term(found: Forecast, name: str) -> float:
    (value,) = [term.value for term in found.terms if term.name.startswith(name)]
    return value


def at(found: Forecast, size: Size) -> float:
    (step,) = [row[2] for row in found.curve if row[:2] == (size.nodes, size.ranks)]
    return step


# --- what the terms are


def test_sizes_without_noise_give_back_the_terms() -> None:
    """All five: within a node and between nodes told apart."""
    found = made([*HERE, *on(2, 4)])
    assert [term.value for term in found.terms] == pytest.approx(
        [1e3 * value for value in (COMPUTE, WITHIN, BETWEEN, INNER, OUTER)] + [0.0], rel=1e-6
    )
    assert [term.source for term in found.terms] == ["fitted"] * 5 + ["not there"]
    for nodes, ranks, step, low, high, kept in found.curve:
        assert ranks is not None
        assert step == pytest.approx(truth(Size(nodes, ranks)), rel=1e-6)
        assert low <= step <= high
        assert kept == pytest.approx(truth(HERE[0]) / truth(Size(nodes, ranks)), rel=1e-6)


def test_nodes_of_equal_size_need_no_smaller_ones() -> None:
    """What is the same at all sizes is in the computing."""
    within = 2 * WITHIN + 1.5 * INNER
    steps = [COMPUTE + within + BETWEEN * math.log2(n) + (OUTER * 2 * (4 * n - 1) / (4 * n) if n > 1 else 0.0)
             for n in (1, 2, 4, 8)]  # fmt: skip
    found = forecast(line(on(1, 2, 4), steps[:3]), [], [], 0.7)
    assert term(found, "compute, with the all-reduce within a node") == pytest.approx(1e3 * (COMPUTE + within))
    assert at(found, Size(8, 32)) == pytest.approx(steps[3])


def test_a_fit_that_nothing_checks_says_so() -> None:
    """As many terms as sizes go through them anyhow; with one more, each can be left out in turn."""
    few, more = made(HERE), made([*HERE, Size(1, 8)])
    assert few.error is None
    assert any("none is left to check" in warning for warning in few.warnings)
    assert more.error == pytest.approx(0, abs=1e-9)
    assert more.left_out_error == pytest.approx(0, abs=1e-6)


# --- whole epochs


NUMBER, SHARED, STAYS = 640, 8.0, 3.0  # steps of an epoch on one rank; seconds beside them, divided and not


def epoch(size: Size) -> float:
    """Under strong scaling, with a step of the model's own formula."""
    assert size.ranks is not None
    return NUMBER / size.ranks * truth(size) + SHARED / size.ranks + STAYS


def epochs_at(sizes: list[Size], of: str = "epoch", counted: bool = True) -> tuple[Forecast, Forecast | None]:
    base = epoch(sizes[0])
    gains = [base / epoch(size) / (size.ranks or 1) for size in sizes]
    made_line = line(sizes, [truth(size) for size in sizes], epoch=[exactly(epoch(size)) for size in sizes],
                     efficiency=[exactly(gain) for gain in gains])  # fmt: skip
    runs = []
    for size in sizes:
        count = NUMBER // (size.ranks or 1) if counted else 0
        rows = [(index + 1, index // count, truth(size), 0.0, 8.0) for index in range(3 * count)]
        seconds = [(number, epoch(size)) for number in range(3)]
        runs.append(replace(run(size), steps=np.array(rows).reshape(-1, 5), epochs=np.array(seconds)))
    return forecasts(replace(made_line, of=of), runs, [], 0.7)


def test_the_forecast_of_a_line_of_epochs_is_of_epochs_with_what_is_outside_of_their_steps() -> None:
    sizes = [*HERE, Size(1, 8)]
    found, steps = epochs_at(sizes)
    assert steps is not None
    assert (found.of, steps.of) == ("epoch", "step")
    for nodes, ranks, seconds, low, high, kept in found.curve:
        assert {type(value) for value in (seconds, low, high, kept)} == {float}  # for JSON
        size = Size(nodes, ranks)
        if nodes == 1:  # nothing was measured between nodes
            assert seconds == pytest.approx(epoch(size), rel=1e-6)
            assert kept == pytest.approx(epoch(HERE[0]) / epoch(size) / (ranks or 1), rel=1e-6)
        assert low <= seconds <= high
        if (nodes, ranks) in [(1, 1), (1, 2), (1, 4), (1, 8)]:  # of times without noise it is narrow
            assert 0.9 * seconds < low < high < 1.1 * seconds
    assert at(steps, Size(1, 8)) == pytest.approx(truth(Size(1, 8)), rel=1e-6)
    outside = [term.value for term in found.terms if term.name.startswith("outside of the steps")]
    assert outside == pytest.approx([SHARED, STAYS, 0.0], abs=1e-6)
    assert found.error == pytest.approx(0, abs=1e-9)
    # Steps alone would keep 70% far beyond where epochs do: 3 s of each stay.
    kept = [size for size in (Size(1, 2), Size(1, 4), Size(1, 8)) if epoch(HERE[0]) / epoch(size) >= 0.7 * size.ranks]
    assert kept[-1:] == [Size(1, 8)]
    assert found.most is not None
    assert steps.most is not None
    assert (found.most.ranks or 0) < (steps.most.ranks or 0)
    said = " ".join(found.warnings)
    assert "at 1x8 whole epochs keep 75%, steps alone" in said
    assert "the forecast of epochs has what is outside of the steps in it" in said


def test_weak_scaling_has_the_same_number_of_steps_at_all_sizes() -> None:
    """A rank's samples stay: 60 steps an epoch, and 2 s beside them."""
    sizes = [*HERE, Size(1, 8)]
    seconds = [60 * truth(size) + 2 for size in sizes]
    made_line = line(sizes, [truth(size) for size in sizes], epoch=[exactly(each) for each in seconds])
    rows = np.array([(index + 1, index // 60, 0.1, 0.0, 8.0) for index in range(180)])
    runs = [replace(run(size), steps=rows, epochs=np.array([(0, s), (1, s), (2, s)]), scaling="weak")
            for size, s in zip(sizes, seconds, strict=True)]  # fmt: skip
    found, _ = forecasts(replace(made_line, scaling="weak"), runs, [], 0.7)
    for nodes, ranks, value, *_, kept in found.curve:
        if nodes == 1:
            assert value == pytest.approx(60 * truth(Size(1, ranks)) + 2, rel=1e-6)
            assert kept == pytest.approx(seconds[0] / (60 * truth(Size(1, ranks)) + 2), rel=1e-6)


def test_where_the_steps_of_an_epoch_are_not_known_the_forecast_says_that_it_is_of_steps() -> None:
    found, more = epochs_at([*HERE, Size(1, 8)], counted=False)
    assert (found.of, more) == ("step", None)
    assert any("outside of the steps isn't in this forecast" in warning for warning in found.warnings)


def test_lines_of_steps_have_a_forecast_of_steps_alone() -> None:
    found, more = epochs_at([*HERE, Size(1, 8)], of="sample")
    assert (found.of, more) == ("step", None)


# --- how far it may be off


def test_the_error_is_the_largest_at_a_measured_size() -> None:
    """Steps of one, two, four and eight ranks, of which those of four take 10% longer."""
    sizes = [*HERE, Size(1, 8)]
    steps = [truth(size) * (1.1 if size.ranks == 4 else 1.0) for size in sizes]
    found = forecast(line(sizes, steps), [], [], 0.7)
    errors = [abs(at(found, size) / step - 1) for size, step in zip(sizes, steps, strict=True)]
    assert found.error == pytest.approx(max(errors))
    assert found.left_out_error is not None
    assert found.left_out_error > found.error


def test_what_is_waited_for_data_is_a_term_of_its_own() -> None:
    wait = 0.02
    steps = [truth(size) + wait for size in HERE]
    found = forecast(line(HERE, steps, wait=[exactly(wait / step) for step in steps]), [], [], 0.7)
    assert (term(found, "input"), term(found, "compute")) == pytest.approx((1e3 * wait, 1e3 * COMPUTE), rel=1e-6)
    assert {term.name: term.source for term in found.terms}["input"] == "measured"


def test_a_wait_that_grows_is_told() -> None:
    waits = [0.001, 0.01, 0.03]
    steps = [truth(size) + wait for size, wait in zip(HERE, waits, strict=True)]
    shares = [exactly(wait / step) for wait, step in zip(waits, steps, strict=True)]
    found = forecast(line(HERE, steps, wait=shares), [], [], 0.7)
    assert any("wait for data grows from 1 to 30 ms" in warning for warning in found.warnings)


def test_no_term_is_negative() -> None:
    """Steps that get shorter with size, as noise makes them, aren't communication that takes less than no time."""
    found = forecast(line(HERE, [0.1, 0.099, 0.098], noise=0.01), [], [], 0.7)
    assert all(term.value >= 0 for term in found.terms)
    assert term(found, "latency") == term(found, "transfer") == 0


def test_a_batch_that_shrinks_with_the_size_shrinks_the_computing() -> None:
    sizes = on(1, 2, 4, each=1)
    steps = [truth(size, compute=COMPUTE / size.nodes) for size in sizes]
    runs = [run(size, batch=64 // size.nodes) for size in sizes]
    found = forecast(line(sizes, steps), runs, [], 0.5)
    assert term(found, "compute") == pytest.approx(1e3 * COMPUTE, rel=1e-6)
    eight = next(row for row in found.curve if row[0] == 8)
    assert eight[2] == pytest.approx(truth(Size(8, 8), compute=COMPUTE / 8), rel=1e-6)
    assert eight[5] == pytest.approx(steps[0] / (8 * eight[2]), rel=1e-6)  # speedup over size


def test_weak_scaling_has_the_same_steps() -> None:
    strong = line(HERE, [truth(size) for size in HERE])
    assert forecast(replace(strong, scaling="weak"), [], [], 0.7).curve == forecast(strong, [], [], 0.7).curve


# --- what isn't in the sizes comes from elsewhere, or it refuses


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (HERE[:1], "one size shows nothing of how times change"),
        (HERE[:2], "2 sizes can't tell 3 terms of a step apart (compute, latency within, transfer within): run 1 more"),
        (on(1, 2), "2 sizes can't tell 3 terms of a step apart (compute, latency between, transfer between)"),
        ([Size(1, 4), Size(2, 4), Size(4, 4)], "all its sizes have 4 ranks"),
    ],
)
def test_it_refuses_what_the_sizes_cannot_tell(sizes: list[Size], words: str) -> None:
    found = made(sizes)
    assert words in found.refused
    assert not found.curve


def test_two_sizes_and_an_all_reduce_benchmark() -> None:
    """Half of the all-reduce hides behind the computing."""
    latency, bandwidth = 20e-6, 20e9
    messages = GRADIENTS / (25 * 2**20)  # DDP's

    def step(ranks: int) -> float:
        whole = messages * latency * math.log2(ranks) + 2 * (ranks - 1) / ranks * GRADIENTS / bandwidth
        return COMPUTE + 0.5 * whole

    benchmarks = [benchmark(Size(1, 2), latency, bandwidth)]
    runs = [run(size, 8) for size in HERE[:2]]
    found = forecast(line(HERE[:2], [step(1), step(2)]), runs, benchmarks, 0.7)
    assert found.refused == ""
    assert term(found, "share of the all-reduce") == pytest.approx(0.5, rel=0.01)
    assert term(found, "latency within") == pytest.approx(20, rel=0.01)
    assert term(found, "bus bandwidth within") == pytest.approx(20, rel=0.01)
    assert {term.source for term in found.terms if "within" in term.name} == {"all-reduce benchmark"}
    assert at(found, Size(2, 4)) == pytest.approx(step(4), rel=0.001)
    assert any("taken to be as fast as within" in warning for warning in found.warnings)


def test_a_benchmark_over_nodes_tells_the_network() -> None:
    benchmarks = [benchmark(Size(1, 2), 10e-6, 40e9), benchmark(Size(2, 2), 50e-6, 5e9)]
    found = forecast(line(HERE[:2], [0.1, 0.12]), [run(size) for size in HERE[:2]], benchmarks, 0.7)
    assert term(found, "bus bandwidth between nodes") == pytest.approx(5, rel=0.01)
    assert not any("taken to be as fast" in warning for warning in found.warnings)
    assert at(found, Size(2, 4)) > 0.2  # the 0.02 s within a node, eight times and more


@pytest.mark.parametrize("other", [{"device": "cuda:0 (NVIDIA H100)"}, {"size": Size(1, 1)}])
def test_a_benchmark_of_other_devices_or_of_one_rank_says_nothing(other: dict[str, object]) -> None:
    benchmarks = [replace(benchmark(Size(1, 2), 1e-5, 1e10), **other)]  # type: ignore[arg-type]
    found = forecast(line(HERE[:2], [0.1, 0.11]), [run(size) for size in HERE[:2]], benchmarks, 0.7)
    assert "2 sizes can't tell 3 terms" in found.refused


def test_steps_that_lose_more_than_the_all_reduce_takes_are_told() -> None:
    benchmarks = [benchmark(Size(1, 2), 1e-6, 100e9)]
    found = forecast(line(HERE[:2], [0.1, 0.2]), [run(size) for size in HERE[:2]], benchmarks, 0.4)
    assert any("something else grows with the ranks" in warning for warning in found.warnings)


def test_two_profiled_sizes_between_nodes_need_no_third() -> None:
    sizes = on(2, 4, each=1)
    steps = [truth(size) for size in sizes]
    exposed = [exactly(1 - COMPUTE / step) for step in steps]
    found = forecast(line(sizes, steps, exposed=exposed), [], [], 0.7)
    assert [(term.value, term.source) for term in found.terms[:3]] == [
        (pytest.approx(1e3 * COMPUTE, rel=1e-6), "fitted"),
        (pytest.approx(1e3 * BETWEEN, rel=1e-6), "profile"),
        (pytest.approx(1e3 * OUTER, rel=1e-6), "profile"),
    ]
    assert at(found, Size(8, 8)) == pytest.approx(truth(Size(8, 8)), rel=1e-6)


def test_one_profiled_size_leaves_the_all_reduce_between_two_extremes() -> None:
    """10 ms at two ranks: at four, 15 ms if all is transfer and 20 ms if all is latency."""
    exposed = [exactly(0.0), exactly(0.01 / 0.11)]
    found = forecast(line(HERE[:2], [0.1, 0.11], exposed=exposed), [], [], 0.7)
    (row,) = [row for row in found.curve if row[1] == 4]
    assert row[2] == pytest.approx(0.1 + (0.015 + 0.020) / 2, rel=1e-6)
    assert row[3] < 0.115
    assert row[4] > 0.120
    assert any("can't be told apart" in warning for warning in found.warnings)


def test_communication_that_hides_may_not_at_larger_sizes() -> None:
    steps = [truth(size) for size in HERE]
    shares = [exactly(0.0), exactly(0.05), exactly(0.08)]
    bare = forecast(line(HERE, steps, exposed=shares), [], [], 0.7)
    hiding = forecast(
        line(HERE, steps, exposed=shares, communication=[exactly(0.0), exactly(0.2), exactly(0.28)]), [], [], 0.7
    )
    rows = {row[1]: row for row in bare.curve}
    for row in hiding.curve:
        more = 0.2 * steps[2] * (math.log2(row[1] or 1) / 2 - 1)  # 28% - 8%, growing with the doublings
        assert row[4] - rows[row[1]][4] == pytest.approx(max(0.0, more), abs=1e-9)


# --- what it says of sizes


def test_the_most_nodes_that_keep_the_efficiency() -> None:
    """Any number of nodes, not only doublings."""
    sizes = on(1, 2, 4, each=1)
    found = forecast(line(sizes, [truth(size) for size in sizes]), [], [], 0.72)
    kept = [n for n in range(1, 65) if truth(sizes[0]) / truth(Size(n, n)) >= 0.72]
    assert found.most == Size(kept[-1], kept[-1])
    assert kept == list(range(1, kept[-1] + 1))
    assert kept[-1] not in (4, 8, 16, 32)
    assert kept[-1] in [row[0] for row in found.curve]


def test_none_but_the_smallest_may_keep_it() -> None:
    found = forecast(line(HERE, [0.1, 0.3, 0.5]), [], [], 0.9)
    assert found.most == HERE[0]


def test_it_says_when_it_reaches_far() -> None:
    sizes = on(1, 2, 4, each=1)
    steps = [truth(size) for size in sizes]
    near, far = (forecast(line(sizes, steps), [], [], efficiency) for efficiency in (0.75, 0.5))
    assert not any("times the largest that was run" in warning for warning in near.warnings)
    assert far.most == Size(64, 64)
    assert any("64x1 is 16 times the largest that was run" in warning for warning in far.warnings)


def test_runs_on_one_node_say_nothing_of_the_network() -> None:
    found = made(HERE)
    assert any("network between nodes is taken to be as fast as within" in warning for warning in found.warnings)
    assert [row[:2] for row in found.curve][:5] == [(1, 1), (1, 2), (1, 4), (2, 8), (4, 16)]
    assert not any("network" in warning for warning in made([*HERE, *on(2, 4)]).warnings)


def test_epochs_that_lose_more_than_steps_are_told() -> None:
    made_line = line(HERE, [truth(size) for size in HERE])
    points = [
        replace(point, efficiency=exactly(kept)) for point, kept in zip(made_line.points, (1, 0.8, 0.6), strict=True)
    ]
    found = forecast(replace(made_line, points=tuple(points)), [], [], 0.7)
    assert any("what is outside of the steps isn't in this forecast" in warning for warning in found.warnings)


def test_the_band_is_wider_the_farther_it_is() -> None:
    found = forecast(line(HERE, [truth(size) for size in HERE], noise=0.01), [], [], 0.7)
    widths = [(high - low) / step for _, ranks, step, low, high, _ in found.curve if (ranks or 0) >= 4]
    assert widths == sorted(widths)
    assert widths[-1] > 3 * widths[0]


@pytest.mark.parametrize(("noise", "sizes"), list(product((0.01, 0.03), (on(1, 2, 4), on(1, 2, 4, 8, each=1)))))
def test_the_band_holds_the_truth_nine_times_in_ten(noise: float, sizes: list[Size]) -> None:
    """At each size, measured or not, for links of any speed."""
    generator = np.random.default_rng(7)
    inside: dict[int, list[bool]] = {}
    for _ in range(60):
        between, outer = generator.uniform(0, 2 * BETWEEN), generator.uniform(0, 2 * OUTER)
        base = truth(sizes[0])
        exact = {
            n: truth(Size(n, n * (sizes[0].ranks or 1)), COMPUTE, between, outer) if n > 1 else base
            for n in (1, 2, 4, 8, 16)
        }
        steps = [exact[size.nodes] * (1 + noise * generator.standard_normal()) for size in sizes]
        for nodes, _, _, low, high, _ in forecast(line(sizes, steps, noise), [], [], 0.7).curve:
            if nodes in exact:
                inside.setdefault(nodes, []).append(low <= exact[nodes] <= high)
    assert {nodes: np.mean(found) >= 0.85 for nodes, found in inside.items()} == dict.fromkeys((1, 2, 4, 8, 16), True)
    assert np.mean([each for found in inside.values() for each in found]) >= 0.93


def _around(size: Size) -> float:
    """Messages from rank to rank all around: 16 pieces of 400 MB, 30 µs and 10 GB/s between nodes, 100 within."""
    ranks = size.ranks or 1
    return 2 * (ranks - 1) * 30e-6 * 16 + 2 * (ranks - 1) / ranks * 0.4 / (100 if size.nodes == 1 else 10)


def _by_levels(size: Size) -> float:
    """Within nodes, then between them."""
    nodes = size.nodes
    return 2 * 0.75 * 0.4 / 100 + 2 * (nodes - 1) / nodes * 0.4 / 10 + 2 * math.log2(nodes) * 50e-6 * 16


def _by_trees(size: Size) -> float:
    return 2 * 0.75 * 0.4 / 100 + (2 * 0.4 / 10 if size.nodes > 1 else 0) + 2 * math.log2(size.nodes) * 50e-6 * 16


@pytest.mark.parametrize("overlap", [0.0, 0.2])
@pytest.mark.parametrize("sizes", [on(1, 2, 4), on(1, 2, 4, 8)])
@pytest.mark.parametrize(("algorithm", "most"), [(_around, 0.05), (_by_levels, 0.03), (_by_trees, 0.01)])
def test_other_algorithms_than_the_models(
    algorithm: Callable[[Size], float], most: float, sizes: list[Size], overlap: float
) -> None:
    """All-reduces as they really may go, of which `overlap` of the computing hides a part, and never the last tenth."""

    def step(size: Size) -> float:
        whole = algorithm(size)
        return 0.3 + max(0.1 * whole, whole - overlap * 0.3)

    found = forecast(line(sizes, [step(size) for size in sizes], noise=0.005), [], [], 0.5)
    rows = {row[0]: row for row in found.curve}
    for times in (2, 4):
        nodes = times * sizes[-1].nodes
        exact = step(Size(nodes, 4 * nodes))
        assert rows[nodes][3] <= exact <= rows[nodes][4]
        assert abs(rows[nodes][2] / exact - 1) <= most * (1 if times == 2 else 3)


def test_times_that_grow_with_the_number_of_ranks_are_told() -> None:
    sizes = on(1, 2, 4, 8, each=1)
    found = forecast(line(sizes, [0.1 + 0.03 * size.nodes for size in sizes]), [], [], 0.2)
    assert any("grow faster with the size than with its doublings" in warning for warning in found.warnings)


# --- epochs alone


def epochs(counts: list[int], seconds: list[float], scaling: str = "strong") -> Line:
    points = tuple(Point(Size(n, None), 1, epoch=exactly(s)) for n, s in zip(counts, seconds, strict=True))
    return Line("horovod", scaling, points[0].size, points)


def test_epochs_of_strong_scaling_have_a_part_that_is_shared_and_one_that_stays() -> None:
    seconds = [400 / n + 20 + 3 * math.log2(n) for n in (1, 2, 4, 8)]
    found = forecast(epochs([1, 2, 4], seconds[:3]), [], [], 0.7)
    assert found.of == "epoch"
    assert [term.value for term in found.terms] == pytest.approx([400, 20, 3])
    eight = next(row for row in found.curve if row[0] == 8)
    assert eight[1] is None
    assert eight[2] == pytest.approx(seconds[3])
    assert eight[5] == pytest.approx(seconds[0] / 8 / seconds[3])
    assert found.most == Size(7, None)  # 420 / 7 / 85.6 is 70.1%, 420 / 8 / 79 is 66.5%
    assert any("whole epochs" in warning for warning in found.warnings)


def test_epochs_of_weak_scaling() -> None:
    seconds = [100 + 5 * math.log2(n) for n in (2, 4, 8, 16)]
    found = forecast(epochs([2, 4, 8], seconds[:3], "weak"), [], [], 0.7)
    assert [term.value for term in found.terms] == pytest.approx([105, 5])
    assert next(row for row in found.curve if row[0] == 16)[5] == pytest.approx(seconds[0] / seconds[3])


def test_two_epoch_times_are_too_few() -> None:
    assert "2 sizes with epoch times can't tell 3 terms" in forecast(epochs([1, 2], [10, 6]), [], [], 0.7).refused


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -1.0])
def test_times_that_are_none_are_passed_over(bad: float) -> None:
    sizes = [*HERE, Size(1, 8)]
    steps = [truth(size) for size in HERE]
    assert forecast(line(sizes, [*steps, bad]), [], [], 0.7).curve == forecast(line(HERE, steps), [], [], 0.7).curve


def test_times_that_leave_nothing_for_the_smallest_size() -> None:
    """One rank has no steps, and those of more ranks are all communication."""
    sizes = [*HERE, Size(1, 8)]
    found = forecast(line(sizes, [math.nan, 0.1, 0.3, 0.6]), [], [], 0.7)
    assert "nothing left at the smallest" in found.refused


def test_nothing_that_runs_record_breaks_it() -> None:
    """Any sizes and times: refused, or a curve whose every number is one and lies in its band."""
    draw = random.Random(4)
    made = 0
    for _ in range(300):
        sizes = sorted(
            {Size(n, n * draw.choice((1, 2, 4))) for n in draw.choices((1, 1, 2, 3, 8), k=draw.randint(1, 6))}
        )
        points = tuple(
            Point(size, 1, *(exactly(draw.choice((draw.uniform(0.1, 0.2), 1e5, 1e-9, math.nan))) for _ in range(2)),
                  wait=exactly(draw.random()), exposed=draw.choice((None, exactly(draw.random()))))
            for size in sizes
        )  # fmt: skip
        found = forecast(Line("ddp", "strong", sizes[0], points), [], [], draw.random())
        made += not found.refused
        for row in found.curve:
            assert all(map(math.isfinite, row[2:]))
            assert row[3] <= row[2] * (1 + 1e-9) <= row[4] * (1 + 2e-9)
    assert made > 50


# --- least squares


def test_least_squares_without_negatives_against_a_search() -> None:
    """The best of a fine grid is nowhere better."""
    generator = np.random.default_rng(3)
    rows, values = generator.normal(size=(5, 2)), generator.normal(size=(5, 30))
    found = solve(rows, values)
    grid = np.stack(np.meshgrid(np.linspace(0, 3, 301), np.linspace(0, 3, 301)), -1).reshape(-1, 2).T
    for column in range(30):
        best = ((rows @ grid - values[:, column : column + 1]) ** 2).sum(axis=0).min()
        mine = ((rows @ found[:, column] - values[:, column]) ** 2).sum()
        assert mine <= best + 1e-9
    assert (found >= 0).all()
    assert_allclose(solve(np.eye(3), np.array([[1.0], [-2.0], [3.0]]))[:, 0], [1, 0, 3])


def test_what_rows_determine() -> None:
    assert determined(np.array([[1.0, 0.0], [1.0, 1.0]]))
    assert not determined(np.array([[1.0, 2.0], [2.0, 4.0]]))
    assert not determined(np.array([[1.0, 0.0]]))


def test_a_wait_that_shrinks_with_the_batch_is_waited_so_elsewhere_too() -> None:
    sizes = on(1, 2, 4, each=1)
    steps = [truth(size, compute=COMPUTE / size.nodes) + 0.02 / size.nodes for size in sizes]
    waits = [exactly(0.02 / size.nodes / step) for size, step in zip(sizes, steps, strict=True)]
    found = forecast(line(sizes, steps, wait=waits), [run(size, batch=64 // size.nodes) for size in sizes], [], 0.7)
    eight = Size(8, 8)
    assert at(found, eight) == pytest.approx(truth(eight, compute=COMPUTE / 8) + 0.02 / 8, rel=1e-6)


def test_a_line_of_very_many_nodes_is_looked_at_in_steps() -> None:
    found = forecast(epochs([1, 1000, 1_000_000], [10.0, 9.0, 8.0]), [], [], 0.7)
    assert len(found.curve) < 100
