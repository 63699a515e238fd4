"""What a job prints after a launch that ended badly, and the code it leaves with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src"
RECORDED = Path(__file__).parent / "launcher_output"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Rank 2 of 4 failed with exit code 3, which srun tells as 143."""
    for name in ("jobs", "errors", "logs"):
        (tmp_path / name).mkdir()
    (tmp_path / "jobs/71.start").write_text("50\n100\n")
    report(tmp_path, 2, 101.0, "SystemExit: 3", 3)
    report(tmp_path, 1, 60.0, "ValueError: of the first start", 9)
    (tmp_path / "logs/2.log").touch()
    return tmp_path


def report(run_dir: Path, rank: int, at: float, exception: str, code: int = 1) -> None:
    said = {"v": 1, "rank": rank, "host": f"node{1 + rank // 2}", "time": at, "exception": exception, "exit_code": code}
    (run_dir / f"errors/{rank}.json").write_text(json.dumps(said))


def tell(run_dir: Path, status: int | str, output: str | None = None, **environ: str) -> tuple[list[str], int]:
    """As a batch script calls it: stdout and stderr are the job's output file."""
    kept = {"PATH": os.environ["PATH"], "PYTHONPATH": str(SOURCES), "SLURM_JOB_ID": "71"}
    path = run_dir / "job.out"
    path.write_text(output or "")
    with path.open("a") as file:
        command = [sys.executable, "-m", "phalanx.report_failure", str(run_dir), str(status)]
        done = subprocess.run(command, stdout=file, stderr=file, env=kept | environ, timeout=60, check=False)
    return path.read_text().removeprefix(output or "").splitlines(), done.returncode


def test_the_failed_rank_is_named_with_its_files_and_its_code_is_the_jobs(run_dir: Path) -> None:
    expected = ["rank 2 on node2 failed: SystemExit: 3", f"  log: {run_dir}/logs/2.log"]
    assert tell(run_dir, 143) == ([*expected, f"  traceback: {run_dir}/errors/2.json"], 3)
    assert not (run_dir / "jobs/71.stopped").exists()  # a failure, which a further job would repeat


def test_the_jobs_own_output_tells_of_ranks_that_left_no_words(run_dir: Path) -> None:
    (run_dir / "errors/2.json").unlink()
    lines, code = tell(run_dir, 143, (RECORDED / "srun-kill-rank2.txt").read_text())
    assert lines[0].startswith("rank 2 on node2 was killed by SIGKILL")
    assert code == 137


@pytest.mark.parametrize("mark", ["=== phalanx: job 71, start 0 ===", "=== phalanx: job 71, start 1 ==="])
@pytest.mark.parametrize("before", ["srun-kill-rank2", "torchrun-kill-rank2", "openmpi-kill-rank2", "cancel-srun"])
def test_what_others_or_earlier_starts_wrote_into_the_same_file_does_not_count(
    run_dir: Path, before: str, mark: str
) -> None:
    (run_dir / "errors/2.json").unlink()
    earlier = "=== phalanx: job 71, start 0 ===\n" + (RECORDED / f"{before}.txt").read_text()
    lines, code = tell(run_dir, 143, f"{earlier}no line break{mark}\n{(RECORDED / 'srun-segv-rank2.txt').read_text()}")
    assert "a segmentation fault" in lines[0]
    assert code == 139


MARKS = "=== phalanx: job 70, start 0 ===\n=== phalanx: job 71, start 0 ===\n"


@pytest.mark.parametrize("marks", [MARKS, "of a job in an empty file\n=== phalanx: job 71, start 0 ===\n"])
@pytest.mark.parametrize("launcher", ["srun", "mpirun", "torchrun"])
def test_a_rank_of_another_job_at_the_same_time_is_not_told_for_ones_own(
    run_dir: Path, launcher: str, marks: str
) -> None:
    """Both write into one file, on the same nodes; that job began before this one, and ended in it."""
    (run_dir / "plan.json").write_text(json.dumps({"launcher": launcher, "world_size": 4, "nproc_per_node": 2}))
    name = {"mpirun": "openmpi"}.get(launcher, launcher)
    output = marks + (RECORDED / f"{name}-kill-rank2.txt").read_text().replace("STEP 21.", "STEP 71.")
    report(run_dir, 1, 101.0, "ValueError: bad")
    (run_dir / "errors/2.json").unlink()
    status = 143 if launcher == "srun" else 1
    lines, code = tell(run_dir, status, output, SLURM_JOB_NODELIST="node[1-2]")
    assert (lines[0], code) == ("rank 1 on node1 failed: ValueError: bad", 1)


