"""Jobs that end early and jobs that start again: requeued, chained, cancelled, out of time. All run at once."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from .conftest import PHALANX, Cluster, User
from .test_jobs import HERE, TRAIN, expected, facts, weights

pytestmark = pytest.mark.timeout(600)
STEPS = 30
LAUNCHERS = ("python", "srun", "torchrun", "mpirun")
CANCELLED = ("srun", "torchrun", "mpirun")


@dataclass(frozen=True)
class Jobs:
    user: User
    late: subprocess.Popen[str]
    """`phalanx submit --wait` of a job that has one minute."""
    chain: list[str]
    """Of three: the first is cancelled in its middle, the second ends well."""
    failing: list[str]
    """Of two: the first fails."""
    again: dict[str, str]
    """Requeued once, in their middle."""
    cancelled: dict[str, str]


@pytest.fixture(scope="module")
def jobs(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    user = User(cluster, tmp_path_factory.mktemp("endings"), "work")
    late = start_with_a_minute(user)
    chain, failing = chained(user), failing_chain(user)
    cancelled = {launcher: long_job(user, "cancelled", launcher, 5000) for launcher in CANCELLED}
    again = {launcher: long_job(user, "again", launcher, STEPS) for launcher in LAUNCHERS}  # watched at once
    actions = {f"again-{name}": lambda job=job: requeue(cluster, job) for name, job in again.items()}
    when_at_step(5, user, {**actions, "c": lambda: cluster.ctl("scancel", chain[0])})
    yield Jobs(user, late, chain, failing, again, cancelled)
    late.kill()
    late.communicate()
    cluster.ctl("scancel", "-u", "root")


def start_with_a_minute(user: User) -> subprocess.Popen[str]:
    words = ("submit", "-t", "1", "--cpus-per-task", "1", "device=cpu", "name=late", "--wait", TRAIN, "--steps=9000")
    return subprocess.Popen(
        user.command(*PHALANX, *words, "--pause=0.5"),
        cwd=user.work,
        env=user.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def long_job(user: User, name: str, launcher: str, steps: int) -> str:
    """On two nodes, unless it is one process."""
    size = ("-N", "1" if launcher == "python" else "2", "--nproc", "1", "--cpus-per-task", "1")
    words = ("--launcher", launcher, f"name={name}-{launcher}", TRAIN, f"--steps={steps}", "--pause=0.5", "--every=2")
    return user.submit(*size, *words)


def chained(user: User) -> list[str]:
    """The first job stays where it is after five steps."""
    (user.work / "twice.py").write_text(
        f"import os, sys, time; sys.path.insert(0, {str(HERE)!r})\n"
        "import train\n"
        "first = not os.path.exists(os.environ['PHALANX_RUN_DIR'] + '/once')\n"
        "open(os.environ['PHALANX_RUN_DIR'] + '/once', 'w').close()\n"
        "train.main(5 if first else 9, 0, 2)\n"
        "time.sleep(300 if first else 0)\n"
    )
    return chain_of(user, 3, "name=c", "twice.py")


def failing_chain(user: User) -> list[str]:
    (user.work / "bad.py").write_text("raise ValueError('bad batch')\n")
    return chain_of(user, 2, "name=bad", "bad.py")


def chain_of(user: User, jobs: int, *words: str) -> list[str]:
    size = ("-t", "5", "--cpus-per-task", "1", "device=cpu")
    done = user.phalanx("submit", "--chain", str(jobs), *size, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-jobs:]


def requeue(cluster: Cluster, job: str) -> None:
    cluster.ctl("scontrol", "requeue", job)


def at_step(run_dir: Path, step: int) -> bool:
    return any(f'"step": {step},' in path.read_text() for path in run_dir.glob("records/0.*.jsonl"))


def when_at_step(step: int, user: User, actions: dict[str, Callable[[], None]], seconds: float = 240) -> None:
    """Do for each run, by its name, what is to be done once it is so far."""
    limit, waiting = time.monotonic() + seconds, dict(actions)
    while waiting:
        for name in [name for name in waiting if at_step(user.run_dir(name), step)]:
            waiting.pop(name)()
        assert time.monotonic() < limit, {name: user.output(name) for name in waiting}
        time.sleep(0.1)


@pytest.mark.parametrize("launcher", CANCELLED)
def test_a_cancelled_job_leaves_no_process_on_any_node(jobs: Jobs, launcher: str) -> None:
    user, job, name = jobs.user, jobs.cancelled[launcher], f"cancelled-{launcher}"
    when_at_step(2, user, {name: lambda: None})
    job_s = f"SLURM_JOB_ID={job}"
    nodes = ("node1", "node2", "node3", "node4")
    assert sum(processes(user.cluster, node, job_s) > 0 for node in nodes) == 2
    done = user.phalanx("cancel", name)
    assert (done.returncode, job in done.stdout) == (0, True)
    assert user.cluster.wait(job)["JobState"] == "CANCELLED"
    assert re.search(rf"{job} .*CANCELLED", user.phalanx("status", job).stdout)
    limit = time.monotonic() + 20
    while any(processes(user.cluster, node, job_s) for node in nodes):
        assert time.monotonic() < limit
        time.sleep(0.5)


def processes(cluster: Cluster, node: str, variable: str) -> int:
    """How many on the node have it in their environment."""
    count = 'grep -lzx "$0" /proc/[0-9]*/environ 2>/dev/null | wc -l'
    return int(cluster("exec", node, "bash", "-c", count, variable))


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_requeued_job_goes_on_where_it_was_and_ends_the_same(jobs: Jobs, launcher: str) -> None:
    user, name = jobs.user, f"again-{launcher}"
    ended = user.cluster.wait(jobs.again[launcher], timeout=200)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), user.output(name)
    resumed = re.findall(r"resumed from .*: step (\d+)", user.output(name))
    assert len(resumed) == 1
    assert 4 <= int(resumed[0]) < STEPS
    assert len({fact["host"] for fact in facts(user.run_dir(name))}) == int(ended["NumNodes"])
    assert weights(user.run_dir(name)) == expected(STEPS)


def test_a_chained_job_goes_on_where_the_one_before_stopped_and_is_the_last_that_trains(jobs: Jobs) -> None:
    first, second, third = jobs.chain
    assert jobs.user.cluster.wait(third, timeout=200)["JobState"] == "COMPLETED", jobs.user.output("c")
    ended = [jobs.user.cluster.job(job)["JobState"] for job in (first, second)]
    assert ended == ["CANCELLED", "COMPLETED"], jobs.user.output("c")
    assert re.findall(r"resumed from .*: step (\d+)", jobs.user.output("c")) == ["4"]
    assert weights(jobs.user.run_dir("c")) == expected(9)
    assert len(list(jobs.user.run_dir("c").glob("records/0.*.jsonl"))) == 2  # nobody trained a third time
    assert f"job {second} before it in the chain ended well" in jobs.user.phalanx("status", third).stdout


def test_a_failure_ends_its_chain(jobs: Jobs) -> None:
    first, second = jobs.failing
    assert jobs.user.cluster.wait(second, timeout=200)["ExitCode"] == "1:0"
    assert jobs.user.output("bad").count("Traceback (most recent call last)") == 1
    said = jobs.user.phalanx("status", "bad").stdout
    assert f"not run: job {first} before it in the chain failed with exit code 1" in said


def test_the_time_limit_is_said_as_such(jobs: Jobs) -> None:
    _, said = jobs.late.communicate(timeout=200)
    assert jobs.late.returncode == 1
    assert "TIMEOUT" in said
    assert "TIMEOUT" in jobs.user.phalanx("status", "late").stdout
    assert "TIME LIMIT" in jobs.user.output("late")
