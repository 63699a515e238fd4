"""Checkpoints: exact resume, any strategy and world size to any other, strictness, broken ones, pruning."""

from __future__ import annotations

import json
import logging
import os
import random
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.utils.data import DataLoader, Dataset

import phalanx
from phalanx.checkpoint import store
from phalanx.checkpoint.manager import Contents, Manager
from phalanx.errors import CheckpointError
from phalanx.records import Epoch, Metric, Step, read_records
from phalanx.strategies.comm import Comm
from tests.dist.harness import RankFailed, run_ranks

pytestmark = pytest.mark.slow

SAMPLES = 53
GLOBAL_BATCH = 8


class Numbers(Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        x = torch.sin(torch.arange(4) * (index + 1.0)) + 0.01 * torch.randn(4)  # augmented
        return x, x.sum().reshape(1), index


class Net(nn.Module):
    """Has a submodule that is really called `module`, like a wrapper's prefix."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(4, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 1)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.module(x))))


def full(tensor: Any) -> Any:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().cpu().clone()


def whole(run: phalanx.Run, model: Any, optimizer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The model's and the optimizer's state, gathered from shards of any kind."""
    strategy = run._session.strategy
    state = {name: full(value) for name, value in strategy.saved_model(model).state_dict().items()}
    saved = strategy.saved_optimizer(optimizer.optimizer)
    groups, states = saved.param_groups, saved.state
    moments = {
        f"{g}.{i}.{key}": full(value)
        for g, group in enumerate(groups)
        for i, p in enumerate(group["params"])
        for key, value in states[p].items()
    }
    return state, moments


def prepared(run: phalanx.Run, batch: int | None = None) -> Any:
    model = Net()
    optimizer = torch.optim.AdamW(
        [
            {"params": model.module.parameters()},
            {"params": [*model.norm.parameters(), *model.head.parameters()], "lr": 2e-3},
        ],
        lr=1e-2,
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
    loader = DataLoader(Numbers(), batch_size=batch or GLOBAL_BATCH // run.world_size, shuffle=True)
    return run.prepare(model, optimizer, loader, scheduler)


def train(
    strategy: str, epochs: int, stop_at: int | None = None, settings: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Train; leave abruptly after `stop_at` steps, as a killed run would. What happened, by this rank."""
    ids: list[tuple[int, int]] = []
    seen_epochs = []
    run = phalanx.init(strategy=strategy, name="net", seed=5, progress=False, **(settings or {}))
    with run:
        model, optimizer, loader, scheduler = prepared(run)
        for epoch in run.epochs(epochs):
            seen_epochs.append(epoch)
            for x, y, index in run.steps(loader):
                with run.accumulate(model):
                    loss = nn.functional.mse_loss(model(x), y)
                    run.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                ids += [(epoch, i) for i in index.tolist()]
                if run.step + 1 == stop_at:
                    break
            else:
                run.log({"loss": loss})
                continue
            break
        state, moments = whole(run, model, optimizer)
        lr = [group["lr"] for group in optimizer.param_groups]
        draws = (torch.rand(2), random.random(), np.random.rand())
    return {
        "state": state,
        "moments": moments,
        "lr": lr,
        "ids": ids,
        "epochs": seen_epochs,
        "step": run.step,
        "draws": draws,
        "dir": str(run.run_dir),
    }


def one_epoch(resume: str | None) -> tuple[int, int, list[float]]:
    """Steps taken here, the scheduler's count, and the learning rates; a warning is an error."""
    warnings.simplefilter("error")
    with phalanx.init(name="net", progress=False, checkpoint={"every_steps": 7}, resume=resume) as run:
        model, optimizer, loader, scheduler = prepared(run)
        steps = 0
        for _ in run.epochs(1):
            for x, y, _ in run.steps(loader):
                run.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
            scheduler.step()
        return steps, scheduler.last_epoch, [group["lr"] for group in optimizer.param_groups]


def test_a_checkpoint_at_an_epochs_last_step_leaves_only_the_rest_of_that_epoch(tmp_path: Path) -> None:
    """What comes after its steps, such as a scheduler's step, is still to be done, and quietly."""
    (first,) = run_ranks(one_epoch, 1, None, folder=tmp_path)
    assert first[:2] == (7, 1)
    (resumed,) = run_ranks(one_epoch, 1, "latest", folder=tmp_path)
    assert resumed == (0, *first[1:])


def assert_same(a: dict[str, Any], b: dict[str, Any], exact: bool) -> None:
    for part in ("state", "moments"):
        assert a[part].keys() == b[part].keys()
        for key, value in a[part].items():
            if exact:
                assert torch.equal(value, b[part][key]), key
            else:
                torch.testing.assert_close(b[part][key], value, rtol=2e-5, atol=2e-6)
    assert a["lr"] == pytest.approx(b["lr"])


@pytest.mark.parametrize(("strategy", "world_size"), [("single", 1), ("ddp", 2), ("fsdp", 2)])
def test_resume_in_the_middle_of_an_epoch_is_exact(tmp_path: Path, strategy: str, world_size: int) -> None:
    """Interrupted after a checkpoint and resumed, a run is bit-identical to one that was left alone."""
    whole = run_ranks(train, world_size, strategy, 3, folder=tmp_path)
    settings = {"checkpoint": {"every_steps": 4}, "run_root": "interrupted"}
    run_ranks(train, world_size, strategy, 3, 11, settings, folder=tmp_path)  # last checkpoint: step 8, in epoch 1
    resumed = run_ranks(train, world_size, strategy, 3, None, {**settings, "resume": "latest"}, folder=tmp_path)
    for left_alone, after in zip(whole, resumed, strict=True):
        assert_same(left_alone, after, exact=True)
        assert after["ids"] == left_alone["ids"][-len(after["ids"]) :]
        assert after["epochs"] == [1, 2]
        assert after["step"] == left_alone["step"] == 21
        for mine, other in zip(left_alone["draws"], after["draws"], strict=True):
            assert np.array_equal(np.asarray(mine), np.asarray(other))


def test_records_show_no_step_or_epoch_twice(tmp_path: Path) -> None:
    settings = {"checkpoint": {"every_steps": 4}}
    run_ranks(train, 1, "single", 3, 11, settings, folder=tmp_path)
    (after,) = run_ranks(train, 1, "single", 3, None, {**settings, "resume": "latest"}, folder=tmp_path)
    records = read_records(after["dir"])
    assert [r.step for r in records if isinstance(r, Step)] == list(range(1, 22))
    assert [r.epoch for r in records if isinstance(r, Epoch)] == [0, 1, 2]
    assert [r.step for r in records if isinstance(r, Metric)] == [7, 14, 21]
    assert {r.attempt for r in records if isinstance(r, Step) and r.step > 8} == {2}


MOVES = [
    (("single", 1), ("ddp", 2)),
    (("ddp", 2), ("single", 1)),
    (("ddp", 2), ("fsdp", 2)),
    (("fsdp", 2), ("ddp", 4)),
    (("fsdp", 4), ("single", 1)),
    (("single", 1), ("fsdp", 4)),
    (("fsdp", 2), ("fsdp", 4)),
]


@pytest.mark.parametrize(("source", "target"), MOVES, ids=lambda side: f"{side[0]}{side[1]}")
def test_moves_between_strategies_and_world_sizes(tmp_path: Path, source: Any, target: Any) -> None:
    """What was saved under one is loaded under another, and no sample of the epoch is lost or repeated."""
    settings = {"checkpoint": {"every_steps": 4}}
    before = run_ranks(train, source[1], source[0], 3, 5, settings, folder=tmp_path)
    after = run_ranks(load_only, target[1], target[0], folder=tmp_path)
    reference = run_ranks(load_only, source[1], source[0], folder=tmp_path)
    for rank in after:
        assert_same(reference[0], rank, exact=True)
        assert rank["step"] == 4
    used = {i for rank in before for epoch, i in rank["ids"] if epoch == 0}
    left = sorted(i for rank in after for i in rank["left"])
    assert len(left) == SAMPLES - 4 * GLOBAL_BATCH
    first_four = sorted(set(range(SAMPLES)) - set(left))
    assert set(first_four) <= used


def load_only(strategy: str) -> dict[str, Any]:
    with phalanx.init(strategy=strategy, name="net", seed=5, progress=False, resume="latest") as run:
        model, optimizer, loader, _ = prepared(run)
        step = run.resume()
        state, moments = whole(run, model, optimizer)
        left = [i for _, _, index in run.steps(loader) for i in index.tolist()] if run.world_size else []
        lr = [group["lr"] for group in optimizer.param_groups]
    return {"state": state, "moments": moments, "step": step, "lr": lr, "left": left}


def slow_save(delay: float) -> tuple[bool, float]:
    """Rank 0's write takes long; every rank looks for the file when save() is back."""
    with phalanx.init(name="slow", progress=False) as run:
        model = run.prepare(nn.Linear(2, 2))
        assert model is not None
        if run.is_main:
            commit = store.commit
            store.commit = lambda *args: (time.sleep(delay), commit(*args))[1]  # type: ignore[assignment]
        begin = time.monotonic()
        path = run.save()
        return path is not None and (path / store.MARKER).exists(), time.monotonic() - begin


def test_every_rank_sees_the_checkpoint_when_save_returns(tmp_path: Path) -> None:
    for seen, seconds in run_ranks(slow_save, 2, 2.0, folder=tmp_path):
        assert seen
        assert seconds >= 1.9


def save_many(keep: int) -> str:
    with phalanx.init(name="many", progress=False, checkpoint={"keep": keep, "every_steps": 1}) as run:
        model, optimizer, loader, _ = prepared(run)
        for x, y, _index in run.steps(loader):
            run.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    return str(run.run_dir)


def test_pruned_to_keep(tmp_path: Path) -> None:
    (run_dir,) = run_ranks(save_many, 1, 2, folder=tmp_path)
    assert [path.name for path in store.steps(Path(run_dir) / "checkpoints")] == ["7", "6"]
    assert sorted(os.listdir(Path(run_dir) / "checkpoints")) == ["6", "7"]


def damage_truncated(path: Path) -> None:
    victim = max(path.glob("*.distcp"), key=lambda file: file.stat().st_size)
    victim.write_bytes(victim.read_bytes()[: victim.stat().st_size // 2])


def damage_no_marker(path: Path) -> None:
    (path / store.MARKER).unlink()


def damage_missing_file(path: Path) -> None:
    next(path.glob("*.distcp")).unlink()


def damage_garbled(path: Path) -> None:
    """Of the right size, and found only when it is read."""
    for victim in path.glob("*.distcp"):
        victim.write_bytes(b"\0" * victim.stat().st_size)


def damage_metadata(path: Path) -> None:
    victim = path / ".metadata"
    victim.write_bytes(b"\0" * victim.stat().st_size)


def damage_empty_marker(path: Path) -> None:
    (path / store.MARKER).write_text("")


DAMAGES = [
    damage_truncated,
    damage_no_marker,
    damage_missing_file,
    damage_garbled,
    damage_metadata,
    damage_empty_marker,
]


def resume_and_log(world_size_changed: bool = False) -> tuple[int | None, str]:
    with phalanx.init(name="many", progress=False, resume="latest") as run:
        prepared(run)
        step = run.resume()
    log = (Path(run.run_dir) / "logs" / f"{run.rank}.log").read_text()
    return step, log


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_broken_newest_is_skipped_with_a_warning(tmp_path: Path, damage: Any, world_size: int) -> None:
    (run_dir, *_) = run_ranks(save_many, world_size, 2, folder=tmp_path)
    newest, older = store.steps(Path(run_dir) / "checkpoints")
    damage(newest)
    for step, log in run_ranks(resume_and_log, world_size, folder=tmp_path):
        assert step == int(older.name)
        assert "resumed" not in log or str(older) in log
    (_, log), *_ = run_ranks(resume_and_log, world_size, folder=tmp_path)
    assert f"checkpoint {newest}" in log
    assert "skipped" in log


def test_the_warning_of_a_skipped_checkpoint_quotes_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that fails under rank 0, and what torch makes of it: tracebacks of all ranks, C++ stacks among them."""
    stack = RuntimeError("reading failed. Perhaps it was cut off.\nException raised from f at f.cc:7\nframe #0: main")
    failures: Any = {1: (stack, None), 0: (OSError(5, "Input/output error", "__0_0.distcp"), None)}

    def fail(*_: Any) -> None:
        raise CheckpointException("load", failures)

    monkeypatch.setattr(logging.getLogger("phalanx"), "propagate", True)
    manager = Manager(Comm(), tmp_path, 1)
    monkeypatch.setattr(manager, "newest", lambda skip: None if skip else tmp_path / "7")
    monkeypatch.setattr(manager, "load", fail)
    for expected in ("OSError on rank 0: [Errno 5] Input/output error: '__0_0.distcp'", "on rank 1: reading failed"):
        with caplog.at_level(logging.WARNING, "phalanx"), pytest.raises(CheckpointError):
            manager.load_newest(Contents(), lambda *_: None)
        assert caplog.messages.pop().endswith(expected)
        failures.pop(0, None)


def all_broken() -> str:
    try:
        resume_and_log()
    except CheckpointError as error:
        return str(error)
    return "no error"


def test_no_readable_checkpoint_is_an_error(tmp_path: Path) -> None:
    (run_dir,) = run_ranks(save_many, 1, 2, folder=tmp_path)
    for path in store.steps(Path(run_dir) / "checkpoints"):
        damage_garbled(path)
    (message,) = run_ranks(all_broken, 1, folder=tmp_path)
    assert "can be read" in message


def other_model(kind: str) -> str:
    with phalanx.init(name="many", progress=False, resume="latest") as run:
        model = Net()
        if kind == "extra":
            model.extra = nn.Linear(1, 1)
        elif kind == "missing":
            model.head = nn.Identity()
        elif kind == "shape":
            model.head = nn.Linear(8, 2)
        kind = torch.optim.SGD if kind == "sgd" else torch.optim.AdamW
        optimizer = kind(model.parameters(), lr=1e-3)
        loader = DataLoader(Numbers(), batch_size=4, shuffle=True)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
        run.prepare(model, optimizer, loader, scheduler)
        try:
            run.resume()
        except CheckpointError as error:
            return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("extra", ["missing in it", "model.0/extra.weight"]),
        ("missing", ["unknown here", "model.0/head.weight"]),
        ("shape", ["another shape", "model.0/head.weight", "(1, 8)", "(2, 8)"]),
        ("groups", ["parameter groups", "same groups"]),
        ("sgd", ["SGD", "AdamW", "'momentum'", "same optimizer"]),
    ],
)
def test_loading_is_strict(tmp_path: Path, kind: str, words: list[str]) -> None:
    run_ranks(save_many, 1, 2, folder=tmp_path)
    (message,) = run_ranks(other_model, 1, kind, folder=tmp_path)
    for word in words:
        assert word in message


def save_at_epoch_end() -> tuple[list[int], int]:
    epochs = []
    with phalanx.init(name="ends", progress=False, **json.loads(os.environ.get("MORE", "{}"))) as run:
        model, optimizer, loader, _ = prepared(run)
        for epoch in run.epochs(int(os.environ["EPOCHS"])):
            epochs.append(epoch)
            for x, y, _index in run.steps(loader):
                run.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
            run.save()
        return epochs, run.step


def test_a_save_after_an_epoch_goes_on_with_the_next(tmp_path: Path) -> None:
    (first,) = run_ranks(save_at_epoch_end, 1, folder=tmp_path, env={"EPOCHS": "2"})
    more = {"EPOCHS": "4", "MORE": json.dumps({"resume": "latest"})}
    (second,) = run_ranks(save_at_epoch_end, 1, folder=tmp_path, env=more)
    assert first == ([0, 1], 14)
    assert second == ([2, 3], 28)


def save_inside(accumulate: int, before_step: bool) -> list[tuple[int, str | None]]:
    found = []
    with phalanx.init(name="inside", progress=False, accumulate=accumulate) as run:
        model, optimizer, loader, _ = prepared(run)
        for batch, (x, y, _index) in enumerate(run.steps(loader)):
            with run.accumulate(model):
                run.backward(nn.functional.mse_loss(model(x), y))
                if before_step and batch == 1:
                    found.append((run.step, str(run.save())))
                optimizer.step()
                optimizer.zero_grad()
            if not before_step and batch in (1, 2):
                path = run.save()
                found.append((run.step, path and path.name))
    found.append((0, ",".join(path.name for path in store.steps(run.run_dir / "checkpoints"))))
    return found


def test_a_save_inside_the_loop_waits_for_the_step(tmp_path: Path) -> None:
    (now,) = run_ranks(save_inside, 1, 1, False, folder=tmp_path)
    assert now == [(2, "2"), (3, "3"), (0, "3,2")]
    (group,) = run_ranks(save_inside, 1, 3, False, folder=tmp_path)  # batches 1 and 2 of a group of 3
    assert group == [(0, None), (1, "1"), (0, "1")]
    (early,) = run_ranks(save_inside, 1, 1, True, folder=tmp_path)
    assert early == [(1, "None"), (0, "2")]


def wrong_source(path: str) -> str:
    with phalanx.init(name="none", progress=False) as run:
        prepared(run)
        assert run.resume() is None
        try:
            run.resume(path)
        except CheckpointError as error:
            return str(error)
    return "no error"


def test_resume_from_nowhere_says_what_was_expected(tmp_path: Path) -> None:
    (message,) = run_ranks(wrong_source, 1, str(tmp_path / "nowhere"), folder=tmp_path)
    assert "nowhere" in message
    assert "checkpoints/<step>" in message


def test_a_failing_rank_is_reported(tmp_path: Path) -> None:
    """The harness itself: a test that a rank fails must not pass."""
    with pytest.raises(RankFailed, match="rank 1"):
        run_ranks(_fail_on_one, 2, folder=tmp_path)


def _fail_on_one() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("on purpose")


class Normed(nn.Module):
    """BatchNorm, whose statistics differ by rank, and a submodule with torch.compile's own name."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self._orig_mod = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self._orig_mod(self.norm(x))


def normed(strategy: str) -> dict[str, list[float]]:
    with phalanx.init(strategy=strategy, progress=False) as run:
        model = Normed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        data = DataLoader(Numbers(), batch_size=4, shuffle=True, drop_last=True)
        model, optimizer, loader = run.prepare(model, optimizer, data)
        for x, y, _ in run.steps(loader):
            run.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        inner = model.module if strategy == "ddp" else model
        own = inner.norm.running_mean.tolist()
        path = run.save()
        saved = inner.norm.running_mean.tolist() + inner.norm.running_var.tolist()
        run.resume(path)
        loaded = inner.norm.running_mean.tolist() + inner.norm.running_var.tolist()
        return {"own": own, "saved": saved, "loaded": loaded}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_buffers_are_rank_0s(tmp_path: Path, strategy: str) -> None:
    """Never a mixture of ranks' statistics, and the same for going on as for resuming."""
    first, second = run_ranks(normed, 2, strategy, folder=tmp_path)
    assert first["own"] != second["own"]
    assert first["saved"][:4] == first["own"]
    assert second["saved"] == first["saved"] == first["loaded"] == second["loaded"]


def broken_off(epochs: int, resume: bool) -> dict[str, Any]:
    """A script that takes three steps an epoch and leaves the loop."""
    settings: dict[str, Any] = {"resume": "latest"} if resume else {}
    with phalanx.init(name="broken", progress=False, checkpoint={"every_steps": 3}, **settings) as run:
        model, optimizer, loader, _ = prepared(run)
        seen = []
        for epoch in run.epochs(epochs):
            for batch, (x, y, index) in enumerate(run.steps(loader)):
                run.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                seen.append((epoch, *index.tolist()))
                if batch == 2:
                    break
        saved = [path.name for path in store.steps(run.run_dir / "checkpoints")]
        weights = [full(p) for p in model.parameters()]
    return {"seen": seen, "saved": saved, "weights": weights, "step": run.step, "dir": str(run.run_dir)}


def test_a_loop_left_by_break_keeps_its_steps_and_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = run_ranks(broken_off, 2, 4, False, folder=tmp_path / "whole")
    half = run_ranks(broken_off, 2, 2, False, folder=tmp_path)
    rest = run_ranks(broken_off, 2, 4, True, folder=tmp_path)
    for rank in range(2):
        assert half[rank]["saved"] == ["6", "3"]
        assert half[rank]["seen"] + rest[rank]["seen"] == whole[rank]["seen"]
        assert rest[rank]["step"] == whole[rank]["step"] == 12
        assert all(torch.equal(a, b) for a, b in zip(rest[rank]["weights"], whole[rank]["weights"], strict=True))
    steps = [r.step for r in read_records(rest[0]["dir"]) if isinstance(r, Step) and r.rank == 0]
    assert steps == list(range(1, 13))


def twice() -> list[tuple[str, int]]:
    """Folds of a cross-validation in one script, as a launch starts it."""
    found = []
    for _ in range(2):
        with phalanx.init(name="folds", progress=False) as run:
            model, optimizer, loader, _ = prepared(run)
            for _ in run.epochs(1):
                for x, y, _index in run.steps(loader):
                    run.backward(nn.functional.mse_loss(model(x), y))
                    optimizer.step()
                    optimizer.zero_grad()
            run.save()
        found.append((str(run.run_dir), run.step))
    return found


@pytest.mark.parametrize("launched", [True, False])
def test_a_second_run_in_one_script_is_a_run_of_its_own(tmp_path: Path, launched: bool) -> None:
    run_dir = tmp_path / "runs" / "folds" / "first"
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").write_text("")
    environ = {"PHALANX_RUN_DIR": str(run_dir)} if launched else {}
    (first, second), (other_first, other_second) = run_ranks(twice, 2, folder=tmp_path, env=environ)
    assert (first, second) == (other_first, other_second)
    assert (first[0] == str(run_dir)) == launched
    assert first[0] != second[0]
    assert first[1] == second[1] == 7
