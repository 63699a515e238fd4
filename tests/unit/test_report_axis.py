"""Where sizes stand, and which ticks there are."""

from __future__ import annotations

import pytest

from phalanx.report.model import Size
from phalanx.report.show.scale import labels, log_ticks, positions, spread


def test_sizes_stand_at_log2_of_their_ranks() -> None:
    sizes = [Size(1, 1), Size(1, 2), Size(1, 4), Size(2, 8), Size(4, 16)]
    assert list(positions(sizes, "ranks").values()) == [0, 1, 2, 3, 4]
    assert positions([Size(1, None), Size(8, None)], "nodes") == {Size(1, None): 0, Size(8, None): 3}


def test_the_same_ranks_stand_side_by_side_about_their_place() -> None:
    places = positions([Size(1, 2), Size(1, 4), Size(2, 4), Size(4, 8)], "ranks")
    low, high = places[Size(1, 4)], places[Size(2, 4)]
    assert (low + high) / 2 == pytest.approx(2)
    assert high - low >= 0.2
    assert places[Size(1, 2)] == 1
    only = positions([Size(1, 4), Size(2, 4), Size(4, 4)], "ranks")
    assert len(set(only.values())) == 3


def test_spread_keeps_order_and_distance() -> None:
    assert spread([0, 1, 2], 0.5) == [0, 1, 2]
    assert spread([1, 1], 1) == pytest.approx([0.5, 1.5])
    assert spread([0, 0.1, 0.2, 5], 1) == pytest.approx([-0.9, 0.1, 1.1, 5])


def test_measured_sizes_are_labelled_first() -> None:
    sizes = [Size(n, n) for n in range(1, 65)]
    places = positions(sizes, "ranks")
    found = labels(places, [Size(3, 3), Size(48, 48)])
    assert len(found) <= 14
    assert {"3x1", "48x1"} <= {words for _, words in found}
    assert [place for place, _ in found] == sorted(place for place, _ in found)


@pytest.mark.parametrize(
    ("low", "high", "doubling", "words"),
    [
        (0.9, 9, True, ["1", "2", "4", "8"]),
        (40, 290, False, ["50", "70", "100", "150", "200"]),
        (0.5, 800, False, ["1", "10", "100"]),
        (3, 40, False, ["5", "10", "20"]),
    ],
)
def test_ticks_of_a_logarithmic_axis(low: float, high: float, doubling: bool, words: list[str]) -> None:
    assert [word for _, word in log_ticks(low, high, doubling)] == words
