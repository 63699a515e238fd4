"""Launcher ray on this machine: a Ray cluster that comes and goes with the run."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.tools import alive, command, run_dirs, wait_for
from tests.slurm.train import closed_form

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: `make engines` does it")
STEPS = 5
HOST = platform.node()
ODD_ARGS = ["--n", "5", "--nnodes=3", "a b", "", "$$", "$HOME", "it's", "--", "k=v", "ü\n*"]

# First as plain torch.distributed, then under each strategy: Ray takes long to start.
SCRIPT = f"""
import json, os, sys, torch, torch.distributed as dist
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.slurm import train
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
value = torch.tensor([rank + 1.0])
dist.all_reduce(value)
dist.destroy_process_group()
seen = {{"sum": value.item(), "args": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd()}}
open(f"seen{{rank}}.json", "w").write(json.dumps(seen))
print(f"out of rank {{rank}}")
print(f"err of rank {{rank}}", file=sys.stderr)
folder = None
for strategy in os.environ["STRATEGIES"].split():
    folder = train.main({STEPS}, 0, 0, strategy, folder)
"""
SLEEPER = """
import os, pathlib, sys, time
rank = os.environ["RANK"]
pathlib.Path(f"pid{rank}").write_text(str(os.getpid()))
while len(list(pathlib.Path().glob("pid*"))) < 2: time.sleep(0.02)
if rank == "1":
    %s
time.sleep(1000)
"""


@pytest.fixture
def temp(work: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where Ray's files go; a short path, as its sockets need."""
    folder = Path("/tmp") / f"phx-ray-{os.getpid()}"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setenv("HOME", str(work))
    yield folder
    left = [path.name for path in folder.iterdir() if path.name.startswith("r")]  # torch's caches may stay
    subprocess.run(["rm", "-rf", folder], check=True)
    assert left == []
    assert ray_processes(str(folder)) == []
    assert not (work / ".ray").exists()


def ray_run(*words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """With patience: Ray starts a dozen processes, which takes minutes on a machine that is busy."""
    all_words = command("--launcher", "ray", "--nproc", "2", "device=cpu", "ray.start_timeout=300", *words)
    return subprocess.run(all_words, capture_output=True, text=True, timeout=400, **more)


def ray_processes(mark: str) -> list[str]:
    """Processes that have `mark` in their environment: all that Ray starts, and the ranks."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (entry / "environ").read_bytes() and int(entry.name) != os.getpid():
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return found


@needs_ray
def test_ranks_of_every_strategy_find_all_they_need(work: Path, temp: Path) -> None:
    """Plain torch.distributed too; arguments, environment and folder as given; the first rank's output unchanged."""
    strategies = ["ddp", "fsdp", *(["deepspeed"] if find_spec("deepspeed") else [])]
    (work / "s.py").write_text(SCRIPT)
    ended = ray_run(
        *("--env.COLOUR", "dark red"),
        *(f"--env.STRATEGIES={' '.join(strategies)}", "--env.DS_ACCELERATOR=cpu", "s.py", *ODD_ARGS),
    )
    assert ended.returncode == 0, ended.stderr
    run_dir = run_dirs(work)[0]  # each further run of a process has its own
    for strategy in strategies:
        weights = json.loads((run_dir / f"weights-{strategy}.json").read_text())
        assert weights["weight"] == pytest.approx(closed_form(STEPS).flatten().tolist(), rel=1e-5), strategy
    cpus = len(os.sched_getaffinity(0))
    for rank in range(2):
        seen = json.loads((work / f"seen{rank}.json").read_text())
        assert (seen["sum"], seen["args"], seen["cwd"]) == (3.0, ODD_ARGS, str(work))
        assert seen["env"]["COLOUR"] == "dark red"
        assert seen["env"]["LOCAL_RANK"] == str(rank)
        assert seen["env"]["LOCAL_WORLD_SIZE"] == seen["env"]["WORLD_SIZE"] == "2"
        assert int(seen["env"]["OMP_NUM_THREADS"]) <= max(1, cpus // 2)
        assert seen["env"]["PHALANX_RUN_DIR"] == str(run_dir)
    assert ended.stdout.splitlines().count("out of rank 0") == 1
    assert ended.stderr.splitlines().count("err of rank 0") == 1
    assert "pid=" not in ended.stdout  # Ray's way to show workers' output
    assert "rank 1" not in ended.stdout
    assert "out of rank 1" in (run_dir / "logs" / "1.log").read_text()


@needs_ray
def test_a_rank_that_is_killed_ends_the_others_and_is_named(work: Path, temp: Path) -> None:
    (work / "s.py").write_text(SLEEPER % "os.kill(os.getpid(), 9)")
    ended = ray_run("s.py")
    assert ended.returncode == 137, ended.stderr
    assert f"rank 1 on {HOST} was killed by SIGKILL" in "\n".join(ended.stderr.splitlines()[-3:])
    assert ended.stderr.count("ray: rank ") == 1  # the other did not fail
    (run_dir,) = run_dirs(work)
    assert f"  log: {run_dir / 'logs/1.log'}" in ended.stderr


@needs_ray
def test_ctrl_c_ends_every_process(work: Path, temp: Path) -> None:
    (work / "s.py").write_text(SLEEPER % "pass")
    words = command("--launcher", "ray", "--nproc", "2", "device=cpu", "s.py")
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: all((work / f"pid{rank}").exists() and (work / f"pid{rank}").read_text() for rank in (0, 1)), 300)
    ranks = [int((work / f"pid{rank}").read_text()) for rank in (0, 1)]
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.splitlines()[-1] == "stopped by SIGINT"
    assert not any(alive(pid) for pid in ranks)


def fake_ray(work: Path, code: str) -> dict[str, str]:
    """An environment in which `ray start` is this code."""
    package = work / "fake" / "ray" / "scripts"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "scripts.py").write_text(code)
    return {**os.environ, "PYTHONPATH": str(work / "fake")}


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("print('still looking', flush=True)\nimport time\ntime.sleep(100)", "did not come up within 2 s"),
        ("import sys; sys.exit('still looking')", "ended with exit code 1"),
    ],
)
def test_a_head_that_never_comes_up_shows_its_log_and_leaves_nothing(
    work: Path, temp: Path, code: str, words: str
) -> None:
    (work / "s.py").write_text("")
    environment = fake_ray(work, code)
    begin = time.monotonic()
    ended = ray_run("ray.start_timeout=2", "s.py", env=environment)
    assert time.monotonic() - begin < 30
    assert ended.returncode in (1, 2)
    assert f"phalanx: the Ray head on {HOST} {words}" in ended.stderr
    assert "\n  still looking\n" in ended.stderr
    assert "ray.start_timeout" in ended.stderr or "exit code 1" in ended.stderr
    assert not list((run_dirs(work)[0] / "errors").glob("*"))


