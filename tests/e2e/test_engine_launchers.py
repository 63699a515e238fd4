"""Engines' own launchers and mpirun on this machine: how failed runs end, and Adasum, which needs MPI."""

import json
import os
import re
import shutil
from importlib.util import find_spec

import pytest

from tests.e2e.test_run_command import HOST, SLEEPER, pids
from tests.e2e.tools import alive, command, run_dirs, start

pytestmark = pytest.mark.slow
MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}  # Open MPI asks root twice


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed: `make engines` does it")


NEEDS_MPI = pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun: `make slurm-packages` installs one")
LAUNCHERS = [
    pytest.param("horovodrun", "horovod", marks=needs("horovod")),
    pytest.param("deepspeed", "ddp", marks=needs("deepspeed")),
    pytest.param("mpirun", "ddp", marks=NEEDS_MPI),
]


def launch(*words: str):
    return start(*command("--nproc", "2", "device=cpu", *words), env={**os.environ, **MPI})


@pytest.mark.parametrize(("launcher", "strategy"), LAUNCHERS)
@pytest.mark.parametrize(
    ("failure", "code", "words"),
    [("sys.exit(7)", 7, "failed: SystemExit: 7"), ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL")],
)
def test_a_failing_rank_ends_the_others_and_is_named(work, launcher, strategy, failure, code, words):
    (work / "s.py").write_text(SLEEPER % failure)
    ended = launch("--launcher", launcher, "-s", strategy, "s.py")
    assert ended.returncode == code, ended.stderr
    assert not any(alive(pid) for pid in pids(work))
    (line,) = re.findall(rf"^(?:a rank|rank 1) on {HOST} .*", ended.stderr, re.MULTILINE)
    assert words in line
    # DeepSpeed says how a rank died, and not which.
    assert line.startswith("a rank") == (launcher == "deepspeed" and code == 137)
    (run_dir,) = run_dirs(work)
    assert (run_dir / "errors/1.json").exists() == (code == 7)


ADASUM = """
import json, torch, phalanx
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ROWS = torch.tensor([[1.0, 2.0, 0.5], [-0.5, 1.0, 3.0]])  # each rank's gradient
with phalanx.init(progress=False) as run:
    model = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(TensorDataset(ROWS), batch_size=1))
    for (x,) in run.steps(loader):
        run.backward(model(x).sum())
        optimizer.step()
    weight = run.state_dict(model).get("weight")
    if run.is_main:
        open("weight.json", "w").write(json.dumps(weight.flatten().tolist()))
"""


@needs("horovod")
@NEEDS_MPI
def test_adasum_adds_the_ranks_updates_by_its_formula(work):
    """Maleki et al., 2020: a (1 - a·b / 2a·a) + b (1 - a·b / 2b·b)."""
    (work / "s.py").write_text(ADASUM)
    ended = launch("--launcher", "mpirun", "-s", "horovod", "horovod.use_adasum=true", "s.py")
    assert ended.returncode == 0, ended.stderr
    a, b = [-0.1, -0.2, -0.05], [0.05, -0.1, -0.3]
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    mine, other = (1 - dot / (2 * sum(x * x for x in side)) for side in (a, b))
    expected = [mine * x + other * y for x, y in zip(a, b, strict=True)]
    assert json.loads((work / "weight.json").read_text()) == pytest.approx(expected, rel=1e-5)
    refused = launch("--launcher", "horovodrun", "-s", "horovod", "horovod.use_adasum=true", "s.py")
    assert refused.returncode == 2
    assert "use_adasum needs Horovod with MPI" in refused.stderr
