import json

import pytest

from phalanx.config import load_config
from phalanx.errors import PlanError
from phalanx.planning.facts import Facts
from phalanx.planning.planner import make_plan
from phalanx.planning.program import Program


def facts(gpus=0, cpus=8, system="Linux", machine="x86_64", omp=None):
    return Facts("here", cpus, gpus, "/py/bin/python", system, machine, {"torch": "2.13.0"}, omp)


def plan(*overrides, script="train.py", args=(), **known):
    return make_plan(load_config((), overrides, {}).config, facts(**known), Program(script, args))


@pytest.mark.parametrize(
    ("overrides", "gpus", "ranks"),
    [
        ([], 0, 1),
        ([], 4, 1),
        (["nproc=3"], 0, 3),
        (["nproc=auto"], 4, 4),
        (["nproc=auto"], 0, 8),
        (["nproc=gpu"], 2, 2),
        (["nproc=cpu"], 0, 8),
        (["nproc=auto", "device=cpu"], 4, 8),
        (["nproc=auto", "gpus_per_node=0"], 4, 8),
        (["nproc=gpu", "gpus_per_node=2"], 4, 2),
        (["ntasks_per_node=4"], 0, 4),
        (["gpus_per_node=4"], 4, 4),
        (["gpus_per_node=0"], 4, 1),
        (["ntasks_per_node=2", "gpus_per_node=4"], 4, 2),
        (["ntasks_per_node=1", "gpus_per_node=4"], 4, 4),
        (["ntasks_per_node=4", "nproc=2"], 0, 2),
    ],
)
def test_ranks_per_node_follow_the_first_setting_that_says_them(overrides, gpus, ranks):
    made = plan(*overrides, gpus=gpus)
    assert (made.nproc_per_node, made.world_size) == (ranks, ranks)


@pytest.mark.parametrize("launcher", ["torchrun", "srun", "mpirun", "deepspeed", "ray"])
@pytest.mark.parametrize("setting", ["nproc=4", "ntasks_per_node=4", "gpus_per_node=4"])
def test_ranks_per_node_are_the_same_under_every_launcher(launcher, setting):
    made = plan("nodes=3", f"launcher={launcher}", setting)
    assert (made.nodes, made.nproc_per_node, made.world_size) == (3, 4, 12)


@pytest.mark.parametrize(
    ("overrides", "strategy", "launcher"),
    [
        ([], "single", "python"),
        (["nproc=2"], "ddp", "torchrun"),
        (["nodes=2"], "ddp", "torchrun"),
        (["strategy=ddp"], "ddp", "python"),
        (["strategy=fsdp", "nproc=2"], "fsdp", "torchrun"),
        (["launcher=torchrun"], "single", "torchrun"),
        (["launcher=srun", "nproc=2"], "ddp", "srun"),
    ],
)
def test_strategy_and_launcher_that_are_not_said_follow_from_the_processes(overrides, strategy, launcher):
    made = plan(*overrides)
    assert (made.strategy, made.launcher) == (strategy, launcher)


def test_the_plan_says_what_it_chose_and_why():
    notes = " | ".join(plan("nproc=auto", gpus=2).notes)
    for words in (
        "2 ranks per node",
        "one per GPU",
        "strategy ddp: more than one process",
        "launcher torchrun",
        "cuda",
    ):
        assert words in notes


@pytest.mark.parametrize(
    ("overrides", "known", "device", "backend"),
    [
        ([], {}, "cpu", "gloo"),
        ([], {"gpus": 1}, "cuda", "nccl"),
        (["gpus_per_node=0"], {"gpus": 1}, "cpu", "gloo"),
        (["device=cpu"], {"gpus": 1}, "cpu", "gloo"),
        (["backend=gloo"], {"gpus": 1}, "cuda", "gloo"),
        ([], {"system": "Darwin", "machine": "arm64"}, "mps", "gloo"),
        (["nproc=2"], {"system": "Darwin", "machine": "arm64"}, "cpu", "gloo"),
        ([], {"system": "Darwin", "machine": "x86_64"}, "cpu", "gloo"),
        (["nodes=2"], {"gpus": 1}, None, None),
        (["nodes=2", "gpus_per_node=2"], {}, "cuda", "nccl"),
        (["nodes=2", "device=cuda"], {}, "cuda", "nccl"),
        (["nodes=2", "gpus_per_node=0"], {"gpus": 1}, "cpu", "gloo"),
    ],
)
def test_device_and_backend(overrides, known, device, backend):
    made = plan(*overrides, **known)
    assert (made.device, made.backend) == (device, backend)


