"""Environments made for real, by venv and pip, from a folder of tiny wheels and without network."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from phalanx import bootstrap
from phalanx.bootstrap import HOROVOD_NEEDS, RECORD, Wanted
from phalanx.config import load_config
from phalanx.config.slurm_schema import ModulesSettings
from phalanx.environments import environment_warnings
from phalanx.environments.job import Build, build_plan, render_build
from phalanx.environments.wheelhouse import Target, check_use, fill
from phalanx.planning.facts import gather

from ..unit.test_bootstrap import old_pythons

pytestmark = pytest.mark.slow
TORCH = 'class version:\n    cuda, hip = {cuda!r}, None\n__version__ = "2.9.0"\n'
HOROVODRUN = "def main():\n    print('[X] PyTorch [{mpi}] MPI [X] Gloo')\n"


def wheel(folder, name, version, files, requires=(), scripts="", extras=()):
    """A wheel as pip takes it; returns its path."""
    stem = f"{name}-{version}"
    metadata = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    metadata += [f"Provides-Extra: {extra}" for extra in extras] + [f"Requires-Dist: {need}" for need in requires]
    info = {"METADATA": "\n".join(metadata) + "\n", "WHEEL": "Wheel-Version: 1.0\nTag: py3-none-any\n"}
    info |= {"entry_points.txt": f"[console_scripts]\n{scripts}\n"} if scripts else {}
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in (files | {f"{stem}.dist-info/{file}": text for file, text in info.items()}).items():
            archive.writestr(file, text)
        archive.writestr(f"{stem}.dist-info/RECORD", "")
    return path


def wheelhouse(folder, cuda=None, mpi=" "):
    folder.mkdir()
    own = {"phalanx/__init__.py": "", "phalanx/bootstrap.py": Path(bootstrap.__file__).read_text()}
    wheel(folder, "torch", "2.9.0", {"torch/__init__.py": TORCH.format(cuda=cuda)})
    wheel(folder, "phalanx", "0.1.0", own, requires=["torch; extra == 'torch'"], extras=["torch"])
    horovod = {"horovod/__init__.py": HOROVODRUN.format(mpi=mpi)}
    wheel(folder, "horovod", "0.28.1", horovod, scripts="horovodrun = horovod:main")
    wheel(folder, "greedy", "1.0", {"greedy.py": ""}, requires=["torch!=2.9.0"])
    for need in HOROVOD_NEEDS:
        name = need.partition("<")[0]
        wheel(folder, name, "3.0", {f"{name}_fake.py": ""})
    return folder


@pytest.fixture
def _offline(monkeypatch):
    """pip without this machine's settings, and without an index."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "HOROVOD_", "PYTHONPATH"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("LOADEDMODULES", "GCC/12.3:CUDA/12.1")


def make(*words, python=sys.executable):
    command = [python, bootstrap.__file__, *map(str, words), "--python", sys.executable]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.usefixtures("_offline")
def test_an_environment_from_the_oldest_python_here(tmp_path):
    """Started by Python 3.6 if there is one; the commands are printed in the order that the builds need."""
    wheels, venv = wheelhouse(tmp_path / "wheels"), tmp_path / "new" / "env"
    done = make("--cpu", venv, "--wheelhouse", wheels, "--with", "horovod", python=[*old_pythons(), sys.executable][0])
    assert done.returncode == 0, done.stdout
    commands = [line for line in done.stdout.splitlines() if line.startswith("+ ")]
    order = ("-m venv", "--upgrade pip", "'torch>=", "phalanx[torch]", "packaging", "--no-build-isolation horovod",
             "--check-build")  # fmt: skip
    assert [word in line for word, line in zip(order, commands, strict=True)] == [True] * 7, commands
    assert all("--no-cache-dir" in line for line in commands[1:-1])
    record = json.loads((venv / RECORD).read_text())
    expected = {"v": 1, "kind": "cpu", "torch": "cpu", "modules": ["GCC/12.3", "CUDA/12.1"], "wheelhouse": str(wheels)}
    assert expected.items() <= record.items()
    assert record["python"] == "{}.{}.{}".format(*sys.version_info)
    assert record["versions"]["horovod"] == "0.28.1"
    assert record["build"]["HOROVOD_WITH_GLOO"] == "1"
    assert not (venv / bootstrap.UNFINISHED).exists()
    assert environment_warnings(venv, ModulesSettings(), os.environ) == []
    subprocess.run([venv / "bin" / "python", "-c", "import torch, phalanx"], check=True)
    again = make("--cpu", venv, "--wheelhouse", wheels)
    assert again.returncode == 2
    assert "is a virtual environment already" in again.stdout


