"""Every launcher × strategy × number of nodes as a real job: the model's weights against their closed form."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from .conftest import Cluster, User
from .train import closed_form

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
TRAIN = Path(__file__).with_name("train.py")
STEPS = 5


@dataclass(frozen=True)
class Cell:
    launcher: str
    strategy: str
    nodes: int
    ranks: tuple[int, ...]  # on each node
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.launcher}-{self.strategy}-{'-'.join(map(str, self.ranks))}"

    def words(self) -> list[str]:
        size = ["--ntasks", str(sum(self.ranks))] if len(set(self.ranks)) > 1 else ["--nproc", str(self.ranks[0])]
        words = ["-N", str(self.nodes), *size, "--cpus-per-task", "2", f"name={self.name}", *self.options]
        return [*words, "--launcher", self.launcher.partition("+")[0], "--strategy", self.strategy]


MPIRUN_TORCHRUN = ("torchrun.start=mpirun",)
CELLS = [
    *(Cell(launcher, "ddp", 2, (2, 2)) for launcher in ("torchrun", "srun", "mpirun")),
    *(Cell(launcher, "fsdp", 2, (2, 2)) for launcher in ("torchrun", "srun", "mpirun")),
    *(Cell("torchrun+mpirun", strategy, 2, (2, 2), MPIRUN_TORCHRUN) for strategy in ("ddp", "fsdp")),
    *(Cell(launcher, "ddp", 1, (2,)) for launcher in ("torchrun", "srun", "mpirun")),
    *(Cell(launcher, "ddp", 4, (1, 1, 1, 1)) for launcher in ("torchrun", "srun", "mpirun")),
    Cell("torchrun+mpirun", "ddp", 4, (1, 1, 1, 1), MPIRUN_TORCHRUN),
    Cell("srun", "ddp", 2, (2, 1)),
    Cell("mpirun", "ddp", 2, (2, 1)),
    Cell("python", "single", 1, (1,)),
]  # fmt: skip


@pytest.fixture(scope="module")
def jobs(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """All cells submitted at once and run to their ends: nodes claim more CPUs than the machine has."""
    user = User(cluster, tmp_path_factory.mktemp("cells"), "work")
    ids = {cell: user.submit(*cell.words(), TRAIN, f"--steps={STEPS}") for cell in CELLS}
    ended = {cell: cluster.wait(job, timeout=600) for cell, job in ids.items()}
    return {cell: (ended[cell], user.run_dir(cell.name), user.output(cell.name)) for cell in CELLS}


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_a_job_of_each_cell_trains_to_the_closed_form(jobs: Any, cell: Cell) -> None:
    ended, run_dir, output = jobs[cell]
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), output
    weights = json.loads((run_dir / "weights.json").read_text())
    assert list(weights) == ["weight"]
    assert weights["weight"] == pytest.approx(closed_form(STEPS).flatten().tolist(), rel=1e-5)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_ranks_lie_on_the_nodes_that_were_asked_for(jobs: Any, cell: Cell) -> None:
    ended, run_dir, _ = jobs[cell]
    facts = [json.loads(path.read_text()) for path in run_dir.glob("facts/*.json")]
    assert sorted(fact["rank"] for fact in facts) == list(range(sum(cell.ranks)))
    assert {fact["world_size"] for fact in facts} == {sum(cell.ranks)}
    hosts = [fact["host"] for fact in facts]
    assert sorted((hosts.count(host) for host in set(hosts)), reverse=True) == list(cell.ranks)
    assert len(set(hosts)) == int(ended["NumNodes"])
    for host in set(hosts):
        here = sorted(fact["local_rank"] for fact in facts if fact["host"] == host)
        assert here == list(range(len(here)))


def test_jobs_that_ran_at_once_on_one_node_met_at_different_ports(jobs: Any) -> None:
    """A rank reads MASTER_PORT from its environment; ports of ephemeral connections are never taken."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = [
        int(json.loads((run_dir / "facts" / "0.json").read_text())["variables"]["MASTER_PORT"])
        for cell, (_, run_dir, _) in jobs.items()
        if cell.launcher in ("srun", "mpirun")
    ]
    assert len(set(ports)) == len(ports)
    assert not [port for port in ports if first <= port <= last]
