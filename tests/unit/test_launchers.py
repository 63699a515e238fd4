"""Command lines, checked by running them with stand-ins for Slurm where they are shell text."""

import os
import subprocess
import sys

import pytest

from phalanx.config import load_config
from phalanx.errors import PlanError
from phalanx.planning.facts import Facts
from phalanx.planning.planner import make_plan
from phalanx.planning.program import Program
from phalanx.shell import render

FACTS = Facts("here", 8, 0, "/py/bin/python", "Linux", "x86_64")

SRUN = r"""#!/bin/sh
printf '%s\n' "$@" > "$SEEN/step"
while case "$1" in -*) true;; *) false;; esac; do shift; done
for node in 0 1; do SLURM_NODEID=$node SLURM_PROCID=$node SLURM_STEP_ID=0 "$@"; done
"""
RECORD = r"""#!/bin/sh
printf '%s\n' "$@" > "$SEEN/node$SLURM_NODEID"
"""


def plan(*overrides, args=()):
    return make_plan(load_config((), overrides, {}).config, FACTS, Program("train.py", args))


def test_python_starts_the_worker_directly():
    command = plan(args=("--n", "$x")).command
    assert command == ("/py/bin/python", "-m", "phalanx.worker", "train.py", "--n", "$x")


@pytest.mark.parametrize("words", ["--export=NONE", "--export=A=1"])
@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_an_export_option_that_hides_the_settings_from_ranks_is_refused(launcher, words):
    with pytest.raises(PlanError, match=r"srun_args has --export=(NONE|A=1), .*use --export=ALL"):
        plan("nodes=2", f"launcher={launcher}", f"srun_args={words}")
    plan("nodes=2", f"launcher={launcher}", "srun_args=--export=ALL")


def test_torchrun_on_one_node_meets_on_loopback():
    command = plan("nproc=2").command
    assert command[:3] == ("/py/bin/python", "-m", "torch.distributed.run")
    assert " ".join(command[3:]).startswith(
        "--standalone --local-addr 127.0.0.1 --log-dir /dev/null --nproc-per-node 2 -m -- phalanx.worker train.py"
    )


def test_a_port_that_was_set_is_the_one_that_torchrun_uses():
    words = " ".join(plan("nproc=2", "master_port=29611").command)
    assert "--master-addr 127.0.0.1 --master-port 29611" in words
    assert "--standalone" not in words


