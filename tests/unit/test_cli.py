import json
import os
import re
import subprocess
import sys

import pytest

import phalanx
from phalanx.cli.main import COMMANDS, main


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch, tmp_path):
    """No settings, and no GPUs, from the machine that the tests run on."""
    for name in [name for name in os.environ if name.startswith("PHALANX_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)


def test_help_lists_every_command_on_a_line(capsys):
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, summary in COMMANDS.items():
        assert any(line.split(maxsplit=1) == [name, summary] for line in lines)


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"phalanx {phalanx.__version__}\n"


def test_no_command_shows_help_and_fails(capsys):
    assert main([]) == 2
    assert "usage: phalanx" in capsys.readouterr().err


def test_an_unknown_command_names_the_nearest(capsys):
    assert main(["paln"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: unknown command 'paln'")
    assert "'plan'" in error


@pytest.mark.parametrize("command", ["run", "plan"])
def test_each_command_has_help(command, capsys):
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: phalanx {command} ")
    assert "phalanx config --explain" in text


@pytest.mark.parametrize("words", [["--launcher", "srun"], ["-N", "2"]])
def test_inside_an_allocation_no_error_says_that_there_is_none(words, tmp_path, monkeypatch, capsys):
    """--local is one reason to be on this machine alone; that srun can't be found is another."""
    (tmp_path / "s.py").touch()
    (tmp_path / "srun").write_text("#!/bin/sh\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["run", "--local", *words, "s.py"]) == 2
    error = capsys.readouterr().err
    assert "inside job 17 (--local" in error
    assert "leave --local out" in error
    assert "outside" not in error
    (tmp_path / "srun").unlink()
    assert main(["run", *words, "s.py"]) == 2
    error = capsys.readouterr().err
    assert "inside job 17, as srun is not on PATH" in error
    assert "put srun on PATH" in error


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["run"], "no script given"),
        (["run", "absent.py"], "no script 'absent.py'"),
        (["run", "."], "'.' is not a file"),
        (["run", "--stratgy", "ddp", "s.py"], "--strategy"),
        (["run", "stratgy=ddp", "s.py"], "strategy"),
        (["run", "--strategy", "dpd", "s.py"], "'ddp'"),
        (["run", "--seed", "x", "s.py"], "seed"),
        (["run", "--nproc", "2", "--backend", "nccl", "s.py"], "--backend gloo"),
        (["run", "--device", "cuda", "s.py"], "--device cpu"),
        (["run", "-j", "2x2", "s.py"], "2 nodes"),
        (["run", "--launcher", "srun", "s.py"], "srun needs a Slurm allocation"),
        (["run", "--launcher", "mpirun", "mpirun.executable=/no/mpirun", "s.py"], "mpirun needs /no/mpirun"),
        (["run", "--launcher", "torchrun", "-s", "horovod", "s.py"], "--launcher horovodrun --strategy horovod"),
        (["run", "-s", "deepspeed", "deepspeed.zero_stage=4", "s.py"], "deepspeed.zero_stage"),
        (["run", "-s", "deepspeed", "deepspeed.offload=nvme", "s.py"], "NVMe"),
        (["run", "-s", "deepspeed", "deepspeed.config=/no/ds.json", "s.py"], "/no/ds.json"),
        (["run", "--launcher", "python", "--nproc", "2", "s.py"], "--launcher torchrun"),
        (["run", "--strategy", "single", "--nproc", "2", "s.py"], "--strategy ddp"),
        (["run", "--venv", "/no/venv", "s.py"], "/no/venv/bin/python"),
        (["run", "--resume", "latest", "s.py"], "no run 'latest'"),
        (["run", "--resume", "nosuch", "s.py"], "no run 'nosuch'"),
        (["run", "-c", "absent.yaml", "s.py"], "absent.yaml"),
        (["run", "--name", "a/b", "s.py"], "'a/b'"),
    ],
)
def test_bad_input_is_one_clear_error_and_leaves_nothing_behind(argv, words, tmp_path, capsys):
    (tmp_path / "s.py").write_text("raise SystemExit('started')\n")
    before = sorted(tmp_path.rglob("*"))
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert words in error
    assert sorted(tmp_path.rglob("*")) == before


def test_a_port_in_use_is_named(tmp_path, capsys):
    import socket

    (tmp_path / "s.py").touch()
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        assert main(["run", "--nproc", "2", "--master-port", str(port), "s.py"]) == 2
    assert f"master_port {port} can't be used" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_plan_is_a_table_and_starts_nothing(tmp_path, capsys):
    assert main(["plan", "-j", "2x4", "--gpus-per-node", "4", "--cpus-per-task", "32", "absent.py", "--n", "a b"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = dict(re.split("  +", line, maxsplit=1) for line in lines if not line.startswith(" "))
    assert rows["nodes"] == "2"
    assert rows["script"] == "absent.py --n 'a b'"
    assert rows["device"] == "cuda"
    assert rows["OMP_NUM_THREADS"] == "8"
    assert list(tmp_path.iterdir()) == []


def test_a_plan_for_programs(capsys):
    assert main(["plan", "--json", "--nproc", "2", "t.py"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["world_size"], plan["strategy"], plan["launcher"], plan["device"]) == (2, "ddp", "torchrun", "cpu")
    assert plan["nodes"] == [{"node_rank": 0, "host": plan["nodes"][0]["host"], "first_rank": 0, "ranks": 2}]


def test_a_plan_of_ten_thousand_nodes_is_summed_up(capsys):
    assert main(["plan", "-j", "10000x8", "t.py"]) == 0
    assert len(capsys.readouterr().out.splitlines()) < 40
    assert main(["plan", "-j", "10000x8", "--json", "t.py"]) == 0
    nodes = json.loads(capsys.readouterr().out)["nodes"]
    assert (len(nodes), nodes[-1]["first_rank"]) == (10000, 79992)


def loaded_modules(*argv):
    code = (
        "import sys; from phalanx.cli.main import main; code = main(sys.argv[1:]);"
        "print(*sys.modules, sep='\\n', file=sys.stderr); sys.exit(code)"
    )
    ended = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=True)
    return set(ended.stderr.splitlines())


def test_help_loads_no_library():
    assert not loaded_modules("--help") & {"torch", "numpy", "pydantic", "yaml", "rich"}


def test_a_plan_loads_no_torch():
    assert not loaded_modules("plan", "--nproc", "2", "t.py") & {"torch", "numpy", "rich"}


def test_a_reader_that_goes_away_is_no_traceback():
    command = f"{sys.executable} -m phalanx plan --json -j 10000x8 t.py | head -n 1"
    ended = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert ended.stderr == ""
    assert ended.returncode == 141


def test_a_launcher_that_cannot_be_executed_leaves_no_run_directory(tmp_path, capsys):
    (tmp_path / "s.py").touch()
    (tmp_path / "venv/bin").mkdir(parents=True)
    python = tmp_path / "venv/bin/python"
    python.write_text("#!/no/such/interpreter\n")
    python.chmod(0o755)
    assert main(["run", "--venv", str(tmp_path / "venv"), "s.py"]) == 2
    assert f"error: cannot start {python}" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_without_torch_the_extra_is_named(tmp_path, capsys, monkeypatch):
    (tmp_path / "s.py").touch()
    monkeypatch.setattr("phalanx.schedulers.local.find_spec", lambda name: None)
    assert main(["run", "--nproc", "2", "s.py"]) == 2
    assert "pip install 'phalanx[torch]'" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_the_api_without_torch_names_the_extra():
    code = "import sys; sys.modules['torch'] = None; import phalanx; phalanx.init()"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stderr.splitlines()[-1].startswith("phalanx.errors.MissingExtraError: ")
    assert "pip install 'phalanx[torch]'" in ended.stderr


def test_a_script_that_cannot_be_read_is_named(tmp_path, capsys, monkeypatch):
    (tmp_path / "s.py").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may read anything
    assert main(["run", "s.py"]) == 2
    assert "script 's.py' can't be read" in capsys.readouterr().err


def test_a_resumed_run_keeps_its_settings_where_none_are_given_anew(tmp_path, capsys):
    run_dir = tmp_path / "runs" / "train" / "20260101-000000-aaaa"
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").write_text("nproc_per_node: 3\nstrategy: fsdp\nenv: {A: '1'}\n")
    assert main(["plan", "--json", "--resume", "latest", "train.py"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["nproc_per_node"], plan["strategy"], plan["environment"]["A"]) == (3, "fsdp", "1")
    assert main(["plan", "--json", "--resume", "latest", "--nproc", "2", "train.py"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["nproc_per_node"], plan["strategy"]) == (2, "fsdp")
    assert main(["plan", "--resume", "latest", "other.py"]) == 2
    assert "no run 'latest' to resume" in capsys.readouterr().err
