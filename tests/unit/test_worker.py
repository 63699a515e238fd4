"""A rank's process: the script runs as `python SCRIPT` would run it, and its failure leaves a report."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from phalanx.rank.entry import USAGE, exit_status, failure

# Shared by all ranks that these tests start, so that each starts fast.
BYTECODE = tempfile.TemporaryDirectory()
PLACES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def write(path: Path, code: str) -> Path:
    path.write_text(textwrap.dedent(code))
    return path


def environment(rank: int | None = None, world: int = 2, run_dir: Path | None = None, **more: str) -> dict[str, str]:
    """This process's own, less any launcher's words, plus a torchrun-like rank's."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "OMPI", "PMI", "PHALANX"))
    }
    for name in PLACES:
        kept.pop(name, None)
    if rank is not None:
        kept |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
        kept |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}
    if run_dir is not None:
        kept["PHALANX_RUN_DIR"] = str(run_dir)
    kept.pop("PYTHONDONTWRITEBYTECODE", None)
    kept |= {"PYTHONPATH": str(Path(__file__).parents[2] / "src"), "PYTHONPYCACHEPREFIX": BYTECODE.name}
    return kept | more


def run(script: Path | str, *arguments: str, how: tuple[str, ...] = ("-m", "phalanx.worker"), cwd: Path | None = None,
        **place: object) -> subprocess.CompletedProcess[str]:  # fmt: skip
    command = [sys.executable, *how, str(script), *arguments]
    env = environment(**place)  # type: ignore[arg-type]
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=60)


def report(run_dir: Path, rank: int = 0) -> dict[str, object]:
    found = json.loads((run_dir / "errors" / f"{rank}.json").read_text())
    assert isinstance(found, dict)
    return found


SELF_PORTRAIT = '''
    """Doc."""
    import dataclasses, inspect, multiprocessing, pickle, sys, warnings
    from pathlib import Path
    import neighbour

    @dataclasses.dataclass
    class Point:
        x: int

    def double(point):
        return Point(2 * point.x)

    if __name__ == "__main__":
        main = sys.modules["__main__"]
        print(sys.argv, sys.path[0], __file__, neighbour.NAME)
        print(__name__, __doc__, __spec__, __package__, __cached__, __loader__.name, type(__builtins__))
        print(main.__dict__ is globals(), main.Point is Point, sorted(vars(main)))
        print(pickle.loads(pickle.dumps(Point(1))), inspect.getsource(double), type(Point(1)).__module__)
        print((lambda: 0).__code__.co_flags, inspect.get_annotations(Point))
        warnings.warn("once")
        if "spawn" in sys.argv:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(double, [Point(3)]))
'''


@pytest.mark.parametrize(("spelling", "extra"), [("relative", "spawn"), ("link", "$X")])
def test_a_script_sees_what_it_would_see_under_python_itself(tmp_path: Path, spelling: str, extra: str) -> None:
    """Arguments, path, module, pickles, sources, spawned workers and warnings are the same."""
    (tmp_path / "code").mkdir()
    (tmp_path / "elsewhere").mkdir()
    write(tmp_path / "code" / "neighbour.py", "NAME = 'neighbour'")
    script = write(tmp_path / "code" / "train.py", SELF_PORTRAIT)
    link = tmp_path / "elsewhere" / "link.py"
    link.symlink_to(script)
    name = {"relative": "code/train.py", "link": str(link)}[spelling]
    arguments = ["--lr=1e-3", "a b", "--", "-m", extra]
    ours = run(name, *arguments, cwd=tmp_path)
    plain = run(name, *arguments, cwd=tmp_path, how=())
    assert (ours.stdout, ours.stderr, ours.returncode) == (plain.stdout, plain.stderr, 0)
    assert ("Point(x=6)" in ours.stdout) == (extra == "spawn")


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import sys; sys.exit('text')", 1),
        ("raise SystemExit", 0),
        ("import os; os._exit(7)", 7),
        ("try:\n    1/0\nexcept ZeroDivisionError as e:\n    raise ValueError('no') from e", 1),
        ("import sys\nsys.excepthook = lambda *a: print('hook', a[0].__name__, a[2].tb_lineno)\nraise ValueError", 1),
        ("import sys\nsys.excepthook = lambda *a: print(sys.exc_info()) or 1/0\nraise ValueError('first')", 1),
        ("x = (1,\n", 1),
        ("import atexit\natexit.register(print, 'bye')\n1/0", 1),
    ],
)
def test_a_script_ends_as_under_python_itself(tmp_path: Path, code: str, status: int) -> None:
    """Same exit code, same output, and a traceback without frames of ours."""
    script = write(tmp_path / "train.py", code)
    ours, plain = run(script), run(script, how=())
    assert (ours.returncode, ours.stdout) == (status, plain.stdout)
    assert ours.stderr == plain.stderr


