"""Whole batch scripts: as files to read, through a shell's and shellcheck's eyes, and run with stand-ins for Slurm."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import phalanx
from phalanx.batch.script import Inserts, render_script
from phalanx.config import load_config
from phalanx.errors import PlanError
from phalanx.planning.facts import Facts
from phalanx.planning.planner import make_plan
from phalanx.planning.program import Program, from_training_cmd
from phalanx.schedulers.slurm.unused import unused

GOLDEN = Path(__file__).parent.parent / "golden"
FACTS = Facts("login", 8, 0, "/py/bin/python", "Linux", "x86_64", cwd="/home/me/project")
GPU_NODES = ("nodes=2", "gpus_per_node=4", "cpus_per_task=32", "time=12:00:00", "account=proj", "partition=gpu")


def script(*overrides, program=None, inserts=None, facts=FACTS, config="strategy: ddp\n", files=(), **environ):
    loaded = load_config(files, overrides, environ)
    if program is None:
        text = loaded.config.training_cmd
        program = from_training_cmd(text) if text else Program("train.py", ("--lr", "1e-3", "it's $5"))
    return render_script(make_plan(loaded.config, facts, program, for_slurm=True), config, inserts)


def directives(text):
    """Options of the #SBATCH lines, which must all stand before the first command."""
    lines = text.splitlines()
    first_command = next(index for index, line in enumerate(lines) if line and not line.startswith("#"))
    assert not [line for line in lines[first_command:] if line.startswith("#SBATCH")]
    found = [line.removeprefix("#SBATCH --").partition("=") for line in lines if line.startswith("#SBATCH")]
    return {name: value for name, _, value in found}


SITES = ("generic", "jsc", "vega", "lumi")
CASES = {
    "torchrun": GPU_NODES,
    "srun": (*GPU_NODES, "launcher=srun", "mpi=pmix"),
    "mpirun": (*GPU_NODES, "launcher=mpirun", "env.DATA=/data/a b"),
    "mpirun-torchrun": (*GPU_NODES, "torchrun.start=mpirun"),
    "mpich": (*GPU_NODES, "launcher=mpirun", "mpirun.flavor=mpich", "mpirun.executable=mpiexec"),
    "deepspeed": (*GPU_NODES, "launcher=deepspeed", "strategy=deepspeed"),
    "horovod": (*GPU_NODES, "strategy=horovod"),
    "horovodrun": ("nproc=2", "cpus_per_task=4", "strategy=horovod"),
    "ray": (*GPU_NODES, "launcher=ray"),
    "container-deepspeed": (*GPU_NODES, "launcher=deepspeed", "container.image=a.sif"),
    "single": ("nodes=1", "cpus_per_task=4", "time=30:00"),
    "uneven": ("nodes=2", "ntasks=3", "cpus_per_task=2", "launcher=srun"),
    "container-torchrun": (*GPU_NODES, "container.image=/images/a.sif", "container.binds=/data:/data:ro"),
    "container-srun": (
        *(*GPU_NODES, "launcher=srun", "runtime=singularity", "container.image=a.sif", "container.clean_env=true"),
        *("container.gpu=rocm", "container.pre=. /opt/env.sh", "env.WANDB_API_KEY=hush", "tmpdir=!sh /tmp/$USER"),
    ),
    "everything": (
        *GPU_NODES,
        *("job_name=two words", "mem=64G", "qos=high", "exclusive=true", "venv=/venvs/a b", "tmpdir=/scratch"),
        *("proxy.http=http://proxy:3128", "proxy.no=localhost,.cluster", "interface=ib0", "host_suffix=i"),
        *("before=ulimit -c 0", "after=echo bye", "snapshot=true", "output=logs/%x-%j.out", "sbatch_args=--spank=1"),
        "training_cmd=train.py --nodes {nodes} --out $SCRATCH/x",
    ),
}


