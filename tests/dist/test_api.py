"""What `Run` promises, at world sizes 1 to 4 and under each strategy."""

from __future__ import annotations

import json
import math
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info

import phalanx
from phalanx.errors import ConfigError, DataError, PhalanxError, PlanError, UsageError
from phalanx.records import Exit, Start, Step, read_records
from tests.dist.harness import run_ranks
from tests.dist.test_parity import full

pytestmark = pytest.mark.slow

BOTH = pytest.mark.parametrize(("strategy", "world_size"), [("single", 1), ("ddp", 2), ("fsdp", 2)])


def line(n: int) -> TensorDataset:
    x = torch.arange(float(n)).reshape(n, 1)
    return TensorDataset(x, 2 * x)


# Values over ranks.


class Pair(NamedTuple):
    first: float
    second: float


def values() -> dict[str, Any]:
    with phalanx.init(progress=False) as run:
        r, w = run.rank, run.world_size
        assert dist.is_initialized() == (w > 1)
        uneven = torch.full((r + 1, 2), float(r))
        nothing = torch.tensor(float("nan")) if r == 0 and w > 1 else torch.tensor(10.0 * r)
        return {
            "mean": run.reduce(torch.tensor([1.0 * r, 2.0])).tolist(),
            "number": run.reduce(r, op="sum"),
            "integers": run.reduce(torch.tensor([r]), op="mean").tolist(),
            "min": run.reduce(float(r), op="min"),
            "max": run.reduce({"a": r, "b": torch.tensor(-r)}, op="max"),
            "weighted": run.reduce(float(r), weight=r + 1),
            "ignores": float(run.reduce(nothing, weight=float(r if w > 1 else 1))),
            "none": math.isnan(run.reduce(1.0, weight=0)),
            "gather": run.gather(uneven).tolist(),
            "scalars": run.gather(torch.tensor(r)).tolist(),
            "objects": run.gather({"rank": r}) if w > 1 else [{"rank": 0}],
            "broadcast": run.broadcast(torch.tensor([r]), src=w - 1).tolist(),
            "object": run.broadcast(f"from {r}", src=w - 1),
            "main": run.is_main,
            "current": phalanx.current() is run,
            "pair": run.reduce(Pair(r, np.float32(r)), op="sum"),
        }


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_values_over_ranks(tmp_path: Path, world_size: int) -> None:
    w = world_size
    mean = sum(range(w)) / w
    weights = sum(range(1, w + 1))
    for rank, got in enumerate(run_ranks(values, w, folder=tmp_path)):
        assert got["mean"] == pytest.approx([mean, 2.0])
        assert got["number"] == sum(range(w))
        assert got["integers"] == pytest.approx([mean])
        assert got["min"] == 0.0
        assert got["max"] == {"a": w - 1, "b": 0}
        assert got["weighted"] == pytest.approx(sum(r * (r + 1) for r in range(w)) / weights)
        expected = sum(10.0 * r * r for r in range(w)) / sum(range(w)) if w > 1 else 0.0
        assert got["ignores"] == pytest.approx(expected)
        assert got["none"]
        assert got["gather"] == [[float(r)] * 2 for r in range(w) for _ in range(r + 1)]
        assert got["scalars"] == list(range(w))
        assert got["objects"] == [{"rank": r} for r in range(w)]
        assert got["broadcast"] == [w - 1]
        assert got["object"] == f"from {w - 1}"
        assert got["main"] == (rank == 0)
        assert got["current"]
        assert got["pair"] == Pair(sum(range(w)), sum(range(w)))


# The user's own module, and its weights.