def test_a_lone_process_can_meet_itself(tmp_path: Path) -> None:
    script = write(
        tmp_path / "train.py",
        f"""
        import os, socket
        print([os.environ[name] for name in {PLACES[:5]}])
        socket.socket().bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
        """,
    )
    done = run(script)
    assert (done.stdout, done.stderr) == ("['0', '1', '0', '1', '127.0.0.1']\n", "")
    assert "'10.0.0.7'" in run(script, MASTER_ADDR="10.0.0.7").stdout


def test_a_launchers_own_words_stay(tmp_path: Path) -> None:
    script = write(tmp_path / "train.py", f"import os; print([os.environ[name] for name in {PLACES}])")
    assert run(script, rank=1).stdout == "['1', '2', '1', '2', 'localhost', '29511']\n"
    step = {"SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NTASKS": "3", "SLURM_STEP_ID": "0"}
    slurm = run(script, SLURM_STEP_NODELIST="lab[01-02]", MASTER_PORT="29611", **step)
    assert slurm.stdout == "['2', '3', '0', '1', 'lab01', '29611']\n"


def test_a_failure_leaves_a_report_and_its_traceback_in_the_log(tmp_path: Path) -> None:
    script = write(tmp_path / "train.py", "def step():\n    raise ValueError('loss is nan')\nstep()\n")
    before = time.time()
    done = run(script, rank=0, run_dir=tmp_path)
    found = report(tmp_path)
    assert found.keys() == {"v", "rank", "host", "pid", "time", "exception", "traceback", "exit_code"}
    assert (found["v"], found["rank"], found["host"], found["exit_code"]) == (1, 0, socket.gethostname(), 1)
    assert found["exception"] == "ValueError: loss is nan"
    assert before <= float(str(found["time"])) <= time.time()
    assert isinstance(found["pid"], int)
    assert found["traceback"] == done.stderr == (tmp_path / "logs" / "0.log").read_text()
    assert [file.name for file in (tmp_path / "errors").iterdir()] == ["0.json"]


@pytest.mark.parametrize(
    ("code", "exception", "status"),
    [
        ("import sys; sys.exit('no data')", "SystemExit: no data", 1),
        ("exit(3)", "SystemExit: 3", 3),
        ("import signal, os; os.kill(os.getpid(), signal.SIGINT); input()", "KeyboardInterrupt", 130),
        (
            "class Own(Exception):\n    def __str__(self): raise TypeError\nraise Own",
            "Own: <no text: its __str__ failed>",
            1,
        ),
        ("import json; json.loads('')", "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)", 1),
        ("x = (", "SyntaxError: '(' was never closed (train.py, line 1)", 1),
        ("raise ValueError('\\udc80 é')", "ValueError: \udc80 é", 1),
    ],
)
def test_each_way_to_fail_is_reported(tmp_path: Path, code: str, exception: str, status: int) -> None:
    done = run(write(tmp_path / "train.py", code), rank=1, run_dir=tmp_path)
    found = report(tmp_path, 1)
    assert (done.returncode, found["exception"], found["exit_code"]) == (status, exception, status)
    assert exception.split(":")[0] in (tmp_path / "logs" / "1.log").read_text()


