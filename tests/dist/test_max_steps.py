"""`max_steps`: training ends at exactly that step on all ranks, and what comes after the loop is still done."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import phalanx
from phalanx.errors import UsageError
from phalanx.records import Epoch, Step, read_records
from tests.dist import engines
from tests.dist.harness import run_ranks

pytestmark = pytest.mark.slow

BOTH = [("single", 1), ("ddp", 2), ("fsdp", 2)]
ENGINES = [pytest.param(*line, marks=engines.needs(line[0])) for line in [("deepspeed", 2), ("horovod", 2)]]


class Stream(IterableDataset[Tensor]):
    """Numbered items: 10 in a pass."""

    def __iter__(self) -> Any:
        return iter(torch.arange(10.0).reshape(-1, 1))


def loaders(run: Any, kinds: str) -> list[DataLoader[Any]]:
    """`s`: a stream; else map-style with 10 numbered samples, shuffled: 5 global batches of two."""
    items = TensorDataset(torch.arange(10.0).reshape(-1, 1))
    size = 2 // run.world_size
    return [DataLoader(Stream() if kind == "s" else items, size, shuffle=kind != "s") for kind in kinds]


def train(strategy: str, most: int, kinds: str, accumulate: int, resume: bool, how: str = "") -> dict[str, Any]:
    """The loss is (w - 1)², whatever the data: from 0, k steps at a rate of 0.1 give 1 - 0.8ᵏ."""
    settings: dict[str, Any] = {"resume": "latest"} if resume else {}
    settings |= {"name": f"most-{kinds}-{accumulate}", "accumulate": accumulate, "max_steps": most, "seed": 5}
    with phalanx.init(strategy=strategy, progress=False, **settings) as run:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, val, *train = run.prepare(model, optimizer, *loaders(run, "v" + kinds))
        epochs, seen, evaluated, shown = [], [], [], []
        run._session.progress.start = lambda title, total, done=0: shown.append(total)
        for epoch in run.epochs(*([3] if how == "count" else [])):
            epochs.append(epoch)
            for loader in train:
                for batch in run.steps(loader):
                    x = batch[0] if isinstance(batch, list) else batch
                    with run.accumulate(model):
                        run.backward((model(torch.ones_like(x)) - 1).square().mean())
                        optimizer.step()
                        optimizer.zero_grad()
                    seen.append(run.gather(x).flatten().tolist())
                    if how == "stop" and run.step == 2 and run.rank == 0:
                        run.stop()
                    if how == "break" and run.sync_gradients and run.step == most - 2:
                        break
            evaluated.append(sum(len(x) for (x,) in run.evaluate(val)))
            run.log({"epoch": epoch})
            run.save()
        return {
            "epochs": epochs, "seen": seen, "step": run.step, "shown": shown, "dir": str(run.run_dir),
            "evaluated": evaluated, "weight": run.broadcast(float(run.state_dict(model).get("weight", 0))),
        }  # fmt: skip


def checked(ranks: list[dict[str, Any]], step: int) -> dict[str, Any]:
    for rank in ranks:
        assert (rank["step"], rank["epochs"], rank["seen"]) == tuple(ranks[0][k] for k in ("step", "epochs", "seen"))
    assert ranks[0]["step"] == step
    assert float(ranks[0]["weight"]) == pytest.approx(1 - 0.8**step, abs=1e-5)
    assert sum(rank["evaluated"][-1] for rank in ranks if rank["evaluated"]) in (0, 10)
    return ranks[0]


def all_kinds(strategy: str, cases: list[tuple[str, int]]) -> list[dict[str, Any]]:
    return [train(strategy, 7, kinds, accumulate, False) for kinds, accumulate in cases]


@pytest.mark.parametrize(("strategy", "world_size"), [*BOTH, *ENGINES])
def test_training_ends_at_that_step(tmp_path: Path, strategy: str, world_size: int) -> None:
    """An epoch has 5 steps, 3 with accumulation, 10 with two loaders: 7 steps end inside an epoch."""
    cases = [("m", 1), ("m", 2), ("s", 1), ("mm", 1)][: 4 if (strategy, world_size) in BOTH else 2]
    env = engines.environ_for(strategy, world_size) if strategy in ("deepspeed", "horovod") else None
    ranks = run_ranks(all_kinds, world_size, strategy, cases, folder=tmp_path, env=env)
    for number, (kinds, accumulate) in enumerate(cases):
        got = checked([rank[number] for rank in ranks], 7)
        of_epoch = math.ceil(5 / accumulate) * len(kinds)
        assert got["epochs"] == list(range(math.ceil(7 / of_epoch)))
        assert got["shown"][-1] == 7 % of_epoch % 5
        records = [record for record in read_records(got["dir"]) if record.rank == 0]
        assert [record.step for record in records if isinstance(record, Step)] == list(range(1, 8))
        whole = [record.epoch for record in records if isinstance(record, Epoch)]
        assert whole == list(range(7 // of_epoch))  # the last one isn't a whole epoch's time
        assert (Path(got["dir"]) / "checkpoints" / "7").is_dir()  # what stands after the loop was done


@pytest.mark.parametrize(("strategy", "world_size"), BOTH)
def test_a_resumed_run_goes_on_to_it(tmp_path: Path, strategy: str, world_size: int) -> None:
    """7 steps and 3 more see what 10 steps at once see; at 10 there is none left, until it is raised."""

    def run(most: int, resume: bool, folder: Path = tmp_path) -> dict[str, Any]:
        return checked(run_ranks(train, world_size, strategy, most, "m", 1, resume, folder=folder), most)

    at_once = tmp_path / "at-once"
    at_once.mkdir()
    whole = run(12, False, at_once)
    parts = [run(7, False), run(10, True), run(10, True), run(12, True)]
    assert [part["epochs"] for part in parts] == [[0, 1], [1], [], [2]]
    assert [batch for part in parts for batch in part["seen"]] == whole["seen"]


@pytest.mark.parametrize(
    ("how", "most", "step", "epochs"),
    [("count", 9, 9, [0, 1]), ("count", 99, 15, [0, 1, 2]), ("count", 10, 10, [0, 1]), ("break", 10, 10, [0, 1, 2])],
)
def test_it_ends_at_whichever_comes_first(tmp_path: Path, how: str, most: int, step: int, epochs: list[int]) -> None:
    """A loop that is left by `break` at step 9 leaves one step to the next epoch."""
    got = checked(run_ranks(train, 2, "ddp", most, "m", 1, False, how, folder=tmp_path), step)
    assert got["epochs"] == epochs


def test_a_stop_before_it_ends_the_run(tmp_path: Path) -> None:
    ranks = run_ranks(train, 2, "ddp", 50, "m", 1, False, "stop", folder=tmp_path)
    assert checked(ranks, ranks[0]["step"])["step"] <= 5


def without(most: int | None) -> str:
    with phalanx.init(max_steps=most, progress=False) as run:
        try:
            for _ in run.epochs():
                pass
        except UsageError as error:
            return str(error)
        return "ended"


def test_epochs_without_an_end_are_refused(tmp_path: Path) -> None:
    (no_number,) = run_ranks(without, 1, None, folder=tmp_path)
    assert "max_steps" in no_number
    assert "epochs(N)" in no_number
    (no_step,) = run_ranks(without, 1, 5, folder=tmp_path)
    assert "no step" in no_step
    assert "max_steps=5" in no_step
