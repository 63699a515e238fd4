"""Verdicts on what real launchers printed: 4 ranks on node1 and node2, where rank 2 failed unless the name says
otherwise. Recorded on Slurm 22.05.8 with torch 2.13, Open MPI 4.1.4 and MPICH 4.0.2, less output of the ranks."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from phalanx.schedulers import failure as verdict
from phalanx.schedulers import launcher_output as deaths

RECORDED = Path(__file__).parent / "launcher_output"
LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.77.0.11]:25304"


def text(name: str) -> str:
    return (RECORDED / f"{name}.txt").read_text()


def error_file(folder: Path, rank: int, at: float, exception: str = LOST, code: int = 1) -> None:
    (folder / "errors").mkdir(exist_ok=True)
    report = {"v": 1, "rank": rank, "host": f"node{1 + rank // 2}", "time": at}
    (folder / f"errors/{rank}.json").write_text(json.dumps({**report, "exception": exception, "exit_code": code}))


def judge(folder: Path, said: str, launcher: str | None, status: int = 143) -> tuple[verdict.Culprit | None, str]:
    attempt = verdict.Attempt(folder, 100.0, status, said, "node1", launcher, 4, 2)
    culprit, stopped = verdict.judge(attempt)
    assert culprit is None or stopped is None
    return culprit, stopped.what if stopped else ""


def launcher_of(name: str) -> str:
    start = name.split("-")[0]
    return {"openmpi": "mpirun", "mpich": "mpirun"}.get(start, start)


@pytest.mark.parametrize("told", [True, False], ids=["launcher known", "launcher unknown"])
@pytest.mark.parametrize("name", ["srun", "openmpi", "torchrun"])
@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("kill", 137, "SIGKILL"),
        ("segv", 139, "a segmentation fault"),
        ("term", 143, "SIGTERM (not by the launch itself)"),  # with which launchers end the others
        ("_exit", 7, "exit code 7"),
    ],
)
def test_a_rank_that_died_without_words_is_named_though_others_complained_first(
    tmp_path: Path, name: str, how: str, code: int, words: str, told: bool
) -> None:
    for rank, at in ((1, 101.0), (3, 101.1)):
        error_file(tmp_path, rank, at)
    culprit, _ = judge(tmp_path, text(f"{name}-{how}-rank2"), launcher_of(name) if told else None)
    assert culprit is not None
    assert (culprit.rank, culprit.exit_code) == (2, code)
    assert culprit.host == (None if (name, how) == ("openmpi", "_exit") else "node2")  # Open MPI doesn't say
    assert words in culprit.what


@pytest.mark.parametrize("name", ["srun", "openmpi", "torchrun"])
@pytest.mark.parametrize(("how", "exception", "code"), [("exit3", "SystemExit: 3", 3), ("raise", "ValueError: nan", 1)])
def test_the_first_error_file_tells_most(tmp_path: Path, name: str, how: str, exception: str, code: int) -> None:
    error_file(tmp_path, 1, 101.5)
    error_file(tmp_path, 2, 101.0, exception, code)
    culprit, _ = judge(tmp_path, text(f"{name}-{how}-rank2"), launcher_of(name))
    assert culprit is not None
    assert (culprit.rank, culprit.host, culprit.exit_code) == (2, "node2", code)
    assert exception in culprit.what


@pytest.mark.parametrize("name", ["srun-exit3-rank2", "openmpi-exit3-rank2", "torchrun-exit3-rank2"])
def test_without_error_files_the_launchers_own_report_counts(tmp_path: Path, name: str) -> None:
    """torchrun's agents report one after the other: that of node2 saw the first failure."""
    culprit, _ = judge(tmp_path, text(name), launcher_of(name))
    assert culprit is not None
    assert (culprit.rank, culprit.exit_code) == (2, 3)


def test_of_two_agents_reports_the_earlier_counts_whichever_comes_first(tmp_path: Path) -> None:
    node2, node1 = text("torchrun-exit3-rank2").split("W1128 05:07:49")[:2]
    culprit, _ = judge(tmp_path, node1 + node2, "torchrun")
    assert culprit is not None
    assert (culprit.rank, culprit.host) == (2, "node2")


def test_mpich_names_host_and_signal_but_no_rank(tmp_path: Path) -> None:
    error_file(tmp_path, 1, 101.0)
    for how, code in (("kill", 137), ("segv", 139)):
        culprit, _ = judge(tmp_path, text(f"mpich-{how}-rank2"), "mpirun", 255)
        assert culprit is not None
        assert (culprit.rank, culprit.host, culprit.exit_code) == (None, "node2", code)


