"""`phalanx run` beside itself: one attempt at a time in a run directory, which other commands know meanwhile."""

import json
import os
import platform
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from phalanx import claims
from tests.e2e.tools import alive, command, ignoring, phalanx, start, wait_for

pytestmark = pytest.mark.slow

SCRIPT = """
import os, sys, time
from pathlib import Path
Path("pid").write_text(str(os.getpid()))
time.sleep(float(sys.argv[1]))
Path("pid").unlink()
print("ended")
"""


@pytest.fixture
def script(work):
    (work / "s.py").write_text(SCRIPT)
    return "s.py"


@contextmanager
def running(*words, **more):
    """A launch, from when its rank is there; killed on leaving, if it still is."""
    there = Path("pid")
    there.unlink(missing_ok=True)
    with subprocess.Popen(command(*words), stderr=subprocess.PIPE, text=True, preexec_fn=ignoring(), **more) as one:
        try:
            wait_for(lambda: there.exists() and there.read_text())
            yield one
        finally:
            one.kill()


def run_dir(work):
    (found,) = (work / "runs" / "s").iterdir()
    return found


def other(*words):
    return start(sys.executable, "-m", "phalanx", *words)


def states():
    return {one["run_dir"]: one["state"] for one in json.loads(other("status", "--json").stdout)}


def test_a_second_attempt_is_refused_until_the_first_has_ended(work, script):
    with running(script, "60") as first:
        before = {path: path.stat().st_mtime_ns for path in run_dir(work).rglob("*.*")}
        second = phalanx("--resume", "latest", "seed=7", script, "0")
        assert second.returncode == 2
        assert f"{run_dir(work)} is in use: pid {first.pid} on host {platform.node()}" in second.stderr
        assert "--take-over" in second.stderr
        assert {path: path.stat().st_mtime_ns for path in run_dir(work).rglob("*.*")} == before  # settings too
        first.send_signal(signal.SIGSTOP)
        assert phalanx("--resume", "latest", script, "0").returncode == 2
        first.send_signal(signal.SIGCONT)
        first.terminate()
        first.wait()
    assert phalanx("--resume", "latest", script, "0").returncode == 0
    assert len(list((work / "runs" / "s").iterdir())) == 1


def test_after_a_killed_command_the_run_goes_on_once_its_ranks_are_gone(work, script):
    """The rank heeds no polite signal: the shell beside the launch ends it after a while, or somebody else does."""
    (work / "s.py").write_text("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SCRIPT)
    with running(script, "60") as first:
        rank = int(Path("pid").read_text())
        first.kill()
        first.wait()
        again = subprocess.Popen(command("--resume", "latest", script, "0"), stderr=subprocess.PIPE, text=True)
        assert again.stderr is not None
        assert f"(pid {rank}" in again.stderr.readline()
        assert alive(rank)
        os.kill(rank, signal.SIGKILL)
        again.communicate(timeout=60)
        assert again.returncode == 0


def test_by_the_users_word_an_attempt_that_nobody_can_ask_gives_way(work, script):
    assert phalanx(script, "0").returncode == 0
    claim = json.loads((run_dir(work) / "claims" / "1.json").read_text())
    claim["process"]["host"] = "elsewhere"
    (run_dir(work) / "claims" / "2.json").write_text(json.dumps(claim | {"token": "another"}))
    refused = phalanx("--resume", "latest", script, "0")
    assert (refused.returncode, "only host elsewhere can tell" in refused.stderr) == (2, True)
    assert phalanx("--resume", "latest", "--take-over", script, "0").returncode == 0
    assert phalanx("--resume", "latest", script, "0").returncode == 0


def test_runs_are_known_to_status_logs_cancel_and_retry(work, script):
    with running(script, "60") as first:
        assert states() == {str(run_dir(work)): "RUNNING"}
        ended = other("cancel", "s")
        assert (ended.returncode, ended.stdout) == (0, "cancelled s, which was RUNNING\n")
        assert first.wait(timeout=60) == 128 + signal.SIGTERM
    assert states() == {str(run_dir(work)): "CANCELLED"}
    (work / "s.py").write_text("raise ValueError('bad batch')\n")
    again = other("retry", "s")
    assert (again.returncode, "ValueError: bad batch" in again.stderr) == (1, True)
    assert "failure    rank 0 on " in other("status", "s").stdout
    logs = other("logs", run_dir(work).name)
    assert "ValueError: bad batch" in logs.stdout
    assert "rank 0 printed on the terminal" in logs.stderr
    (work / "s.py").write_text("")
    assert other("retry", "s").returncode == 0
    assert states() == {str(run_dir(work)): "COMPLETED"}
    assert other("retry", "s").stdout == "nothing to retry: s is COMPLETED\n"


def test_a_killed_command_is_not_said_to_run(work, script):
    with running(script, "60") as first:
        first.kill()
        first.wait()
    assert states() == {str(run_dir(work)): "GONE"}


def test_scripts_that_no_command_of_ours_started_claim_too(work):
    """By `python`, with the run to go on with in what `init` is given."""
    there = work / "runs" / "s" / "20260101-000000-aaaa"
    there.mkdir(parents=True)
    (work / "s.py").write_text("import phalanx\nphalanx.init(device='cpu', name='s', resume='latest').close()\n")
    with claims.claimed(there, claims.of_this_process()):
        refused = start(sys.executable, "s.py")
    assert (refused.returncode, f"is in use: pid {os.getpid()}" in refused.stderr) == (1, True)
    assert start(sys.executable, "s.py").returncode == 0
    files = ["1.json", "1.released", "2.json", "2.released"]
    assert sorted(path.name for path in (there / "claims").iterdir()) == files


def test_a_run_without_its_folder_is_noted_nowhere(work):
    (work / "s.py").write_text("import shutil, os; shutil.rmtree(os.environ['PHALANX_RUN_DIR'])\n")
    assert phalanx("s.py").returncode == 0
    assert list((work / "runs" / "s").iterdir()) == []
