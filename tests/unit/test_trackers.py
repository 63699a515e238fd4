"""What people read of a run that was resumed: each metric of a step once, the newest."""

import csv
from pathlib import Path

import pytest

from phalanx.trackers.copies import Copies
from phalanx.trackers.csv import Csv


def rows(folder: Path) -> list[tuple[str, ...]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [tuple(row) for row in csv.reader(file)][1:]


def attempt(folder: Path, resumed: int | None, *logged: tuple[int, float]) -> None:
    tracker = Csv()
    tracker.start(folder, {})
    if resumed is not None:
        tracker.resumed(resumed)
    for step, value in logged:
        tracker.log({"loss": value}, step)
    tracker.close()


@pytest.mark.parametrize("resumed", [2, 0, None])
def test_what_was_done_again_stands_once(tmp_path: Path, resumed: int | None) -> None:
    """At step 2 the checkpoint was taken; what was logged there before it is logged no more."""
    attempt(tmp_path, None, (1, 0.9), (2, 0.8), (3, 0.7), (4, 0.6))
    attempt(tmp_path, resumed, *[(step, 0.5) for step in range(3 if resumed == 2 else 1, 5)])
    first = [("1", "loss", "0.9"), ("2", "loss", "0.8")] if resumed == 2 else [(str(n), "loss", "0.5") for n in (1, 2)]
    assert rows(tmp_path) == [*first, ("3", "loss", "0.5"), ("4", "loss", "0.5")]


def test_a_shorter_second_attempt_leaves_nothing_of_what_the_first_did_beyond_the_checkpoint(tmp_path: Path) -> None:
    attempt(tmp_path, None, (1, 0.9), (2, 0.8), (3, 0.7))
    attempt(tmp_path, 2, (2, 0.1))  # logged after the checkpoint, both times
    assert rows(tmp_path) == [("1", "loss", "0.9"), ("2", "loss", "0.1")]


def test_a_line_that_was_cut_off_is_none(tmp_path: Path) -> None:
    attempt(tmp_path, None, (1, 0.9))
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("2,los")
    attempt(tmp_path, 1, (2, 0.8))
    assert rows(tmp_path) == [("1", "loss", "0.9"), ("2", "loss", "0.8")]


def test_only_the_first_resume_of_a_start_voids_anything(tmp_path: Path) -> None:
    """A look at the best checkpoint at the end is none."""
    attempt(tmp_path, None, (1, 0.9), (2, 0.8))
    copies = Copies(["csv"], tmp_path, dict)
    copies.resumed(2)
    copies.log({"loss": 0.7}, 3)
    copies.resumed(1)
    copies.log({"best": 0.7}, 3)
    copies.close()
    assert rows(tmp_path) == [
        ("1", "loss", "0.9"), ("2", "loss", "0.8"), ("3", "loss", "0.7"), ("3", "best", "0.7"),
    ]  # fmt: skip
