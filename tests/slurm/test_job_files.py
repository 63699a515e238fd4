"""What job files say arrives in the ranks: variables, secrets, arguments, a launcher's line, CPUs of own steps."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from .conftest import User

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SHOW = """
import json, os, sys
names = ("A", "HF_TOKEN", "HTTP_PROXY", "SUBMITTED", "WORLD_SIZE")
seen = {"arguments": sys.argv[1:], **{name: os.environ.get(name) for name in names}}
with open(f"{os.environ['PHALANX_RUN_DIR']}/seen.{os.environ['RANK']}", "w") as file:
    json.dump(seen, file)
"""
ODD = ["--h", "-m", "a b", "$HOME", "", "--", "x"]
SECRETS = ("env.A=x,y z=1", "env.HF_TOKEN=t,1", "proxy.http=http://u:pw@h:1")
EXPORT = "PYTHONPATH,OMPI_ALLOW_RUN_AS_ROOT,OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"  # and nothing else
SIZE = ("nproc=2", "cpus_per_task=1")
# Name, settings, and what `training_cmd` or the command line says.
JOBS: dict[str, tuple[tuple[str, ...], int]] = {
    "srun": (("launcher=srun", "nodes=2"), 4),
    "torchrun": (("launcher=torchrun", "nodes=2"), 4),
    "mpirun": (("launcher=mpirun", "nodes=2"), 4),
    "deepspeed": (("launcher=deepspeed", "nodes=2"), 4),
    "horovodrun": (("launcher=horovodrun",), 2),
}


def seen(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(run_dir.glob("seen.*"))]


def test_under_each_launcher_ranks_get_what_the_file_says_whatever_the_export_option(user: User) -> None:
    (user.work / "my show.py").write_text(SHOW)
    ids = {}
    for name, (settings, _) in JOBS.items():
        words = (f"name={name}", f"export={EXPORT}", *SIZE, *settings, *SECRETS, "my show.py", *ODD)
        ids[name] = user.submit(*words, SUBMITTED="1")
    expected = {"arguments": ODD, "A": "x,y z=1", "HF_TOKEN": "t,1", "HTTP_PROXY": "http://u:pw@h:1", "SUBMITTED": None}
    for name, job in ids.items():
        assert user.cluster.wait(job)["JobState"] == "COMPLETED", user.output(name)
        ranks = JOBS[name][1]
        assert seen(user.run_dir(name)) == [{**expected, "WORLD_SIZE": str(ranks)}] * ranks
        texts = [
            path.read_text() for path in user.run_dir(name).rglob("*") if path.is_file() and "seen" not in path.name
        ]
        assert not [text for text in texts if "t,1" in text or "u:pw" in text]


def test_a_launchers_line_makes_one_world(user: User) -> None:
    (user.work / "show.py").write_text(SHOW)
    lines = {
        "a": (
            "srun torchrun --nnodes $SLURM_NNODES --nproc_per_node 2 --rdzv_endpoint $H:1 ${WHERE}/show.py --a 'b c'",
            4,
        ),
        "b": ("python -m torch.distributed.run --nproc_per_node=2 show.py --a 'b c'", 2),
        "c": ("""srun -n 4 python -u show.py --a "$(echo "b $([ $((SLURM_NNODES - 1)) = 1 ] && echo c)")\"""", 4),
    }
    nodes = {"a": "nodes=2", "b": "nodes=1", "c": "nodes=2"}
    active = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # the lines say `python` and `torchrun`
    environment = {"PATH": active, "WHERE": str(user.work)}
    ids = {
        name: user.submit(f"name={name}", nodes[name], "cpus_per_task=1", f"training_cmd={line}", **environment)
        for name, (line, _) in lines.items()
    }
    for name, job in ids.items():
        assert user.cluster.wait(job)["JobState"] == "COMPLETED", user.output(name)
        ranks = lines[name][1]
        found = seen(user.run_dir(name))
        assert [(fact["WORLD_SIZE"], fact["arguments"]) for fact in found] == [(str(ranks), ["--a", "b c"])] * ranks


def test_a_step_of_ones_own_has_all_cpus_and_a_job_without_its_secrets_ends(user: User) -> None:
    own = "exec_command=time srun bash -c 'echo cpus=$SLURM_CPUS_PER_TASK'"
    step = user.submit("name=own", "cpus_per_task=2", "ntasks_per_node=2", own)
    (user.work / "show.py").write_text(SHOW)
    saved = user.phalanx("submit", "-t", "5", "device=cpu", "name=s", "--no-submit-job", *SECRETS, "show.py")
    assert "HF_TOKEN" in saved.stderr
    lacks, has = (
        user.shell("sbatch", "--parsable", f"--output={user.work}/%j.out", "slurm-scripts/s.sh", **more).stdout.strip()
        for more in ({}, {"HF_TOKEN": "1", "http_proxy": "2"})
    )
    assert user.cluster.wait(lacks)["ExitCode"] == "2:0"
    assert "HF_TOKEN" in (user.work / f"{lacks}.out").read_text()
    assert user.cluster.wait(has)["JobState"] == "COMPLETED"
    (found,) = seen(user.work / "runs" / "s" / f"job-{has}")
    assert (found["HF_TOKEN"], found["HTTP_PROXY"]) == ("1", "2")
    assert user.cluster.wait(step)["JobState"] == "COMPLETED", user.output("own")
    assert user.output("own").count("cpus=2") == 2
