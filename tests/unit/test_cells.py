import pytest

from phalanx import cells
from phalanx.errors import PlanError
from phalanx.registry import LAUNCHERS, STRATEGIES


def test_every_cell_of_launcher_strategy_and_nodes_is_in_the_table():
    assert set(cells.TABLE) == {(a, b, c) for a in LAUNCHERS for b in STRATEGIES for c in (False, True)}
    assert all(reason is None or reason for reason in cells.TABLE.values())


@pytest.mark.parametrize("launcher", ["torchrun", "srun", "mpirun", "deepspeed", "ray"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("nodes", [1, 16])
def test_distributed_strategies_run_under_every_launcher_of_many_processes(launcher, strategy, nodes):
    cells.check(launcher, strategy, nodes, 8 * nodes)


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
    ],
)
def test_a_missing_cell_is_refused_with_the_reason_and_the_nearest_that_works(
    launcher, strategy, nodes, processes, why, instead
):
    with pytest.raises(PlanError) as caught:
        cells.check(launcher, strategy, nodes, processes)
    assert why in str(caught.value)
    assert instead in str(caught.value)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("nodes", [1, 2])
def test_the_nearest_cell_itself_always_works(nodes, processes):
    for launcher, strategy, _ in cells.TABLE:
        near = cells.nearest(launcher, strategy, nodes, nodes * processes)
        assert cells.refusal(near[0], near[1], nodes, nodes * processes) is None