def test_the_only_silent_rank_is_to_blame_when_mpich_says_nothing(tmp_path: Path) -> None:
    for rank in (0, 1, 3):
        error_file(tmp_path, rank, 101.0 + rank)
    culprit, _ = judge(tmp_path, "", "mpirun", 7)
    assert culprit is not None
    assert (culprit.rank, culprit.exit_code) == (2, 7)
    (tmp_path / "errors/3.json").unlink()  # two are silent: either may have been ended
    culprit, _ = judge(tmp_path, "", "mpirun", 7)
    assert culprit is not None
    assert culprit.rank == 0


@pytest.mark.parametrize("name", ["openmpi-abort5-rank2", "mpich-abort5-rank2"])
@pytest.mark.parametrize("launcher", ["mpirun", None])
def test_a_rank_that_called_mpi_abort_is_named(tmp_path: Path, name: str, launcher: str | None) -> None:
    culprit, _ = judge(tmp_path, text(name), launcher, 5)
    assert culprit is not None
    assert (culprit.rank, culprit.exit_code) == (2, 5)


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("limit", "time limit"),
        ("cancel", "was cancelled"),
        ("crash", "node2"),
        ("preempt", "preempted"),
        ("requeue", "requeued"),
    ],
)
def test_a_launch_that_something_else_ended_has_no_culprit(
    tmp_path: Path, launcher: str, what: str, words: str
) -> None:
    """Ranks that complain because the others were ended, or their node is gone, did not fail first."""
    said = text(f"{what}-{launcher}")
    error_file(tmp_path, 1, stamp(said) + 0.4 if what != "crash" else 101.0)
    culprit, stopped = judge(tmp_path, said, launcher)
    assert culprit is None
    assert words in stopped


def stamp(said: str) -> float:
    found = said.split("CANCELLED AT ")[1][:19] if "CANCELLED AT " in said else "2026-11-28T05:00:00"
    return time.mktime(time.strptime(found, "%Y-%m-%dT%H:%M:%S"))


@pytest.mark.parametrize("name", ["limit-srun", "cancel-srun", "preempt-mpirun"])
def test_a_rank_that_failed_before_the_job_was_ended_is_the_culprit_still(tmp_path: Path, name: str) -> None:
    """The others waited for it until the limit."""
    error_file(tmp_path, 3, stamp(text(name)) - 30, "ValueError: nan")
    culprit, _ = judge(tmp_path, text(name), name.split("-")[1])
    assert culprit is not None
    assert culprit.rank == 3
    late = tmp_path / "late"
    late.mkdir()
    said = "srun: error: node2: task 3: Out Of Memory\n" + text(name)
    culprit, _ = judge(late, said, "srun")
    assert culprit is not None
    assert (culprit.rank, culprit.exit_code) == (3, 137)
    assert "out of memory" in culprit.what


@pytest.mark.parametrize("name", ["srun", "openmpi", "torchrun"])
def test_a_rank_ended_from_outside_does_not_hide_one_that_had_failed(tmp_path: Path, name: str) -> None:
    error_file(tmp_path, 3, 101.0, "ValueError: nan")
    culprit, _ = judge(tmp_path, text(f"{name}-term-rank2"), launcher_of(name))
    assert culprit is not None
    assert culprit.rank == 3


def test_a_rank_that_fails_in_the_moment_in_which_another_is_ended_is_not_its_cause(tmp_path: Path) -> None:
    """torchrun looks ten times a second: of two in one look it calls the lower one the root cause."""
    swapped = {"pid: 240": "pid: 241", "rank      : 2": "rank      : 3", "rank      : 3": "rank      : 2"}
    said = re.sub("|".join(swapped), lambda found: swapped[found[0]], text("torchrun-term-rank2"))
    said = re.sub(r".*closing signal SIGTERM\n", "", said, count=1).replace(
        "local_rank: 1)\n  exitcode  : -15 (pid: 241)", "local_rank: 1)\n  exitcode  : 1 (pid: 241)"
    )
    error_file(tmp_path, 3, 101.0)
    culprit, _ = judge(tmp_path, said, "torchrun")
    assert culprit is not None
    assert culprit.exit_code == 143


