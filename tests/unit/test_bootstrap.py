"""bootstrap.py: old Pythons, refusals, what is installed in which order, other systems' paths."""

import ast
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path, PureWindowsPath

import pytest

from phalanx import bootstrap
from phalanx.bootstrap import BootstrapError, Python, Wanted
from phalanx.cli.main import main

FILE = Path(bootstrap.__file__)
ROOT = FILE.parent.parent.parent
CHECK_BUILD = """\
Horovod v0.28.1:

Available Frameworks:
    [ ] TensorFlow
    [X] PyTorch
    [ ] MXNet

Available Controllers:
    [ ] MPI
    [X] Gloo

Available Tensor Operations:
    [X] NCCL
    [ ] DDL
    [ ] CCL
    [ ] MPI
    [X] Gloo
"""


def old_pythons():
    """Pythons before 3.10 that start, from PATH or beside each other in a version manager's folder."""
    names = [f"python3.{minor}" for minor in range(6, 10)]
    names += map(str, Path.home().glob(".pyenv/versions/3.[6-9].*/bin/python"))
    found = {}
    for name in names:
        try:
            done = subprocess.run(
                [name, "-c", "import sys; print(sys.version_info[1])"], capture_output=True, text=True
            )
        except OSError:
            continue
        if done.returncode == 0:
            found[int(done.stdout)] = name
    return [found[minor] for minor in sorted(found)]


def bootstrap_py(*words, python=sys.executable, **options):
    return subprocess.run([python, str(FILE), *map(str, words)], capture_output=True, text=True, **options)


# Python 3.6


def test_the_file_is_python_3_6():
    tree = ast.parse(FILE.read_text(), feature_version=(3, 6))
    newer = (ast.NamedExpr, ast.Match)
    assert not [node for node in ast.walk(tree) if isinstance(node, newer)]
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert modules <= {"argparse", "json", "os", "pathlib", "re", "shlex", "shutil", "signal", "subprocess", "sys",
                       "time", "typing"}  # fmt: skip
    keywords = {word.arg for node in ast.walk(tree) if isinstance(node, ast.Call) for word in node.keywords}
    assert not keywords & {"capture_output", "text", "missing_ok", "dirs_exist_ok", "exit_on_error"}
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not attributes & {"removeprefix", "removesuffix", "is_relative_to", "readlink", "cache", "get_running_loop"}


def test_the_oldest_python_here_runs_it(tmp_path):
    pythons = old_pythons()
    if not pythons:
        pytest.skip("no Python from 3.6 to 3.9 is installed here")
    (tmp_path / "file").write_text("")
    assert bootstrap_py("--help", python=pythons[0]).returncode == 0
    refused = bootstrap_py("--cpu", tmp_path / "file", python=pythons[0])
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "is no folder" in refused.stderr


def test_it_holds_no_host_name():
    """Package indexes come from options and pip's own settings."""
    assert not re.search(r"https?://[\w.]|pytorch\.org|pypi", FILE.read_text())


# Refusals


def venv(path):
    path.mkdir()
    (path / "pyvenv.cfg").write_text("home = /usr/bin\n")


def folder_with_files(path):
    path.mkdir()
    (path / "notes.txt").write_text("mine")


def unfinished(path):
    venv(path)
    (path / bootstrap.UNFINISHED).write_text("")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (venv, "is a virtual environment already"),
        (folder_with_files, "is a folder with files in it"),
        (unfinished, "is being made, or whose making was broken off"),
        (Path.touch, "is no folder"),
    ],
)
def test_nothing_is_overwritten(tmp_path, make, words):
    path = tmp_path / "env"
    make(path)
    before = sorted(path.rglob("*"))
    done = bootstrap_py("--cpu", path)
    assert done.returncode == 2
    assert str(path) in done.stderr
    assert words in done.stderr
    assert "another PATH" in done.stderr
    assert sorted(path.rglob("*")) == before


def test_a_dangling_link_is_no_place(tmp_path):
    (tmp_path / "env").symlink_to("nowhere")
    with pytest.raises(BootstrapError, match="is no folder"):
        bootstrap.check_target(tmp_path / "env")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "one of the arguments --cpu --gpu is required"),
        (["--cpu", "--gpu"], "not allowed with argument --cpu"),
        (["--cpu", "env", "--with", "demo", "./env"], "--with ./env: there is no such file"),
        (["--cpu", "env", "--wheelhouse", "absent"], "--wheelhouse absent: expected a folder of wheels"),
        (["--cpu", "env", "--python", "absent-python"], "absent-python is not there"),
        (["--cpu", "env", "--constraint", "absent.txt"], "there is no file of constraints absent.txt: give the path"),
        (["--cpu", "--dry-run", "--python", "absent-python"], "absent-python is not there"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_made(tmp_path, words, expected):
    done = bootstrap_py(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert expected.replace("absent:", f"{tmp_path}/absent:") in done.stderr or expected in done.stderr
    assert list(tmp_path.iterdir()) == []


def fake_python(folder, name, version, code=0):
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\ncase $1 in -c) echo {version}; exit {code};; *) exec sleep 60;; esac\n")
    path.chmod(0o755)
    return path


