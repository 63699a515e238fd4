import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from phalanx.errors import PlanError
from phalanx.planning import cells
from phalanx.registry import LAUNCHERS, STRATEGIES

ROOT = Path(__file__).parents[2]
# By hand, from what the launchers and engines can do: who starts what, on one node and on several.
ONE = {
    "python": {"single", "ddp", "fsdp", "deepspeed", "horovod"},
    "torchrun": {"single", "ddp", "fsdp", "deepspeed"},
    "srun": {"single", "ddp", "fsdp", "deepspeed", "horovod"},
    "mpirun": {"single", "ddp", "fsdp", "deepspeed", "horovod"},
    "horovodrun": {"horovod"},
    "deepspeed": {"single", "ddp", "fsdp", "deepspeed"},
    "ray": {"ddp", "fsdp", "deepspeed"},
}
SEVERAL = {**{name: able - {"single"} for name, able in ONE.items()}, "python": set(), "horovodrun": set()}


@pytest.mark.parametrize("runtime", cells.RUNTIMES)
@pytest.mark.parametrize(("nodes", "able"), [("one", ONE), ("several", SEVERAL)])
def test_the_table_says_of_every_cell_whether_it_works(runtime, nodes, able):
    for launcher, strategy in product(LAUNCHERS, STRATEGIES):
        reason = cells.TABLE[cells.Cell(launcher, strategy, runtime, nodes)]
        assert (reason is None) == (strategy in able[launcher]), (launcher, strategy)
        assert reason is None or len(reason) > 20
    assert len(cells.TABLE) == len(LAUNCHERS) * len(STRATEGIES) * 4


@pytest.mark.parametrize(
    ("launcher", "strategy", "nodes", "processes", "why", "instead"),
    [
        ("python", "ddp", 1, 2, "python starts one process, and 2", "--launcher torchrun --strategy ddp"),
        ("python", "fsdp", 2, 2, "python starts one process", "--launcher torchrun --strategy fsdp"),
        ("torchrun", "single", 1, 4, "single is one process, and 4", "--launcher torchrun --strategy ddp"),
        ("srun", "single", 2, 2, "single is one process", "--launcher srun --strategy ddp"),
        ("python", "single", 1, 3, "single is one process", "--launcher torchrun --strategy ddp"),
        ("horovodrun", "ddp", 1, 2, "Horovod's own communication", "--launcher torchrun --strategy ddp"),
        ("ray", "single", 1, 1, "groups of workers", "--launcher torchrun --strategy single"),
        ("torchrun", "horovod", 1, 2, "torchrun cannot start Horovod", "--launcher horovodrun --strategy horovod"),
        ("torchrun", "horovod", 2, 4, "torchrun cannot start Horovod", "--launcher srun --strategy horovod"),
        ("horovodrun", "horovod", 2, 4, "needs ssh", "--launcher srun --strategy horovod"),
        ("deepspeed", "horovod", 2, 4, "cannot start Horovod", "--launcher srun --strategy horovod"),
        ("ray", "horovod", 1, 2, "no Horovod any more", "--launcher horovodrun --strategy horovod"),
        ("python", "deepspeed", 1, 2, "python starts one process, and 2", "--launcher torchrun --strategy deepspeed"),
    ],
)
@pytest.mark.parametrize("runtime", ["venv", "apptainer", "singularity"])
def test_a_missing_cell_is_refused_with_the_reason_and_the_nearest_that_works(
    launcher, strategy, nodes, processes, why, instead, runtime
):
    with pytest.raises(PlanError) as caught:
        cells.check(cells.cell(launcher, strategy, runtime, nodes), nodes, processes)
    assert why in str(caught.value)
    assert instead in str(caught.value)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("nodes", [1, 2])
def test_the_nearest_cell_itself_always_works(nodes, processes):
    for cell in cells.TABLE:
        if (cell.nodes == "several") == (nodes > 1):
            near = cells.nearest(cell, nodes * processes)
            assert cells.refusal(near, nodes * processes) is None
            assert near.strategy == cell.strategy or cell.strategy == "single"


@pytest.mark.parametrize(
    ("strategy", "nodes", "processes", "launcher"),
    [
        ("single", 1, 1, "python"),
        ("ddp", 1, 4, "torchrun"),
        ("fsdp", 2, 8, "torchrun"),
        ("deepspeed", 2, 8, "torchrun"),
        ("deepspeed", 1, 1, "python"),
        ("horovod", 1, 4, "horovodrun"),
        ("horovod", 1, 1, "horovodrun"),
        ("horovod", 2, 8, "srun"),
    ],
)
def test_the_launcher_that_auto_chooses_can_start_the_strategy(strategy, nodes, processes, launcher):
    assert cells.default_launcher(strategy, nodes, processes) == launcher
    cells.check(cells.cell(launcher, strategy, "venv", nodes), nodes, processes)


def test_the_page_of_the_docs_is_the_tables():
    done = subprocess.run([sys.executable, ROOT / "tools/cells.py"], capture_output=True, text=True, check=True)
    assert (ROOT / "docs/cells.md").read_text(encoding="utf-8") == done.stdout, "python tools/cells.py >docs/cells.md"
    for launcher in LAUNCHERS:
        assert f"\n- **{launcher}**: " in done.stdout