@pytest.mark.usefixtures("_offline")
@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["--cpu", "--with", "no-such-package"], 1, ["No matching distribution found for no-such-package"]),
        (["--cpu", "--with", "greedy"], 1, ["torch==2.9.0", "conflict"]),
        (["--gpu"], 2, ["--gpu, but torch is built for the CPU only", "--torch-index-url"]),
    ],
)
def test_a_failure_stops_shows_why_and_leaves_nothing(tmp_path, words, code, expected):
    """pip's own exit code is 1, that of a refusal 2."""
    folder = wheelhouse(tmp_path / "wheels")
    done = make(words[0], tmp_path / "env", *words[1:], "--wheelhouse", folder)
    assert done.returncode == code
    for text in (*expected, "error: "):
        assert text in done.stdout
    assert not (tmp_path / "env").exists()


@pytest.mark.usefixtures("_offline")
def test_cuda_is_refused_before_it_is_downloaded(tmp_path):
    folder = tmp_path / "wheels"
    folder.mkdir()
    wheel(folder, "torch", "2.9.0", {"torch/__init__.py": ""}, requires=["nvidia-nccl-cu12"])
    wheel(folder, "nvidia_nccl_cu12", "2.20", {"nccl.py": ""})
    done = make("--cpu", tmp_path / "env", "--wheelhouse", folder)
    assert done.returncode == 2
    assert "pip would install torch 2.9.0 for CUDA with 1 packages of NVIDIA's" in done.stdout
    assert "Successfully installed torch" not in done.stdout
    assert not (tmp_path / "env").exists()


# As bash exports a function: batch jobs have `module` from the shell that submitted them.
MODULE = {"BASH_FUNC_module%%": '() { if [ "$1" = load ]; then export LOADEDMODULES=GCCcore/12.3:GCC/12.3; fi; }'}


def run_script(script):
    return subprocess.run(
        ["bash", script], env={**os.environ, **MODULE}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def job_script(tmp_path, wanted, venv):
    """The script of a job, for which `MODULE` stands in for the site's function `module`."""
    (tmp_path / "job.yaml").write_text("modules: {purge: true, load: [GCC/12.3]}\nenv: {HOROVOD_CUDA_HOME: /cuda}\n")
    config = load_config([tmp_path / "job.yaml"], (), {}).config
    plan = build_plan(config, gather(os.environ), str(venv))
    script = tmp_path / "job.sh"
    script.write_text(render_build(plan, Build(str(venv), wanted, sys.executable), config))
    return script


@pytest.mark.usefixtures("_offline")
def test_the_job_makes_the_environment_and_notes_its_modules(tmp_path):
    venv = tmp_path / "a b" / "env"
    wanted = Wanted("gpu", extras=("horovod",), wheelhouse=str(wheelhouse(tmp_path / "wheels", cuda="12.8")))
    script = job_script(tmp_path, wanted, venv)
    done = run_script(script)
    assert done.returncode == 2, done.stdout
    assert "Horovod was built without NCCL" in done.stdout
    assert not venv.exists()
    (tmp_path / "job.sh").write_text(script.read_text().replace(":-NCCL}", ":-}"))
    done = run_script(script)
    assert done.returncode == 0, done.stdout
    record = json.loads((venv / RECORD).read_text())
    assert (record["kind"], record["torch"]) == ("gpu", "cuda 12.8")
    assert (record["modules"], record["load"]) == (["GCCcore/12.3", "GCC/12.3"], ["GCC/12.3"])
    assert record["build"]["HOROVOD_CUDA_HOME"] == "/cuda"
    assert environment_warnings(venv, ModulesSettings(purge="true", load="GCC/12.3"), os.environ) == []
    assert len(environment_warnings(venv, ModulesSettings(purge="true", load="GCC/13.1"), os.environ)) == 1
    again = subprocess.run(["bash", script], env={**os.environ, **MODULE}, capture_output=True, text=True)
    assert again.returncode == 2
    assert "is there already" in again.stderr
    assert (venv / RECORD).exists()


@pytest.mark.usefixtures("_offline")
def test_a_wheelhouse_is_filled_and_suffices(tmp_path, monkeypatch):
    source, folder = wheelhouse(tmp_path / "index"), tmp_path / "wheels"
    wheel(source, "pip", "99.0", {"pip_fake.py": ""})
    own = source / "phalanx-0.1.0-py3-none-any.whl"
    monkeypatch.setenv("PIP_FIND_LINKS", str(source))
    python = bootstrap.find_python(sys.executable)
    target = Target(python.version.rpartition(".")[0])
    fill(folder, Wanted("cpu", str(own), ("wheel",)), target, python)
    assert {path.name.partition("-")[0] for path in folder.glob("*.whl")} == {"pip", "torch", "phalanx", "wheel"}
    assert (folder / bootstrap.PIN).read_text() == "torch==2.9.0\n"
    check_use(folder, "cpu", target)
    monkeypatch.delenv("PIP_FIND_LINKS")
    (folder / "pip-99.0-py3-none-any.whl").unlink()  # pip's stand-in would take its place
    done = make("--cpu", tmp_path / "env", "--wheelhouse", folder, "--with", "wheel")
    assert done.returncode == 0, done.stdout
    assert {"torch", "phalanx", "wheel"} <= set(json.loads((tmp_path / "env" / RECORD).read_text())["versions"])
