"""`phalanx run` with real processes: what arrives in the ranks, and how runs end."""

import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.tools import alive, command, ignoring, in_terminal, phalanx, read_all, run_dirs, started, wait_for

pytestmark = pytest.mark.slow

HOST = platform.node()
ODD_ARGS = ["--n", "5", "--nnodes=3", "a b", "", "$$", "${local_rank}", "$HOME", "it's", "--", "k=v", "ü\n*", "-m"]

ALL_REDUCE = """
import json, os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(value)
sys.stderr.write("\\r10%\\r20%\\x1b[K\\r\\n")
seen = {"sum": value.item(), "world": dist.get_world_size(), "args": sys.argv[1:], "env": dict(os.environ)}
seen["threads"] = torch.get_num_threads()
open(f"seen{dist.get_rank()}.json", "w").write(json.dumps(seen))
dist.destroy_process_group()
"""
SLEEPER = """
import os, pathlib, signal, sys, time
rank = os.environ["RANK"]
pathlib.Path(f"pid{rank}").write_text(str(os.getpid()))
while len(list(pathlib.Path().glob("pid*"))) < int(os.environ["WORLD_SIZE"]): time.sleep(0.02)
if rank == "1":
    %s
time.sleep(60)
"""


def pids(work, ranks=2):
    def written():
        files = [work / f"pid{rank}" for rank in range(ranks)]
        return all(file.exists() and file.read_text() for file in files)

    wait_for(written)
    return [int((work / f"pid{rank}").read_text()) for rank in range(ranks)]