@pytest.mark.parametrize("code", ["raise SystemExit(0)", "import os; os._exit(7)"])
def test_no_report_without_a_failure_that_python_sees(tmp_path: Path, code: str) -> None:
    run(write(tmp_path / "train.py", code), rank=0, run_dir=tmp_path)
    assert list((tmp_path / "errors").iterdir()) == []


def test_a_crash_leaves_its_stack_in_the_log_and_no_report(tmp_path: Path) -> None:
    script = write(
        tmp_path / "train.py", "import os, signal\ndef crash():\n    os.kill(os.getpid(), signal.SIGSEGV)\ncrash()\n"
    )
    done = run(script, rank=0, run_dir=tmp_path)
    assert done.returncode == -signal.SIGSEGV
    assert "in crash" in (tmp_path / "logs" / "0.log").read_text()
    assert list((tmp_path / "errors").iterdir()) == []


def test_only_rank_0_prints_to_the_terminal(tmp_path: Path) -> None:
    """The others' output goes to their logs, that of child processes and C code too, line by line."""
    code = """
        import os, subprocess, sys
        print("one"); print("two", file=sys.stderr); subprocess.run(["echo", "three"]); os.write(1, b"four\\n")
        print("five"); os._exit(0)
    """
    script = write(tmp_path / "train.py", code)
    lines = "one\ntwo\nthree\nfour\nfive\n"
    for attempt in (1, 2):
        done = run(script, rank=1, run_dir=tmp_path)
        assert (done.stdout, done.stderr) == ("", "")
        assert (tmp_path / "logs" / "1.log").read_text() == lines * attempt
    main = run(script, rank=0, run_dir=tmp_path, PYTHONUNBUFFERED="1")
    assert (main.stdout, main.stderr) == (lines.replace("two\n", ""), "two\n")
    assert (tmp_path / "logs" / "0.log").read_text() == ""


def test_a_scripts_own_hook_runs_and_the_log_has_the_traceback_still(tmp_path: Path) -> None:
    script = write(tmp_path / "train.py", "import sys\nsys.excepthook = lambda *a: print('own hook')\n1/0\n")
    run(script, rank=1, run_dir=tmp_path)
    log = (tmp_path / "logs" / "1.log").read_text()
    assert "own hook" in log
    assert log.count("ZeroDivisionError") == 1


@pytest.mark.parametrize(("script", "said"), [("missing.py", "'missing.py' is not there"), (".", "'.' is a folder")])
def test_a_script_that_is_not_there_is_named(tmp_path: Path, script: str, said: str) -> None:
    done = run(script, cwd=tmp_path, run_dir=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert str(tmp_path) in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert report(tmp_path)["exit_code"] == 2


def test_no_script_shows_the_usage() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "phalanx.worker"], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (2, f"{USAGE}\n")


def test_contradictory_variables_stop_the_rank_before_the_script(tmp_path: Path) -> None:
    script = write(tmp_path / "train.py", "print('ran')")
    done = run(script, rank=0, run_dir=tmp_path, RANK="2")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("phalanx: RANK=2 but WORLD_SIZE=2")
    (file,) = (tmp_path / "errors").iterdir()
    found = json.loads(file.read_text())
    assert file.name.startswith(f"{socket.gethostname()}-")
    assert (found["rank"], found["exit_code"]) == (None, 2)
    assert found["exception"].startswith("phalanx.errors.TopologyError: RANK=2")


@pytest.mark.parametrize("kind", ["missing", "file", "no room for logs"])
def test_a_run_directory_that_cannot_be_written_names_the_node(tmp_path: Path, kind: str) -> None:
    run_dir = tmp_path / "run"
    if kind == "file":
        run_dir.write_text("")
    elif kind == "no room for logs":
        run_dir.mkdir()
        (run_dir / "logs").write_text("")
    done = run(write(tmp_path / "train.py", "print('ran')"), rank=1, run_dir=run_dir)
    assert (done.returncode, done.stdout) == (2, "")
    for part in ("rank 1", socket.gethostname(), str(run_dir)):
        assert part in done.stderr
    assert run_dir.exists() == (kind != "missing")