def test_no_fit_python_is_told_with_those_that_are_there(tmp_path, monkeypatch):
    fake_python(tmp_path / "bin", "python3", "3.6.8")
    fake_python(tmp_path / "bin", "python3.11", "3.11.2", code=1)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(bootstrap.sys, "executable", "")
    with pytest.raises(BootstrapError) as caught:
        bootstrap.find_python()
    text = str(caught.value)
    assert "python3 is 3.6.8, too old" in text
    assert "python3.11 is 3.11.2 without venv and ensurepip" in text
    assert "module load" in text
    assert "--python EXE" in text


def test_the_first_fit_python_of_path_is_taken(tmp_path, monkeypatch):
    fake_python(tmp_path / "bin", "python3", "3.9.1")
    fake_python(tmp_path / "bin", "python3.10", "3.10.4")
    fake_python(tmp_path / "bin", "python3.12", "3.12.0")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(bootstrap.sys, "executable", "")
    assert bootstrap.find_python() == (("python3.12",), "3.12.0")


@pytest.mark.parametrize("existed", [False, True])
def test_an_end_by_signal_leaves_nothing(tmp_path, existed):
    python = fake_python(tmp_path / "bin", "python3", "3.11.0")
    path = tmp_path / "env"
    if existed:
        path.mkdir()
    process = subprocess.Popen([sys.executable, str(FILE), "--cpu", str(path), "--python", str(python)],
                               stdout=subprocess.PIPE, text=True)  # fmt: skip
    while not process.stdout.readline().startswith("+ "):
        pass
    assert (path / bootstrap.UNFINISHED).exists()
    time.sleep(0.1)
    process.terminate()
    assert process.wait(timeout=30) == 143
    process.stdout.close()
    assert path.exists() == existed
    assert not existed or list(path.iterdir()) == []


# What is installed


def test_torch_comes_before_phalanx_and_horovod_last():
    wanted = Wanted("gpu", phalanx="/src/phalanx", extras=("horovod>=0.28", "demo", "wandb"))
    steps = bootstrap.pip_steps(wanted, "/env")
    pin = ["--constraint", os.path.join("/env", bootstrap.PIN)]
    assert all(step[0] == "--no-cache-dir" for step in steps)
    assert [step[1:] for step in steps] == [
        ["--upgrade", "pip"],
        ["torch>=2.7"],
        ["/src/phalanx[torch,demo]", *pin],
        ["setuptools<81", "wheel", "packaging", "cmake<4", "cloudpickle", "psutil", "pyyaml", "cffi", *pin],
        ["--no-build-isolation", "horovod>=0.28", *pin],
        ["wandb", *pin],
    ]


def test_torch_has_an_index_of_its_own():
    wanted = Wanted("cpu", index_url="https://mirror/simple", torch_index_url="https://mirror/cpu", extras=("x",))
    pip, torch, phalanx, extra = bootstrap.pip_steps(wanted, "/env")
    assert pip[-2:] == ["--index-url", "https://mirror/simple"]
    assert torch[-2:] == ["--index-url", "https://mirror/cpu"]
    for step in (phalanx, extra):
        assert step[-4:] == ["--index-url", "https://mirror/simple", "--extra-index-url", "https://mirror/cpu"]


def test_all_commands_for_the_cpu():
    python = Python(("/usr/bin/python3.12",), "3.12.1")
    wanted = Wanted("cpu", "/src", torch_index_url="https://m/cpu")
    found = bootstrap.commands(Path("/envs/a b"), wanted, python, "posix")
    own = ["/envs/a b/bin/python", "-m", "pip", "install", "--no-cache-dir"]
    keep = ["--constraint", f"/envs/a b/{bootstrap.PIN}"]
    assert found == [
        ["/usr/bin/python3.12", "-m", "venv", "/envs/a b"],
        [*own, "--upgrade", "pip"],
        [*own, "torch>=2.7", "--index-url", "https://m/cpu"],
        [*own, "/src[torch]", *keep, "--extra-index-url", "https://m/cpu"],
    ]


