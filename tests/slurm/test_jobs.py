"""Jobs as users have them: allocations, arrays, devices, failures, restarts, and jobs within jobs."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from .conftest import User
from .train import closed_form

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
HERE = Path(__file__).parent
TRAIN, PLAIN = HERE / "train.py", HERE / "plain.py"


def weights(run_dir: Path) -> list[float]:
    return json.loads((run_dir / "weights.json").read_text())["weight"]


def expected(steps: int) -> Any:
    return pytest.approx(closed_form(steps).flatten().tolist(), rel=1e-5)


def facts(run_dir: Path) -> list[dict[str, Any]]:
    found = [json.loads(path.read_text()) for path in run_dir.glob("facts/*.json")]
    return sorted(found, key=lambda fact: fact["rank"])


def wait_for_step(run_dir: Path, step: int, seconds: float = 90) -> None:
    limit = time.monotonic() + seconds
    while not any(f'"step": {step},' in path.read_text() for path in run_dir.glob("records/0.*.jsonl")):
        assert time.monotonic() < limit, f"step {step} was never reached"
        time.sleep(0.1)


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_within_salloc_a_run_goes_over_the_allocation_beside_the_shell(user: User, launcher: str) -> None:
    run = ["python3", "-m", "phalanx", "run", "device=cpu", "name=a", "--launcher", launcher, TRAIN]
    done = user.shell("salloc", "-N2", "--ntasks-per-node=2", "-c1", "-t5", *user.here(run))
    assert done.returncode == 0, done.stderr
    assert [fact["host"] for fact in facts(user.run_dir("a"))] == ["node1", "node1", "node2", "node2"]
    assert weights(user.run_dir("a")) == expected(5)


def test_a_run_uses_an_allocation_by_its_id_from_the_login_node(user: User) -> None:
    granted = user.shell("salloc", "--no-shell", "-N2", "-c2", "-t5").stderr
    job = re.search(r"Granted job allocation (\d+)", granted)[1]  # type: ignore[index]
    done = user.phalanx("run", "--jobid", job, "device=cpu", "--nproc", "2", "name=b", TRAIN)
    assert done.returncode == 0, done.stderr
    assert [fact["host"] for fact in facts(user.run_dir("b"))].count("node2") == 2
    assert user.cluster.job(job)["JobState"] == "RUNNING"  # it stays the user's
    more = user.phalanx("run", "--jobid", job, "-N", "3", "device=cpu", TRAIN)
    assert more.returncode == 2
    assert "nodes=3" in more.stderr
    assert f"job {job} has 2" in more.stderr
    user.shell("scancel", job)
    user.cluster.wait(job)
    ended = user.phalanx("run", "--jobid", job, TRAIN)
    assert ended.returncode == 2
    assert "ended" in ended.stderr


def test_on_a_login_node_training_right_there_must_be_meant(user: User) -> None:
    refused = user.phalanx("run", "device=cpu", PLAIN)
    assert refused.returncode == 2
    assert "--local" in refused.stderr
    assert not (user.work / "runs").exists()
    meant = user.phalanx("run", "--local", "--nproc", "2", "device=cpu", PLAIN)
    assert "sum 3.0 of 2" in meant.stdout


@pytest.mark.parametrize("launcher", ["torchrun", "srun", "mpirun"])
def test_a_failing_rank_ends_the_job_with_its_own_code_and_is_named(user: User, launcher: str) -> None:
    (user.work / "bad.py").write_text(
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1': sys.exit(7)\n"
        "time.sleep(200)\n"
    )  # fmt: skip
    start = time.monotonic()
    done = user.phalanx(
        *("submit", "-N", "2", "--nproc", "1", "--cpus-per-task", "1", "-t", "5", "name=bad", "device=cpu"),
        *("--launcher", launcher, "--wait", "before=set -euo pipefail; trap 'exit 9' ERR", "bad.py"),
    )
    assert done.returncode == 7, done.stderr
    assert "rank 1 on node2 failed: SystemExit: 7" in done.stderr
    assert time.monotonic() - start < 60
    job = done.stdout.splitlines()[-1]
    said = user.output("bad")
    assert re.search(r"rank 1 on node2 failed: SystemExit: 7", said), said
    status = user.phalanx("status", job).stdout
    assert "FAILED" in status
    assert "rank 1 on node2 failed" in status


@pytest.mark.parametrize(
    ("launcher", "setting", "words"),
    [
        ("srun", "python=/no/such/python", "on node1, node2: /no/such/python: No such file or directory"),
        ("torchrun", "python=/no/such/python", "on node1, node2: /no/such/python: No such file or directory"),
        ("mpirun", "python=/no/such/python", "on node1: /no/such/python"),
        ("torchrun", "srun_args=--gres=gpu:9", "Invalid generic resource (gres) specification"),
    ],
)
def test_a_launch_that_did_not_happen_blames_no_rank(user: User, launcher: str, setting: str, words: str) -> None:
    where = ("nodes=2", "sbatch.nodelist=node[1-2]", f"launcher={launcher}", setting)
    done = user.phalanx("submit", "--force", "--wait", "-t", "2", "device=cpu", *where, TRAIN)
    assert done.returncode not in (0, 137)
    said = done.stderr[done.stderr.index("ended as FAILED") :]
    assert "the launch failed" in said
    assert words in said
    assert "rank " not in said


def test_scripts_without_the_api_run_too(user: User) -> None:
    ids = [
        user.submit(
            "-N", "2", "--nproc", "2", "--cpus-per-task", "2", "--launcher", launcher, f"name={launcher}", PLAIN
        )
        for launcher in ("torchrun", "srun", "mpirun")
    ]
    for job, launcher in zip(ids, ("torchrun", "srun", "mpirun"), strict=True):
        assert user.cluster.wait(job)["JobState"] == "COMPLETED", user.output(launcher)
        assert "sum 10.0 of 4" in user.output(launcher)


@pytest.mark.parametrize("request_by", ["gres", "gpus-per-node", "gpus-per-task"])
def test_each_rank_gets_a_device_of_its_own_however_the_site_asks_for_them(user: User, request_by: str) -> None:
    from phalanx.rank.devices import device_index, visible_devices
    from phalanx.rank.topology import Topology

    job = user.submit(
        *("-N", "2", "--gpus-per-node", "2", "--cpus-per-task", "2", "--launcher", "srun"),
        *(f"gpu_request={request_by}", "name=g", TRAIN),
    )
    assert user.cluster.wait(job)["JobState"] == "COMPLETED", user.output("g")
    used = []
    for fact in facts(user.run_dir("g")):
        seen = visible_devices(fact["variables"]) or []
        place = Topology(fact["rank"], 4, fact["local_rank"], 2, fact["rank"] // 2, 2, None, None, "slurm")
        used.append((fact["host"], seen[device_index(place, fact["variables"], len(seen))]))
    assert sorted(used) == [("node1", "0"), ("node1", "1"), ("node2", "0"), ("node2", "1")]


def test_each_task_of_an_array_has_a_run_directory_of_its_own(user: User) -> None:
    job = user.submit("-a", "1-2", "--cpus-per-task", "1", "name=array", TRAIN, "--steps=3")
    for task in (1, 2):
        assert user.cluster.wait(f"{job}_{task}")["JobState"] == "COMPLETED"
        assert weights(user.run_dir("array") / f"array-{task}") == expected(3)
    shown = user.phalanx("status", job).stdout
    assert f"{job}_1" in shown
    assert f"{job}_2" in shown


def test_jobs_that_share_nodes_keep_apart(user: User) -> None:
    """Two tasks of an array and a job of each launcher, all on the same two nodes at the same time."""
    size = ("-N", "2", "--nproc", "1", "--cpus-per-task", "1", "nodelist=node[1-2]")
    (user.work / "there").mkdir()
    launches = {
        1: ("--launcher", "torchrun", "-a", "1-2"),
        10: ("--launcher", "srun"),
        100: ("--launcher", "mpirun"),
        1000: ("--launcher", "torchrun", "torchrun.start=mpirun"),
    }
    count = str(len(launches) + 1)
    ids = [
        user.submit(*size, *words, f"name=share{value}", HERE / "sharing.py", str(value), "there", count)
        for value, words in launches.items()
    ]
    for value, job in zip(launches, ids, strict=True):
        for one in (f"{job}_1", f"{job}_2") if value == 1 else (job,):
            assert user.cluster.wait(one)["JobState"] == "COMPLETED", user.output(f"share{value}")
        assert user.output(f"share{value}").count(f"{count} jobs, sums {2 * value} {2 * value}\n") == 1 + (value == 1)


def test_a_job_submitted_from_within_a_job_is_a_job_of_its_own(user: User) -> None:
    inner = f"python3 -m phalanx submit -N 2 --nproc 1 --cpus-per-task 1 -t 5 device=cpu name=inner {TRAIN}"
    outer = user.submit("--cpus-per-task", "1", "name=outer", f"training_cmd={' '.join(user.here(inner.split()))}")
    assert user.cluster.wait(outer)["JobState"] == "COMPLETED", user.output("outer")
    job = (user.run_dir("outer") / "jobs").glob("*.json")
    assert len(list(job)) == 1  # the inner one is noted elsewhere
    (note,) = (user.run_dir("inner") / "jobs").glob("*.json")
    assert user.cluster.wait(note.stem)["JobState"] == "COMPLETED", user.output("inner")
    assert {fact["host"] for fact in facts(user.run_dir("inner"))} == {"node1", "node2"}


def test_cancel_status_and_logs_of_a_running_job(user: User) -> None:
    job = user.submit("--cpus-per-task", "1", "name=long", TRAIN, "--steps=500", "--pause=0.5")
    wait_for_step(user.run_dir("long"), 2)
    shown = json.loads(user.phalanx("status", "long", "--json").stdout)
    assert [(one["job_id"], one["state"], one["hosts"]) for one in shown] == [(job, "RUNNING", "node1")]
    assert shown[0]["progress"]["step"] >= 2
    assert "rank 0 of 1 on node1" in user.phalanx("logs", job).stdout
    cancelled = user.phalanx("cancel", "long")
    assert cancelled.returncode == 0
    assert job in cancelled.stdout
    assert user.cluster.wait(job)["JobState"] == "CANCELLED"
    assert "CANCELLED" in user.phalanx("status", job).stdout
    assert user.phalanx("logs", job, "--follow", "--lines", "1").returncode == 0  # ends, as the job has


def test_a_saved_script_works_under_plain_sbatch(user: User) -> None:
    words = ["-N", "2", "--nproc", "1", "--cpus-per-task", "1", "-t", "5", "device=cpu", "name=byhand", TRAIN]
    shown = user.phalanx("submit", "--preview", *words).stdout
    saved = user.phalanx("submit", "--no-submit-job", *words)
    assert saved.returncode == 0
    assert saved.stdout == ""
    script = user.work / "slurm-scripts" / "byhand.sh"
    assert script.read_text() == shown
    job = user.shell("sbatch", "--parsable", script).stdout.strip()
    assert user.cluster.wait(job)["JobState"] == "COMPLETED"
    assert weights(user.work / "runs" / "byhand" / f"job-{job}") == expected(5)
    assert "COMPLETED" in user.phalanx("status", job).stdout


def test_a_step_may_use_the_cpus_of_its_task(user: User) -> None:
    """Since Slurm 22.05 a step doesn't inherit the job's CPUs per task: with --exact it would have one."""
    words = (
        "-N",
        "1",
        "--nproc",
        "1",
        "--cpus-per-task",
        "2",
        "--launcher",
        "srun",
        "srun_args=--exact,--cpu-bind=cores",
    )
    job = user.submit(*words, "name=cpus", TRAIN)
    assert user.cluster.wait(job)["JobState"] == "COMPLETED", user.output("cpus")
    assert [fact["cpus"] for fact in facts(user.run_dir("cpus"))] == [2]


def test_names_folders_and_values_with_odd_letters_arrive(user: User) -> None:
    job = user.submit(
        *("--cpus-per-task", "1", "--job-name", "two words", "name=odd", "output=logs/deep/%x-%j.out"),
        *('env.MY_A=it\'s "$HOME" [x],{y} `id`', TRAIN, "a b", "$HOME"),
    )
    said = user.cluster.ctl("scontrol", "show", "job", job)
    assert "JobName=two words" in said
    assert user.cluster.wait(job)["JobState"] == "COMPLETED"
    (fact,) = facts(user.run_dir("odd"))
    assert fact["variables"]["MY_A"] == 'it\'s "$HOME" [x],{y} `id`'
    assert fact["arguments"] == ["a b", "$HOME"]
    assert (user.work / "logs" / "deep" / f"two words-{job}.out").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-p", "nope"], ["partition='nope'", "main, high"]),
        (["-N", "9"], ["nodes=9", "has 4"]),
        (["--gpus-per-node", "5"], ["gpus_per_node=5", "has 2"]),
        (["--cpus-per-task", "99"], ["99 CPUs", "has 8"]),
        (["--mem", "1T"], ["mem=1T", "4000 MB"]),
        (["-t", "2-00"], ["time=2-00", "60 minutes"]),
        (["--force", "--constraint", "nope"], ["sbatch refused", "eature"]),
    ],
)
def test_what_the_cluster_cannot_give_is_said_before_anything_is_left_behind(
    user: User, words: list[str], said: list[str]
) -> None:
    done = user.phalanx("submit", "device=cpu", "--no-save-script", *words, PLAIN)
    assert done.returncode == 2
    for word in said:
        assert word in done.stderr
    assert not list(user.work.glob("runs/*/*"))
    assert not (user.work / "slurm-scripts").exists()


def test_in_the_shell_of_an_interactive_step_a_run_goes_over_the_allocation_too(user: User) -> None:
    """`srun --pty bash` holds the job's resources in a step of one task; a run's own step must not wait for it."""
    from tests.e2e.tools import in_terminal, read_all

    run = " ".join(
        user.here(["python3", "-m", "phalanx", "run", "device=cpu", "--launcher", "srun", "name=pty", TRAIN])
    )
    allocate = ["salloc", "-N2", "--ntasks-per-node=1", "-c2", "-t5"]
    words = user.command(*allocate, "srun", "-N1", "-n1", "--pty", "bash", "-c", run)
    process, terminal = in_terminal(words, cwd=user.work, env=user.environment)
    shown = read_all(terminal)
    assert process.wait(timeout=60) == 0, shown
    assert weights(user.run_dir("pty")) == expected(5)