@pytest.mark.parametrize(("launcher", "status"), [("srun", 7), ("mpirun", 7)])
def test_an_end_that_does_not_fit_the_exit_code_is_another_jobs(run_dir: Path, launcher: str, status: int) -> None:
    (run_dir / "plan.json").write_text(json.dumps({"launcher": launcher, "world_size": 4, "nproc_per_node": 2}))
    (run_dir / "errors/2.json").unlink()
    name = {"mpirun": "openmpi"}.get(launcher, launcher)
    killed = (RECORDED / f"{name}-kill-rank2.txt").read_text()
    assert tell(run_dir, status, MARKS + killed)[1] == status
    assert tell(run_dir, 137, MARKS + killed)[1] == 137


def test_what_slurm_says_of_a_job_at_the_same_time_does_not_count(run_dir: Path) -> None:
    (run_dir / "errors/2.json").unlink()
    others = (RECORDED / "srun-kill-rank2.txt").read_text().replace("node", "other").replace("STEP ", "STEP 9")
    own = (RECORDED / "srun-segv-rank2.txt").read_text().replace("STEP 21.", "STEP 71.")
    assert tell(run_dir, 143, others + own, SLURM_JOB_NODELIST="node[1-2]")[1] == 139


@pytest.mark.parametrize(
    ("rank", "launcher", "told"),
    [(0, "torchrun", True), (3, "torchrun", True), (3, "srun", True), (0, "srun", False), (0, "ray", True)],
)
def test_a_traceback_that_the_launchers_own_words_hide_is_told_after_them(
    run_dir: Path, rank: int, launcher: str, told: bool
) -> None:
    (run_dir / "errors/2.json").unlink()
    (run_dir / "plan.json").write_text(json.dumps({"launcher": launcher, "world_size": 4, "nproc_per_node": 2}))
    report(run_dir, rank, 101.0, "ValueError: bad")
    path = run_dir / f"errors/{rank}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "traceback": "Traceback:\n  here\nValueError: bad\n"}))
    lines, _ = tell(run_dir, 1)
    expected = (
        [f"the last lines of rank {rank}'s traceback:", "Traceback:", "  here", "ValueError: bad"] if told else []
    )
    assert lines[: len(expected) + 1] == [*expected, f"rank {rank} on node{1 + rank // 2} failed: ValueError: bad"]


def test_the_verdict_is_kept_for_those_who_ask_later(run_dir: Path) -> None:
    tell(run_dir, 143)
    said = json.loads((run_dir / "jobs/71.verdict").read_text())
    assert (said["start"], said["rank"], said["host"]) == (100.0, 2, "node2")
    assert said["lines"][0] == "rank 2 on node2 failed: SystemExit: 3"


def test_only_the_end_of_a_long_output_is_read(run_dir: Path) -> None:
    (run_dir / "errors/2.json").unlink()
    output = "srun: error: node1: task 0: Killed\n" + "loss 0.1\n" * 20_000 + "srun: error: node2: task 3: Killed\n"
    assert tell(run_dir, 143, output)[0][0].startswith("rank 3 on node2")


def test_the_output_file_in_the_run_directory_serves_when_stderr_is_none(run_dir: Path) -> None:
    (run_dir / "errors/2.json").unlink()
    (run_dir / "slurm-71.out").write_text((RECORDED / "limit-srun.txt").read_text())
    command = [sys.executable, "-m", "phalanx.report_failure", str(run_dir), "143"]
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(SOURCES), "SLURM_JOB_ID": "71"}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=60, check=False)
    assert "time limit" in done.stderr
    assert done.returncode == 143
    assert "time limit" in (run_dir / "jobs/71.stopped").read_text()  # a chain goes on