@pytest.mark.parametrize(
    "what", ["RuntimeError: Gloo connectFullMesh failed with …", "DistBackendError: ncclSystemError"]
)
def test_ranks_that_did_not_reach_each_other_are_told_of_the_interface(tmp_path: Path, what: str) -> None:
    error_file(tmp_path, 1, 101.0, what)
    lines, _ = verdict.conclude(verdict.Attempt(tmp_path, 100.0, 1, "", "node1", "srun", 4, 2))
    assert "set interface" in lines[-1]


def test_a_rank_whose_disk_took_no_report_is_named_by_what_it_said(tmp_path: Path) -> None:
    """As worker.py says it on the launcher's stderr."""
    error_file(tmp_path, 0, 101.0)
    said = "phalanx: rank 3 on node2 failed: OSError: [Errno 28] No space left on device (exit code 1; no report: x)\n"
    culprit, _ = judge(tmp_path, said + text("srun-exit3-rank2"), "srun")
    assert culprit is not None
    assert (culprit.rank, culprit.host, culprit.exit_code) == (3, "node2", 1)
    assert culprit.what == "failed: OSError: [Errno 28] No space left on device"


@pytest.mark.parametrize(
    ("code", "words"), [(139, "SIGSEGV in a container or shell (a seg"), (137, "SIGKILL in a con")]
)
def test_a_signal_that_a_container_tells_as_an_exit_code_is_named(tmp_path: Path, code: int, words: str) -> None:
    culprit, _ = judge(tmp_path, f"srun: error: node2: task 2: Exited with exit code {code}\n", "srun")
    assert culprit is not None
    assert (culprit.rank, culprit.exit_code) == (2, code)
    assert words in culprit.what


@pytest.mark.parametrize("name", ["torchrun-kill-rank2", "openmpi-kill-rank2", "srun-kill-rank2"])
@pytest.mark.parametrize(
    "said", ["1 oom_kill event in StepId=3.0. Some of the", "2 oom-kill event(s) in StepId=3.0; Some"]
)
def test_a_killed_rank_of_a_step_that_ran_out_of_memory_was_killed_for_that(
    tmp_path: Path, name: str, said: str
) -> None:
    oom = f"slurmstepd-node2: error: Detected {said} step tasks have been OOM Killed.\n"
    culprit, _ = judge(tmp_path, text(name) + oom, launcher_of(name))
    assert culprit is not None
    assert "out of memory, as Slurm says; set mem" in culprit.what


def test_a_cancelled_step_is_told_from_one_that_a_rank_ended(tmp_path: Path) -> None:
    """Slurm writes 'STEP … CANCELLED' for both; in the first case the ranks die after it."""
    culprit, stopped = judge(tmp_path, text("cancelstep-srun"), "srun", 137)
    assert (culprit, stopped) == (None, "step 7.0 was cancelled")
    assert judge(tmp_path, text("srun-exit3-rank2"), "srun")[1] == ""
    both = text("srun-exit3-rank2") + text("openmpi-exit3-rank2")  # the first of two launches in a job failed too
    for launcher in ("mpirun", None):
        culprit, stopped = judge(tmp_path, both, launcher, 3)
        assert culprit is not None
        assert culprit.rank == 2


def test_several_tasks_in_one_line_are_all_read() -> None:
    found = deaths.deaths(text("srun-exit5-ranks013"), "srun")
    assert [(death.rank, death.host, death.code) for death in found] == [
        (0, "node1", 5), (1, "node1", 5), (3, "node2", 5),
    ]  # fmt: skip
    (line, _, _) = deaths.deaths("srun: error: gpu[3-5]: tasks 1,4-5: Bus error (core dumped)\n", "srun")
    assert (line.rank, line.host, line.code) == (1, "gpu3", -7)


def test_ranks_that_were_killed_while_the_step_ended_are_not_to_blame(tmp_path: Path) -> None:
    """Slurm kills those that ignore its SIGTERM; rank 1 had failed before."""
    error_file(tmp_path, 1, 101.0)
    said = text("srun-exit3-rank2").replace("task 2: Exited with exit code 3", "task 1: Exited with exit code 1")
    culprit, _ = judge(tmp_path, said.replace("task 3: Terminated", "task 3: Killed"), "srun")
    assert culprit is not None
    assert culprit.rank == 1