@pytest.mark.parametrize("name", [*CASES, *SITES])
def test_a_script_is_as_the_file_that_was_read_and_agreed_on(name):
    text = script(*CASES[name]) if name in CASES else script("nodes=2", "gpus_per_node=4", PHALANX_SITE=name)
    text = text.replace(str(Path(phalanx.__file__).parent), "/host/phalanx")
    path = GOLDEN / f"{name}.sh"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text(), f"read the difference, then run with UPDATE_GOLDEN=1 ({path})"


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.sh")), ids=lambda path: path.stem)
def test_a_script_is_faultless_bash(path):
    subprocess.run(["bash", "-n", str(path)], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed: the scripts were not checked by it")
    found = subprocess.run(["shellcheck", "--severity=warning", str(path)], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize(
    ("overrides", "expected", "absent"),
    [
        (GPU_NODES, {"ntasks-per-node": "1", "cpus-per-task": "32", "gpus-per-node": "4"}, ["gres"]),
        ((*GPU_NODES, "launcher=srun"), {"ntasks-per-node": "4", "cpus-per-task": "8", "gpus-per-node": "4"}, []),
        ((*GPU_NODES, "gpu_request=gres"), {"gres": "gpu:4"}, ["gpus-per-node"]),
        ((*GPU_NODES, "gpu_request=gres", "gpu_type=a100"), {"gres": "gpu:a100:4"}, ["gpus-per-node"]),
        ((*GPU_NODES, "gpu_request=gpus-per-task"), {"gpus-per-task": "4"}, ["gpus-per-node", "gres"]),
        ((*GPU_NODES, "gpu_request=gpus-per-task", "launcher=srun"), {"gpus-per-task": "1"}, ["gpus-per-node"]),
        (("gpus_per_node=a100:4", "nodes=2"), {"gpus-per-node": "a100:4"}, ["gres"]),
        (("gpus_per_node=a100:4", "gpu_request=gres"), {"gres": "gpu:a100:4"}, ["gpus-per-node"]),
        (
            ("gpus=a100:2,h100:1", "nodes=1", "launcher=srun"),
            {"gpus": "a100:2,h100:1", "ntasks-per-node": "3"},
            ["gres"],
        ),
        (
            ("gpus_per_node=a100:2,h100:1", "nodes=2", "launcher=srun"),
            {"gres": "gpu:a100:2,gpu:h100:1", "ntasks-per-node": "3"},
            ["gpus-per-node"],
        ),
        (
            ("nodes=2", "gpus_per_node=4", "gpus_per_task=1", "launcher=srun"),
            {"ntasks-per-node": "4", "gpus-per-task": "1"},
            ["ntasks"],
        ),
        (("gpus=8", "nodes=2", "launcher=srun"), {"gpus": "8", "ntasks-per-node": "4"}, ["gpus-per-node", "gres"]),
        (("gres=gpu:2", "nodes=2"), {"gres": "gpu:2", "ntasks-per-node": "1"}, ["gpus-per-node"]),
        (("gpus_per_node=0", "cpus_per_task=1"), {"cpus-per-task": "1"}, ["gpus-per-node", "gres", "cpus-per-gpu"]),
        (("gpus_per_node=0", "cpus_per_gpu=4"), {"nodes": "1"}, ["cpus-per-gpu", "gpus-per-node"]),
        (("mem_per_gpu=1G",), {}, ["mem-per-gpu"]),
        (("nproc=4", "cpus_per_task=2", "launcher=srun"), {"cpus-per-task": "1"}, []),
        (("mem_per_cpu=100M",), {"mem-per-cpu": "100M"}, ["mem", "mem-per-gpu"]),
        (("time=90",), {"time": "90"}, []),
        (("qos=a", "requeue=true", "exclusive=user"), {"qos": "a", "requeue": "", "exclusive": "user"}, []),
        (("requeue=false", "exclusive=True", "nice=0"), {"no-requeue": "", "exclusive": "", "nice": "0"}, ["requeue"]),
        (("exclusive=False", "no_kill=off", "hold=false"), {"no-kill": "off"}, ["exclusive", "hold"]),
        (("nodes=2", "ntasks=3", "cpus_per_task=2"), {"ntasks": "3", "cpus-per-task": "2"}, ["ntasks-per-node"]),
        ((), {"open-mode": "append", "chdir": "/home/me/project", "job-name": "train", "nodes": "1"}, ["output"]),
    ],
)
def test_directives_say_what_was_asked_for_once(overrides, expected, absent):
    found = directives(script(*overrides))
    assert {name: found.get(name) for name in expected} == expected
    assert not [name for name in absent if name in found]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_one_task_and_four_gpus_a_node_are_four_ranks_under_every_strategy(strategy, tmp_path):
    """As in job files of itwinai, where an agent is Slurm's one task."""
    file = tmp_path / "slurm_config.yaml"
    file.write_text(
        f"num_nodes: 2\nnum_tasks_per_node: 1\ngpus_per_node: 4\ncpus_per_task: 16\ndist_strat: {strategy}\n"
        "memory: 10G\nstd_out: out.log\nstd_err: err.log\ntraining_cmd: train.py\n"
    )
    text = script(files=[str(file)])
    assert "--nnodes 2" in text
    assert "--nproc-per-node 4" in text
    found = directives(text)
    assert (found["mem"], found["output"], found["error"]) == ("10G", "out.log", "err.log")


STUBS = {
    "srun": r"""#!/bin/bash
while [[ $1 = -* ]]; do shift; done
for node in 0 1; do SLURM_NODEID=$node SLURM_PROCID=$node SLURM_STEP_ID=0 "$@" || exit; done
""",
    "rank": r"""#!/bin/bash
if [ "$2" = phalanx.ports ]; then echo 20000; exit; fi
if [ "$2" = phalanx.claims ]; then mkdir -p "$3/claims"; echo "$3/claims/1.released"; exit; fi
if [ "$3" = --exec ]; then shift 3; exec "$@"; fi  # as the worker does
n=$(ls "$SEEN" | wc -l)
printf '%s\0' "$@" >"$SEEN/$n.argv"
env -0 >"$SEEN/$n.env"
exit "${RANK_EXIT:-0}"
""",
}


@pytest.fixture
def batch_node(tmp_path):
    """Runs a script as Slurm does on the first node, with an srun that runs tasks on two."""
    for folder in ("bin", "seen", "run"):
        (tmp_path / folder).mkdir()
    (tmp_path / "run/config.yaml").touch()
    for name, text in STUBS.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)

    def run(*overrides, argument=True, exit_code=0, node="lab07", around=None, stderr=subprocess.PIPE, **more):
        facts = Facts("login", 8, 0, str(tmp_path / "bin" / "rank"), "Linux", "x86_64", cwd=str(tmp_path))
        text = script("nodes=2", *overrides, facts=facts, **more)
        (tmp_path / "job.sh").write_text(text)
        environment = {
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "SEEN": str(tmp_path / "seen"),
            "HOME": "/home/me",
            "RANK_EXIT": str(exit_code),
            **(around or {}),
            **{
                "SLURMD_NODENAME": node,
                "SLURM_JOB_ID": "70001",
                "SLURM_NODEID": "0",
                "SLURM_PROCID": "0",
                "SLURM_NNODES": "2",
            },
        }
        words = [
            *text.splitlines()[0].removeprefix("#!").split(),
            "job.sh",
            *([str(tmp_path / "run")] if argument else []),
        ]
        done = subprocess.run(words, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True)
        ranks = sorted((tmp_path / "seen").glob("*.argv"), key=lambda path: int(path.stem))
        seen = [(_split(path), dict(pair.split("=", 1) for pair in _split(path.with_suffix(".env")))) for path in ranks]
        return done, seen

    return run


def _split(path):
    return path.read_text().split("\0")[:-1]


def value(words, option):
    return words[words.index(option) + 1]


def test_agents_learn_their_node_in_the_task_and_the_same_meeting_point(batch_node):
    """Slurm sets SLURM_NODEID=0 in the batch shell, which hides an expansion in the wrong place."""
    done, seen = batch_node("nproc=2")
    assert done.returncode == 0, done.stderr
    assert [value(words, "--rdzv-conf") for words, _ in seen] == ["is_host=1,rank=0", "is_host=0,rank=1"]
    assert len({value(words, "--rdzv-endpoint") for words, _ in seen}) == 1
    host, port = value(seen[0][0], "--rdzv-endpoint").split(":")
    assert host not in ("", "localhost", "127.0.0.1")
    assert 1024 < int(port) < 32768  # below the ephemeral ports


def test_arguments_and_variables_arrive_as_written(batch_node):
    odd = ["a b", "it's", '"q"', "$HOME", "`id`", "[x],{y}", "back\\slash", "#c", "*", ""]
    overrides = [f"env.V{index}={text}" for index, text in enumerate(odd) if text]
    done, seen = batch_node("nproc=1", "launcher=srun", *overrides, program=Program("train.py", tuple(odd)))
    assert done.returncode == 0, done.stderr
    for words, variables in seen:
        assert words == ["-m", "phalanx.worker", "train.py", *odd]
        for index, text in enumerate(odd):
            assert variables.get(f"V{index}", "") == text
        assert variables["PYTHONUNBUFFERED"] == "1"


def test_shell_text_of_training_cmd_is_evaluated_in_the_task(batch_node):
    done, seen = batch_node(
        "nproc=1", "launcher=srun", "training_cmd=train.py --node $SLURM_NODEID '$HOME' --n {nodes}"
    )
    assert done.returncode == 0, done.stderr
    assert [words[2:] for words, _ in seen] == [
        ["train.py", "--node", "0", "$HOME", "--n", "2"],
        ["train.py", "--node", "1", "$HOME", "--n", "2"],
    ]


@pytest.mark.parametrize("after", ["true", "false", "echo bye", "ls /nowhere", "exit 0", "exit 9", "set -e; false"])
@pytest.mark.parametrize("code", [0, 7])
def test_the_script_ends_with_the_trainings_exit_code_whatever_comes_after(batch_node, tmp_path, after, code):
    done, _ = batch_node("nproc=1", "launcher=srun", f"after={after}", exit_code=code)
    assert done.returncode == code
    assert (tmp_path / "run" / "jobs" / "70001.exit").read_text().strip() == str(code)


@pytest.mark.parametrize("lines", ["srun bash -c 'exit 7' | tee log", "srun bash -c 'exit 7'\necho done"])
def test_a_failure_behind_a_pipe_or_before_an_echo_is_one(batch_node, lines):
    done, _ = batch_node(f"exec_command={lines}")
    assert done.returncode == 7


def test_what_stood_in_a_shared_output_file_before_a_start_is_marked_off(batch_node, tmp_path):
    path = tmp_path / "job.out"
    for before, restart, mark in (("", "0", ""), ("of another\n", "3", "=== phalanx: job 70001, start 3 ===\n")):
        path.write_text(before)
        with path.open("a") as output:
            batch_node("nproc=2", stderr=output, around={"SLURM_RESTART_COUNT": restart})
        assert path.read_text() == before + mark


def test_an_export_option_of_the_job_hides_nothing_from_its_steps(batch_node):
    _, seen = batch_node("nproc=2", around={"SLURM_EXPORT_ENV": "NONE"})
    assert [(environ.get("SLURM_EXPORT_ENV"), "PHALANX_RUN_DIR" in environ) for _, environ in seen] == [
        (None, True)
    ] * 2


def test_a_node_without_the_run_directory_makes_none_of_its_own(batch_node, tmp_path):
    (tmp_path / "run/config.yaml").unlink()
    done, seen = batch_node("nproc=2")
    assert (done.returncode, seen) == (2, [])
    assert f"no run directory {tmp_path}/run: set run_root" in done.stderr
    assert list((tmp_path / "run").iterdir()) == []


def test_under_plain_sbatch_the_job_makes_its_own_run_directory_with_its_settings(batch_node, tmp_path):
    config = "strategy: ddp\nenv:\n  A: it's $x `y`\n"
    done, seen = batch_node("nproc=1", "launcher=srun", argument=False, config=config)
    assert done.returncode == 0, done.stderr
    run_dir = tmp_path / "runs" / "train" / "job-70001"
    assert seen[0][1]["PHALANX_RUN_DIR"] == str(run_dir)
    assert (run_dir / "config.yaml").read_text() == config


def test_the_users_lines_stand_where_they_were_asked_for():
    text = script("before=echo before", "after=echo after", inserts=Inserts(before="echo file\n"))
    order = [text.index(word) for word in ("set -o pipefail", "echo before", "echo file", "\nsrun ", "echo after")]
    assert order == sorted(order)
    assert script("exec_command=./start --all").count("srun") == 0


def test_the_fast_networks_name_of_a_node_is_before_its_domain(batch_node, monkeypatch):
    done, seen = batch_node("nproc=2", "host_suffix=i", node="jw07.site")
    assert done.returncode == 0, done.stderr
    assert value(seen[1][0], "--rdzv-endpoint").startswith("jw07i.site:")
    assert value(seen[0][0], "--local-addr") == "jw07i.site"  # which the ranks get as MASTER_ADDR


def test_a_failure_in_a_pipe_of_training_cmd_is_one(batch_node):
    done, _ = batch_node("nproc=1", "launcher=srun", "training_cmd=rank x | tee log", exit_code=7)
    assert done.returncode == 7


def test_an_echo_after_a_failed_training_hides_nothing(batch_node):
    done, _ = batch_node("nproc=1", "launcher=srun", "training_cmd=rank x; echo done", exit_code=7)
    assert done.returncode == 7
    assert "done" not in done.stdout


def test_words_of_a_job_around_a_plain_sbatch_do_not_reach_the_ranks(batch_node):
    leftovers = {"RANK": "3", "WORLD_SIZE": "9", "MASTER_ADDR": "127.0.0.1", "SLURM_CPU_BIND": "map_cpu:5"}
    leftovers |= {"SLURM_MEM_PER_CPU": "100", "SRUN_CPUS_PER_TASK": "3"}
    done, seen = batch_node("nproc=1", "launcher=srun", "mem=1G", argument=False, around=leftovers)
    assert done.returncode == 0, done.stderr
    assert not leftovers.keys() & seen[0][1].keys()


def test_shell_values_are_the_batch_shells_and_all_others_are_not(batch_node):
    done, seen = batch_node("nproc=1", "launcher=srun", "env.A=!sh $HOME/x y", "env.B=$HOME/x y", "tmpdir=!sh $PWD/t")
    assert done.returncode == 0, done.stderr
    variables = seen[0][1]
    assert (variables["A"], variables["B"]) == ("/home/me/x y", "$HOME/x y")
    assert Path(variables["TMPDIR"]).is_dir()
    assert variables["TRITON_CACHE_DIR"] == f"{variables['TMPDIR']}/triton"


def test_commands_that_are_no_python_script_run_once_a_rank(batch_node):
    done, seen = batch_node("nproc=1", "launcher=srun", "training_cmd=rank $SLURM_PROCID && rank again")
    assert done.returncode == 0, done.stderr
    assert [words for words, _ in seen] == [["0"], ["again"], ["1"], ["again"]]


PYTHON = """#!/bin/bash
if [ "$1" = -c ]; then [ -z "${NO_PHALANX:-}" ]; exit; fi
export PYTHON_IS="${0%/bin/*}"
exec rank "$@"
"""
# What `conda shell.bash hook` prints is a function `conda`; this one knows one environment.
CONDA = """#!/bin/bash
[ "$1 $2" = "shell.bash hook" ] || { echo "run conda init" >&2; exit 1; }
echo 'conda() { [ "$1 $2" = "activate train" ] && export PATH="$ENVS/train/bin:$PATH"; }'
"""


def program_at(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def test_the_python_of_the_command_is_the_one_of_the_job_after_modules_and_the_users_lines(batch_node, tmp_path):
    """`module` puts a tool on PATH, which the line before needs in order to find the Python."""
    program_at(tmp_path / "mine" / "bin" / "python", PYTHON)
    program_at(tmp_path / "tools" / "whereis-python", f"#!/bin/bash\necho {tmp_path}/mine/bin\n")
    module = f'module() {{ if [ "$1" = load ]; then PATH="{tmp_path}/tools:$PATH"; fi; }}\nexport -f module'
    program_at(tmp_path / "setup", module)
    before = 'before=PATH="$(whereis-python):$PATH"'
    around = {"BASH_ENV": str(tmp_path / "setup")}
    done, seen = batch_node(
        "nproc=1", "launcher=srun", "modules.load=tool", before, "training_cmd=python train.py", around=around
    )
    assert done.returncode == 0, done.stderr
    assert [variables["PYTHON_IS"] for _, variables in seen] == [str(tmp_path / "mine")] * 2


USUAL = ("/etc/profile.d/modules.sh", "/etc/profile.d/lmod.sh", "/etc/profile.d/z00_lmod.sh",
         "/etc/profile.d/z00-lmod.sh", "/usr/share/lmod/lmod/init/bash", "/usr/share/modules/init/bash")  # fmt: skip
needs_no_modules = pytest.mark.skipif(
    any(map(os.path.exists, USUAL)), reason="this machine has a module system, which would be found"
)


@pytest.mark.parametrize("where", ["MODULESHOME", "LMOD_PKG", "before", "the shell"])
def test_modules_are_loaded_once_wherever_module_comes_from(batch_node, tmp_path, where):
    """A batch shell reads no profile, so on many sites nothing has defined `module` there."""
    log = tmp_path / "loaded"
    text = f'module() {{ echo "$*" >>{log}; export TOOL=here; }}\n'
    program_at(tmp_path / "opt" / "init" / "bash", text)
    program_at(tmp_path / "setup", text + "export -f module\n")
    before = f"source {tmp_path}/opt/init/bash; " if where == "before" else ""
    around = {"MODULESHOME": "", "LMOD_PKG": ""}
    if where in around:
        around[where] = str(tmp_path / "opt")
    if where == "the shell":
        around["BASH_ENV"] = str(tmp_path / "setup")
    words = ("nproc=1", "launcher=srun", "modules={purge: true, load: [GCC, CUDA]}")
    if where == "before" and any(map(os.path.exists, USUAL)):
        pytest.skip("this machine has a module system, which would be found")
    done, seen = batch_node(*words, f"before={before}export LINE=ran:$TOOL", around=around)
    assert done.returncode == 0, done.stderr
    assert log.read_text() == "purge\nload GCC CUDA\n"
    for _, variables in seen:
        assert variables["TOOL"] == "here"
        assert variables["LINE"] == ("ran:" if where == "before" else "ran:here")
    if where == "before":
        return
    done, seen = batch_node(*words, around=around)  # without lines of the user's
    assert done.returncode == 0, done.stderr
    assert log.read_text() == "purge\nload GCC CUDA\n" * 2


@needs_no_modules
@pytest.mark.parametrize("before", [(), ("before=export LINE=ran",)])
def test_a_job_whose_modules_nothing_can_load_ends_and_says_what_to_set(batch_node, tmp_path, before):
    around = {"MODULESHOME": "", "LMOD_PKG": ""}
    done, seen = batch_node("nproc=1", "launcher=srun", "modules.load=GCC", *before, around=around)
    assert (done.returncode, seen) == (2, [])
    assert "error: modules are set" in done.stderr
    assert "shebang" in done.stderr
    assert "before" in done.stderr
    assert (tmp_path / "run" / "jobs" / "70001.exit").read_text().strip() == "2"


def test_a_python_without_phalanx_ends_the_job_and_is_named(batch_node, tmp_path):
    program_at(tmp_path / "bin" / "python", PYTHON)
    done, seen = batch_node("nproc=1", "launcher=srun", "training_cmd=python train.py", around={"NO_PHALANX": "1"})
    assert (done.returncode, seen) == (2, [])
    assert str(tmp_path / "bin" / "python") in done.stderr
    assert (tmp_path / "run" / "jobs" / "70001.exit").read_text().strip() == "2"


@pytest.mark.parametrize("command", ["train.py", "python train.py", "torchrun --nproc_per_node 1 train.py"])
def test_a_conda_environment_is_entered_by_its_name(batch_node, tmp_path, command):
    program_at(tmp_path / "bin" / "conda", CONDA)
    program_at(tmp_path / "envs" / "train" / "bin" / "python", PYTHON)
    around = {"ENVS": str(tmp_path / "envs"), "CONDA_EXE": ""}
    words = ["nproc=1", "launcher=srun", "conda=train", f"training_cmd={command}"]
    if "torchrun" in command:
        words.remove("launcher=srun")
    done, seen = batch_node(*words, around=around)
    assert done.returncode == 0, done.stderr
    assert [variables["PYTHON_IS"] for _, variables in seen] == [str(tmp_path / "envs" / "train")] * 2
    done, _ = batch_node(*words[:-2], "conda=other", words[-1], around=around)
    assert done.returncode == 2
    assert "conda environment other" in done.stderr


def test_a_conda_environments_folder_needs_no_conda(batch_node, tmp_path):
    folder = tmp_path / "my envs" / "train"
    program_at(folder / "bin" / "python", PYTHON)
    program_at(folder / "etc" / "conda" / "activate.d" / "a.sh", 'export FROM_HOOK="$CONDA_PREFIX"')
    done, seen = batch_node("nproc=1", "launcher=srun", f"conda={folder}")
    assert done.returncode == 0, done.stderr
    for _, variables in seen:
        assert variables["PYTHON_IS"] == variables["FROM_HOOK"] == str(folder)
        assert variables["PATH"].startswith(f"{folder}/bin:")
    done, _ = batch_node("nproc=1", "launcher=srun", "conda=./nowhere")
    assert (done.returncode, "nowhere is no conda environment" in done.stderr) == (2, True)


def test_a_venv_with_conda_meta_is_a_conda_environment(tmp_path, monkeypatch):
    from phalanx.schedulers.slurm.submit import build

    (tmp_path / "env" / "conda-meta").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    facts = Facts("login", 8, 0, "/py", "Linux", "x86_64", cwd=str(tmp_path))
    job = build(load_config((), ["venv=env"], {}), Program("t.py"), facts)
    assert "bin/activate" not in job.script
    assert f"CONDA_PREFIX={tmp_path}/env" in job.script
    assert job.plan.python == f"{tmp_path}/env/bin/python"


def test_two_environments_at_once_are_refused():
    with pytest.raises(PlanError, match="two environments"):
        script("venv=a", "conda=b")


def test_a_script_behind_a_variable_is_run_as_a_script(batch_node):
    done, seen = batch_node(
        "nproc=1", "launcher=srun", 'training_cmd="${DIR}/my t.py" $X', around={"DIR": "/d", "X": "1 2"}
    )
    assert done.returncode == 0, done.stderr
    assert [words for words, _ in seen] == [["-m", "phalanx.worker", "/d/my t.py", "1", "2"]] * 2


def test_variables_before_a_launchers_words_are_the_ranks(batch_node):
    done, seen = batch_node(
        "training_cmd=OMP_NUM_THREADS=3 A='b c' srun -N2 python train.py", "launcher=srun", "python=rank"
    )
    assert done.returncode == 0, done.stderr
    assert {(v["OMP_NUM_THREADS"], v["A"]) for _, v in seen} == {("3", "b c")}


def test_a_step_of_ones_own_has_the_cpus_of_a_task_unless_the_user_says_else(batch_node):
    line = 'exec_command=echo "cpus=${SRUN_CPUS_PER_TASK:-none}"'
    around = {"SLURM_CPUS_PER_TASK": "4", "SRUN_CPUS_PER_TASK": "9"}  # the latter of a job around
    done, _ = batch_node(line, around=around)
    assert "cpus=4\n" in done.stdout
    done, _ = batch_node(line, "before=export SRUN_CPUS_PER_TASK=2", around=around)
    assert "cpus=2\n" in done.stdout
    done, _ = batch_node(line, around={"SRUN_CPUS_PER_TASK": "9"})
    assert "cpus=none\n" in done.stdout


def test_a_job_that_lacks_a_secret_says_so_and_ends(batch_node, tmp_path):
    words = ("nproc=1", "launcher=srun", "env.HF_TOKEN=a,b", "proxy.http=http://u:pw@h:1")
    done, seen = batch_node(*words)
    assert (done.returncode, seen) == (2, [])
    assert "HF_TOKEN" in done.stderr
    assert "http_proxy" in done.stderr
    assert (tmp_path / "run" / "jobs" / "70001.exit").read_text().strip() == "2"
    done, seen = batch_node(*words, around={"HF_TOKEN": "a,b", "http_proxy": "x"})
    assert done.returncode == 0, done.stderr
    assert seen[0][1]["HF_TOKEN"] == "a,b"
    assert seen[0][1]["HTTP_PROXY"] == "x"


@pytest.mark.parametrize(
    ("export", "expected"),
    [
        ("NONE", "HF_TOKEN"),
        ("NIL", "HF_TOKEN"),
        ("ALL", "ALL"),
        ("ALL,A=1", "ALL,A=1"),
        ("A,B=2", "A,B=2,HF_TOKEN"),
        ("HF_TOKEN", "HF_TOKEN"),
    ],
)
def test_an_export_option_lets_secrets_pass(export, expected):
    assert directives(script(f"export={export}", "env.HF_TOKEN=x"))["export"] == expected
    assert directives(script(f"export={export}"))["export"] == export


@pytest.mark.parametrize(("mode", "folder", "file"), [(None, 0o700, 0o600), ("0770", 0o770, 0o660)])
def test_a_run_directory_that_a_job_makes_is_as_open_as_run_mode_says(batch_node, tmp_path, mode, folder, file):
    words = [f"run_mode={mode}"] if mode else []
    done, _ = batch_node("nproc=1", "launcher=srun", *words, argument=False)
    assert done.returncode == 0, done.stderr
    run_dir = tmp_path / "runs" / "train" / "job-70001"
    assert run_dir.stat().st_mode & 0o777 == folder
    assert (run_dir / "config.yaml").stat().st_mode & 0o777 == file
    assert mode is None or (run_dir / "jobs" / "70001.start").stat().st_mode & file == file


def test_shares_of_gpus_say_nothing_where_there_are_none(tmp_path):
    site = tmp_path / "site.yaml"
    site.write_text("mem: 64G\ncpus_per_task: 4\n")
    files = [str(site)]
    found = directives(script("gpus_per_node=0", "mem_per_gpu=10G", "cpus_per_gpu=3", files=files))
    assert (found["mem"], found["cpus-per-task"]) == ("64G", "4")
    assert not {"mem-per-gpu", "cpus-per-gpu"} & found.keys()
    found = directives(script("gpus_per_node=2", "mem_per_gpu=10G", "cpus_per_gpu=3", files=files))
    assert (found["mem-per-gpu"], found["cpus-per-gpu"], found.get("mem")) == ("10G", "3", None)


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ("gpus_per_node=1", "gpus-per-node"),
        ("gres=gpu:a100:2", "gres"),
        ("gpus=4", "gpus"),
        ("gpus_per_task=1", "gpus-per-task"),
        ("sbatch.gpus_per_socket=1", "gpus-per-socket"),
        ("sbatch.tres_per_task=gres/gpu:1", "tres-per-task"),
        (None, None),
        ("gres=gpu:0", "gres"),
        ("gres=gpu:a100:0", "gres"),
        ("gres=nvme:1", "gres"),
        ("gpus_per_node=0", None),
        ("sbatch_args=--gpus-per-socket=2", "gpus-per-socket"),
        ("sbatch_args=--tres-per-node=gres/gpu:2", "tres-per-node"),
        ("sbatch_args=--tres-bind=gres/gpu:none", "tres-bind"),
        ("sbatch_args=--constraint=gpu", "constraint"),
        ("sbatch_args=--gres-flags=enforce-binding", "gres-flags"),
        ("sbatch_args=--comment=gpu", "comment"),
    ],
)
def test_a_share_of_each_gpu_is_asked_for_or_is_told_to_have_no_effect(asked, line):
    """Slurm 22.05 refuses mem-per-gpu in a job without GPUs, and with cpus-per-gpu it starts no step."""
    overrides = ["mem_per_gpu=10G", "cpus_per_gpu=3", *([asked] if asked else [])]
    found = directives(script(*overrides))
    notes = [note for note in load_config((), overrides, {}).notes if "has no effect" in note]
    with_gpus = asked is not None and ":0" not in asked and "nvme" not in asked and asked != "gpus_per_node=0"
    with_gpus = with_gpus and line not in ("constraint", "gres-flags", "comment", "tres-bind")
    assert ({"mem-per-gpu", "cpus-per-gpu"} <= found.keys()) == with_gpus
    assert (sorted(note.partition("=")[0] for note in notes) == ["cpus_per_gpu", "mem_per_gpu"]) == (not with_gpus)
    assert line is None or line in found


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["gpu_type=a100"], "gpu_type=a100"),
        (["gpu_type=a100", "gres=gpu:2"], "gpu_type=a100"),
        (["gpu_type=a100", "gpus=2"], "gpu_type=a100"),
        (["gpu_type=a100", "gpus_per_node=2"], None),
        (["nodes=2", "launcher=mpirun", "srun_args=--exclusive"], "srun_args=--exclusive"),
        (["nodes=2", "launcher=mpirun", "cpu_bind=cores"], "cpu_bind=cores"),
        (["nodes=2", "launcher=srun", "cpu_bind=cores", "srun_args=--exclusive"], None),
        (["nodes=2", "srun_args=--exclusive"], None),  # torchrun's agents are a step
        (["nodes=2", "launcher=srun", "mpirun.args=--verbose"], "mpirun.args=--verbose"),
        (["nodes=2", "launcher=srun", "torchrun.executable=torchrun_jsc"], "torchrun.executable=torchrun_jsc"),
        (["nodes=2", "exec_command=srun ./own", "srun_args=--exclusive"], "srun_args=--exclusive"),
        (["exec_command=srun ./own", "exec_file=own.sh"], "exec_file=own.sh"),
    ],
)
def test_a_setting_that_the_script_can_not_use_is_told(overrides, told, tmp_path):
    site = tmp_path / "site.yaml"
    site.write_text("cpu_bind: none\nmpi: pmix\ngpu_type: h100\n")  # for the jobs that can use them
    loaded = load_config((), overrides, {"PHALANX_SITE": str(site)})
    found = unused(loaded, make_plan(loaded.config, FACTS, Program("train.py", ()), for_slurm=True))
    assert [text.partition(" (command line) has no effect: ")[0] for text in found] == ([told] if told else [])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["job_name=a\nb"], ["job_name", "a\\nb", "one line"]),
        (
            ["gpus_per_node=3", "nproc=2", "launcher=srun", "gpu_request=gpus-per-task"],
            ["3 GPUs", "2 tasks", "gpus-per-node"],
        ),
        (["ntasks=3", "nodes=2", "launcher=torchrun"], ["ntasks=3", "2 nodes", "--launcher srun"]),
        (["gpus_per_node=0", "gres=gpu:2"], ["gpus_per_node=0", "gres"]),
        (["gpus_per_node=0", "gpus_per_task=1"], ["gpus_per_node=0", "gpus_per_task"]),
        (["gpus_per_node=2", "gres=gpu:4"], ["gpus_per_node asks for 2", "gres asks for 4"]),
        (["nodes=2", "gpus_per_node=2", "gpus=8"], ["gpus_per_node asks for 4", "gpus asks for 8"]),
        (["gpus_per_node=4", "gpus_per_task=1", "ntasks_per_node=2"], ["gpus_per_task asks for 2", "4"]),
        (["gpus_per_node=4", "gpus_per_task=1", "ntasks=1"], ["gpus_per_task asks for 1", "4"]),
        (["ntasks=1", "nodes=2"], ["ntasks=1", "nodes=2", "nodes=1"]),
        (["ntasks=5", "nodes=2", "nproc=2"], ["ntasks=5", "2 ranks"]),
    ],
)
def test_what_slurm_cannot_be_asked_is_refused(overrides, words):
    with pytest.raises(PlanError) as caught:
        script(*overrides)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "lines",
    [
        ("before=set -euo pipefail",),
        ("before=set -E; trap 'exit 9' ERR",),
        ("shebang=/bin/bash -eu",),
        ("shebang=/bin/bash -e", "before=set -u"),
    ],
)
def test_a_strict_shell_of_the_users_lines_does_not_leave_at_a_failed_launch(batch_node, tmp_path, lines):
    done, _ = batch_node("nproc=2", "after=echo after", *lines, exit_code=3)
    left = tmp_path / "run/jobs/70001.exit"
    assert (done.returncode, left.read_text().strip()) == (3, "3"), done.stderr
    assert "after" in done.stdout


@pytest.mark.parametrize("launcher", ["auto", "torchrun", "srun"])
def test_a_launch_of_ones_own_has_the_tasks_that_the_file_says(launcher):
    own = ("exec_command=time srun python t.py", f"launcher={launcher}", "ntasks_per_node=4", "cpus_per_task=3")
    said = directives(script("nodes=2", *own))
    assert (said["nodes"], said["ntasks-per-node"], said["cpus-per-task"]) == ("2", "4", "3")
    for total, each in ((8, "4"), (2, "1")):
        own = ("exec_command=time srun python t.py", f"launcher={launcher}", f"ntasks={total}")
        assert directives(script("nodes=2", *own))["ntasks-per-node"] == each
    agents = ("exec_command=srun torchrun t.py", "nproc=4", "cpus_per_task=12")
    said = directives(script("nodes=2", *agents))
    assert (said["ntasks-per-node"], said["cpus-per-task"]) == ("1", "12")
