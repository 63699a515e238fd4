"""`phalanx test`: which launcher runs which tests, what is refused before a start, and the verdict over all workers."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from phalanx.cli.main import main
from phalanx.cli.test import _read
from phalanx.errors import MissingExtraError, PlanError, UsageError
from phalanx.schedulers.local import Outcome
from phalanx.testing import junit, pairing, results

ALL = ("torch_dist", "deepspeed_dist", "horovod_dist", "ray_dist")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty project without Slurm around it; a set of the engines that aren't installed, at first none."""
    for name in ("SLURM_JOB_ID", "PHALANX_SITE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    gone: set[str] = set()

    def check(plan):
        if gone & {plan.strategy, plan.launcher}:
            raise MissingExtraError(f"pip install 'phalanx[{plan.strategy}]'")

    monkeypatch.setattr("phalanx.planning.engines.check", check)
    return gone


def said(capsys, *words: str) -> str:
    """The error of a command line that must be refused."""
    assert main(["test", *words]) == 2
    shown = capsys.readouterr()
    assert "run directory" not in shown.err
    return shown.err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, {marker: marker for marker in ALL}),
        ("torch_dist", {"torch_dist": "torch_dist"}),
        ("hpc and torch_dist", {"torch_dist": "hpc and torch_dist"}),
        ("hpc and not slow", {marker: f"(hpc and not slow) and {marker}" for marker in ALL}),
        ("torch_dist or ray_dist", {m: f"(torch_dist or ray_dist) and {m}" for m in ("torch_dist", "ray_dist")}),
        ("hpc and not ray_dist", {m: f"(hpc and not ray_dist) and {m}" for m in ALL[:3]}),
    ],
)
def test_an_expression_of_markers_is_a_launch_for_each_kind_of_test(text, expected):
    assert pairing.expressions(text) == expected


@pytest.mark.parametrize("text", ["torch_dist and ray_dist", "not hpc and hpc", "torch_dist and", "a b"])
def test_an_expression_that_selects_nothing_or_cant_be_read_is_refused(text):
    with pytest.raises(UsageError) as caught:
        pairing.expressions(text)
    assert text in str(caught.value)
    assert "torch_dist" in str(caught.value)


def launcher_of(capsys, *words: str) -> str:
    """What the comment in a previewed script says: launcher and strategy."""
    assert main(["test", "--preview", *words]) == 0
    script = capsys.readouterr().out
    (line,) = [line for line in script.splitlines() if line.startswith("# ") and "(phalanx " in line]
    return line.removeprefix("# ").partition(", ranks")[0]


@pytest.mark.parametrize(
    ("marker", "options", "expected"),
    [
        ("torch_dist", (), "torchrun, ddp"),
        ("torch_dist", ("--launcher", "srun"), "srun, ddp"),
        ("torch_dist", ("--launcher", "deepspeed", "--strategy", "fsdp"), "deepspeed, fsdp"),
        ("deepspeed_dist", (), "srun, deepspeed"),
        ("deepspeed_dist", ("--launcher", "torchrun"), "torchrun, deepspeed"),
        ("horovod_dist", (), "mpirun, horovod"),
        ("horovod_dist", ("--launcher", "srun"), "srun, horovod"),
        ("ray_dist", (), "ray, ddp"),
    ],
)
def test_each_marker_has_its_launcher_in_a_job(here, capsys, marker, options, expected):
    assert launcher_of(capsys, "-m", marker, "-N", "2", "--nproc", "2", *options) == expected


@pytest.mark.parametrize(
    ("marker", "expected"),
    [("torch_dist", "torchrun"), ("deepspeed_dist", "torchrun"), ("horovod_dist", "horovodrun"), ("ray_dist", "ray")],
)
def test_each_marker_has_its_launcher_on_one_machine(here, monkeypatch, capsys, marker, expected):
    seen = []
    monkeypatch.setattr("phalanx.schedulers.local.launch", lambda plan, loaded: seen.append(plan) or _Stop.now())
    with pytest.raises(_Stop):
        main(["test", "-m", marker, "--", "tests/hpc", "-k", "a b"])
    (plan,) = seen
    assert (plan.launcher, plan.world_size) == (expected, 2)  # one process would prove nothing
    assert plan.args == (expected, marker, "300", "tests/hpc", "-k", "a b")