def test_an_agent_that_died_is_no_rank(tmp_path: Path) -> None:
    """Under torchrun, task 1 of the step is an agent, and its ranks are 2 and 3."""
    culprit, _ = judge(tmp_path, text("agent-killed-node2"), "torchrun")
    assert culprit is not None
    assert (culprit.who, culprit.host, culprit.exit_code) == ("torchrun itself", "node2", 137)


def test_a_log_that_earlier_attempts_wrote_too_is_read_from_the_last_start(tmp_path: Path) -> None:
    old, new = text("preempt-srun"), text("srun-kill-rank2")
    said = deaths.since(old + new, stamp(old) + 60)
    assert "PREEMPTION" not in said
    culprit, _ = judge(tmp_path, said, "srun")
    assert culprit is not None
    assert culprit.rank == 2
    assert "PREEMPTION" in deaths.since(old + new, stamp(old) - 60)


@pytest.mark.parametrize("launcher", ["srun", "torchrun", "mpirun", "deepspeed", "python", None])
@pytest.mark.parametrize(
    ("name", "where", "why", "change"),
    [
        ("layout", "on node1", "Unable to layout tasks on given cpus", "cpus_per_task"),
        ("slurmd", "on node2", "Communication connection failure", "exclude=node2"),
        ("program", "on node1, node2", "/opt/venv/bin/python: No such file or directory", "set venv"),
        ("shell", "on node1, node2", "/opt/venv/bin/python: No such file or directory", "set venv"),
        ("mpirun-program", "on node1", "/no/such/python", "set venv"),
    ],
)
def test_a_step_that_slurm_could_not_start_blames_no_rank(
    tmp_path: Path, name: str, where: str, why: str, change: str, launcher: str | None
) -> None:
    """Of the tasks that did start, some lost their connection and Slurm killed the others."""
    error_file(tmp_path, 1, 101.0)
    said = text(f"unlaunched-{name}")
    attempt = verdict.Attempt(tmp_path, 100.0, 193, said, "node1", launcher, 4, 2)
    (line,), code = verdict.conclude(attempt)
    assert line.startswith(f"the launch failed {where}: {why}")
    assert change in line
    assert code == 193
    assert verdict.judge(attempt)[0] is None


# As Slurm 22.05.8 said them, the last three by its sources.
@pytest.mark.parametrize(
    ("said", "change"),
    [
        ("Unable to create step for job 23: Invalid generic resource (gres) specification", "gpus_per_node"),
        ("Unable to create step for job 23: More processors requested than permitted", "cpus_per_task"),
        ("Unable to create step for job 23: Requested node configuration is not available", "nodes"),
        ("Application launch failed: Unable to satisfy cpu bind request", "cpu_bind"),
        ("Only allocated 2 nodes asked for 3", "set nodes"),
        ("Unable to confirm allocation for job 23: Invalid job id specified", "start anew"),
        ("Unable to allocate resources: Invalid account or account/partition combination specified", "account"),
        ('unrecognized --cpu-bind argument "nonsense"', "cpu_bind"),
        ("Invalid MPI type 'nosuch', --mpi=list for acceptable types", "set mpi"),
        ("Could not open stdout file: No such file or directory", "srun_args"),
        ("task 0 launch failed: Invalid job credential", "tell those who run the cluster"),
        ("timeout waiting for task launch, started 1 of 2 tasks", "tell those who run the cluster"),
        ('Munge encode failed: Unable to access "/run/munge/munge.socket.2"', "tell those who run the cluster"),
    ],
)
def test_a_step_that_could_not_be_made_is_told_in_sruns_words(tmp_path: Path, said: str, change: str) -> None:
    culprit, stopped = judge(tmp_path, f"srun: error: {said}\n", "torchrun", 1)
    assert culprit is None
    assert stopped.startswith("the launch failed: ")
    assert said in stopped
    assert change in stopped


def test_an_option_that_srun_does_not_know_is_told_so(tmp_path: Path) -> None:
    said = "srun: unrecognized option '--nonsense'\nTry \"srun --help\" for more information\n"
    assert judge(tmp_path, said, "srun", 255)[1].startswith("the launch failed: unrecognized option '--nonsense'")