@pytest.mark.parametrize(("name", "passes"), [("slurmd", True), ("program", False), ("layout", False)])
def test_a_chain_goes_on_after_a_node_that_could_not_start_tasks_but_not_if_none_can(
    run_dir: Path, name: str, passes: bool
) -> None:
    (run_dir / "errors/2.json").unlink()
    lines, code = tell(run_dir, 193, (RECORDED / f"unlaunched-{name}.txt").read_text())
    assert "the launch failed" in lines[0]
    assert code == 193
    assert (run_dir / "jobs/71.stopped").exists() == passes


def test_scontrol_is_asked_where_the_output_is(run_dir: Path, tmp_path: Path) -> None:
    (run_dir / "errors/2.json").unlink()
    told = tmp_path / "elsewhere.err"
    told.write_text((RECORDED / "crash-srun.txt").read_text())
    (tmp_path / "bin").mkdir()
    stand_in = tmp_path / "bin/scontrol"
    stand_in.write_text(f'#!/bin/sh\n[ "$*" = "show job 71" ] && echo "   StdErr={told}"\n')
    stand_in.chmod(0o755)
    command = [sys.executable, "-m", "phalanx.report_failure", str(run_dir), "143"]
    environ = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "PYTHONPATH": str(SOURCES), "SLURM_JOB_ID": "71"}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=60, check=False)
    assert done.stderr.startswith("node2 failed")


def test_the_plan_tells_ranks_from_agents(run_dir: Path) -> None:
    (run_dir / "errors/2.json").unlink()
    said = (RECORDED / "agent-killed-node2.txt").read_text()
    assert tell(run_dir, 143, said)[0][0].startswith("rank 1 on node2")
    assert tell(run_dir, 143, said, PHALANX_RDZV_PORT="20001")[0][0].startswith("torchrun itself on node2")
    (run_dir / "plan.json").write_text(json.dumps({"launcher": "torchrun", "world_size": 4, "nproc_per_node": 2}))
    assert tell(run_dir, 143, said)[0][0].startswith("torchrun itself on node2")


def test_a_launch_of_which_nothing_is_known_keeps_its_code(run_dir: Path) -> None:
    (run_dir / "errors/2.json").unlink()
    lines, code = tell(run_dir, 5)
    assert code == 5
    assert "exit code 5" in lines[0]


@pytest.mark.parametrize("broken", ["missing", "plan", "start", "errors"])
def test_it_never_fails_for_reasons_of_its_own(run_dir: Path, broken: str) -> None:
    if broken == "missing":
        assert tell(run_dir, 143)[1] == 3
        lines, code = tell(run_dir, 5, PHALANX_EXPECTED_WORLD_SIZE="many")
        assert code == 3
        return
    name = {"plan": "plan.json", "start": "jobs/71.start", "errors": "errors/3.json"}[broken]
    (run_dir / name).write_bytes(b"\xff[1, ")
    lines, code = tell(run_dir, 143)
    assert lines
    assert code in (3, 9, 143)  # without its start, an earlier one's error may count


def test_a_fault_inside_is_told_in_a_line_and_the_status_stays(run_dir: Path) -> None:
    (run_dir / "errors/0.json").write_text('{"rank":0,"host":1,"time":"x","exception":2,"exit_code":3}')
    lines, code = tell(run_dir, 77)
    assert code == 77
    assert len(lines) == 1
    assert "no verdict" in lines[0]


def test_without_arguments_or_a_failure_it_does_nothing(run_dir: Path) -> None:
    assert tell(run_dir, 0) == ([], 0)
    assert tell(run_dir, "bad")[1] == 3


def test_it_costs_little_and_imports_no_torch(run_dir: Path) -> None:
    names = "{'torch', 'numpy', 'pydantic', 'yaml', 'rich'}"
    code = f"import sys, phalanx.report_failure as r; r.main(sys.argv[1:]); print({names} & set(sys.modules))"
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(SOURCES)}
    command = [sys.executable, "-c", code, str(run_dir), "1"]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=60, check=True)
    assert done.stdout == "set()\n"
