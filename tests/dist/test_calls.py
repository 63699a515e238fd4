"""Small calls that a training script makes beside its loop, at several world sizes and under each strategy."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from phalanx.errors import UsageError
from tests.dist.harness import RankFailed, run_ranks

pytestmark = pytest.mark.slow

BOTH = pytest.mark.parametrize(("strategy", "world_size"), [("single", 1), ("ddp", 2), ("fsdp", 2)])


def ready(run: Any, samples: int = 8, batch_size: int = 2) -> Any:
    """A model of one weight, its optimizer, and a loader of ones."""
    model = nn.Linear(1, 1, bias=False)
    data = TensorDataset(torch.ones(samples, 1))
    return run.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size // run.world_size)
    )


# The group's last micro-batch.


def boundaries(strategy: str) -> dict[str, Any]:
    with phalanx.init(strategy=strategy, accumulate=3, progress=False) as run:
        before = run.sync_gradients
        model, optimizer, loader = ready(run, samples=14)
        inside, after, steps, evaluated = [], [], [], []
        for (x,) in run.steps(loader):
            with run.accumulate(model):
                inside.append(run.sync_gradients)
                run.backward(model(x).mean())
                optimizer.step()
                optimizer.zero_grad()
            after.append(run.sync_gradients)
            steps.append(run.step)
            evaluated.append(next(run.sync_gradients for _ in run.evaluate(loader)))
        ended = run.sync_gradients
        for _ in run.steps(loader):
            broken_at = run.sync_gradients
            break
        return {
            "before": before, "inside": inside, "after": after, "steps": steps, "evaluated": evaluated,
            "ended": ended, "broken": (broken_at, run.sync_gradients),
        }  # fmt: skip


@BOTH
def test_the_groups_last_micro_batch_is_told(tmp_path: Path, strategy: str, world_size: int) -> None:
    """Seven micro-batches in groups of three: the third, the sixth and the lone seventh are last."""
    last = [False, False, True, False, False, True, True]
    for rank in run_ranks(boundaries, world_size, strategy, folder=tmp_path):
        assert (rank["before"], rank["ended"], rank["broken"]) == (True, True, (False, True))
        assert rank["inside"] == rank["after"] == rank["evaluated"] == last
        assert rank["steps"] == [0, 0, 0, 1, 1, 1, 2]


# One rank first.


def fetch(name: str, seconds: float = 0.3) -> bool:
    """As a download with a cache: slow for the first, and a reader of a half-written file would fail."""
    path = Path(name)
    if path.exists():
        assert path.read_text() == "whole"
        return False
    path.write_text("ha")
    time.sleep(seconds)
    path.write_text("whole")
    return True


def in_turn() -> dict[str, Any]:
    """Before `prepare`, nested, on its own node, and inside a loop."""
    with phalanx.init(progress=False) as run:
        with run.main_first():
            first = fetch("before")
        with run.main_first():
            with run.main_first(local=True):
                nested = fetch("nested")
            with run.main_first():
                again = fetch("again")
        with run.main_first(local=True), run.main_first():
            swapped = fetch("swapped")
        with run.main_first(local=True):
            own = fetch(f"node-{run.topology.node_rank}")
        model, optimizer, loader = ready(run, batch_size=4)
        within = []
        for (x,) in run.steps(loader):
            run.backward(model(x).mean())
            optimizer.step()
            with run.main_first():
                within.append(fetch(f"step-{run.step}", 0.05))
            run.barrier()
        return {"found": [first, nested, again, swapped], "own": own, "within": within}


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_one_rank_goes_first(tmp_path: Path, world_size: int) -> None:
    """Four ranks are two nodes of two each."""

    def place(rank: int) -> dict[str, str]:
        if world_size < 4:
            return {}
        node = {"LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": str(rank // 2)}
        return {**node, "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": socket.gethostname()}

    for rank, got in enumerate(run_ranks(in_turn, world_size, folder=tmp_path, env=place)):
        assert got["found"] == [rank == 0] * 4
        assert got["own"] == (rank % 2 == 0)
        assert got["within"]
        assert set(got["within"]) == {rank == 0}


def failing(who: int, local: bool) -> str:
    with phalanx.init(progress=False) as run:
        try:
            with run.main_first(local):
                if run.rank == who:
                    raise OSError("disk full")
        except RuntimeError as error:
            return str(error)
        except OSError:
            time.sleep(3)  # not the end of its run: what the others hear was told before
            return "mine"
        return "went on"


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("who", [0, 1, 2])
def test_a_rank_that_fails_in_its_turn_is_named_on_all_others(tmp_path: Path, who: int, local: bool) -> None:
    begin = time.monotonic()
    said = run_ranks(failing, 3, who, local, folder=tmp_path)
    assert said.pop(who) == "mine"
    assert said == [f"rank {who} failed in run.main_first(): OSError: disk full"] * 2
    assert time.monotonic() - begin < 25


def misused(how: str) -> str:
    with phalanx.init(progress=False) as run:
        _, _, loader = ready(run, batch_size=4)
        if how == "apart":
            calls = {
                "save": run.save,
                "steps": lambda: next(run.steps(loader)),
                "evaluate": lambda: next(run.evaluate(loader)),
                "barrier": run.barrier,
                "prepare": lambda: run.prepare(nn.Linear(1, 1)),
            }
            said = []
            with run.main_first():
                for name, call in calls.items():
                    with pytest.raises(UsageError, match="one after another") as caught:
                        call()
                    said.append(name in str(caught.value))
            return str(all(said))
        if run.rank == 0:
            run.barrier()
        elif how == "other":
            with run.main_first():
                pass
        return "came through"


@pytest.mark.parametrize("world_size", [1, 2])
def test_calls_of_all_ranks_are_refused_where_they_go_one_after_another(tmp_path: Path, world_size: int) -> None:
    assert run_ranks(misused, world_size, "apart", folder=tmp_path) == ["True"] * world_size


@pytest.mark.parametrize(("how", "words"), [("none", "did not come"), ("other", "run.main_first()")])
def test_a_barrier_of_one_rank_alone_is_an_error(tmp_path: Path, how: str, words: str) -> None:
    with pytest.raises(RankFailed) as caught:
        run_ranks(misused, 2, how, folder=tmp_path)
    assert "run.barrier()" in caught.value.traces[0]
    assert words in caught.value.traces[0]


def patient(seconds: float) -> str:
    """A wait that is longer than every limit, with nothing of torch's in the log."""
    import torch.distributed as dist

    from phalanx.strategies import agreement as meeting
    from phalanx.strategies import turns

    meeting.LIMIT = turns.PATIENCE = meeting.PATIENCE = 0.5
    log = os.open("stderr.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(log, 2)
    with phalanx.init(progress=False) as run:
        dist.distributed_c10d._get_default_store().set_timeout(timedelta(seconds=1))
        with run.main_first():
            if run.is_main:
                time.sleep(seconds)
        if run.is_main:
            time.sleep(seconds)
        run.barrier()
        run.reduce(1.0)  # the harness ends rank 0, which keeps the store, without a goodbye
    return Path("stderr.log").read_text()


def test_a_long_wait_has_no_limit_and_no_warnings_of_torchs(tmp_path: Path) -> None:
    said = run_ranks(patient, 2, 3.0, folder=tmp_path)
    assert "c10d" not in "".join(said)
    logs = (tmp_path / "runs").glob("*/*/logs/1.log")
    text = "".join(path.read_text() for path in logs)
    assert "s in run.main_first() for the rank that goes first" in text
    assert "s in run.barrier() for rank 0" in text
