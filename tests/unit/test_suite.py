"""The documented commands run every test that stands in a file.

pytest leaves out silently what its settings or names don't match. So what stands in the files is read here without
pytest, and compared with what the commands of the Makefile, CONTRIBUTING.md and docs/testing.md would run.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.testing.pairing import KINDS
from tests import leftovers

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
NO_SOURCES = {"build", "dist", "runs"}  # of the project's own folders
Named = tuple[str, str]  # a file, and `function` or `Class::function` in it


def commands() -> list[list[str]]:
    """The arguments that `make test`, a machine with GPUs and `phalanx test` give to pytest."""
    ranks = shlex.split(documented("docs/testing.md", r"^    phalanx test .* -- (tests/.*)$"))
    return [
        shlex.split(documented("Makefile", r"^test:.*\n\t.*-m pytest (.*)$")),
        shlex.split(documented("CONTRIBUTING.md", r"`python -m pytest (-m gpu)`")),
        *([*ranks, "-m", kind] for kind in KINDS),
    ]


def documented(file: str, pattern: str) -> str:
    found = re.search(pattern, (ROOT / file).read_text(), re.MULTILINE)
    assert found, f"the command in {file} has another form now: read it here as it is"
    return found[1]


def own_files(pattern: str) -> Iterator[Path]:
    """Those on disk, whether git knows them or not."""
    for top in ROOT.iterdir():
        if top.is_dir() and not top.name.startswith(".") and top.name not in NO_SOURCES:
            yield from top.rglob(pattern)


def definitions(parent: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """What a module or class defines, in its branches too, but not inside functions."""
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node
        elif isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
            yield from definitions(node)


def written(path: Path) -> Iterator[Named]:
    """The tests of one file, in any class."""
    name = path.relative_to(ROOT).as_posix()
    for node in definitions(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef):
            inner = [each.name for each in definitions(node)]
            yield from ((name, f"{node.name}::{test}") for test in inner if test.startswith("test"))
        elif node.name.startswith("test"):
            yield name, node.name


@pytest.fixture(scope="module")
def collected() -> list[dict[str, list[str]]]:
    words = [sys.executable, "-m", "tests.collected", *map(json.dumps, commands())]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_every_test_that_is_written_is_run_by_a_documented_command(collected: list[dict[str, list[str]]]) -> None:
    assert not [one for each in collected for one in each["failed"]]
    run = {tuple(test.partition("[")[0].split("::", 1)) for each in collected for test in each["tests"]}
    skipped = {file for each in collected for file in each["skipped"]}  # they say what is missing here
    tests = [test for path in TESTS.rglob("*.py") for test in written(path)]
    assert len(tests) > 1000, "hardly any test was read from the files"
    assert sorted(test for test in {*tests} - run if test[0] not in skipped) == []
    files = {path.relative_to(ROOT).as_posix() for path in TESTS.rglob("test_*.py")}
    assert sorted(files - {file for file, _ in run} - skipped) == [], "files of which no test is run"


def test_no_test_hides_another_of_its_name() -> None:
    counts = Counter(test for path in TESTS.rglob("*.py") for test in written(path))
    assert [test for test, count in counts.items() if count > 1] == []


def test_tests_stand_in_the_folder_for_them() -> None:
    names = [*own_files("test_*.py"), *own_files("*_test.py"), *ROOT.glob("test_*.py"), *ROOT.glob("*_test.py")]
    assert [path for path in names if TESTS not in path.parents or not path.name.startswith("test_")] == []


def test_a_function_of_a_test_file_that_nothing_uses_is_a_misnamed_test() -> None:
    unused = []
    for path in TESTS.rglob("test_*.py"):
        tree = ast.parse(path.read_text())
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for node in definitions(tree):
            fixture = any("fixture" in ast.unparse(each) for each in node.decorator_list)
            if not (node.name.lower().startswith(("test", "pytest_")) or node.name in names or fixture):
                unused.append(f"{path.name}: {node.name}")
    assert unused == []


# What clusters, launches, terminals and users set: a task of a step of 8, in a job, with threads, proxies and settings.
AROUND = """
OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 GOMP_CPU_AFFINITY=0 CUDA_VISIBLE_DEVICES=0,1,2,3 ROCR_VISIBLE_DEVICES=0
SLURM_JOB_ID=42 SLURM_JOBID=42 SLURM_JOB_NAME=sh SLURM_NNODES=2 SLURM_JOB_NUM_NODES=2 SLURM_NTASKS=8 SLURM_NPROCS=8
SLURM_NTASKS_PER_NODE=4 SLURM_TASKS_PER_NODE=4(x2) SLURM_CPUS_PER_TASK=4 SLURM_CPUS_ON_NODE=16 SLURM_GPUS_ON_NODE=4
SLURM_JOB_CPUS_PER_NODE=16(x2) SLURM_JOB_NODELIST=n[1-2] SLURM_NODELIST=n[1-2] SLURM_CLUSTER_NAME=c SLURM_CONF=/no/conf
SLURM_EXPORT_ENV=NONE SLURM_STEP_ID=0 SLURM_STEPID=0 SLURM_PROCID=3 SLURM_LOCALID=3 SLURM_NODEID=0 SLURMD_NODENAME=n1
SLURM_STEP_NUM_TASKS=8 SLURM_STEP_NUM_NODES=2 SLURM_STEP_NODELIST=n[1-2] SLURM_STEP_TASKS_PER_NODE=4(x2)
SLURM_RESTART_COUNT=1 SLURM_ARRAY_JOB_ID=40 SLURM_ARRAY_TASK_ID=2 SLURM_TIME_FORMAT=relative SBATCH_ACCOUNT=other
SBATCH_EXPORT=NONE SRUN_CPUS_PER_TASK=4 SALLOC_ACCOUNT=x SQUEUE_FORMAT=%i SINFO_FORMAT=%n SACCT_FORMAT=JobID
RANK=3 WORLD_SIZE=8 LOCAL_RANK=3 LOCAL_WORLD_SIZE=4 GROUP_RANK=0 MASTER_ADDR=n1 MASTER_PORT=29500
TORCHELASTIC_RUN_ID=x PMI_RANK=3 PMI_SIZE=8 PMIX_RANK=3 OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=8
OMPI_COMM_WORLD_LOCAL_RANK=3 MPI_LOCALRANKID=3 HOROVOD_RANK=3 HOROVOD_SIZE=8 RAY_ADDRESS=n1:6379 DS_ACCELERATOR=cuda
PHALANX_STRATEGY=fsdp PHALANX_SEED=7 PHALANX_RUN_DIR=/no/run PHALANX_SITE=/no/site.yaml PHALANX_RANK=5 PHALANX_TYPO=1
PHALANX_WORLD_SIZE=9 USE_CONTAINER=1 APPTAINER_BIND=/x SINGULARITY_BIND=/x GLOO_SOCKET_IFNAME=ib0
NO_COLOR=1 FORCE_COLOR=1 COLUMNS=40 LINES=10 TERM=dumb LC_ALL=C LANG=de_DE.UTF-8 TZ=Asia/Tokyo PYTHONIOENCODING=latin-1
PYTHONWARNINGS=default LOADEDMODULES=GCC/12:CUDA/12 LMOD_CMD=/x MODULESHOME=/y VIRTUAL_ENV=/no/venv CONDA_PREFIX=/no
PIP_USER=1 PIP_REQUIRE_VIRTUALENV=1 MPLBACKEND=TkAgg GIT_DIR=/no/git GIT_WORK_TREE=/no
http_proxy=http://127.0.0.1:9 https_proxy=http://127.0.0.1:9 HTTP_PROXY=http://127.0.0.1:9 all_proxy=http://127.0.0.1:9
"""
SOME = ("test_cli", "test_plan", "test_topology", "test_test_sites", "test_config_command", "test_slurm_builder")


def test_what_is_set_around_the_suite_changes_nothing(tmp_path: Path) -> None:
    """Where an environment is set for all tests, those that print plans, write scripts and start processes pass."""
    settings, scratch = tmp_path / "xdg", tmp_path / "job 42"
    (settings / "phalanx").mkdir(parents=True)
    (settings / "phalanx/config.yaml").write_text("strategy: fsdp\nnodes: 5\n")
    scratch.mkdir()
    environ = {**os.environ, **dict(word.split("=", 1) for word in AROUND.split())}
    environ |= {"TMPDIR": str(scratch), "XDG_CONFIG_HOME": str(settings)}
    del environ["HOME"]
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*words, *(f"tests/unit/{name}.py" for name in SOME)], cwd=ROOT, env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_a_process_that_a_test_left_is_named_and_ended() -> None:
    code = "import time; print(flush=True); time.sleep(60)"
    environ = {**os.environ, leftovers.MARK: "another suite"}
    with subprocess.Popen([sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert leftovers.found("a third suite") == {}
        (named,) = leftovers.end("another suite", patience=0)
        assert named.startswith(f"{process.pid}: tests/unit/test_suite.py::test_a_process_that_a_test_left")
        assert process.wait(timeout=20) == -9