def test_a_failure_to_launch_hides_no_failure_of_a_rank(tmp_path: Path) -> None:
    """One's own lines went on after a step that could not start; or a rank had died before."""
    step = "srun: error: Unable to create step for job 23: More processors requested than permitted\n"
    killed = text("srun-kill-rank2")
    began = "phalanx: rank 0 of 4 on node1: node 0, local rank 0, cpu, strategy ddp\n"
    for said in (step + began + killed, killed + step):
        culprit, _ = judge(tmp_path, said, "srun")
        assert culprit is not None
        assert (culprit.rank, culprit.exit_code) == (2, 137)
    error_file(tmp_path, 1, 101.0, "ValueError: nan")
    culprit, _ = judge(tmp_path, text("unlaunched-slurmd"), "srun")
    assert culprit is not None
    assert culprit.rank == 1
    _, stopped = judge(tmp_path / "none", text("cancel-srun") + text("unlaunched-slurmd"), "srun")
    assert "was cancelled" in stopped


def test_a_launch_of_another_job_in_the_same_file_is_not_this_ones() -> None:
    other = text("unlaunched-slurmd").splitlines(keepends=True)[0] + text("unlaunched-program")
    kept = deaths.of_job(other, "27", ["node3"])
    assert "launch" not in kept.replace("srun: launch/slurm", "")
    assert "execve" not in kept
    assert deaths.of_job(other, "26", ["node1", "node2"]) == other


def test_the_words_of_a_verdict(tmp_path: Path) -> None:
    """What `phalanx run` and a job print, and the code they leave with, which is the failed rank's."""
    error_file(tmp_path, 2, 101.0, "ValueError: nan", 3)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/2.log").touch()
    said = verdict.Attempt(tmp_path, 100.0, 143, text("srun-exit3-rank2"), "node1", "srun", 4, 2)
    assert verdict.conclude(said) == (
        [
            "rank 2 on node2 failed: ValueError: nan",
            f"  log: {tmp_path}/logs/2.log",
            f"  traceback: {tmp_path}/errors/2.json",
        ],
        3,
    )
    (tmp_path / "logs/node63.log").touch()  # above 64 ranks, a node has one log
    error_file(tmp_path, 127, 100.5, "ValueError: nan")
    many = verdict.Attempt(tmp_path, 100.0, 143, "", "node1", "srun", 128, 2)
    assert f"  log: {tmp_path}/logs/node63.log" in verdict.conclude(many)[0]


def test_a_verdict_without_a_culprit_keeps_the_code(tmp_path: Path) -> None:
    stopped = verdict.Attempt(tmp_path, 100.0, 143, text("limit-srun"), "node1", "srun", 4, 2)
    (line,), code = verdict.conclude(stopped)
    assert code == 143
    assert "time limit" in line
    assert "--chain" in line
    nothing = verdict.Attempt(tmp_path, 100.0, -9, "", "node1", "srun", 4, 2)
    assert verdict.conclude(nothing) == (["srun ended with exit code 137; no rank reported an error"], 137)


BEGAN = "phalanx: rank 0 of 4 on node1\n"
TRIED = [
    "srun: error: Unable to create step for job 23: Job/step already completing or completed\n",
    "srun: error: Munge decode failed: Expired credential\n",
    "bash: line 1: nvcc: command not found\n",
]


@pytest.mark.parametrize("tried", TRIED)
def test_what_a_running_rank_tried_in_vain_is_no_failed_launch(tmp_path: Path, tried: str) -> None:
    """The rank that died is told, also where others ended as a shell without the program does."""
    ends = ("task 2: Segmentation fault", "task 3: Exited with exit code 127")
    said = BEGAN + tried + "".join(f"srun: error: node2: {end}\n" for end in ends)
    culprit, _ = judge(tmp_path, said, "srun", 139)
    assert culprit is not None
    assert (culprit.rank, culprit.exit_code) == (2, 139)
    attempt = verdict.Attempt(tmp_path, 100.0, 139, said, "node1", "srun", 4, 2)
    assert "the launch failed" not in verdict.conclude(attempt)[0][0]
    later = judge(tmp_path, BEGAN + TRIED[0], "srun", 1)[1]  # a further step of ranks
    assert "the launch failed" in later


def test_mpichs_rank_counts_in_a_log_that_jobs_share(tmp_path: Path) -> None:
    """Its exit code is none of a rank's."""
    said = text("mpich-segv-rank2")
    attempt = verdict.Attempt(tmp_path, 100.0, 255, said, "node1", "mpirun", 4, 2, shared=True)
    culprit, _ = verdict.judge(attempt)
    assert culprit is not None
    assert (culprit.host, culprit.exit_code) == ("node2", 139)