@pytest.mark.parametrize(
    ("overrides", "known", "words"),
    [
        (["nproc=gpu"], {}, ["nproc_per_node gpu", "no GPU is visible on here", "--nproc cpu"]),
        (["nproc=gpu", "device=cpu"], {"gpus": 2}, ["device is cpu"]),
        (["backend=nccl"], {}, ["nccl", "no GPU is visible on here", "--backend gloo"]),
        (["backend=nccl", "nproc=2"], {}, ["nccl", "--backend gloo"]),
        (["backend=nccl", "device=cpu"], {"gpus": 1}, ["nccl", "device is cpu", "--backend gloo"]),
        (["backend=nccl", "gpus_per_node=0"], {"gpus": 1}, ["nccl", "gpus_per_node is 0"]),
        (["backend=nccl", "nodes=2", "device=cpu"], {}, ["nccl", "device is cpu"]),
        (["device=cuda"], {}, ["device cuda", "no GPU is visible on here", "--device cpu"]),
        (["device=cuda", "gpus_per_node=0"], {"gpus": 1}, ["device cuda", "gpus_per_node is 0"]),
        (["device=mps"], {}, ["device mps", "Linux", "--device cpu"]),
        (["device=mps", "nproc=2"], {"system": "Darwin", "machine": "arm64"}, ["mps", "one process", "2"]),
        (["nproc=3"], {"gpus": 2}, ["3 ranks per node", "has 2", "--nproc 2"]),
        (["nodes=2", "nproc=4", "gpus_per_node=2"], {}, ["4 ranks per node", "has 2"]),
        (["gpus_per_node=4"], {"gpus": 2}, ["gpus_per_node is 4", "here has 2"]),
        (["nodes=2", "nproc=gpu"], {"gpus": 2}, ["other machines", "gpus_per_node"]),
        (["nodes=2", "nproc=cpu"], {}, ["other machines", "cpus_per_task"]),
        (["launcher=python", "nproc=2"], {}, ["python starts one process", "torchrun"]),
        (["nodes=2", "master_addr=127.0.0.1"], {}, ["master_addr='127.0.0.1'", "nodes=2", "first node"]),
        (["strategy=single", "nproc=2"], {}, ["single is one process", "ddp"]),
    ],
)
def test_what_cannot_start_is_refused_with_the_value_the_reason_and_what_to_change(overrides, known, words):
    with pytest.raises(PlanError) as caught:
        plan(*overrides, **known)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "known", "per_node", "per_rank", "threads"),
    [
        (["nproc=2"], {"cpus": 8}, 8, 4, "4"),
        (["nproc=3"], {"cpus": 8}, 8, 2, "2"),
        (["nproc=4"], {"cpus": 2}, 2, 1, "1"),
        (["nproc=2"], {"cpus": 8, "omp": "7"}, 8, 4, "7"),
        (["nproc=2", "env.OMP_NUM_THREADS=5"], {"cpus": 8, "omp": "7"}, 8, 4, "5"),
        (["nodes=2", "nproc=4", "cpus_per_task=32"], {}, 32, 8, "8"),
        (["nodes=2", "ntasks_per_node=4", "cpus_per_task=8"], {}, 32, 8, "8"),
        (["nodes=2", "ntasks_per_node=4", "nproc=2", "cpus_per_task=8"], {}, 32, 16, "16"),
        (["nodes=2", "nproc=4"], {"cpus": 8}, None, None, None),
    ],
)
def test_cpus_are_divided_among_the_ranks_and_threads_follow(overrides, known, per_node, per_rank, threads):
    made = plan(*overrides, **known)
    assert (made.cpus_per_node, made.cpus_per_rank, made.omp_num_threads) == (per_node, per_rank, threads)
    assert made.environment.get("OMP_NUM_THREADS") == threads
    assert made.environment.get("PHALANX_CPUS_PER_RANK") == (str(per_rank) if per_rank else None)