class _Stop(Exception):
    @classmethod
    def now(cls):
        raise cls


@pytest.mark.parametrize(
    ("words", "reason", "instead"),
    [
        (("-m", "horovod_dist", "--launcher", "torchrun"), "torchrun cannot start Horovod", "--launcher horovodrun"),
        (("-m", "horovod_dist", "-N", "2", "--preview", "--launcher", "torchrun"), "cannot", "--launcher mpirun"),
        (("-m", "horovod_dist", "--launcher", "ray"), "Ray Train has no Horovod", "--launcher horovodrun"),
        (("-m", "torch_dist", "--launcher", "horovodrun"), "Horovod's own", "--launcher torchrun"),
        (("-m", "torch_dist", "--launcher", "python"), "python starts one process", "--launcher torchrun"),
        (("-m", "ray_dist", "--launcher", "srun"), "need Ray's cluster", "--launcher ray"),
        (("-m", "deepspeed_dist", "--strategy", "ddp"), "run under deepspeed", "unset strategy"),
        (("-m", "torch_dist", "--strategy", "horovod"), "run under auto or ddp", "unset strategy"),
    ],
)
def test_a_wrong_pairing_is_refused_before_anything_starts(here, capsys, words, reason, instead):
    error = said(capsys, *words)
    assert words[1] in error
    assert reason in error
    assert instead in error
    assert not list(Path().glob("runs"))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("-m",), "option -m needs a marker"),
        (("-m", "torch_dist", "--wait"), "add --submit"),
        (("--submit", "--junit", "x.xml"), "add --wait"),
        (("--submit", "--local"), "leave out --jobid and --local"),
        (("-m", "torch_dist", "--", "-m", "slow"), "give -m before --"),
        (("-m", "torch_dist", "--", "--junitxml=x"), "give --junit before --"),
        (("-m", "torch_dist", "--test-timeout", "soon"), "expected a number of seconds"),
        (("-m", "torch_dist", "exec_command=echo"), "exec_command and exec_file stand in place of the launch"),
        (("-m", "torch_dist", "--laucher", "srun"), "--launcher"),
    ],
)
def test_words_that_cant_be_meant_are_refused(here, capsys, words, reason):
    assert reason in said(capsys, *words)


def test_an_engine_that_isnt_installed_is_named_with_the_command_that_installs_it(here, capsys):
    here.add("deepspeed")
    assert "pip install 'phalanx[deepspeed]'" in said(capsys, "-m", "deepspeed_dist")


def test_without_a_marker_engines_that_arent_there_are_left_out_loudly(here, monkeypatch, capsys):
    here.update({"deepspeed", "horovod", "ray"})
    seen = []
    monkeypatch.setattr("phalanx.schedulers.local.launch", lambda plan, loaded: seen.append(plan) or _Stop.now())
    with pytest.raises(_Stop):
        main(["test"])
    assert [plan.launcher for plan in seen] == ["torchrun"]
    shown = capsys.readouterr().err
    assert [line.split(":")[1].strip() for line in shown.splitlines() if line.startswith("NOT RUN")] == list(ALL[1:])


def test_if_no_engine_is_left_nothing_is_started(here, capsys):
    here.update({"deepspeed", "horovod"})
    error = said(capsys, "-m", "deepspeed_dist or horovod_dist")
    assert "none of the distributed tests can run here" in error
    assert error.count("NOT RUN: ") == 2


def test_a_preview_without_a_marker_shows_the_script_of_each_kind(here, capsys):
    here.update({"deepspeed", "horovod", "ray"})
    assert main(["test", "--preview", "-N", "2", "--nproc", "2", "--no-submit-job"]) == 0
    assert capsys.readouterr().out.count("#!/bin/bash") == 4