def test_torchruns_own_substitution_of_dollar_signs_is_undone():
    from string import Template  # what torchrun applies to each argument

    odd = ("$$", "${local_rank}", "$local_rank", "a$b", "100$")
    passed = plan("nproc=2", args=odd).command[-len(odd) :]
    assert tuple(Template(word).safe_substitute(local_rank="1") for word in passed) == odd


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A stand-in srun that runs its command for nodes 0 and 1, as the batch shell of a job sees it."""
    for name, text in {
        "srun": SRUN,
        "python": RECORD,
        "deepspeed": RECORD,
        "scontrol": "#!/bin/sh\nprintf 'lab07\\nlab08\\n'\n",
    }.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    variables = {"SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "lab[07-08]"}
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SEEN": str(tmp_path),
        "SLURM_JOB_ID": "70001",
        "PHALANX_RDZV_HOST": "lab07",
        "PHALANX_RDZV_PORT": "20011",
        **variables,
    }

    def run(made, **more):
        line = render([str(tmp_path / "python") if word == FACTS.python else word for word in made.command])
        line = line.replace(FACTS.python, str(tmp_path / "python"))
        subprocess.run(["sh", "-c", line], env={**environment, **more}, check=True)
        nodes = [(tmp_path / f"node{node}").read_text().splitlines() for node in (0, 1)]
        return (tmp_path / "step").read_text().splitlines(), nodes

    return run


def value(words, option):
    return words[words.index(option) + 1]


def test_torchrun_on_several_nodes_finds_its_node_inside_the_task(slurm):
    """Expanded in the batch shell, every node would be node 0, and the rendezvous would hang."""
    srun, nodes = slurm(plan("nodes=2", "nproc=4", "cpus_per_task=16", args=("it's", "$A")))
    assert srun[:4] == ["--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=16"]
    assert {"--kill-on-bad-exit=1", "--cpu-bind=none"} <= set(srun)
    assert [value(words, "--rdzv-conf") for words in nodes] == ["is_host=1,rank=0", "is_host=0,rank=1"]
    for words in nodes:
        assert value(words, "--nnodes") == "2"
        assert value(words, "--nproc-per-node") == "4"
        assert value(words, "--rdzv-id") == "70001.0.0"
        assert words[-4:] == ["phalanx.worker", "train.py", "it's", "$$A"]


def test_a_head_and_a_port_that_were_set_are_kept(slurm):
    _, nodes = slurm(plan("nodes=2", "nproc=2", "master_addr=10.0.0.4", "master_port=29611"))
    for node, words in enumerate(nodes):
        assert value(words, "--node-rank") == str(node)
        assert value(words, "--master-addr") == "10.0.0.4"
        assert value(words, "--master-port") == "29611"
        assert "c10d" not in words  # whose ranks would meet at a port that the first agent takes at random


def test_a_head_that_was_set_is_kept(slurm):
    _, nodes = slurm(plan("nodes=2", "nproc=2", "master_addr=10.0.0.4"))
    assert value(nodes[1], "--rdzv-endpoint") == "10.0.0.4:20011"


def test_a_requeued_job_does_not_meet_its_former_self(slurm):
    _, nodes = slurm(plan("nodes=2", "nproc=2"), SLURM_RESTART_COUNT="1")
    assert value(nodes[0], "--rdzv-id") == "70001.0.1"


def test_srun_starts_a_task_per_rank_with_the_ranks_cpus():
    """A step doesn't inherit the job's CPUs per task."""
    command = list(plan("nodes=2", "nproc=4", "cpus_per_task=16", "launcher=srun").command)
    assert command[:5] == ["srun", "--nodes=2", "--ntasks=8", "--ntasks-per-node=4", "--cpus-per-task=4"]
    assert command[5:] == ["--kill-on-bad-exit=1", "/py/bin/python", "-m", "phalanx.worker", "train.py"]


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_a_port_and_an_address_of_the_users_are_the_ranks(launcher):
    made = plan("nodes=2", f"launcher={launcher}", "master_port=29611", "master_addr=10.0.0.4")
    assert (made.environment["MASTER_PORT"], made.environment["MASTER_ADDR"]) == ("29611", "10.0.0.4")
    assert "MASTER_PORT" not in plan("nodes=2", f"launcher={launcher}").environment


@pytest.mark.parametrize(
    ("environ", "port"),
    [({"MASTER_PORT": "29611"}, 29611), ({"MASTER_PORT": "29611", "RANK": "0", "WORLD_SIZE": "2"}, None), ({}, None)],
)
def test_a_port_in_the_environment_is_the_users_unless_another_launch_set_it(environ, port):
    assert load_config((), (), environ).config.master_port == port


def test_unknown_cpus_are_left_to_slurm():
    assert not [word for word in plan("nodes=2", "launcher=srun").command if "cpus" in str(word)]


@pytest.mark.parametrize(
    ("flavor", "expected"),
    [
        ("openmpi", ["-np", "8", "--map-by", "ppr:4:node", "--bind-to", "none", "-x", "A", "-x", "NCCL_DEBUG"]),
        ("mpich", ["-n", "8", "-ppn", "4", "-bind-to", "none", "-genvlist", "A,NCCL_DEBUG,PATH,PHALANX_RUN_DIR"]),
    ],
)
def test_mpirun_places_ranks_by_node_unbound_with_the_variables_that_are_set(tmp_path, flavor, expected):
    made = plan("nodes=2", "nproc=4", "launcher=mpirun", "env.A=1", f"mpirun.flavor={flavor}")
    (tmp_path / "mpirun").write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    (tmp_path / "mpirun").chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        **{"A": "a b", "NCCL_DEBUG": "INFO", "PHALANX_RUN_DIR": "/r", "OTHER": "stays"},
    }
    done = subprocess.run(["bash", "-c", render(made.command)], env=environment, capture_output=True, text=True)
    words = done.stdout.splitlines()
    assert words[: len(expected)] == expected
    assert "OTHER" not in done.stdout
    assert words[-4:] == ["/py/bin/python", "-m", "phalanx.worker", "train.py"]


def test_mpirun_starts_an_agent_a_node_which_learns_its_node_from_mpi():
    words = render(plan("nodes=2", "nproc=4", "torchrun.start=mpirun").command)
    assert words.startswith("mpirun -np 2 --map-by ppr:1:node --bind-to none ")
    assert "rank=$OMPI_COMM_WORLD_RANK" in words


def test_one_process_on_slurm_is_a_step_too():
    made = make_plan(load_config((), (), {}).config, FACTS, Program("train.py"), for_slurm=True)
    assert made.command[0] == "srun"
    assert made.command[-3:] == ("-m", "phalanx.worker", "train.py")


def test_deepspeed_takes_the_ranks_of_a_node_by_the_kind_of_device():
    one = " ".join(plan("nproc=2", "launcher=deepspeed").command)
    assert "--num_accelerators 2" in one
    assert "--num_gpus 2" in " ".join(plan("nodes=2", "nproc=2", "launcher=deepspeed", "gpus_per_node=2").command)


def test_deepspeeds_ranks_see_the_devices_that_were_allocated(tmp_path, monkeypatch):
    """Its launcher sets 0, 1, … on every node; here a stand-in for it starts the worker as it does."""
    made = plan("nproc=2", "launcher=deepspeed")
    line = render(made.command)
    python = tmp_path / "python"
    python.write_text(
        f"#!{sys.executable}\nimport os, subprocess, sys\n"
        "if 'phalanx.ports' in sys.argv: print(29511); sys.exit()\n"
        "env = {**os.environ, 'CUDA_VISIBLE_DEVICES': '0,1', 'RANK': '0', 'WORLD_SIZE': '1', 'LOCAL_RANK': '0'}\n"
        "subprocess.run([sys.executable, '-m', *sys.argv[sys.argv.index('--module') + 1:]], env=env, check=True)\n"
    )
    python.chmod(0o755)
    (tmp_path / "train.py").write_text("import os; print(os.environ['CUDA_VISIBLE_DEVICES'])")
    monkeypatch.chdir(tmp_path)
    for allocated, seen in (("2,3", "2,3"), ("GPU-3fa8,GPU-77b1", "GPU-3fa8,GPU-77b1"), ("", "0,1")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", allocated)
        words = ["bash", "-c", line.replace("/py/bin/python", str(python))]
        done = subprocess.run(words, capture_output=True, text=True)
        assert done.stdout.split() == [seen], done.stderr


def test_deepspeed_on_several_nodes_is_told_its_node_inside_the_task(slurm):
    _, nodes = slurm(plan("nodes=2", "nproc=2", "launcher=deepspeed", "gpus_per_node=2"), PHALANX_RUN_DIR="/r")
    assert [value(words, "--node_rank") for words in nodes] == ["0", "1"]
    assert value(nodes[1], "--master_addr") == "lab07"
    assert value(nodes[0], "--hostfile") == "/r/hostfile"