@pytest.mark.parametrize(("setting", "workers"), [("auto", 3), ("0", 0), ("2", 2), (None, None)])
def test_loader_workers_leave_a_cpu_to_the_rank_itself(setting, workers):
    made = plan("nproc=2", *([f"num_workers={setting}"] if setting else []), cpus=8)
    assert made.num_workers == workers
    handed = made.environment.get("PHALANX_NUM_WORKERS_AUTO")
    assert handed == ("3" if setting == "auto" else None)


def test_the_environment_holds_the_users_own_variables_above_ours():
    made = plan("env.PYTHONUNBUFFERED=0", "env.NCCL_DEBUG=INFO")
    assert made.environment["PYTHONUNBUFFERED"] == "0"
    assert made.environment["NCCL_DEBUG"] == "INFO"
    assert made.in_run_dir("/r/1").environment["PHALANX_RUN_DIR"] == "/r/1"


@pytest.mark.parametrize(
    ("overrides", "gpus", "told"), [([], 0, "true"), (["device=cpu"], 2, "true"), ([], 2, None), (["nodes=2"], 0, None)]
)
def test_accelerate_hears_of_the_cpu_only_where_that_is_the_device(overrides, gpus, told):
    """It makes each rank a run of its own on a CPU that it wasn't told of, and would ignore GPUs otherwise."""
    assert plan(*overrides, gpus=gpus).environment.get("ACCELERATE_USE_CPU") == told


def test_a_single_process_is_told_that_it_is_rank_0_of_1():
    """An srun or mpirun around the command must not make it a rank of theirs."""
    environment = plan("env.A=1").environment
    assert {name: environment[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")} == {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
    }
    assert "RANK" not in plan("nproc=2").environment


def test_a_named_virtual_environment_is_the_ranks_python():
    made = plan("venv=/my/venv")
    assert made.command[0] == "/my/venv/bin/python"
    assert made.versions == {}
    assert plan().versions == {"torch": "2.13.0"}


@pytest.mark.parametrize(
    ("script", "setting", "name"),
    [("a/b/train.py", [], "train"), ("train.py", ["name=big"], "big"), ("x.tar.py", [], "x.tar")],
)
def test_a_run_is_named_by_its_setting_else_by_its_script(script, setting, name):
    assert plan(*setting, script=script).name == name


def test_json_has_one_entry_a_node_with_its_first_rank():
    made = json.loads(plan("nodes=3", "nproc=2", "launcher=srun", args=("--x", "a b")).to_json())
    assert [(node["node_rank"], node["first_rank"], node["ranks"]) for node in made["nodes"]] == [
        (0, 0, 2),
        (1, 2, 2),
        (2, 4, 2),
    ]
    assert (made["world_size"], made["nproc_per_node"], made["args"]) == (6, 2, ["--x", "a b"])
    assert made["command"][-2:] == ["--x", "a b"]
    assert made["command_line"].endswith("--x 'a b'")


def test_the_plan_for_this_machine_names_it():
    assert [node["host"] for node in plan("nproc=2").as_dict()["nodes"]] == ["here"]
    assert [node["host"] for node in plan("nodes=2").as_dict()["nodes"]] == [None, None]


def test_threads_that_are_shell_text_stay_so():
    from phalanx.shell import Sh

    made = plan("nproc=2", "env.OMP_NUM_THREADS=!sh $SLURM_CPUS_ON_NODE")
    assert made.environment["OMP_NUM_THREADS"] == Sh("$SLURM_CPUS_ON_NODE")