def test_a_worker_costs_little_and_imports_no_torch(tmp_path: Path) -> None:
    script = write(tmp_path / "train.py", "import sys; print(*sorted({name.split('.')[0] for name in sys.modules}))")
    loaded = set(run(script, rank=0, run_dir=tmp_path).stdout.split())
    assert not loaded & {"torch", "numpy", "pydantic", "yaml", "rich"}
    assert "json" not in loaded


RIGHT_AFTER_A_COLLECTIVE = """
    import os, sys, torch, torch.distributed as dist
    import phalanx
    {begin}
    held = dist.group.WORLD._get_backend(torch.device("cpu"))  # as engines hold it: its threads outlive the group
    sys.setswitchinterval(100)
    for _ in range(4):
        dist.all_reduce(torch.ones(1_000_000), async_op=True)
    {end}
    """
OWN_GROUP = 'dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("begin", "end", "ours"),
    [
        (OWN_GROUP, "", True),
        (f'{OWN_GROUP}; phalanx.EpochTimer("ddp").close()', "dist.destroy_process_group()", False),
        (f"{OWN_GROUP}; phalanx.init(strategy='ddp', progress=False).close()", "", False),
    ],
    ids=["worker", "EpochTimer", "init"],
)
def test_a_script_that_ends_right_after_a_collective_is_not_aborted(
    tmp_path: Path, begin: str, end: str, ours: bool
) -> None:
    """Gloo's thread wants the interpreter for the tensors' end; here it would often get it too late. A worker of ours
    sees to that, and what of ours a script uses that another launcher started."""
    script = write(tmp_path / "s.py", textwrap.dedent(RIGHT_AFTER_A_COLLECTIVE).format(begin=begin, end=end))
    how = ("-m", "phalanx.worker") if ours else ()
    codes = [run(script, how=how, cwd=tmp_path, rank=0, world=1).returncode for _ in range(4)]
    assert codes == [0] * 4


def test_exit_status_is_pythons() -> None:
    assert [exit_status(code) for code in (None, 0, 3, -1, 256, True, "text", "")] == [0, 0, 3, 255, 0, 1, 1, 1]


def test_a_report_can_be_built_for_any_error() -> None:
    found = failure(KeyError("lr"), rank=5, exit_code=1)
    assert (found["rank"], found["exception"]) == (5, "KeyError: 'lr'")
    assert found["traceback"] == "KeyError: 'lr'\n"


def test_above_64_ranks_logs_are_one_file_a_node(tmp_path: Path) -> None:
    script = write(tmp_path / "s.py", "print('hello')")
    place = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "64", "GROUP_RANK": "1", "MASTER_ADDR": "node0"}
    environ = environment(rank=65, world=128, run_dir=tmp_path, **place) | place
    subprocess.run([sys.executable, "-m", "phalanx.worker", str(script)], env=environ, check=True, timeout=60)
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["node1.log"]
    assert (tmp_path / "logs" / "node1.log").read_text() == "hello\n"


def test_a_command_takes_the_ranks_place_with_its_variables_log_and_exit_code(tmp_path: Path) -> None:
    command = ("sh", "-c", 'echo "$RANK of $WORLD_SIZE $1"; exit 5', "sh", "a b")
    done = run("--exec", *command, rank=1, run_dir=tmp_path)
    assert done.returncode == 5
    assert done.stdout == ""
    assert "1 of 2 a b" in (tmp_path / "logs" / "1.log").read_text()
    assert run("--exec", *command, rank=0, run_dir=tmp_path).stdout == "0 of 2 a b\n"


def test_a_command_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = run("--exec", "no-such-command", rank=0, run_dir=tmp_path)
    assert done.returncode == 2
    assert "no-such-command" in done.stderr
    assert "no-such-command" in str(report(tmp_path)["exception"])
    assert run("--exec", rank=0).returncode == 2