def test_a_plain_script_in_two_processes_gets_all_it_needs(work):
    """Also where another launch's variables are in the environment, and whatever the arguments hold."""
    (work / "s.py").write_text(ALL_REDUCE)
    stale = {"RANK": "7", "WORLD_SIZE": "9", "LOCAL_RANK": "3", "MASTER_ADDR": "no.such.host", "MASTER_PORT": "1"}
    stale |= {"PHALANX_RANK": "5", "TORCHELASTIC_RUN_ID": "x", "PET_NNODES": "4", "PHALANX_RUN_DIR": "/nowhere"}
    stale["TMPDIR"] = str(work / "tmp")
    (work / "tmp").mkdir()
    ended = subprocess.run(
        command("--nproc", "2", "--env.COLOUR", "dark red", "s.py", *ODD_ARGS),
        capture_output=True,
        env={**os.environ, **stale},
        timeout=120,
        check=True,
    )
    (run_dir,) = run_dirs(work)
    for rank in (0, 1):
        seen = json.loads((work / f"seen{rank}.json").read_text())
        assert (seen["sum"], seen["world"], seen["args"]) == (3.0, 2, ODD_ARGS)
        cpus = len(os.sched_getaffinity(0))
        assert seen["threads"] == int(seen["env"]["OMP_NUM_THREADS"]) <= max(1, cpus // 2)
        assert seen["env"]["COLOUR"] == "dark red"
        assert seen["env"]["PHALANX_RUN_DIR"] == str(run_dir)
        assert seen["env"]["PYTHONUNBUFFERED"] == "1"
    assert ended.stderr.startswith(f"run directory: {run_dir}\n".encode())
    assert b"\r10%\r20%\x1b[K\r\n" in ended.stderr
    assert list((work / "tmp").iterdir()) == []  # where torchrun would leave folders
    assert json.loads((run_dir / "plan.json").read_text())["world_size"] == 2
    assert {"config.yaml", "origins.json", "plan.json", "job.sh", "source.json"} <= set(os.listdir(run_dir))
    assert subprocess.run(["sh", "-n", run_dir / "job.sh"]).returncode == 0


@pytest.mark.parametrize(
    ("failure", "code", "words"),
    [
        ("sys.exit(3)", 3, "SystemExit: 3"),
        ("raise ValueError('too big: 7')", 1, "ValueError: too big: 7"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "SIGKILL"),
    ],
)
def test_a_failing_rank_ends_the_others_and_is_named(work, failure, code, words):
    (work / "s.py").write_text(SLEEPER % failure)
    ended = phalanx("--nproc", "2", "s.py")
    assert ended.returncode == code
    assert ended.seconds < 30  # the other rank sleeps 60
    assert not any(alive(pid) for pid in pids(work))
    (run_dir,) = run_dirs(work)
    last = ended.stderr.splitlines()[-3:]
    verdict = next(index for index, line in enumerate(last) if line.startswith(f"rank 1 on {HOST} "))
    assert words in last[verdict]
    assert last[verdict + 1] == f"  log: {run_dir / 'logs/1.log'}"
    if code != 137:
        assert last[-1] == f"  traceback: {run_dir / 'errors/1.json'}"
        assert words in (run_dir / "logs/1.log").read_text()


def test_in_a_terminal_progress_is_live_and_ctrl_c_ends_every_process(work):
    show = "print('\\r50%%', sys.stderr.isatty(), end='', file=sys.stderr, flush=True)"
    (work / "s.py").write_text(SLEEPER.replace("time.sleep(60)", f"{show}\ntime.sleep(60)") % "pass")
    process, terminal = in_terminal(command("--nproc", "2", "s.py"))
    ranks = pids(work)
    time.sleep(0.5)
    os.write(terminal, b"\x03")
    shown = read_all(terminal)
    assert process.wait(timeout=60) == 130
    assert "\r50% True" in shown
    assert shown.splitlines()[-1] == "stopped by SIGINT"
    assert not any(alive(pid) for pid in ranks)


@pytest.mark.parametrize("victim", ["command", "launcher"])
def test_ranks_do_not_outlive_what_started_them(work, victim):
    (work / "s.py").write_text(SLEEPER % "pass")
    process = subprocess.Popen(command("--nproc", "2", "s.py"), stderr=subprocess.DEVNULL)
    ranks = pids(work)
    launcher = int(Path(f"/proc/{ranks[0]}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(process.pid if victim == "command" else launcher, signal.SIGKILL)
    assert process.wait(timeout=60) == (-9 if victim == "command" else 137)
    wait_for(lambda: not any(alive(pid) for pid in [*ranks, launcher]), 30)


@pytest.mark.parametrize(
    ("script", "code", "words"),
    [
        ("print('fine')", 0, None),
        ("raise SystemExit(7)", 7, "SystemExit: 7"),
        ("import os; os._exit(9)", 9, "exit code 9"),
        ("{}['missing']", 1, "KeyError: 'missing'"),
        ("def f(:", 1, "SyntaxError"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 139, "SIGSEGV"),
    ],
)
def test_the_exit_code_of_a_single_process_is_the_scripts(work, script, code, words):
    (work / "s.py").write_text(script)
    ended = phalanx("s.py")
    assert ended.returncode == code
    assert (f"rank 0 on {HOST}" in ended.stderr) == (words is not None)
    assert words is None or words in ended.stderr


def test_a_single_process_is_not_taken_for_a_task_of_the_step_around_it(work):
    (work / "s.py").write_text(
        "import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'], 'MASTER_PORT' in os.environ)"
    )
    step = {"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NTASKS": "2"}
    step |= {"SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NNODES": "1"}
    mpi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    for outer, said in ((step, "SLURM_STEP_NUM_TASKS=2"), (mpi, "OMPI_COMM_WORLD_SIZE=2")):
        assert phalanx("--local", "s.py", env={**os.environ, **outer}).stdout == "0 1 True\n"
        refused = phalanx("s.py", env={**os.environ, **outer})  # a world for each task is seldom meant
        assert (refused.returncode, refused.stdout) == (2, "")
        assert said in refused.stderr
        assert "add --local" in refused.stderr
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--"]
    for first, code, told in ([], 1, "WORLD_SIZE=2: a launcher"), (["--local"], 0, ""):
        words = [*agent, "phalanx", "run", *first, "s.py"]
        ended = subprocess.run(words, capture_output=True, text=True, timeout=120)
        assert (ended.returncode, told in ended.stderr) == (code, True)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_a_signal_reaches_the_script_once_and_its_end_is_awaited(work, name):
    (work / "s.py").write_text(
        "import signal, sys, time\n"
        "got = []\n"
        f"signal.signal(signal.{name}, lambda *_: got.append(1))\n"
        "print('ready', flush=True)\n"
        "while not got: time.sleep(0.01)\n"
        "time.sleep(0.5)\n"
        "print(len(got), 'then saved', flush=True)\n"
    )
    with started(command("s.py"), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(getattr(signal, name))
        assert process.stdout.read() == "1 then saved\n"
        assert process.wait(timeout=30) == 0


@pytest.mark.parametrize(
    ("ignored", "first"),
    [
        ([], ""),
        ([signal.SIGTERM, signal.SIGINT], ""),
        ([], "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"),
    ],
    ids=["as nohup does", "more by the caller", "more by the script"],
)
def test_a_launch_whose_terminal_is_gone_goes_on_and_ends_with_its_command(work, ignored, first):
    """Its ranks are ended also where they ignore the polite signal: nobody else would."""
    (work / "s.py").write_text(first + SLEEPER % "pass")
    quick = "import sys; from phalanx.schedulers import keeper; keeper.PATIENCE = 1; from phalanx.cli.main import main"
    words = [sys.executable, "-c", f"{quick}; sys.exit(main(sys.argv[1:]))", "run", "--local", "s.py"]
    process, terminal = in_terminal(words, preexec_fn=ignoring(signal.SIGHUP, *ignored))
    try:
        (rank,) = pids(work, 1)
        os.close(terminal)
        time.sleep(0.5)
        assert process.poll() is None
        assert alive(rank)
    finally:
        process.kill()
        process.wait()
    try:
        wait_for(lambda: not alive(rank), 30)
    finally:
        if alive(rank):
            os.kill(rank, signal.SIGKILL)


def test_a_caller_that_ignores_the_ends_of_its_children_hides_no_failure(work):
    (work / "s.py").write_text("raise SystemExit(7)")
    with started(command("--local", "s.py"), signal.SIGCHLD, stderr=subprocess.DEVNULL) as process:
        assert process.wait(timeout=60) == 7


def test_lines_of_stdout_and_stderr_stay_in_order_where_they_share_a_stream(work):
    (work / "s.py").write_text(
        "import sys\nfor n in range(300): print(n, file=(sys.stderr, sys.stdout)[n % 2], flush=True)"
    )
    ended = subprocess.run(command("s.py"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
    assert ended.stdout.splitlines()[1:] == [str(n) for n in range(300)]
    apart = phalanx("s.py")
    assert apart.stdout.splitlines() == [str(n) for n in range(1, 300, 2)]
    assert apart.stderr.splitlines()[1:] == [str(n) for n in range(0, 300, 2)]


def test_two_launches_in_one_second_share_nothing(work):
    (work / "s.py").write_text("import os; print(os.environ['PHALANX_RUN_DIR'])")
    both = [subprocess.Popen(command("s.py"), stdout=subprocess.PIPE, text=True) for _ in range(2)]
    folders = {process.communicate(timeout=60)[0].strip() for process in both}
    assert len(folders) == 2
    assert folders == {str(path) for path in run_dirs(work)}


def test_resuming_goes_on_in_the_same_run_directory(work):
    (work / "s.py").write_text("import os, sys; print(os.environ['PHALANX_RUN_DIR']); sys.exit(int(sys.argv[1]))")
    first = phalanx("s.py", "4")
    (run_dir,) = run_dirs(work)
    assert first.stdout.strip() == str(run_dir)
    for target in ("latest", run_dir.name, f"s/{run_dir.name}", str(run_dir)):
        again = phalanx("--resume", target, "s.py", "0")
        assert (again.stdout.strip(), again.returncode) == (str(run_dir), 0)
    absent = phalanx("--resume", "nosuch", "s.py", "0")
    assert absent.returncode == 2
    assert "no run 'nosuch'" in absent.stderr
    assert run_dir.name in absent.stderr
    (work / "s.py").write_text("import os; os._exit(6)")  # leaves no error file of its own
    died = phalanx("--resume", "latest", "s.py")
    assert died.returncode == 6
    assert "exit code 6" in died.stderr
    assert run_dirs(work) == [run_dir]


def test_the_source_of_a_run_is_kept(work):
    script = work / "s.py"
    script.write_text("print(1)\n")
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    for words in (["init", "-q"], ["add", "s.py"], [*identity, "commit", "-qm", "first"]):
        subprocess.run(["git", *words], check=True, cwd=work)
    script.write_text("print(2)\n")
    assert phalanx("s.py").stdout == "2\n"
    source = json.loads((run_dirs(work)[0] / "source.json").read_text())
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=work, capture_output=True, text=True).stdout.strip()
    assert source["commit"] == head
    assert "-print(1)\n+print(2)" in source["diff"]


def test_settings_of_the_command_line_reach_the_run_directory(work):
    (work / "s.py").write_text("pass")
    assert phalanx("--precision", "bf16", "name=big", "s.py").returncode == 0
    (run_dir,) = run_dirs(work, "big")
    assert re.search(r"^precision: bf16$", (run_dir / "config.yaml").read_text(), re.MULTILINE)
    assert json.loads((run_dir / "origins.json").read_text())["precision"] == "command line"