class Tied(nn.Module):
    """Odd sizes, a tied weight, buffers (one of them not saved), a frozen part and a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.blocks = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
        self.norm = nn.BatchNorm1d(5).eval()
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[0].requires_grad_(False)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return self.head(self.norm(hidden))

    def greedy(self) -> str:
        return "mine"


def exported(strategy: str) -> tuple[dict[str, Tensor], bool, str]:
    with phalanx.init(strategy=strategy, seed=3, progress=False) as run:
        net = Tied()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        rows = torch.arange(8)
        loader = DataLoader(TensorDataset(rows % 7, (rows * 3) % 7), batch_size=-(-8 // run.world_size))
        model, optimizer, loader = run.prepare(net, optimizer, loader)
        for x, y in run.steps(loader):
            run.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
        weights = run.state_dict(model)
        kept = {name: value.clone() for name, value in weights.items()}
        for parameter in model.parameters():  # goes on training: the export is a copy
            parameter.data.add_(1.0)
        assert all(torch.equal(kept[name], value) for name, value in weights.items())
        return weights, run.unwrap(model) is net, run.unwrap(model).greedy()


@pytest.mark.parametrize(("strategy", "world_size"), [("ddp", 2), ("fsdp", 2), ("fsdp", 1), ("fsdp", 3)])
def test_exported_weights_are_a_single_processs(tmp_path: Path, strategy: str, world_size: int) -> None:
    ((alone, *_),) = run_ranks(exported, 1, "single", folder=tmp_path)
    results = run_ranks(exported, world_size, strategy, folder=tmp_path)
    weights = results[0][0]
    assert list(weights) == list(Tied().state_dict())
    assert all(type(value) is Tensor and value.device.type == "cpu" for value in weights.values())
    assert weights["head.weight"].data_ptr() == weights["embed.weight"].data_ptr()
    for rank, (others, again, mine) in enumerate(results):
        assert (again, mine) == (True, "mine")
        assert rank == 0 or others == {}
    plain = Tied()
    plain.load_state_dict(weights)
    torch.testing.assert_close(dict(plain.state_dict()), alone)


# Evaluation.


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.drop = nn.Dropout(0.5)
        self.frozen = nn.BatchNorm1d(1).eval()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.frozen(self.drop(self.linear(x)))


def evaluate(strategy: str, size: int) -> dict[str, Any]:
    with phalanx.init(strategy=strategy, progress=False) as run:
        model, val = run.prepare(Counting(), DataLoader(line(size), batch_size=2))
        inner = model.module if hasattr(model, "module") else model
        ids, modes, grads = [], set(), set()
        total, n = torch.zeros(()), 0
        for x, y in run.evaluate(val):
            out = model(x)
            assert out.shape == x.shape
            modes.add(inner.drop.training)
            grads.add(torch.is_grad_enabled())
            ids += x.flatten().tolist()
            total, n = total + y.sum(), n + len(x)
        mean = run.reduce(total / n if n else total * float("nan"), weight=n)
        after = (inner.training, inner.drop.training, inner.frozen.training, torch.is_grad_enabled())
        broken_off = [next(iter(run.evaluate(val)))[0].shape[0]]
        return {
            "ids": ids,
            "modes": modes,
            "grads": grads,
            "mean": float(mean),
            "calls": inner.calls,
            "after": after,
            "off": (broken_off, torch.is_grad_enabled()),
        }


@pytest.mark.parametrize("size", [1, 5, 8])
@BOTH
def test_evaluation_counts_every_sample_once(tmp_path: Path, strategy: str, world_size: int, size: int) -> None:
    ranks = run_ranks(evaluate, world_size, strategy, size, folder=tmp_path)
    assert sorted(i for rank in ranks for i in rank["ids"]) == list(range(size))
    for rank in ranks:
        assert rank["mean"] == pytest.approx(sum(2.0 * i for i in range(size)) / size)
        assert rank["calls"] == ranks[0]["calls"] == math.ceil(size / (2 * world_size))
        assert rank["modes"] == {False}
        assert rank["grads"] == {False}
        assert rank["after"] == (True, True, False, True)
        assert rank["off"][1] is True


# Stopping.


def stop_early(where: str) -> dict[str, Any]:
    with phalanx.init(progress=False) as run:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        model, optimizer, loader = run.prepare(model, optimizer, DataLoader(line(4000), batch_size=2))
        epochs = []
        for epoch in run.epochs(50):
            epochs.append(epoch)
            for x, y in run.steps(loader):
                run.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                if where == "step" and run.rank == run.world_size - 1 and run.step == 7:
                    run.stop()
            if where == "epoch" and run.rank == run.world_size - 1 and epoch == 1:
                run.stop()
        again = [0 for _ in run.steps(loader)]
        return {"step": run.step, "epochs": epochs, "again": again, "weight": next(model.parameters()).item()}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_stop_on_one_rank_ends_all_after_the_same_step(tmp_path: Path, world_size: int) -> None:
    ranks = run_ranks(stop_early, world_size, "step", folder=tmp_path)
    assert len({(rank["step"], rank["weight"]) for rank in ranks}) == 1
    assert 8 <= ranks[0]["step"] <= math.ceil(4000 / (2 * world_size))  # at the latest at the end of the pass
    assert all(rank["epochs"] == [0] and rank["again"] == [] for rank in ranks)


def test_a_stop_between_epochs_ends_before_the_next(tmp_path: Path) -> None:
    for rank in run_ranks(stop_early, 2, "epoch", folder=tmp_path):
        assert rank["epochs"] == [0, 1]
        assert rank["step"] == 2000


# Preparing.


def same_weights_and_other_dropout(strategy: str) -> dict[str, Any]:
    with phalanx.init(strategy=strategy, seed=3, progress=False) as run:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        if run.rank == 1:
            with torch.no_grad():
                model[0].weight.add_(1.0)
                model[1].running_mean.add_(7.0)
        shared = torch.rand(1).item()
        model = run.prepare(model)
        return {
            "state": {k.removeprefix("module."): full(v) for k, v in model.state_dict().items()},
            "shared": shared,
            "own": torch.rand(1).item(),
        }


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_prepare_gives_all_ranks_rank_0s_weights_and_their_own_randomness(tmp_path: Path, strategy: str) -> None:
    first, second = run_ranks(same_weights_and_other_dropout, 2, strategy, folder=tmp_path)
    assert first["state"]["1.running_mean"].eq(0).all()
    for key, value in first["state"].items():
        assert torch.equal(value, second["state"][key])
    assert first["shared"] == second["shared"]
    assert first["own"] != second["own"]
    assert run_ranks(same_weights_and_other_dropout, 2, strategy, folder=tmp_path)[1]["own"] == second["own"]


def _nested(run: phalanx.Run) -> None:
    loader = run.prepare(DataLoader(line(4)))
    for _ in run.steps(loader):
        next(iter(run.steps(loader)))


def _mixed_weights(run: phalanx.Run, model: nn.Module) -> None:
    run.backward(model(torch.ones(1, 1)).sum(), weight=1)
    run.backward(model(torch.ones(1, 1)).sum())


MISTAKES: dict[str, Callable[[phalanx.Run, nn.Module, torch.optim.Optimizer], Any]] = {
    "": lambda run, model, optimizer: None,
    "few": lambda run, model, optimizer: run.prepare(model, optimizer, DataLoader(line(1))),
    "few shuffled": lambda run, model, optimizer: run.prepare(DataLoader(line(1), shuffle=True)),
    "number": lambda run, model, optimizer: run.prepare(model, 3),
    "no model": lambda run, model, optimizer: run.prepare(optimizer),
    "twice": lambda run, model, optimizer: run.prepare(run.prepare(model)),
    "raw loader": lambda run, model, optimizer: next(iter(run.steps(DataLoader(line(4))))),
    "nested": lambda run, model, optimizer: _nested(run),
    "second init": lambda run, model, optimizer: phalanx.init(),
    "log": lambda run, model, optimizer: run.log({"x": "text"}),
    "src": lambda run, model, optimizer: run.broadcast(1, src=5),
    "op": lambda run, model, optimizer: run.reduce(1, op="median"),  # type: ignore[arg-type]
    "wrap": lambda run, model, optimizer: run.prepare(nn.Sequential(nn.Linear(1, 1))),
    "mixed weights": lambda run, model, optimizer: _mixed_weights(run, model),
}


def error_with(mistake: str, settings: dict[str, Any]) -> tuple[str, str]:
    try:
        with phalanx.init(progress=False, **settings) as run:
            model = nn.Linear(1, 1)
            MISTAKES[mistake](run, model, torch.optim.SGD(model.parameters(), lr=0.1))
    except PhalanxError as error:
        return type(error).__name__, str(error)
    return "", "no error"


ERRORS: list[tuple[str, int, dict[str, Any], type[PhalanxError], list[str]]] = [
    ("few", 2, {}, DataError, ["1 samples", "2 ranks"]),
    ("few shuffled", 3, {}, DataError, ["1 samples", "3 ranks"]),
    ("number", 1, {}, UsageError, ["'int'", "position 1", "DataLoader"]),
    ("no model", 1, {}, UsageError, ["SGD", "no prepared model"]),
    ("twice", 1, {}, UsageError, ["Linear", "second time"]),
    ("raw loader", 1, {}, UsageError, ["DataLoader", "run.prepare()"]),
    ("nested", 1, {}, UsageError, ["inside another"]),
    ("second init", 1, {}, UsageError, ["twice", "phalanx.current()"]),
    ("log", 1, {}, UsageError, ["'text'", "'x'", "number"]),
    ("src", 1, {}, UsageError, ["src=5", "0 to 0"]),
    ("op", 1, {}, UsageError, ["median", "mean, sum, min or max"]),
    ("mixed weights", 1, {}, UsageError, ["weight"]),
    ("", 2, {"strategy": "single"}, PlanError, ["single", "world size is 2"]),
    ("", 2, {"strategy": "fsdp", "fsdp": {"replicate": 3}}, ConfigError, ["fsdp.replicate=3", "world size 2"]),
    ("wrap", 1, {"strategy": "fsdp", "fsdp": {"wrap": "Linaer"}}, ConfigError, ["Linaer", "Did you mean 'Linear'"]),
    ("", 1, {"strategy": "dpp"}, ConfigError, ["dpp", "single", "ddp", "fsdp", "Did you mean 'ddp'"]),
    ("", 1, {"precison": "bf16"}, ConfigError, ["precison", "precision"]),
    ("", 2, {"backend": "nccl"}, PlanError, ["nccl", "cpu", "gloo"]),
    ("", 1, {"device": "cuda"}, PlanError, ["cuda", "--device cpu"]),
]


@pytest.mark.parametrize(
    ("make", "world_size", "settings", "kind", "words"), ERRORS, ids=[f"{e[0] or e[2]}" for e in ERRORS]
)
def test_bad_use_is_a_clear_error_on_every_rank(
    tmp_path: Path, make: str, world_size: int, settings: dict[str, Any], kind: type[PhalanxError], words: list[str]
) -> None:
    if settings.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has CUDA devices, and the error is for those without")
    for name, message in run_ranks(error_with, world_size, make, settings, folder=tmp_path, timeout=60):
        assert name == kind.__name__, message
        for word in words:
            assert word in message


def no_current() -> str:
    try:
        phalanx.current()
    except UsageError as error:
        return str(error)
    return "no error"


def test_current_without_a_run(tmp_path: Path) -> None:
    assert "phalanx.init()" in run_ranks(no_current, 1, folder=tmp_path)[0]


# Iterable data.


class Stream(IterableDataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Any:
        return iter(range(self.size))


def stream(size: int, workers: int, batch: int) -> dict[str, Any]:
    with phalanx.init(progress=False) as run:
        model = nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            model.weight.zero_()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer, loader = run.prepare(
            model, optimizer, DataLoader(Stream(size), batch_size=batch, num_workers=workers)
        )
        ids, moves = [], []
        for x in run.steps(loader):
            before = float(next(model.parameters()))
            run.backward(-model(x[:, None].float()).mean())
            optimizer.step()
            optimizer.zero_grad()
            moves.append(float(next(model.parameters())) - before)
            if run._session.gradients.micro.local:
                ids += x.tolist()
        seen = [i for x in run.evaluate(loader) for i in x.tolist()]
        return {"ids": ids, "moves": moves, "seen": seen, "step": run.step}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [1, 7, 8])
def test_iterable_data_is_seen_once(tmp_path: Path, size: int, workers: int) -> None:
    """Over 2 ranks and their workers; unequal counts neither hang nor lose data, nor bend the gradient."""
    ranks = run_ranks(stream, 2, size, workers, 2, folder=tmp_path)
    for part in ("ids", "seen"):
        assert sorted(i for rank in ranks for i in rank[part]) == list(range(size))
    assert ranks[0]["step"] == ranks[1]["step"]
    assert ranks[0]["moves"] == pytest.approx(ranks[1]["moves"])


def test_an_uneven_iterable_step_is_the_mean_over_its_samples(tmp_path: Path) -> None:
    """7 items dealt in turn to 2 ranks, in batches of 4: one step of 4 + 3 samples, whose mean is 3."""
    for rank in run_ranks(stream, 2, 7, 0, 4, folder=tmp_path):
        assert rank["moves"] == pytest.approx([3.0])


class ByRank(Stream):
    """Splits by the rank, as scripts for one process a GPU do."""

    def __iter__(self) -> Any:
        return iter(range(int(os.environ["RANK"]), self.size, int(os.environ["WORLD_SIZE"])))


class Unseeded(Stream):
    def __iter__(self) -> Any:
        order = list(range(self.size))
        Random(os.getpid()).shuffle(order)
        return iter(order)


class Curious(Stream):
    """Asks for its worker, but doesn't split by it."""

    def __iter__(self) -> Any:
        info = get_worker_info()
        assert info.id < info.num_workers
        return iter(range(self.size))


