"""The forecast against steps of known terms: what it finds again, what it refuses, and how often its band is right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from phalanx.report.forecast import forecast
from phalanx.report.model import Line, Point, RunData, Size, Stat, Work

COMPUTE, LATENCY, BANDWIDTH = 0.1, 0.002, 0.01
GRADIENTS = 400_000_000  # bytes


def truth(x: float, compute: float = COMPUTE) -> float:
    return float(compute + LATENCY * np.log2(x) + BANDWIDTH * 2 * (x - 1) / x)


def point(size: Size, step: float, noise: float = 0.0, **more: Stat) -> Point:
    spread = 1.96 * noise * step
    return Point(size, 1, step=Stat(step, step - spread, step + spread, 100), **more)


def line(sizes: list[Size], steps: list[float], noise: float = 0.0, **more: Stat) -> Line:
    points = [point(size, step, noise, **more) for size, step in zip(sizes, steps, strict=True)]
    return Line("ddp", "strong", sizes[0], tuple(points))


def nodes(*counts: int, each: int = 4) -> list[Size]:
    return [Size(count, count * each) for count in counts]


def run(size: Size, batch: int | None = None, rows: list[tuple[float, float, float]] | None = None) -> RunData:
    work = Work("train.py", parameters=1, gradient_bytes=GRADIENTS, batch_size=batch)
    found = {} if rows is None else {"allreduce": np.array(rows)}
    return RunData(Path("r"), "r", "ddp", size, work, **found)


def one(value: float) -> Stat:
    return Stat(value, value, value, 1)


def values(found: object) -> dict[str, float]:
    return {term.name: term.value for term in found.terms}  # type: ignore[attr-defined]


def test_three_sizes_without_noise_give_back_the_three_terms() -> None:
    found = forecast(line(nodes(1, 2, 4), [truth(x) for x in (1, 2, 4)]), [], [], 0.7)
    assert values(found) == pytest.approx({"compute": COMPUTE, "latency": LATENCY, "bandwidth": BANDWIDTH}, rel=1e-6)
    assert {term.source for term in found.terms} == {"fitted"}
    for count, ranks, step, low, high, kept in found.curve:
        assert ranks == 4 * count
        assert step == pytest.approx(truth(count), rel=1e-6)
        assert low <= step <= high
        assert kept == pytest.approx(truth(1) / truth(count), rel=1e-6)
    assert found.error == pytest.approx(0, abs=1e-9)


def test_the_largest_size_that_keeps_the_efficiency() -> None:
    """0.1 / (0.1 + 0.002 k + 0.02 (1 - 1/2^k)) is at least 0.8 for 2^k nodes up to k = 2: 0.840, at k = 3 0.810."""
    steps = [truth(x) for x in (1, 2, 4)]
    kept = [k for k in range(20) if truth(1) / truth(2**k) >= 0.81]
    assert kept == [0, 1, 2]
    assert forecast(line(nodes(1, 2, 4), steps), [], [], 0.81).most == Size(4, 16)
    assert forecast(line(nodes(1, 2, 4), steps), [], [], 0.86).most == Size(2, 8)


def test_it_says_when_it_reaches_far() -> None:
    steps = [truth(x) for x in (1, 2, 4)]
    near, far = (forecast(line(nodes(1, 2, 4), steps), [], [], efficiency) for efficiency in (0.86, 0.5))
    assert not any("more than 4 times" in warning for warning in near.warnings)
    assert far.most is not None
    assert any("more than 4 times the largest run, 4x4" in warning for warning in far.warnings)


def test_runs_on_one_node_say_nothing_of_the_network() -> None:
    sizes = [Size(1, 1), Size(1, 2), Size(1, 4)]
    found = forecast(line(sizes, [truth(x) for x in (1, 2, 4)]), [], [], 0.7)
    assert any("the network is taken to be as fast" in warning for warning in found.warnings)
    assert [row[:2] for row in found.curve][:5] == [(1, 1), (1, 2), (1, 4), (2, 8), (4, 16)]


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (nodes(1), "one size alone"),
        (nodes(1, 2), "2 sizes can't tell an all-reduce's latency from its bandwidth"),
        ([Size(1, 4), Size(2, 4), Size(4, 4)], "no two sizes have the same ranks a node"),
        ([Size(1, None), Size(2, None)], "only epoch times are recorded, or no ranks"),
    ],
)
def test_it_refuses_what_the_sizes_cannot_tell(sizes: list[Size], words: str) -> None:
    found = forecast(line(sizes, [truth(size.nodes) for size in sizes]), [], [], 0.7)
    assert words in found.refused
    assert not found.curve


def test_two_sizes_and_an_all_reduce_benchmark() -> None:
    """The benchmark's all-reduce of these gradients takes 2 · LATENCY and 2 · BANDWIDTH; half of it hides."""
    sizes = [Size(1, 1), Size(1, 2)]
    rows = [
        (size, 2 * LATENCY * np.log2(2) + 2 * BANDWIDTH * 2 * (1 / 2) * size / GRADIENTS, 10.0)
        for size in (1024, 2**20, 2**26, 2**28)
    ]
    benchmark = run(Size(1, 2), rows=rows)
    found = forecast(line(sizes, [truth(1), truth(2)]), [run(size, 8) for size in sizes], [benchmark], 0.7)
    assert found.refused == ""
    assert values(found)["share of the all-reduce"] == pytest.approx(0.5, rel=1e-3)
    assert values(found)["latency"] == pytest.approx(2 * LATENCY, rel=1e-3)
    assert {term.name: term.source for term in found.terms}["bandwidth"] == "all-reduce benchmark"
    at_4 = next(row for row in found.curve if row[1] == 4)
    assert at_4[2] == pytest.approx(truth(4), rel=1e-3)


