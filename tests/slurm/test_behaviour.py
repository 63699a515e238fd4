"""What our code takes for granted about Slurm, each shown once by Slurm itself."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phalanx.config import walltime
from phalanx.rank.hostlist import expand_counts, expand_hostlist

from .conftest import Cluster, User

pytestmark = pytest.mark.timeout(200)
two_cpus = pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="this machine has one CPU: binding was not tested")
Batch = Callable[..., tuple[dict[str, str], str]]


@pytest.fixture
def batch(slurm: Cluster, tmp_path: Path) -> Batch:
    """Runs shell lines as a job to its end; gives what scontrol says of it, and its output."""

    def run(lines: str, *options: Any, arguments: tuple[str, ...] = (), **more: Any) -> tuple[dict[str, str], str]:
        path, out = tmp_path / "job.sh", tmp_path / "out"
        path.write_text(f"#!/bin/bash\n{lines}\n")
        words = ("sbatch", "--parsable", "-o", out, "--open-mode=append", *options, path, *arguments)
        ended = slurm.wait(slurm.ctl(*words, **more).strip())
        return ended, out.read_text() if out.exists() else ""

    return run


def shown(text: str, *names: str) -> list[dict[str, str]]:
    """Lines `name=value name=value`."""
    lines = [dict(word.split("=", 1) for word in line.split(" ")) for line in text.splitlines()]
    assert all(set(line) == set(names) for line in lines), text
    return lines


def show(*names: str) -> str:
    """A shell command that prints variables in one line, as `shown` reads it."""
    return "echo " + " ".join(f'"{name}=${name}"' for name in names)


def test_the_batch_shell_is_node_0_whichever_node_asks(batch: Batch) -> None:
    """So nothing that differs between nodes may be evaluated there."""
    names = ("SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID", "SLURMD_NODENAME")
    ended, said = batch(show(*names), "-N3", "--ntasks-per-node=2")
    hosts = expand_hostlist(ended["NodeList"])
    assert len(hosts) == 3
    assert shown(said, *names) == [dict(zip(names, ("0", "0", "0", hosts[0]), strict=True))]


def test_a_step_tells_each_task_its_place(batch: Batch) -> None:
    names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURMD_NODENAME", "SLURM_STEP_NUM_TASKS")
    more = ("SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE")
    step = f"srun -N2 -n4 --ntasks-per-node=2 sh -c '{show(*names, *more)}'"
    ended, said = batch(f"scontrol show hostnames\ntrue\n{step}\n{step}", "-N2", "--ntasks-per-node=2")
    hosts, tasks = said.split()[:2], shown("\n".join(said.splitlines()[2:]), *names, *more)
    assert expand_hostlist(ended["NodeList"]) == hosts
    for number in ("0", "1"):  # steps are counted from 0, anew after a restart
        step_tasks = sorted((t for t in tasks if t["SLURM_STEP_ID"] == number), key=lambda task: task["SLURM_PROCID"])
        assert [task["SLURM_PROCID"] for task in step_tasks] == ["0", "1", "2", "3"]
        assert [task["SLURM_NODEID"] for task in step_tasks] == ["0", "0", "1", "1"]
        assert [task["SLURM_LOCALID"] for task in step_tasks] == ["0", "1", "0", "1"]
        assert [task["SLURMD_NODENAME"] for task in step_tasks] == [hosts[0], hosts[0], hosts[1], hosts[1]]
        assert {task["SLURM_STEP_NUM_TASKS"] for task in step_tasks} == {"4"}
        assert {tuple(expand_counts(task["SLURM_STEP_TASKS_PER_NODE"])) for task in step_tasks} == {(2, 2)}


def test_uneven_tasks_fill_the_first_nodes(slurm: Cluster) -> None:
    said = slurm.ctl("srun", "-N2", "-n3", "sh", "-c", show("SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID"))
    tasks = shown(said, "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID")
    assert sorted(task["SLURM_NODEID"] for task in tasks) == ["0", "0", "1"]
    assert {task["SLURM_STEP_TASKS_PER_NODE"] for task in tasks} == {"2,1"}


@pytest.mark.parametrize("text", ["node[1-4]", "node1,node[3-4]", "node[4,1],x[08-11]", "a[1-2]b[1-2]", "n[098-101]"])
def test_lists_of_hosts_are_read_as_slurm_reads_them(slurm: Cluster, text: str) -> None:
    assert expand_hostlist(text) == slurm.ctl("scontrol", "show", "hostnames", text).split()


@two_cpus
def test_a_step_does_not_inherit_the_cpus_of_its_task(batch: Batch) -> None:
    """Since Slurm 22.05; what its tasks may use is to be said again."""
    step = "srun --exact --cpu-bind=cores"
    lines = f"{show('SLURM_CPUS_PER_TASK', 'SRUN_CPUS_PER_TASK')}\n{step} nproc\n{step} --cpus-per-task=2 nproc"
    _, said = batch(lines, "-n1", "--cpus-per-task=2")
    assert said.splitlines() == ["SLURM_CPUS_PER_TASK=2 SRUN_CPUS_PER_TASK=", "1", "2"]


@pytest.mark.parametrize(("option", "seconds"), [("1", (0, 4)), ("0", (6, 20))])
def test_a_step_ends_at_the_first_failure_only_if_told_to(
    slurm: Cluster, option: str, seconds: tuple[int, int]
) -> None:
    fails = "[ $SLURM_PROCID = 1 ] || exec sleep 6; exit 3"
    start = time.monotonic()
    done = slurm.run("exec", "ctl", "srun", "-N2", "-n2", f"--kill-on-bad-exit={option}", "bash", "-c", fails)
    assert seconds[0] <= time.monotonic() - start <= seconds[1]
    # The code may be that of the tasks that srun ended: not to be taken for the script's own.
    assert done.returncode == {"1": 128 + 15, "0": 3}[option]


def test_arguments_of_a_script_survive_a_requeue_and_scontrol_shows_them_unquoted(
    slurm: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "job.sh").write_text(
        "#!/bin/bash\n"
        'printf "%s|%s|%s|%s\\n" "$#" "$1" "$2" "$SLURM_RESTART_COUNT"\n'
        '[ -n "$SLURM_RESTART_COUNT" ] || sleep 100\n'
    )
    out = tmp_path / "out"
    words = ("-o", out, "--open-mode=append", tmp_path / "job.sh", "a b", "$x;y")
    job = slurm.ctl("sbatch", "--parsable", *words).strip()
    slurm.wait(job, "RUNNING")
    time.sleep(1)
    slurm.ctl("scontrol", "requeue", job)
    assert slurm.wait(job)["Restarts"] == "1"
    lines = [line for line in out.read_text().splitlines() if "|" in line]
    assert lines == ["2|a b|$x;y|", "2|a b|$x;y|1"]
    assert f"Command={tmp_path}/job.sh a b $x;y\n" in slurm.ctl("scontrol", "show", "job", job)


def test_directives_after_the_first_command_are_not_read(batch: Batch) -> None:
    ended, _ = batch("#SBATCH --job-name=first\ntrue\n#SBATCH --time=7")
    assert (ended["JobName"], ended["TimeLimit"]) == ("first", "00:10:00")  # the partition's default


def test_variables_win_over_directives_and_options_over_both(batch: Batch, slurm: Cluster) -> None:
    directives = "#SBATCH --time=3 --mem=100 --job-name=mine"
    environment = {"SBATCH_TIMELIMIT": "4", "SBATCH_MEM_PER_NODE": "200", "SBATCH_JOB_NAME": "theirs"}
    ended, _ = batch(directives, env=environment)
    assert (ended["TimeLimit"], ended["MinMemoryNode"], ended["JobName"]) == ("00:04:00", "200M", "theirs")
    ended, _ = batch(directives, "--time=5", env=environment)
    assert ended["TimeLimit"] == "00:05:00"


@pytest.mark.parametrize(
    ("variable", "field", "expected"),
    [
        ("SBATCH_TIMELIMIT=9", "TimeLimit", "00:05:00"),
        ("SBATCH_JOB_NAME=theirs", "JobName", "mine"),
        ("SBATCH_PARTITION=high", "Partition", "main"),
        ("SBATCH_GPUS_PER_NODE=2", "TresPerNode", "gres:gpu:1"),
    ],
)
def test_a_user_s_variables_do_not_win_over_a_submitted_script(
    user: User, variable: str, field: str, expected: str
) -> None:
    name, value = variable.split("=")
    words = ("-p", "main", "--job-name", "mine", "--gpus-per-node", "1", "--hold", "training_cmd=true")
    job = user.submit(*words, **{name: value})
    assert user.cluster.job(job)[field] == expected


def test_a_step_waits_for_another_unless_it_may_overlap(batch: Batch) -> None:
    lines = "srun sleep 5 & sleep 1; SECONDS=0\nsrun --overlap true; echo $SECONDS\nsrun true; echo $SECONDS\nwait"
    _, said = batch(lines, "-n1")
    beside, after = (int(line) for line in said.splitlines() if line.isdecimal())
    assert beside <= 1
    assert after >= 3


@pytest.mark.parametrize("ending", ["exit 3", "sleep 100"])
def test_a_job_that_comes_after_any_end_starts_after_a_bad_one(slurm: Cluster, tmp_path: Path, ending: str) -> None:
    words = ("sbatch", "--parsable", "-o", tmp_path / "%j")
    first = slurm.ctl(*words, "--wrap", ending).strip()
    second = slurm.ctl(*words, f"--dependency=afterany:{first}", "--wrap", "true").strip()
    if ending.startswith("sleep"):
        slurm.wait(first, "RUNNING")
        slurm.ctl("scancel", first)
    assert slurm.wait(first)["JobState"] in ("FAILED", "CANCELLED")
    assert slurm.wait(second)["JobState"] == "COMPLETED"


def test_a_job_without_a_folder_for_its_output_fails_without_a_word(slurm: Cluster, tmp_path: Path) -> None:
    words = ("sbatch", "--parsable", "-o", tmp_path / "none" / "out", "--wrap", f"touch {tmp_path}/ran")
    assert slurm.wait(slurm.ctl(*words).strip())["JobState"] == "FAILED"
    assert list(tmp_path.iterdir()) == []


def test_tasks_of_an_array_have_job_ids_of_their_own(batch: Batch) -> None:
    names = ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID")
    ended, _ = batch("sleep 1", "--array=3,7")
    assert ended["ArrayJobId"]
    _, said = batch(f"{show(*names)}; sleep 1", "--array=3,7", "--wait")
    tasks = shown(said, *names)
    assert sorted(task["SLURM_ARRAY_TASK_ID"] for task in tasks) == ["3", "7"]
    assert len({task["SLURM_ARRAY_JOB_ID"] for task in tasks}) == 1
    assert len({task["SLURM_JOB_ID"] for task in tasks}) == 2


@pytest.mark.parametrize("text", ["90", "30:00", "1:30:15", "2-3", "1-12:30", "3-04:05:06"])
def test_time_limits_are_read_as_slurm_reads_them(slurm: Cluster, text: str) -> None:
    said = slurm.ctl("sbatch", "--parsable", "--hold", f"--time={text}", "--wrap", "true").strip()
    days, clock = re.fullmatch(r"(?:(\d+)-)?([\d:]+)", slurm.job(said)["TimeLimit"]).groups()  # type: ignore[union-attr]
    hours, minutes, seconds = map(int, clock.split(":"))
    limit = ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    assert limit == -(-walltime.seconds(text) // 60) * 60  # type: ignore[operator]  # Slurm counts whole minutes


def test_without_accounting_sacct_says_so(slurm: Cluster) -> None:
    done = slurm.run("exec", "ctl", "sacct")
    assert done.returncode == 1
    assert "Slurm accounting storage is disabled" in done.stderr