def test_a_signal_to_the_command_ends_all_launches_and_blames_nobody(here, monkeypatch, capsys):
    seen = []

    def launch(plan, loaded):
        seen.append(plan)
        return Outcome(Path(), 130, ("stopped by SIGINT",), stopped=True)

    monkeypatch.setattr("phalanx.schedulers.local.launch", launch)
    assert main(["test", "--", "tests/hpc"]) == 130
    assert len(seen) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "torch_dist: stopped by SIGINT"


def test_options_end_where_pytests_arguments_begin():
    for words in (["-mtorch_dist", "nodes=2", "--", "a.py", "-x"], ["nodes=2", "-m", "torch_dist", "a.py", "-x"]):
        scanned, expression = _read(words)
        assert (expression, scanned.overrides, scanned.args) == ("torch_dist", (("nodes", "2"),), ("a.py", "-x"))


# What ranks write down, and what is made of it.


def write(run_dir: Path, rank: int, *tests: tuple[str, str], code: int | None = 0, during: str = "", hung=None) -> None:
    events = [{"event": "start", "time": 100.0, "rank": rank, "host": f"node{rank // 2 + 1}"}]
    for name, outcome in tests:
        events += [{"event": "test", "time": 101.0, "test": name}]
        events += [
            {"event": "done", "time": 102.0, "test": name, "outcome": outcome, "seconds": 1, "said": f"of {name}"}
        ]
    events += [{"event": "test", "time": 103.0, "test": during}] if during else []
    events += [{"event": "hung", "time": 104.0, "test": during, "seconds": hung}] if hung else []
    events += [{"event": "end", "time": 123.0, "code": code, "said": "why"}] if code is not None else []
    for name in ("tests", "logs"):
        (run_dir / name).mkdir(exist_ok=True)
    (run_dir / "tests" / f"{rank}.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (run_dir / "logs" / f"{rank}.log").write_text(f"words of rank {rank}\n" if rank else "")


def launch(run_dir: Path, size: int, code: int = 0, **more) -> results.Launch:
    return results.Launch(run_dir, "torch_dist", "torch_dist", results.read(run_dir, size), 2, code, **more)


GOOD = (("t.py::a", "passed"), ("t.py::b", "passed"), ("t.py::c", "skipped"))


def test_workers_that_agree_are_one_line(tmp_path):
    for rank in range(4):
        write(tmp_path, rank, *GOOD)
    found = launch(tmp_path, 4)
    assert results.verdict(found) == ["torch_dist: 4 workers: 2 passed, 1 skipped in 23 s"]
    assert found.exit_code == 0


def test_workers_that_differ_have_a_line_each(tmp_path):
    for rank in range(4):
        write(tmp_path, rank, *(GOOD if rank != 2 else GOOD[:2]))
    lines = results.verdict(launch(tmp_path, 4))
    expected = [
        "ranks 0 to 1: 2 passed, 1 skipped",
        "rank 2 on node2: 2 passed",
        "rank 3 on node2: 2 passed, 1 skipped",
    ]
    assert [line.strip() for line in lines[1:]] == expected


def test_a_failure_on_one_worker_fails_all_and_shows_its_log(tmp_path):
    for rank in range(4):
        outcome = "failed" if rank == 3 else "passed"
        write(tmp_path, rank, *GOOD, ("t.py::d", outcome), code=int(rank == 3))
    found = launch(tmp_path, 4, 1)
    text = "\n".join(results.verdict(found))
    assert found.exit_code == 1
    assert "rank 3 on node2: 1 failed: t.py::d" in text
    assert "words of rank 3" in text
    assert "words of rank 1" not in text
    assert str(tmp_path / "logs" / "3.log") in text


def test_a_worker_that_died_is_named_with_its_test_and_the_launchers_words(tmp_path):
    write(tmp_path, 0, *GOOD, code=None, during="t.py::d")
    write(tmp_path, 1, *GOOD, code=None, during="t.py::d")
    found = launch(tmp_path, 2, 137, reason=("rank 1 on node1 was killed by SIGKILL",), culprit=1)
    text = "\n".join(results.verdict(found))
    assert found.exit_code == 137
    assert "rank 1 on node1: died in t.py::d (rank 1 on node1 was killed by SIGKILL)" in text
    assert "rank 0 on node1: died" not in text


def test_a_worker_that_was_ended_before_pytest_printed_its_failure_still_says_why(tmp_path):
    write(tmp_path, 0, *GOOD, code=None, during="t.py::d")
    write(tmp_path, 1, *GOOD, ("t.py::d", "failed"), code=None)
    text = "\n".join(results.verdict(launch(tmp_path, 2, 1)))
    assert "rank 1 on node1: 1 failed: t.py::d\n  | of t.py::d\n" in text


def test_a_worker_that_left_nothing_is_in_the_verdict(tmp_path):
    write(tmp_path, 0, *GOOD)
    found = launch(tmp_path, 2)
    assert found.exit_code == 1
    assert "rank 1: no tests; ended early" in "\n".join(results.verdict(found))


def test_a_line_that_was_cut_off_is_no_event(tmp_path):
    write(tmp_path, 0, *GOOD)
    with (tmp_path / "tests" / "0.jsonl").open("a") as file:
        file.write('{"event": "do')
    assert launch(tmp_path, 1).exit_code == 0


def test_a_test_that_hung_is_named_with_its_limit(tmp_path):
    for rank in range(2):
        write(tmp_path, rank, *GOOD, code=None, during="t.py::d", hung=7)
    found = launch(tmp_path, 2, 1)
    assert found.exit_code == 1
    assert "all workers: t.py::d took more than 7 s" in "\n".join(results.verdict(found))


def test_a_worker_that_failed_comes_before_those_that_waited_for_it(tmp_path):
    for rank in range(2):
        write(tmp_path, rank, *GOOD, code=None, during="t.py::d", hung=7)
    write(tmp_path, 2, *GOOD, ("t.py::d", "failed"), code=None)
    lines = [line for line in results.verdict(launch(tmp_path, 3, 1)) if line.startswith("rank ")]
    assert lines[0] == "rank 2 on node2: 1 failed: t.py::d"
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("codes", "launch_code", "expected"),
    [((0, 0), 0, 0), ((5, 5), 5, 5), ((4, 4), 4, 4), ((0, 1), 1, 1), ((2, 1), 1, 1), ((0, 0), 3, 3), ((None, 0), 0, 1)],
)
def test_the_exit_code_is_pytests_where_all_agree(tmp_path, codes, launch_code, expected):
    for rank, code in enumerate(codes):
        write(tmp_path, rank, *GOOD, code=code)
    assert launch(tmp_path, 2, launch_code).exit_code == expected