def test_two_sizes_that_were_profiled_have_their_compute_from_that() -> None:
    sizes, steps = nodes(2, 4), [truth(2), truth(4)]
    points = tuple(point(size, step, exposed=one(1 - COMPUTE / step)) for size, step in zip(sizes, steps, strict=True))
    found = forecast(Line("ddp", "strong", sizes[0], points), [], [], 0.7)
    assert {term.name: term.source for term in found.terms} == {
        "latency": "fitted",
        "bandwidth": "fitted",
        "compute": "profile",
    }
    assert values(found) == pytest.approx({"compute": COMPUTE, "latency": LATENCY, "bandwidth": BANDWIDTH}, rel=1e-6)


def test_a_batch_that_shrinks_with_the_size_shrinks_the_compute() -> None:
    sizes = nodes(1, 2, 4)
    steps = [truth(x, compute=COMPUTE / x) for x in (1, 2, 4)]
    runs = [run(size, batch=64 // size.nodes) for size in sizes]
    found = forecast(line(sizes, steps), runs, [], 0.7)
    assert values(found)["compute"] == pytest.approx(COMPUTE, rel=1e-6)
    at_8 = next(row for row in found.curve if row[0] == 8)
    assert at_8[2] == pytest.approx(truth(8, compute=COMPUTE / 8), rel=1e-6)
    assert at_8[5] == pytest.approx(truth(1) / (8 * at_8[2]), rel=1e-6)  # speedup over size


def test_what_is_waited_for_data_is_a_term_of_its_own() -> None:
    sizes, wait = nodes(1, 2, 4), 0.02
    steps = [truth(x) + wait for x in (1, 2, 4)]
    points = tuple(point(size, step, wait=one(wait / step)) for size, step in zip(sizes, steps, strict=True))
    found = values(forecast(Line("ddp", "strong", sizes[0], points), [], [], 0.7))
    assert (found["input"], found["compute"]) == pytest.approx((wait, COMPUTE), rel=1e-6)


def test_no_term_is_negative() -> None:
    """Steps that get shorter with size, as noise makes them, aren't communication that takes less than no time."""
    found = forecast(line(nodes(1, 2, 4), [0.1, 0.099, 0.098], noise=0.01), [], [], 0.7)
    assert all(term.value >= 0 for term in found.terms)
    assert values(found)["latency"] == values(found)["bandwidth"] == 0


def test_the_band_holds_the_truth_nine_times_in_ten() -> None:
    generator, noise, inside = np.random.default_rng(7), 0.01, []
    for _ in range(60):
        steps = [truth(x) * (1 + noise * generator.standard_normal()) for x in (1, 2, 4)]
        found = forecast(line(nodes(1, 2, 4), steps, noise), [], [], 0.7)
        inside += [low <= truth(count) <= high for count, _, _, low, high, _ in found.curve if count in (8, 16)]
    assert np.mean(inside) >= 0.9
