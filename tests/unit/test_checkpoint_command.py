"""`phalanx checkpoint`: which checkpoint is meant, and what can't be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.checkpoint import store
from phalanx.cli.main import main


def run_dir(folder: Path, **markers: object) -> Path:
    """A run with checkpoints that hold a marker only, by their steps."""
    for step, said in markers.items():
        place = folder / "checkpoints" / step.strip("_")
        place.mkdir(parents=True)
        (place / store.MARKER).write_text(json.dumps(said))
    return folder


WHOLE = {"v": store.VERSION, "sizes": {}, "crc32": {}}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--step", "7"], "has no such checkpoint; there are 4, 16"),
        (["--best"], "has a value of loss that is a number"),
        (["--best", "--step", "4"], "exclude each other"),
    ],
)
def test_a_checkpoint_that_is_not_there(tmp_path, capsys, words, said):
    nan = {**WHOLE, "monitor": {"loss": float("nan")}, "mode": "min"}
    run = run_dir(tmp_path, _4=WHOLE, _16=nan)
    assert main(["checkpoint", "export", str(run), str(tmp_path / "out.pt"), *words]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.parametrize("words", [["--step", "4"], ["--best"]])
def test_options_that_choose_need_a_run(tmp_path, capsys, words):
    one = run_dir(tmp_path, _4=WHOLE) / "checkpoints" / "4"
    assert main(["checkpoint", "export", str(one), str(tmp_path / "out.pt"), *words]) == 2
    assert "is one of them" in capsys.readouterr().err


def test_a_list_takes_a_checkpoint_and_odd_markers(tmp_path, capsys):
    run = run_dir(tmp_path, _4=WHOLE, _5={**WHOLE, "monitor": 5})
    assert main(["checkpoint", "list", str(run), "--json"]) == 0
    assert [row["step"] for row in json.loads(capsys.readouterr().out)] == [5, 4]
    assert main(["checkpoint", "list", str(run / "checkpoints" / "4"), "--json"]) == 0
    assert [row["step"] for row in json.loads(capsys.readouterr().out)] == [4]