def test_no_test_at_all_is_an_error_of_its_own(tmp_path):
    for rank in range(2):
        write(tmp_path, rank, code=5)
    (line,) = results.verdict(launch(tmp_path, 2, 5))
    assert "no test has marker 'torch_dist'" in line


XML = '<testsuites><testsuite name="pytest" tests="{tests}" failures="{failures}" errors="0" skipped="0"/></testsuites>'


def test_one_junit_file_has_a_suite_for_each_worker(tmp_path):
    write(tmp_path, 0, *GOOD)
    write(tmp_path, 1, *GOOD, code=1)
    write(tmp_path, 2, *GOOD[:1], code=None, during="t.py::b")
    for rank in range(2):
        (tmp_path / "tests" / f"{rank}.xml").write_text(XML.format(tests=3, failures=rank))
    junit.merge([launch(tmp_path, 3, 137, reason=("it was killed",))], tmp_path / "out" / "all.xml")
    root = ElementTree.parse(tmp_path / "out" / "all.xml").getroot()
    assert [suite.get("name") for suite in root] == [
        "torch_dist rank 0 on node1",
        "torch_dist rank 1 on node1",
        "torch_dist rank 2 on node2",
    ]
    assert [root.get(name) for name in ("tests", "failures", "errors", "skipped")] == ["7", "1", "1", "0"]
    (case,) = root[2]
    assert (case.get("name"), case[0].tag, case[0].get("message")) == ("t.py::b", "error", "it was killed")


def test_a_junit_file_that_cant_be_written_is_said(tmp_path):
    write(tmp_path, 0, *GOOD)
    with pytest.raises(PlanError, match="--junit"):
        junit.merge([launch(tmp_path, 1)], tmp_path)