class CuriousButDeclared(Curious):
    splits_itself = False


def by_worker_init(worker: int) -> None:
    """torch's documented recipe: each worker's copy of the dataset gets a part."""
    info = get_worker_info()
    info.dataset.parts = (worker, info.num_workers)


class InParts(Stream):
    parts = (0, 1)

    def __iter__(self) -> Any:
        return iter(range(self.parts[0], self.size, self.parts[1]))


def foreign_stream(dataset: Any, workers: int, init: Any) -> tuple[list[int], str, int]:
    with phalanx.init(progress=False) as run:
        loader = run.prepare(DataLoader(dataset, batch_size=2, num_workers=workers, worker_init_fn=init))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                return [i for x in run.evaluate(loader) for i in x.tolist()], "", len(caught)
            except DataError as error:
                return [], str(error), len(caught)


@pytest.mark.parametrize(
    ("dataset", "workers", "init"),
    [(ByRank(64), 0, None), (ByRank(64), 2, None), (Unseeded(64), 0, None), (InParts(64), 2, by_worker_init)],
    ids=["by rank", "by rank in workers", "unseeded shuffle", "worker_init_fn"],
)
def test_a_stream_that_differs_by_rank_or_worker_is_no_silent_loss(
    tmp_path: Path, dataset: Any, workers: int, init: Any
) -> None:
    for _, message, _ in run_ranks(foreign_stream, 2, dataset, workers, init, folder=tmp_path):
        assert type(dataset).__name__ in message
        assert "splits_itself" in message


