"""CONTRIBUTING's recipes, done: a launcher, a strategy and a tracker, each by its one file and its one line in the
registry, in a copy of the sources, and by nothing else that the recipe doesn't name."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.tools import run_dirs

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
LAUNCHER = '''
from phalanx.launchers.base import Launcher, rank, task

LOOP = """
for rank in $(seq 0 $(($LOOP_SIZE - 1))); do LOOP_RANK=$rank "$@" & done
code=0
for process in $(jobs -p); do wait $process || code=$?; done
exit $code
"""


class Loop(Launcher):
    """The shell's own: ranks in the background."""

    agents = True

    def command(self, plan):
        return task(plan, ["bash", "-c", LOOP, "loop", *rank(plan)])

    def environment(self, plan):
        return {"LOOP_SIZE": str(plan.nproc_per_node), "LOOP_LOCAL_SIZE": str(plan.nproc_per_node)}
'''
VARIABLES = """    "loop": {
        "rank": ("LOOP_RANK",),
        "world_size": ("LOOP_SIZE",),
        "local_rank": ("LOOP_RANK",),
        "local_world_size": ("LOOP_LOCAL_SIZE",),
    },
"""
STRATEGY = '''
from contextlib import contextmanager

from phalanx.strategies.process_group import ProcessGroupStrategy, broadcast_state


class Plain(ProcessGroupStrategy):
    """Each gradient averaged by itself, after the backward pass."""

    name = "plain"

    def setup(self):
        super().setup()
        self._models, self._held = [], False

    def wrap(self, model):
        model = model.to(self.device)
        broadcast_state(model, self.comm)
        self._models.append(model)
        return model

    @contextmanager
    def no_sync(self, model):
        self._held = True
        try:
            yield
        finally:
            self._held = False

    def backward(self, loss):
        super().backward(loss)
        for parameter in [] if self._held else [p for model in self._models for p in model.parameters()]:
            self.comm.all_reduce(parameter.grad, "sum")
            parameter.grad /= self.topology.world_size
'''
TRACKER = """
import json

from phalanx.trackers.base import Tracker


class Lines(Tracker):
    def start(self, run_dir, settings):
        self._file = (run_dir / "lines.json").open("a")

    def log(self, values, step):
        print(json.dumps({"step": step, **values}), file=self._file)

    def close(self):
        self._file.close()
"""
# The mean of all samples' x is 1.5 in the first step and 5.5 in the second, whatever the ranks: -0.1 * (1.5 + 5.5).
TRAIN = """
import phalanx, torch
from torch.utils.data import DataLoader, TensorDataset
with phalanx.init() as run:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    data = DataLoader(TensorDataset(torch.arange(8.0).reshape(8, 1)), 4 // run.world_size)
    model, optimizer, data = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1), data)
    for (x,) in run.steps(data):
        with run.accumulate(model):
            run.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
    run.log({"weight": run.unwrap(model).weight.item()})
    print(run.topology.source, run.rank, run.world_size, flush=True)
"""


def add(path: Path, before: str, text: str) -> None:
    """One place in a file of the copy."""
    old = path.read_text()
    assert old.count(before) == 1, (path, before)
    path.write_text(old.replace(before, text + before))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the three recipes say."""
    src = tmp_path_factory.mktemp("recipes") / "src"
    package = src / "phalanx"
    shutil.copytree(ROOT / "src/phalanx", package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "launchers/loop.py").write_text(LAUNCHER)
    (package / "strategies/plain.py").write_text(STRATEGY)
    (package / "trackers/lines.py").write_text(TRACKER)
    registry = package / "registry.py"
    add(registry, '    "ray": Entry(', '    "loop": Entry("phalanx.launchers.loop:Loop", "the shell, on one node"),\n')
    add(
        registry, '    "horovod": Entry(', '    "plain": Entry("phalanx.strategies.plain:Plain", "averages by hand"),\n'
    )
    add(registry, '    "csv": Entry(', '    "lines": Entry("phalanx.trackers.lines:Lines", "lines of JSON"),\n')
    add(package / "rank/launch_variables.py", '    "slurm": {\n', VARIABLES)
    several = '    _Refusal(frozenset({"loop"}), _ANY, ("several",), "the shell starts ranks on its own node"),\n'
    add(package / "planning/cells.py", '    _Refusal(frozenset({"horovodrun"}), _ANY, ("several",)', several)
    return src


def start(sources: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(sources), "PHALANX_DEVICE": "cpu"}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=200, env=environ)


def phalanx(sources: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return start(sources, "-m", "phalanx", *words)


def test_they_train_together(sources: Path, work: Path) -> None:
    (work / "s.py").write_text(TRAIN)
    words = ["--local", "--nproc", "2", "--launcher", "loop", "-s", "plain", "trackers=lines,csv", "s.py"]
    done = phalanx(sources, "run", *words)
    assert done.returncode == 0, done.stderr
    (run_dir,) = run_dirs(work)
    assert done.stdout == "loop 0 2\n"
    assert "\nloop 1 2\n" in (run_dir / "logs/1.log").read_text()
    assert (run_dir / "metrics.csv").exists()
    logged = json.loads((run_dir / "lines.json").read_text())
    assert logged == {"step": 2, "weight": pytest.approx(-0.7)}


def test_a_failed_rank_of_a_new_launcher_is_named(sources: Path, work: Path) -> None:
    (work / "s.py").write_text("import os, sys; sys.exit(3 * int(os.environ['RANK']))")
    done = phalanx(sources, "run", "--local", "--nproc", "2", "--launcher", "loop", "-s", "ddp", "s.py")
    assert done.returncode == 3
    assert "failed: SystemExit: 3" in done.stderr
    (work / "s.py").write_text("import os; os._exit(9)")
    done = phalanx(sources, "run", "--local", "--nproc", "2", "--launcher", "loop", "-s", "ddp", "s.py")
    assert done.returncode == 9
    assert done.stderr.splitlines()[-1].startswith("loop ended with exit code 9")


def test_the_command_and_the_page_know_them(sources: Path, work: Path) -> None:
    (work / "s.py").write_text("")
    plan = phalanx(sources, "plan", "--nproc", "2", "--launcher", "loop", "-s", "plain", "s.py")
    assert plan.returncode == 0, plan.stderr
    assert "LOOP_RANK" in plan.stdout
    refused = phalanx(sources, "plan", "-N", "2", "--launcher", "loop", "-s", "plain", "s.py")
    assert refused.returncode == 2
    assert "the shell starts ranks on its own node" in refused.stderr
    job = phalanx(sources, "submit", "--preview", "--nproc", "2", "-s", "plain", "s.py")
    assert job.returncode == 0, job.stderr
    page = start(sources, str(ROOT / "tools/cells.py")).stdout
    assert "| **loop** | 1 " in page
    assert "\n- **loop**: The shell, on one node.\n" in page
    assert "\n- **plain**: averages by hand.\n" in page
