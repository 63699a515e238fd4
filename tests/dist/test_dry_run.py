"""A dry run: one group of each loop, one batch of each evaluation, one checkpoint, nothing of a real run touched."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from phalanx.errors import PlanError, UsageError
from phalanx.records import Exit, Start, Step, read_records
from phalanx.rundir import find_run_dir, is_dry
from tests.dist import engines
from tests.dist.harness import RankFailed, run_ranks

pytestmark = pytest.mark.slow

BOTH = [("single", 1), ("ddp", 2), ("fsdp", 2)]
ENGINES = [pytest.param(*line, marks=engines.needs(line[0])) for line in [("deepspeed", 2), ("horovod", 2)]]


def train(strategy: str, settings: dict[str, Any], how: str = "") -> dict[str, Any]:
    """Two training loops of 5 and 10 steps, an evaluation, a plain loop, and a save; three epochs."""
    with phalanx.init(strategy=strategy, name="try", progress=False, trackers=["csv"], **settings) as run:
        model = nn.Linear(3, 1)
        size = 2 // run.world_size
        x = torch.ones(20, 3)
        loaders = [DataLoader(TensorDataset(x), size, shuffle=True), DataLoader(TensorDataset(x), size)]
        val = DataLoader(TensorDataset(x[:10]), size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model, optimizer, a, b, val = run.prepare(model, optimizer, *loaders, val)
        seen: dict[str, list[int]] = {"epochs": [], "a": [], "b": [], "val": [], "plain": []}
        at = None
        for epoch in run.epochs(3):
            at = run.step if at is None else at
            seen["epochs"].append(epoch)
            for name, loader in (("a", a), ("b", b)):
                for (batch,) in run.steps(loader):
                    seen[name].append(len(batch))
                    with run.accumulate(model):
                        loss = model(batch).square().mean()
                        run.backward(loss)
                        optimizer.step()
                        optimizer.zero_grad()
            seen["val"] += [len(batch) for (batch,) in run.evaluate(val)]
            seen["plain"] += [len(batch) for (batch,) in val]
            run.log({"loss": 0.25})
            if how == "fail":
                run.save()
                if run.rank == run.world_size - 1:
                    raise OSError("the script's own")
            if how == "save":
                run.save()
                run.save()
        return {**seen, "at": at, "step": run.step, "dir": str(run.run_dir), "weight": float(loss)}


DRY = {"PHALANX_DRY_RUN": "1"}


def environ(strategy: str, world_size: int) -> Any:
    if strategy not in ("deepspeed", "horovod"):
        return DRY
    of = engines.environ_for(strategy, world_size)
    return lambda rank: {**of(rank), **DRY}


def files(folder: Path) -> dict[str, Any]:
    """Everything below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("strategy", "world_size"), [*BOTH, *ENGINES])
def test_one_of_each(tmp_path: Path, strategy: str, world_size: int) -> None:
    env = environ(strategy, world_size)
    ranks = run_ranks(train, world_size, strategy, {"accumulate": 4}, folder=tmp_path, env=env)
    one = 2 // world_size
    for rank in ranks:
        assert rank["epochs"] == [0]
        assert (rank["a"], rank["b"], rank["val"], rank["plain"]) == ([one] * 4, [one] * 4, [one], [one])
        assert rank["step"] == 2
    run_dir = Path(ranks[0]["dir"])
    assert is_dry(run_dir)
    assert not list(run_dir.glob("*checkpoints*"))
    assert not (run_dir / "metrics.csv").exists()
    assert "loss,0.25" in (run_dir / "metrics.dry.csv").read_text()
    records = read_records(run_dir)
    assert {(record.dry, record.rank) for record in records if isinstance(record, Start | Exit)} == {
        (True, rank) for rank in range(world_size)
    }
    said = (run_dir / "logs" / "0.log").read_text()
    for words in (
        f"4 parameters, world size {world_size}",
        f"training loop 1: TensorDataset, 4 batches of [float32 ({one}, 3)] on this rank, 8 samples over all ranks; "
        "a whole pass has 10 batches a rank, 3 steps",
        "training loop 2",
        f"evaluation 1: TensorDataset, 1 batch of [float32 ({one}, 3)]",
        "logged: loss 0.25",
        "checkpoint of ",
        "MiB of memory in one rank",
    ):
        assert f"dry run: {words}" in said or words in said
    with pytest.raises(PlanError, match="no run 'latest'"):
        find_run_dir(tmp_path / "runs", "try", "latest")
    with pytest.raises(PlanError, match="dry run"):
        find_run_dir(tmp_path / "runs", "try", run_dir.name)


@pytest.mark.parametrize(("strategy", "world_size"), BOTH)
def test_a_run_that_is_gone_on_with_is_left_as_it_was(tmp_path: Path, strategy: str, world_size: int) -> None:
    """At the end of an epoch, where the next one is tried; its checkpoint is read, and nothing of it is written."""
    real = run_ranks(train, world_size, strategy, {"max_steps": 20}, "save", folder=tmp_path)
    run_dir = Path(real[0]["dir"])
    before = files(run_dir)
    env = {**DRY, "PHALANX_RESUME": "latest"}
    dry = run_ranks(train, world_size, strategy, {}, "save", folder=tmp_path, env=env)
    assert (dry[0]["at"], dry[0]["epochs"], dry[0]["step"]) == (20, [1], 22)
    assert files(run_dir) == before
    assert Path(dry[0]["dir"]) != run_dir
    assert not list(Path(dry[0]["dir"]).glob("*checkpoints*"))
    assert find_run_dir(tmp_path / "runs", "try", "latest") == run_dir


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_failure_leaves_no_checkpoint(tmp_path: Path, world_size: int) -> None:
    with pytest.raises(RankFailed, match="the script's own"):
        run_ranks(train, world_size, "auto", {}, "fail", folder=tmp_path, env=DRY)
    (run_dir,) = (tmp_path / "runs" / "try").iterdir()
    assert not list(run_dir.glob("*checkpoints*"))
    assert [record.step for record in read_records(run_dir) if isinstance(record, Step)]


class Unpicklable:
    def state_dict(self) -> Any:
        return {"lambda": lambda: 0}

    def load_state_dict(self, state: Any) -> None: ...


def unsaveable() -> None:
    with phalanx.init(progress=False) as run:
        run.prepare(nn.Linear(1, 1))
        run._session.contents.stateful["own"] = Unpicklable()


def test_what_cannot_be_saved_is_seen_though_checkpoints_are_off(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="pickle"):
        run_ranks(unsaveable, 1, folder=tmp_path, env=DRY)
    (run_dir,) = tmp_path.glob("runs/*/*")
    assert not list(run_dir.glob("*checkpoints*"))


def test_it_is_the_launchs_to_say() -> None:
    os.environ.pop("PHALANX_DRY_RUN", None)
    with pytest.raises(UsageError, match="--dry-run"):
        phalanx.init(dry_run=True)