def test_all_commands_on_windows_offline():
    path, python = PureWindowsPath(r"C:\My envs\gpu"), Python(("py", "-3.12"), "3.12.1")
    found = bootstrap.commands(path, Wanted("gpu", wheelhouse=r"D:\wheels"), python, "nt")
    assert found[0] == ["py", "-3.12", "-m", "venv", r"C:\My envs\gpu"]
    assert [words[0] for words in found[1:]] == [r"C:\My envs\gpu\Scripts\python.exe"] * 3
    assert all(words[-3:] == ["--no-index", "--find-links", r"D:\wheels"] for words in found[1:])


def test_horovods_own_report_comes_last():
    python = Python(("python3",), "3.12.1")
    found = bootstrap.commands(Path("/env"), Wanted("gpu", extras=("horovod", "demo")), python, "posix")
    assert found[-1] == ["/env/bin/horovodrun", "--check-build"]


def test_several_constraints_hold_together(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").touch()
    (tmp_path / "b.txt").touch()
    given = ["--cpu", "--constraint", "a.txt", "--constraint", "b.txt", "--constraint", "https://m/c.txt"]
    wanted = bootstrap.wanted_of(bootstrap.parser().parse_args(given))
    expected = [f"{tmp_path}/a.txt", f"{tmp_path}/b.txt", "https://m/c.txt"]
    for step in bootstrap.pip_steps(wanted, "/env")[1:]:
        files = [file for word, file in itertools.pairwise(step) if word == "--constraint"]
        assert [file for file in files if not file.endswith(bootstrap.PIN)] == expected


def test_a_dry_run_prints_the_commands_and_makes_nothing(tmp_path):
    words = ["--gpu", "env", "--dry-run", "--with", "horovod", "--python", sys.executable]
    plain = {name: text for name, text in os.environ.items() if not name.startswith("HOROVOD_")}
    done = bootstrap_py(*words, cwd=tmp_path, env={**plain, "HOROVOD_GPU_OPERATIONS": "MPI"})
    assert (done.returncode, done.stderr) == (0, "")
    printed = [shlex.split(line[2:]) for line in done.stdout.splitlines() if line.startswith("+ ")]
    assert printed[0] == [sys.executable, "-m", "venv", str(tmp_path / "env")]
    assert printed[-1] == [str(tmp_path / "env" / "bin" / "horovodrun"), "--check-build"]
    assert "variable HOROVOD_WITHOUT_MXNET=1" in done.stdout
    assert "HOROVOD_GPU_OPERATIONS" not in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("end", "code"), [("exit 7", 7), ("kill -9 $$", 137)])
def test_the_failing_commands_exit_code_is_ours(tmp_path, end, code):
    python = fake_python(tmp_path / "bin", "python3", "3.11.0")
    python.write_text(python.read_text().replace("exec sleep 60", end))
    done = bootstrap_py("--cpu", tmp_path / "env", "--python", python)
    assert done.returncode == code
    assert f"failed with exit code {code}" in done.stderr
    assert not (tmp_path / "env").exists()
    assert main(["env", "create", "--cpu", str(tmp_path / "env"), "--python", str(python)]) == code


def test_a_wheelhouse_needs_no_index():
    wanted = Wanted("cpu", wheelhouse="/wheels", index_url="https://mirror/simple", extras=("horovod",))
    for step in bootstrap.pip_steps(wanted, "/env"):
        assert step[-3:] == ["--no-index", "--find-links", "/wheels"]
        assert "--index-url" not in step


def test_torch_is_what_the_package_needs():
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11 to read pyproject.toml")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert bootstrap.TORCH in project["optional-dependencies"]["torch"]
    assert f">=3.{bootstrap.OLDEST}" == project["requires-python"]
    assert bootstrap.own_extras() == list(project["optional-dependencies"])


@pytest.mark.parametrize(
    ("requirement", "expected"),
    [
        ("horovod", True),
        ("Horovod[pytorch]==0.28.1", True),
        ("horovod @ git+https://host/team/fork", True),
        ("git+https://host/horovod/horovod.git@v0.28.1", True),
        ("wheels/horovod-0.28.1.tar.gz", True),
        (r"C:\wheels\horovod-0.28.1.tar.gz", True),
        ("horovodlike", False),
        ("wandb", False),
    ],
)
def test_horovod_is_known_in_every_form(requirement, expected):
    assert bootstrap.is_horovod(requirement) is expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("phalanx", "phalanx[torch]"),
        ("/src/phalanx", "/src/phalanx[torch]"),
        ("phalanx @ git+file:///src@abc", "phalanx[torch] @ git+file:///src@abc"),
    ],
)
def test_extras_of_every_source(source, expected):
    assert bootstrap.with_extras(source, ["torch", "torch"]) == expected


