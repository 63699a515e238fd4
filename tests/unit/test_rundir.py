import os
import time
from pathlib import Path

import pytest

from phalanx.errors import PlanError
from phalanx.rundir import find_run_dir, log_path, new_run_dir, next_attempt, run_dirs_of_series, write_atomic


def test_launches_in_one_second_get_different_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "gmtime", lambda: time.struct_time((2026, 1, 2, 3, 4, 5, 4, 2, 0)))
    made = {new_run_dir(tmp_path, "net") for _ in range(50)}
    assert len(made) == 50
    assert all(path.parent == tmp_path / "net" and path.name.startswith("20260102-030405-") for path in made)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b"])
def test_a_name_that_is_no_folder_name_is_refused(tmp_path, name):
    with pytest.raises(PlanError, match="run name"):
        new_run_dir(tmp_path, name)


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(PlanError, match="runs"):
        new_run_dir(tmp_path / "runs", "net")


def test_a_run_is_found_by_latest_id_name_and_path(tmp_path):
    runs = [tmp_path / "net" / name for name in ("20260101-000000-aaaa", "20260102-000000-0000")]
    other = tmp_path / "other" / "20260103-000000-bbbb"
    for path in (*reversed(runs), other):  # the newest by name, not by its time on the disk
        path.mkdir(parents=True)
    assert find_run_dir(tmp_path, "net", "latest") == runs[1]
    assert find_run_dir(tmp_path, "net", runs[0].name) == runs[0]
    assert find_run_dir(tmp_path, "net", f"net/{runs[0].name}") == runs[0]
    assert find_run_dir(tmp_path, "net", str(other)) == other
    assert find_run_dir(tmp_path, "net", other.name) == other
    with pytest.raises(PlanError, match=f"no run 'gone'.*{runs[0].name}, {runs[1].name}"):
        find_run_dir(tmp_path, "net", "gone")
    with pytest.raises(PlanError, match="none"):
        find_run_dir(tmp_path, "absent", "latest")


def test_attempts_count_up(tmp_path):
    assert next_attempt(tmp_path) == 1
    (tmp_path / "records").mkdir()
    for name in ("0.1.jsonl", "1.1.jsonl", "0.10.jsonl"):
        (tmp_path / "records" / name).write_text("")
    assert next_attempt(tmp_path) == 11


def test_logs_are_one_a_rank_up_to_64_ranks():
    assert log_path(Path("r"), 63, 7, 64) == Path("r/logs/63.log")
    assert log_path(Path("r"), 63, 7, 65) == Path("r/logs/node7.log")


def test_an_atomic_write_leaves_no_part(tmp_path):
    write_atomic(tmp_path / "a.json", "one")
    write_atomic(tmp_path / "a.json", "two")
    assert os.listdir(tmp_path) == ["a.json"]
    assert (tmp_path / "a.json").read_text() == "two"


def test_the_members_of_a_series_are_found_by_its_name(tmp_path):
    for run, note, text in (
        ("s-ddp-1x2/b", "12", '{"series": "s-1"}'),
        ("s-ddp-1x2/b", "13", '{"series": "s-1"}'),  # the same run, submitted once more
        ("s-ddp-1x1/a", "local", '{"series": "s-1"}'),
        ("s-ddp-1x1/c", "14", '{"series": "s-2"}'),
        ("other/d", "15", '{"series": null}'),
        ("other/e", "16", '["series"]'),
        ("other/f", "17", "cut o"),
    ):
        path = tmp_path / run / "jobs" / f"{note}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert run_dirs_of_series(tmp_path, "s-1") == [tmp_path / "s-ddp-1x1" / "a", tmp_path / "s-ddp-1x2" / "b"]
    assert run_dirs_of_series(tmp_path, "s") == []
    assert run_dirs_of_series(tmp_path / "nowhere", "s-1") == []