@pytest.mark.parametrize(
    ("code", "received"),
    [
        ('parser.add_argument("--local_rank", type=int, default=-1)', ["--local_rank=1", "--lr", "2"]),
        ("parser.add_argument('--local-rank', type=int, default=0)", ["--local-rank=1", "--lr", "2"]),
        ('parser.add_argument("--lr")', ["--lr", "2"]),
    ],
)
def test_the_local_rank_that_deepspeeds_launcher_adds_reaches_the_scripts_that_take_it(
    tmp_path: Path, code: str, received: list[str]
) -> None:
    """It stands before the script, as the launcher takes the worker for the script."""
    script = write(tmp_path / "s.py", f"import sys\nprint(sys.argv[1:])\n# {code}\n")
    done = run("--local_rank=1", str(script), "--lr", "2", rank=1)
    assert done.stdout == f"{received}\n", done.stderr


def test_words_that_a_launcher_was_not_to_see_arrive_as_they_were(tmp_path: Path) -> None:
    script = write(tmp_path / "own.py", "import sys; print(sys.argv[1:])")
    words = ["--h", "-m", "", "a b", "=x", "--"]
    done = run("--local_rank=1", "=", f"={script}", *(f"={word}" for word in words), rank=0)
    assert done.stdout == f"{words}\n"


def test_a_script_for_torchs_old_launcher_gets_its_local_rank(tmp_path: Path) -> None:
    script = write(tmp_path / "old.py", "import sys; print(sys.argv[1:]) or '--local_rank'")
    assert run(script, "--x", rank=0, PHALANX_LOCAL_RANK_OPTION="1").stdout == "['--local_rank=0', '--x']\n"


def test_a_command_gets_no_local_rank_option() -> None:
    done = run("--local_rank=0", "--exec", "echo", "--local_rank", rank=0)
    assert done.stdout == "--local_rank\n", done.stderr


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_can_leave_no_report_says_so_to_the_launcher(tmp_path: Path, rank: int) -> None:
    """As on a full disk, which doesn't take the rank's log either."""
    script = write(
        tmp_path / "s.py",
        """
        import os
        folder = os.environ["PHALANX_RUN_DIR"] + "/errors"
        os.rmdir(folder)
        open(folder, "w").close()
        raise OSError(28, "No space left on device")
        """,
    )
    done = run(script, rank=rank, run_dir=tmp_path)
    said = f"phalanx: rank {rank} on {socket.gethostname()} failed: OSError: [Errno 28] No space left on device "
    assert said + "(exit code 1; no report: " in done.stderr


@pytest.mark.parametrize(
    ("code", "rank", "noted"),
    [
        ("print(1)", 0, True),
        ("import sys; sys.exit()", 0, True),
        ("import sys; sys.exit(3)", 0, False),
        ("print(1)", 1, False),  # once is enough
        ("import sys, types; sys.modules['horovod'] = types.ModuleType('horovod')", 0, False),
    ],
)
def test_several_ranks_that_never_met_are_told_of_at_the_end(tmp_path: Path, code: str, rank: int, noted: bool) -> None:
    script = write(tmp_path / "s.py", code)
    done = run(script, rank=rank, run_dir=tmp_path)
    assert ("2 ranks ran s.py, and it made no process group" in done.stderr) == noted
    assert "no process group" not in run(script, rank=0, world=1, run_dir=tmp_path).stderr


@pytest.mark.parametrize(
    ("name", "inside", "left"), [("torchinductor_me", 0, 0), ("torchinductor_me", 1, 1), ("c", 0, 1)]
)
def test_an_empty_cache_of_torchs_own_is_taken_away(tmp_path: Path, name: str, inside: int, left: int) -> None:
    """One with compiled code in it serves the next run, and a folder of the user's own is theirs."""
    folder = tmp_path / name
    script = write(
        tmp_path / "s.py",
        f"""
        import os
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = {str(folder)!r}  # as torch does
        os.mkdir({str(folder)!r})
        if {inside}: open({str(folder / "code")!r}, "w").close()
        """,
    )
    run(script, rank=0, world=1)
    assert folder.exists() == bool(left)
