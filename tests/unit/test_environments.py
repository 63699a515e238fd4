"""Environments of jobs: the build script, what it was built with, and what a wheelhouse is filled with."""

import json
import os
from pathlib import Path

import pytest

from phalanx.batch.directives import directives
from phalanx.bootstrap import PIN, RECORD, UNFINISHED, Wanted
from phalanx.cli.env import split_extras
from phalanx.cli.main import main
from phalanx.config import load_config
from phalanx.config.slurm_schema import ModulesSettings
from phalanx.environments import environment_warnings
from phalanx.environments.job import Build, build_plan, render_build
from phalanx.environments.record import compare_modules, job_modules
from phalanx.environments.wheelhouse import NOTE, Target, check_use, first_steps, later_steps
from phalanx.errors import UsageError
from phalanx.planning.facts import Facts

GOLDEN = Path(__file__).parent.parent / "golden"
FACTS = Facts("login", 8, 0, "/py/bin/python", "Linux", "x86_64", cwd="/home/me/project")
JOB_FILE = """\
nodes: 4
ntasks_per_node: 4
gpus_per_task: 1
cpus_per_task: 8
account: proj
partition: gpu
time: 1:00:00
output: logs/train-%j.out
launcher: mpirun
before: ulimit -c 0
modules: {purge: true, load: [Stages/2024, CUDA/12.1, OpenMPI/4.1]}
proxy: {http: "http://proxy:3128"}
env: {DATA: /data/a b, HOROVOD_NCCL_HOME: /opt/nccl, NCCL_DEBUG: INFO}
tmpdir: /scratch
array: 1-8
"""


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("PHALANX_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("LOADEDMODULES", raising=False)
    monkeypatch.chdir(tmp_path)


def script(tmp_path, wanted, venv="/home/me/project/envs/gpu", text=JOB_FILE, python=None, version=None):
    file = tmp_path / "job.yaml"
    file.write_text(text)
    config = load_config([file], (), {}).config
    return render_build(build_plan(config, FACTS, venv), Build(venv, wanted, python, version), config)


# The script


@pytest.mark.parametrize(
    ("name", "wanted", "version"),
    [
        ("env-horovod", Wanted("gpu", "/home/me/phalanx", ("horovod", "demo")), None),
        ("env-wheelhouse", Wanted("cpu", wheelhouse="/home/me/project/wheels"), "3.11"),
    ],
)
def test_whole_scripts(tmp_path, name, wanted, version):
    text = script(tmp_path, wanted, version=version)
    path = GOLDEN / f"{name}.sh"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text(), f"read the difference, then run with UPDATE_GOLDEN=1 ({path})"


def test_one_task_on_one_of_the_nodes_with_all_that_it_has(tmp_path):
    lines = script(tmp_path, Wanted("gpu")).splitlines()
    directives = [line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")]
    assert {"nodes=1", "ntasks-per-node=1", "cpus-per-task=32", "gpus-per-node=4"} <= set(directives)
    assert "output=logs/gpu-env-%j.out" in directives
    assert not [line for line in directives if line.startswith("array")]


def test_gpus_of_all_nodes_are_shared_out_to_the_one_that_builds():
    config = load_config((), ["nodes=2", "gpus=a100:8"], {}).config
    lines = directives(build_plan(config, FACTS, "/v"))
    assert "#SBATCH --gpus-per-node=a100:4" in lines
    assert not [line for line in lines if line.startswith("#SBATCH --gpus=")]


def test_horovod_is_built_after_torch_and_checked(tmp_path):
    lines = script(tmp_path, Wanted("gpu", extras=("horovod",))).splitlines()
    pips = [line for line in lines if " -m pip install " in line]
    assert all("--no-cache-dir" in line for line in pips)
    torch, horovod = (next(i for i, line in enumerate(lines) if word in line) for word in ("'torch>=", " horovod "))
    assert torch < horovod < lines.index("horovodrun --check-build")
    assert "export HOROVOD_NCCL_HOME=/opt/nccl" in lines
    assert not [line for line in lines if "HOROVOD_NCCL_HOME:-" in line]
    assert 'export HOROVOD_WITH_MPI="${HOROVOD_WITH_MPI:-1}"' in lines
    assert 'export HOROVOD_GPU_OPERATIONS="${HOROVOD_GPU_OPERATIONS:-NCCL}"' in lines


def test_nothing_of_ranks_is_in_its_environment(tmp_path):
    text = script(tmp_path, Wanted("gpu"), text=JOB_FILE + "interface: ib0\n")
    for word in ("RANK=", "WORLD_SIZE=", "MASTER_ADDR", "PHALANX_", "SOCKET_IFNAME"):
        assert word not in text
    assert "export DATA='/data/a b'" in text


# The command


def preview(capsys, *words):
    code = main(["env", "job", "--preview", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_preview_touches_nothing(tmp_path, capsys, monkeypatch):
    (tmp_path / "job.yaml").write_text("venv: envs/a\ngpus_per_node: 2\n")
    (tmp_path / "envs" / "a").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    code, out, _ = preview(capsys, "-c", "job.yaml", "--wheelhouse", "wheels", "--python-version", "3.12")
    assert code == 0
    assert f"venv={tmp_path}/envs/a\n" in out
    assert "--finish --gpu" in out
    assert f"--no-index --find-links {tmp_path}/wheels" in out
    assert "sys.version_info[:2] != (3, 12)" in out
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("text", ["pins.txt", "/etc/pins", "requirements.in", "here"])
def test_pips_constraints_are_no_features_of_nodes(tmp_path, capsys, text):
    (tmp_path / "here").write_text("torch==2.7\n")
    code, out, err = preview(capsys, "--cpu", "new", "--constraint", text)
    assert (code, out) == (2, "")
    assert f"--pip-constraint {text}" in err
    assert preview(capsys, "--cpu", "new", "--constraint", "a100&ib")[0] == 0


@pytest.mark.parametrize(
    ("words", "controller"),
    [
        (["nodes=1", "nproc=2"], "GLOO"),  # by horovodrun
        (["nodes=2", "nproc=2"], "MPI"),  # by srun
        (["nodes=2", "strategy=horovod", "launcher=srun"], "MPI"),
        (["nodes=1", "launcher=mpirun"], "MPI"),
        (["nodes=1", "launcher=horovodrun", "nproc=2"], "GLOO"),
        (["nodes=2", "launcher=torchrun"], "GLOO"),
    ],
)
def test_horovod_gets_the_controller_of_the_launcher_that_the_job_will_use(capsys, words, controller):
    code, out, err = preview(capsys, "--cpu", "new", "--with", "horovod", "device=cpu", *words)
    assert code == 0, err
    assert f"export HOROVOD_WITH_{controller}=" in out


def test_a_job_that_builds_has_no_secret_in_its_script(capsys):
    code, out, _ = preview(capsys, "--cpu", "new", "env.HF_TOKEN=hush", "proxy.https=http://u:hush@h:1", "env.A=1")
    assert code == 0
    assert "hush" not in out
    assert "missing+=' HF_TOKEN'" in out
    assert "export A=1" in out


def test_path_and_extras_stand_anywhere(capsys, tmp_path):
    texts = {
        preview(capsys, *words)[1]
        for words in (
            ("--cpu", "--with", "demo", "horovod", "nodes=1", "new"),
            ("new", "--cpu", "--with", "demo", "--with=horovod"),
            ("--with", "demo", "horovod", "--cpu", "new"),
        )
    }
    assert len(texts) == 1
    assert f"venv={tmp_path}/new\n" in texts.pop()


def test_several_files_of_constraints(capsys, tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).touch()
    _, out, _ = preview(capsys, "--cpu", "--pip-constraint", "a.txt", "new", "--pip-constraint=b.txt")
    assert f"'torch>=2.7' --constraint {tmp_path}/a.txt --constraint {tmp_path}/b.txt\n" in out


def test_files_among_the_extras_have_whole_paths(capsys, tmp_path):
    (tmp_path / "horovod").mkdir()
    _, out, _ = preview(capsys, "--cpu", "new", "--with", "./horovod", "horovod")
    assert f"--no-build-isolation {tmp_path}/horovod " in out
    assert "--no-build-isolation horovod " in out


def test_variables_in_paths_are_the_login_nodes(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("PROJECT", "/project/x")
    _, out, _ = preview(capsys, "output=$PROJECT/logs/%j.out", "venv=$PROJECT/env")
    assert "#SBATCH --output=/project/x/logs/env-env-%j.out\n" in out
    assert "venv=/project/x/env\n" in out


def test_extras_end_at_an_option_or_a_setting():
    argv = ["-c", "a.yaml", "--with", "horovod", "wandb==0.17", "mem=1G", "path", "--with=demo"]
    assert split_extras(argv) == (["-c", "a.yaml", "mem=1G", "path"], ["horovod", "wandb==0.17", "demo"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["env"], "no action given: expected phalanx env create or phalanx env job"),
        (["env", "jop"], "unknown action 'jop'"),
        (["env", "job", "--preview"], "no PATH given"),
        (["env", "job", "--cpu", "--gpu", "x"], "--cpu and --gpu: give one of them"),
        (["env", "job", "x", "y"], "unexpected 'y'"),
        (["env", "job", "x", "--pip-constraint"], "option --pip-constraint needs a value"),
        (["env", "job", "x", "--pip-constraint", "absent.txt"], "there is no file of constraints absent.txt"),
        (["env", "job", "x", "--platform", "manylinux_2_28_aarch64"], "give --wheelhouse DIR too"),
        (["env", "job", "x", "--preview", "--wheelhouse", "w", "--python-version", "311"], "such as 3.11"),
        (["env", "job", "old"], "is a virtual environment already"),
        (["env", "create", "--cpu", "old"], "is a virtual environment already"),
    ],
)
def test_what_cannot_be_meant_is_refused(words, expected, capsys, tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "pyvenv.cfg").write_text("")
    assert main(words) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("saved", [True, False])
def test_submission_saves_the_script_and_ends_with_the_id(tmp_path, capsys, monkeypatch, saved):
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(f'#!/bin/sh\ncat "$2" >{tmp_path}/submitted\necho 4711\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    options = ["--cpu", "new", "output=logs/%j.out"]
    assert main(["env", "job", *options, *([] if saved else ["--no-save-script"])]) == 0
    assert capsys.readouterr().out == "4711\n"
    submitted = (tmp_path / "submitted").read_text()
    assert submitted == preview(capsys, *options)[1]
    assert (tmp_path / "logs").is_dir()
    assert [path.read_text() for path in tmp_path.glob("slurm-scripts/*")] == [submitted] * saved


# The record


def environment(tmp_path, modules, load=None, python="3.11.4", target="python3.11"):
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (tmp_path / target).write_text("")
    (venv / "bin" / "python").symlink_to(tmp_path / target)
    (venv / "pyvenv.cfg").write_text(f"home = {tmp_path}\nversion = {python}\n")
    record = {"v": 1, "python": python, "modules": modules, "load": load}
    (venv / RECORD).write_text(json.dumps(record))
    return venv


def modules(*load, **others):
    return ModulesSettings(**{"purge": "true", **others, "load": ",".join(load)})


BUILT = ["Stages/2024", "zlib/1.2", "GCC/12.3", "CUDA/12.1", "OpenMPI/4.1"]


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (("Stages/2024", "GCC/12.3", "CUDA/12.1", "OpenMPI/4.1"), []),
        (("Stages", "GCC", "CUDA/12", "OpenMPI"), []),
        (("GCC", "CUDA/12.4", "OpenMPI"), ["built with CUDA/12.1, the job loads CUDA/12.4"]),
        (("GCC", "CUDA", "OpenMPI", "NCCL/2.20"), ["built without NCCL/2.20"]),
        (("GCC", "OpenMPI"), ["built with CUDA/12.1, not loaded in the job"]),
        (("GCC", "OpenMPI", "CUDA"), ["in the order GCC/12.3, CUDA/12.1, OpenMPI/4.1, the job loads GCC, OpenMPI"]),
        ((), ["built with GCC/12.3, CUDA/12.1, OpenMPI/4.1, not loaded in the job"]),
    ],
)
def test_modules_that_differ_are_told(tmp_path, load, expected):
    venv = environment(tmp_path, BUILT, load=["GCC/12.3", "CUDA/12.1", "OpenMPI/4.1"])
    found = environment_warnings(venv, modules(*load), {})
    assert len(found) == len(expected)
    for warning, words in zip(found, expected, strict=True):
        assert words in warning
        assert str(venv) in warning


def test_modules_of_dependencies_are_not_missed(tmp_path):
    """An environment that was made by hand knows only what was loaded, not what was asked for."""
    assert environment_warnings(environment(tmp_path, BUILT), modules("CUDA/12.1", "OpenMPI"), {}) == []


def test_the_submitting_shells_modules_travel(tmp_path):
    venv = environment(tmp_path, ["GCC/12.3", "CUDA/12.1"])
    shell = {"LOADEDMODULES": "GCC/12.3:CUDA/12.1"}
    assert environment_warnings(venv, ModulesSettings(), shell) == []
    (warning,) = environment_warnings(venv, ModulesSettings(), {})
    assert "built with GCC/12.3, CUDA/12.1, not loaded in the job" in warning
    assert environment_warnings(venv, modules(), shell) == environment_warnings(venv, ModulesSettings(), {})


def test_module_commands_keep_their_order():
    shell = {"LOADEDMODULES": "A/1:B/1"}
    assert job_modules(ModulesSettings(unload="A", load="C/2"), shell) == ["B/1", "C/2"]
    assert job_modules(ModulesSettings(load="C/2", unload="C"), shell) == ["A/1", "B/1"]
    assert job_modules(ModulesSettings(purge="true", load="C/2,A/1"), shell) == ["C/2", "A/1"]


def test_versions_that_only_begin_alike_differ():
    assert compare_modules(["CUDA/12.10"], ["CUDA/12.1"], ()) == ["built with CUDA/12.10, the job loads CUDA/12.1"]
    assert compare_modules(["lang/Python/3.11.3-GCC"], ["lang/Python/3.11.3"], ()) == []


def test_another_python_is_told(tmp_path):
    (warning,) = environment_warnings(environment(tmp_path, [], target="python3.12"), modules(), {})
    assert "built with python 3.11.4, which is now 3.12" in warning


def test_a_python_that_is_gone_is_told(tmp_path):
    venv = environment(tmp_path, [])
    (tmp_path / "python3.11").unlink()
    (warning,) = environment_warnings(venv, modules(), {})
    assert "its python is gone (it was 3.11.4" in warning


def test_environments_without_a_whole_record(tmp_path):
    venv = environment(tmp_path, [])
    (venv / RECORD).write_text("{")
    assert "can't be read" in environment_warnings(venv, modules(), {})[0]
    (venv / RECORD).unlink()
    assert environment_warnings(venv, modules("CUDA"), {}) == []
    (venv / UNFINISHED).touch()
    assert "is not finished" in environment_warnings(venv, modules(), {})[0]


# The wheelhouse


def test_wheels_are_for_the_target():
    assert Target("3.11").options("3.11") == []
    other = Target("3.12", "manylinux_2_28_aarch64").options("3.11")
    assert other == [
        *("--python-version", "3.12", "--implementation", "cp", "--platform", "manylinux_2_28_aarch64"),
        *("--only-binary", ":all:"),
    ]
    wanted = Wanted("cpu", "/src", ("horovod", "wandb"), torch_index_url="https://mirror/cpu")
    first, later = first_steps(wanted, "/w", other), later_steps(wanted, "/w", other, "/w/phalanx-0.1.whl")
    assert [step[0] for step in first] == ["download", "download", "wheel"]
    assert first[1][-3:] == ["torch>=2.7", "--index-url", "https://mirror/cpu"]
    assert first[2] == ["wheel", "--no-deps", "--wheel-dir", "/w", "/src"]
    own, needs, horovod, wandb = later
    assert "/w/phalanx-0.1.whl[torch]" in own
    for step in (own, needs, wandb):
        assert step[step.index("--constraint") + 1] == f"/w/{PIN}"
        assert "--only-binary" in step
    assert "--only-binary" not in horovod
    assert horovod[-4:] == ["--no-deps", "--no-binary", "horovod", "horovod"]


def test_a_wheelhouse_is_for_one_kind_and_one_python(tmp_path):
    check_use(tmp_path / "new", "cpu", Target("3.11"))
    (tmp_path / NOTE).write_text(json.dumps({"v": 1, "kind": "cpu", "python": "3.11", "platform": None}))
    check_use(tmp_path, "cpu", Target("3.11"))
    with pytest.raises(UsageError, match=r"is for kind cpu, not gpu, python 3\.11, not 3\.12: give each build"):
        check_use(tmp_path, "gpu", Target("3.12"))
    (tmp_path / NOTE).unlink()
    (tmp_path / "torch-2.9-cp311-cp311-linux_x86_64.whl").touch()
    with pytest.raises(UsageError, match="unknown origin"):
        check_use(tmp_path, "cpu", Target("3.11"))