def test_a_stream_that_asks_and_does_not_split_is_warned_of(tmp_path: Path) -> None:
    ranks = run_ranks(foreign_stream, 2, Curious(8), 0, None, folder=tmp_path)
    assert all(rank[2] for rank in ranks)
    ranks = run_ranks(foreign_stream, 2, CuriousButDeclared(8), 0, None, folder=tmp_path)
    assert sorted(i for rank in ranks for i in rank[0]) == list(range(8))


# Shuffling and augmentation.


class Augmented(Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        import random

        import numpy as np

        return index, torch.rand(()).item(), float(np.random.rand()), random.random()


def draws(workers: int, batch: int) -> list[list[tuple[Any, ...]]]:
    with phalanx.init(seed=7, progress=False) as run:
        loader = run.prepare(DataLoader(Augmented(), batch_size=batch, shuffle=True, num_workers=workers))
        return [
            [tuple(v.item() for v in row) for b in run.steps(loader) for row in zip(*b, strict=True)] for _ in range(2)
        ]


def test_epochs_and_ranks_differ_and_a_rerun_does_not(tmp_path: Path) -> None:
    ranks = run_ranks(draws, 2, 1, 4, folder=tmp_path)
    again = run_ranks(draws, 2, 1, 4, folder=tmp_path)
    (alone,) = run_ranks(draws, 1, 0, 8, folder=tmp_path)
    assert ranks == again
    for epoch in (0, 1):
        merged = [row for rank in ranks for row in rank[epoch]]
        assert sorted(row[0] for row in merged) == list(range(16))
        assert len({row[1:] for row in merged}) == 16
        assert sorted(merged) == sorted(alone[epoch])  # whatever the workers and the world size
    order = [[row[0] for row in rank[epoch]] for rank in ranks for epoch in (0, 1)]
    assert order[0] != order[1]
    assert order[2] != order[3]
    assert not {row[1:] for row in ranks[0][0]} & {row[1:] for row in ranks[0][1]}  # new augmentation each epoch


def two_loaders() -> list[list[float]]:
    with phalanx.init(seed=7, progress=False) as run:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        val = DataLoader(line(12), batch_size=2)
        first, second = (DataLoader(line(12), batch_size=2, shuffle=True) for _ in range(2))
        _, _, val, first, second = run.prepare(model, optimizer, val, first, second)
        return [[i for x, _ in loader for i in x.flatten().tolist()] for loader in (val, first, second)]


def test_two_training_loaders_are_shuffled_differently(tmp_path: Path) -> None:
    ranks = run_ranks(two_loaders, 2, folder=tmp_path)
    val, first, second = ([rank[which] for rank in ranks] for which in range(3))
    for order in (val, first, second):
        assert sorted(i for part in order for i in part) == list(range(12))
    assert first != second


# Run directory, records, log.


def one_folder(delay: float) -> dict[str, Any]:
    if os.environ["RANK"] == "1":
        time.sleep(delay)
    with phalanx.init(progress=False, run_root="out/${now:%H%M%S}", checkpoint={"keep": 1}) as run:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = run.prepare(model, optimizer, DataLoader(line(6), batch_size=1))
        for x, y in run.steps(loader):
            run.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        run.log({"loss": torch.tensor(1.5), "best": 2})
        return {"dir": str(run.run_dir), "params": run.config.run_root}


def test_all_ranks_share_one_folder_whatever_the_clock_says(tmp_path: Path) -> None:
    first, second = run_ranks(one_folder, 2, 2.0, folder=tmp_path)
    assert first == second
    assert len(list(tmp_path.glob("out/*/*/*"))) == 1


def placed(settings: dict[str, str]) -> tuple[str, str]:
    with phalanx.init(progress=False, **settings) as run:
        return str(run.run_dir), (run.run_dir / "logs" / "0.log").read_text()


@pytest.mark.parametrize(
    ("settings", "late"),
    [
        ({"run_root": "elsewhere", "name": "fit"}, ["run_root"]),
        ({"name": "other"}, ["name"]),
        ({"run_root": "runs"}, []),
    ],
)
def test_where_the_run_is_cannot_be_said_after_the_launch(
    tmp_path: Path, settings: dict[str, str], late: list[str]
) -> None:
    run_dir = tmp_path / "runs" / "fit" / "1"
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").write_text("")
    ((where, log),) = run_ranks(placed, 1, settings, folder=tmp_path, env={"PHALANX_RUN_DIR": str(run_dir)})
    assert where == str(run_dir)
    told = [line for line in log.splitlines() if "came too late" in line]
    assert len(told) == len(late)
    assert all(f"give {key}={settings[key]} to the command" in line for key, line in zip(late, told, strict=True))


def test_records_and_logs_of_each_rank(tmp_path: Path) -> None:
    ranks = run_ranks(one_folder, 2, 0.0, folder=tmp_path)
    run_dir = Path(ranks[0]["dir"])
    records = read_records(run_dir)
    for rank in (0, 1):
        mine = [record for record in records if record.rank == rank]
        assert isinstance(mine[0], Start)
        assert (mine[0].world_size, mine[0].strategy, mine[0].local_rank) == (2, "ddp", rank)
        steps = [record for record in mine if isinstance(record, Step)]
        assert [(s.step, s.samples) for s in steps] == [(1, 1), (2, 1), (3, 1)]
        assert all(0 <= s.wait <= s.seconds for s in steps)
        assert isinstance(mine[-1], Exit)
        assert mine[-1].exception == ""
        log = (run_dir / "logs" / f"{rank}.log").read_text()
        assert log.count(f"rank {rank} of 2") == 1
        assert "done after" in log
    metric = [json.loads(text) for text in (run_dir / "records" / "0.1.jsonl").read_text().splitlines()]
    assert [m["values"] for m in metric if m["kind"] == "metric"] == [{"loss": 1.5, "best": 2}]
    assert "metric" not in (run_dir / "records" / "1.1.jsonl").read_text()


def killed() -> None:
    run = phalanx.init(progress=False, name="killed")
    loader = run.prepare(DataLoader(line(6), batch_size=1))
    for _ in run.steps(loader):
        if run.step == 3:
            os.kill(os.getpid(), 9)


def test_a_killed_run_leaves_readable_records(tmp_path: Path) -> None:
    from tests.dist.harness import RankFailed

    with pytest.raises(RankFailed):
        run_ranks(killed, 1, folder=tmp_path)
    (run_dir,) = tmp_path.glob("runs/killed/*")
    with (run_dir / "records" / "0.1.jsonl").open("a") as file:
        file.write('{"v": 1, "kind": "step", "ti')  # what a write cut off by a full disk leaves
    assert [r.step for r in read_records(run_dir) if isinstance(r, Step)] == [1, 2, 3]


def tracked() -> str:
    with phalanx.init(progress=False, trackers=["csv"]) as run:
        run.log({"loss": 0.5}, step=3)
        run.log({"loss": 0.25, "lr": 1e-3}, step=4)
    return str(run.run_dir)


def test_the_csv_tracker_writes_once(tmp_path: Path) -> None:
    run_dir, other = run_ranks(tracked, 2, folder=tmp_path)
    assert run_dir == other
    text = (Path(run_dir) / "metrics.csv").read_text()
    assert text.split() == ["step,name,value", "3,loss,0.5", "4,loss,0.25", "4,lr,0.001"]


def joined() -> float:
    """A loop of the user's own over uneven inputs, by torch's Join: no hang."""
    with phalanx.init(progress=False) as run:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = run.prepare(model, optimizer)
        with run.join(model):
            for _ in range(2 + 3 * run.rank):
                run.backward(model(torch.ones(1, 1)).sum())
                optimizer.step()
        return next(model.parameters()).item()


@pytest.mark.parametrize("world_size", [1, 2])
def test_join(tmp_path: Path, world_size: int) -> None:
    assert len(set(run_ranks(joined, world_size, folder=tmp_path))) == 1


def hybrid() -> list[Any]:
    with phalanx.init(strategy="fsdp", fsdp={"replicate": 2, "wrap": "size:10"}, progress=False) as run:
        model = run.prepare(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)))
        return [tuple(p.device_mesh.shape) for p in model.parameters()] + [type(m).__name__ for m in model]


def test_hsdp_mesh_and_wrapping_by_size(tmp_path: Path) -> None:
    for rank in run_ranks(hybrid, 4, folder=tmp_path):
        assert rank == [(2, 2)] * 4 + ["FSDPLinear", "FSDPLinear"]