def test_phalanx_is_installed_from_where_this_one_is_from(tmp_path):
    assert bootstrap.phalanx_source() == str(ROOT)
    installed = tmp_path / "lib" / "phalanx" / "bootstrap.py"
    assert bootstrap.phalanx_source(installed) == "phalanx"
    note = tmp_path / "lib" / "phalanx-0.1.0.dist-info" / "direct_url.json"
    note.parent.mkdir(parents=True)
    note.write_text(json.dumps({"url": "file:///src", "vcs_info": {"vcs": "git", "commit_id": "abc"}}))
    assert bootstrap.phalanx_source(installed) == "phalanx @ git+file:///src@abc"
    note.write_text(json.dumps({"url": "file:///src", "dir_info": {}}))
    assert bootstrap.phalanx_source(installed) == "phalanx @ file:///src"


def test_horovods_variables_give_way_to_the_users():
    given = {"HOROVOD_WITHOUT_GLOO": "1", "HOROVOD_WITH_MPI": "1", "CUDA_HOME": "/cuda", "EBROOTNCCL": "/nccl"}
    assert bootstrap.horovod_variables(given, "gpu") == {
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        "HOROVOD_CUDA_HOME": "/cuda",
        "HOROVOD_NCCL_HOME": "/nccl",
    }
    assert bootstrap.horovod_variables({"HOROVOD_WITH_TENSORFLOW": "1"}, "cpu") == {
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
    }


def test_pip_stays_in_the_environment():
    given = {"PIP_TARGET": "/x", "PIP_PREFIX": "/x", "PYTHONHOME": "/x", "PIP_USER": "1", "PIP_INDEX_URL": "https://m"}
    found = bootstrap.build_environment(given, Wanted("cpu"))
    assert found == {"PIP_USER": "0", "PIP_INDEX_URL": "https://m", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


# Checks at the end


@pytest.mark.parametrize(
    ("build", "kind", "system", "expected"),
    [
        ("cpu", "cpu", "linux", None),
        ("cuda 12.8", "gpu", "linux", None),
        ("rocm 6.2", "gpu", "linux", None),
        ("cpu", "gpu", "darwin", None),
        ("cuda 12.8", "cpu", "linux", "torch is built for cuda 12.8"),
        ("cpu", "gpu", "win32", "torch is built for the CPU only"),
    ],
)
def test_the_build_of_torch_must_be_the_wanted_one(build, kind, system, expected):
    if expected is None:
        bootstrap.check_torch(build, kind, system)
        return
    with pytest.raises(BootstrapError, match=f"{expected}.*--torch-index-url"):
        bootstrap.check_torch(build, kind, system)


def test_horovod_must_have_what_it_was_built_for():
    asked = {"HOROVOD_WITH_PYTORCH": "1", "HOROVOD_WITH_GLOO": "1", "HOROVOD_GPU_OPERATIONS": "NCCL"}
    bootstrap.check_horovod(CHECK_BUILD, asked)
    with pytest.raises(BootstrapError, match="without MPI, which HOROVOD_"):
        bootstrap.check_horovod(CHECK_BUILD, {**asked, "HOROVOD_WITH_MPI": "1"})


# Other systems


def test_paths_and_commands_of_windows():
    folder = PureWindowsPath(r"C:\My envs\gpu")
    assert str(bootstrap.python_in(folder, "nt")) == r"C:\My envs\gpu\Scripts\python.exe"
    assert bootstrap.activation(folder, "nt") == r"C:\My envs\gpu\Scripts\activate"
    assert bootstrap.python_candidates("nt")[1:] == [
        ("py", "-3.13"), ("py", "-3.12"), ("py", "-3.11"), ("py", "-3.10"), ("python",)
    ]  # fmt: skip
    assert bootstrap.show([r"C:\My envs\python.exe", "-m", "pip"], "nt") == r'"C:\My envs\python.exe" -m pip'


def test_paths_of_linux_and_macos():
    assert str(bootstrap.python_in(Path("/envs/a"), "posix")) == "/envs/a/bin/python"
    assert bootstrap.activation(Path("/envs/a"), "posix") == "source /envs/a/bin/activate"
    names = [words[0] for words in bootstrap.python_candidates("posix")[1:]]
    assert names == ["python3", "python3.13", "python3.12", "python3.11", "python3.10", "python"]


def test_passwords_are_not_printed():
    shown = bootstrap.show(["pip", "--index-url", "https://me:secret@mirror/simple", "torch>=2.7"], "posix")
    assert shown == "pip --index-url https://***@mirror/simple 'torch>=2.7'"