def test_a_head_that_gives_up_early_is_started_again_until_the_limit(work: Path, temp: Path) -> None:
    """Ray itself waits 30 seconds for its processes, whatever our limit is."""
    (work / "s.py").write_text("")
    code = "import sys; open('starts', 'a').write('x'); sys.exit('The current node timed out during startup.')"
    ended = ray_run("ray.start_timeout=4", "s.py", env=fake_ray(work, code))
    assert ended.returncode == 2
    assert f"the Ray head on {HOST} did not come up within 4 s; more time: ray.start_timeout" in ended.stderr
    assert len((work / "starts").read_text()) >= 2


def test_a_raylet_that_dies_while_ray_starts_is_started_again(work: Path, temp: Path) -> None:
    """It does so where its own processes take more than 30 seconds; `ray start` then waits for it in vain."""
    (work / "s.py").write_text("")
    (work / "raylet").symlink_to("/bin/sleep")
    code = (
        "import subprocess, time; open('starts', 'a').write('x'); subprocess.run(['./raylet', '0.5']); time.sleep(1000)"
    )
    ended = ray_run("ray.start_timeout=8", "s.py", env=fake_ray(work, code))
    assert ended.returncode == 2
    assert f"the Ray head on {HOST} did not come up within 8 s" in ended.stderr
    assert len((work / "starts").read_text()) >= 2


def test_without_ray_nothing_is_started(work: Path) -> None:
    """An environment of its own that has everything but Ray."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "bare"], check=True)
    (packages,) = (work / "bare" / "lib").glob("python3*/site-packages")
    for path in map(Path, sys.path):
        for item in path.glob("*") if path.name == "site-packages" else ():
            if not item.name.startswith("ray"):
                (packages / item.name).symlink_to(item)
    (work / "s.py").write_text("")
    words = command("--launcher", "ray", "--nproc", "2", "device=cpu", "s.py")
    ended = subprocess.run([work / "bare" / "bin" / "python", *words[1:]], capture_output=True, text=True)
    assert ended.returncode == 2
    assert "launcher ray needs ray" in ended.stderr
    assert "pip install 'phalanx[ray]'" in ended.stderr
    assert not (work / "runs").exists()
