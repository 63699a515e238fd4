"""Every launcher × strategy × number of nodes as a real job: the model's weights against their closed form."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from phalanx.planning.cells import NODES, TABLE

from .conftest import Cluster, User
from .train import closed_form

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
TRAIN = Path(__file__).with_name("train.py")
STEPS = 5


@dataclass(frozen=True)
class Launch:
    """One job: a launcher, and the strategies that are trained one after the other in it."""

    launcher: str
    strategies: tuple[str, ...]
    ranks: tuple[int, ...]  # on each node
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        how = "+mpirun" if self.options else ""
        engine = "-horovod" if self.strategies == HOROVOD else ""
        return f"{self.launcher}{how}{engine}-{'-'.join(map(str, self.ranks))}"

    @property
    def nodes(self) -> int:
        return len(self.ranks)

    def words(self) -> list[str]:
        size = ["--ntasks", str(sum(self.ranks))] if len(set(self.ranks)) > 1 else ["--nproc", str(self.ranks[0])]
        words = ["-N", str(self.nodes), *size, "--cpus-per-task", "2", f"name={self.name}", *self.options]
        # One strategy is launched as such; several choose theirs in the script.
        chosen = ["--strategy", self.strategies[0]] if len(self.strategies) == 1 else []
        return [*words, "--launcher", self.launcher, *chosen]


MPIRUN_TORCHRUN = ("torchrun.start=mpirun",)
DDP, HOROVOD = ("ddp",), ("horovod",)
MANY = ("ddp", "fsdp", "deepspeed")
LAUNCHES = [
    *(Launch(launcher, MANY, (2, 2)) for launcher in ("torchrun", "srun", "mpirun", "deepspeed")),
    Launch("torchrun", MANY, (2, 2), MPIRUN_TORCHRUN),
    *(Launch(launcher, HOROVOD, (2, 2)) for launcher in ("srun", "mpirun")),
    *(Launch(launcher, MANY, (2,)) for launcher in ("torchrun", "srun", "mpirun", "deepspeed")),
    *(Launch(launcher, HOROVOD, (2,)) for launcher in ("srun", "mpirun", "horovodrun")),
    *(Launch(launcher, ("single",), (1,)) for launcher in ("torchrun", "srun", "mpirun", "deepspeed")),
    Launch("python", ("single", *MANY, *HOROVOD), (1,)),
    *(Launch(launcher, DDP, (1, 1, 1, 1)) for launcher in ("torchrun", "srun", "mpirun")),
    Launch("torchrun", DDP, (1, 1, 1, 1), MPIRUN_TORCHRUN),
    *(Launch(launcher, DDP, (2, 1)) for launcher in ("srun", "mpirun")),
    Launch("srun", HOROVOD, (2, 1)),
]  # fmt: skip
LACKING = [name for name in ("deepspeed", "horovod", "ray") if find_spec(name) is None]


def skip_without(launch: Launch) -> None:
    lacking = [name for name in LACKING if name in (launch.launcher, *launch.strategies)]
    lacking += ["horovod"] if "horovod" in LACKING and launch.launcher == "horovodrun" else []
    if lacking:
        pytest.skip(f"{' and '.join(lacking)} not installed: `make engines` does it")


@pytest.fixture(scope="module")
def jobs(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """All submitted at once and run to their ends: nodes claim more CPUs than the machine has."""
    user = User(cluster, tmp_path_factory.mktemp("cells"), "work")
    ids = {}
    for launch in LAUNCHES:
        if not set(LACKING) & {launch.launcher.replace("run", ""), *launch.strategies}:
            chosen = f"--strategies={','.join(launch.strategies)}"
            ids[launch] = user.submit(*launch.words(), TRAIN, f"--steps={STEPS}", chosen)
    ended = {launch: cluster.wait(job, timeout=900) for launch, job in ids.items()}
    return {launch: (ended[launch], user.run_dir(launch.name), user.output(launch.name)) for launch in ids}


@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: launch.name)
def test_a_job_of_each_cell_trains_to_the_closed_form(jobs: Any, launch: Launch) -> None:
    skip_without(launch)
    ended, run_dir, output = jobs[launch]
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), output
    for strategy in launch.strategies:
        weights = json.loads((run_dir / f"weights-{strategy}.json").read_text())
        assert list(weights) == ["weight"]
        assert weights["weight"] == pytest.approx(closed_form(STEPS).flatten().tolist(), rel=1e-5), strategy


def test_every_cell_that_works_is_run() -> None:
    """On this cluster, but for Ray's, which are in test_ray, and those in containers, in test_containers."""
    run = {(launch.launcher, name, NODES[launch.nodes > 1]) for launch in LAUNCHES for name in launch.strategies}
    works = {(cell.launcher, cell.strategy, cell.nodes) for cell, reason in TABLE.items() if reason is None}
    assert run == {cell for cell in works if cell[0] != "ray"}


@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: launch.name)
def test_ranks_lie_on_the_nodes_that_were_asked_for(jobs: Any, launch: Launch) -> None:
    skip_without(launch)
    ended, run_dir, _ = jobs[launch]
    facts = [json.loads(path.read_text()) for path in run_dir.glob("facts/*.json")]
    assert sorted(fact["rank"] for fact in facts) == list(range(sum(launch.ranks)))
    assert {fact["world_size"] for fact in facts} == {sum(launch.ranks)}
    hosts = [fact["host"] for fact in facts]
    assert sorted((hosts.count(host) for host in set(hosts)), reverse=True) == list(launch.ranks)
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
        if cell.launcher in ("srun", "mpirun") and sum(cell.ranks) > 1
    ]
    assert len(set(ports)) == len(ports)
    assert not [port for port in ports if first <= port <= last]
