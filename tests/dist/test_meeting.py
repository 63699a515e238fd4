"""Calls that only some ranks make end with an error that names them, on all ranks, instead of an abort or a hang."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from phalanx.errors import UsageError
from phalanx.strategies import agreement as meeting
from phalanx.strategies.agreement import Meeting
from phalanx.strategies.comm import naming
from tests.dist.harness import RankFailed, free_ports, rank_environ, run_ranks

pytestmark = pytest.mark.slow


def alone(kind: str, place: str, run: phalanx.Run, model: nn.Module, train: Any, val: Any) -> None:
    """What rank 0 does, and nobody else, at one place of the script."""
    if kind.partition(" at ")[2] != place or not run.is_main:
        return
    what = kind.partition(" at ")[0]
    if what == "save":
        run.save()
    elif what == "evaluate":
        for x, _ in run.evaluate(val):
            model(x)
    elif what == "steps":
        next(iter(run.steps(train)))
    elif what == "state_dict":
        run.state_dict(model)
    else:
        run.reduce(1.0)


def script(kind: str, strategy: str) -> str:
    """What this rank saw of a script in which rank 0 alone does one thing."""
    meeting.PATIENCE, meeting.LIMIT = 0.5, 3.0
    try:
        train_and_fail(kind, strategy)
    except (UsageError, RuntimeError, ValueError) as error:
        return str(error)
    return "nothing"


def train_and_fail(kind: str, strategy: str) -> None:
    with phalanx.init(strategy=strategy, progress=False) as run:
        net = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        data = TensorDataset(torch.randn(16, 3), torch.randn(16, 1))
        model, optimizer, train, val = run.prepare(net, optimizer, DataLoader(data, 2), DataLoader(data, 2))
        for _ in run.epochs(2):
            for number, (x, y) in enumerate(run.steps(train)):
                run.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                alone(kind, f"step {number}", run, model, train, val)
                if kind == "break" and run.is_main and number == 1:
                    break
            alone(kind, "epoch", run, model, train, val)
        alone(kind, "end", run, model, train, val)
        if kind == "failure":
            if not run.is_main:
                raise ValueError("a rank's own error")
            run.save()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("kind", "mine", "theirs"),
    [
        ("save at epoch", "run.save()", "the end of an epoch"),
        ("reduce at epoch", "run.reduce()", "the end of an epoch"),
        ("evaluate at epoch", "run.evaluate()", "the end of an epoch"),
        ("steps at epoch", "the beginning of run.steps()", "the end of an epoch"),
        ("state_dict at epoch", "run.state_dict()", "the end of an epoch"),
    ],
)
def test_a_call_of_one_rank_is_named_on_all(tmp_path: Path, kind: str, mine: str, theirs: str, strategy: str) -> None:
    first, second = run_ranks(script, 2, kind, strategy, folder=tmp_path)
    assert first == second
    assert f"{mine}" in first
    assert f"{theirs}" in first
    assert ("rank 0" in first, "rank 1" in first) == (True, True)
    assert "run.is_main" in first


@pytest.mark.parametrize(
    ("kind", "call"),
    [("save at step 1", "run.save()"), ("reduce at step 1", "run.reduce()"), ("break", "the end of an epoch")],
)
def test_a_rank_that_others_wait_for_in_a_step_says_so(tmp_path: Path, kind: str, call: str) -> None:
    first, _ = run_ranks(script, 2, kind, "ddp", folder=tmp_path)
    assert f"rank 0 is in {call}" in first
    assert "to which rank 1 did not come in 3 s" in first
    assert "`break`" in first
    (log,) = tmp_path.glob("runs/*/*/logs/0.log")
    assert f"in {call}" in log.read_text().partition("has waited")[2]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("save at end", "to which rank 1 did not come before the end of its run"),
        ("reduce at end", "to which rank 1 did not come before the end of its run"),
        ("failure", "to which rank 1 did not come before the end of its run"),
    ],
)
def test_a_rank_that_has_ended_is_not_waited_for(tmp_path: Path, kind: str, words: str) -> None:
    begin = time.monotonic()
    first, second = run_ranks(script, 2, kind, "ddp", folder=tmp_path)
    assert words in first
    assert "All ranks must make this call" in first
    assert second == ("a rank's own error" if kind == "failure" else "nothing")
    assert time.monotonic() - begin < 20


def test_calls_of_all_ranks_go_on_as_they_were(tmp_path: Path) -> None:
    assert run_ranks(script, 3, "none", "fsdp", folder=tmp_path) == ["nothing"] * 3


@pytest.mark.parametrize("late", [0, 1])
def test_an_end_that_is_later_on_one_rank_is_quiet(tmp_path: Path, late: int) -> None:
    """Rank 0 keeps the store that the others take leave of: its process ends last."""
    code = f"import phalanx, time\nwith phalanx.init(progress=False) as run: time.sleep(run.rank == {late})"
    (port,) = free_ports(1)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, **rank_environ(rank, 2, port)},
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    texts = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert texts[1] == ""
    assert [line for line in texts[0].splitlines() if not line.startswith("phalanx: ")] == []


def killed() -> None:
    with phalanx.init(progress=False) as run:
        if run.rank == 0:
            os._exit(3)
        run.save()


def test_a_lost_store_is_named(tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as caught:
        run_ranks(killed, 2, folder=tmp_path)
    assert "rank 1 lost its connection to rank 0 in run.save()" in caught.value.traces[1]


class Work:
    """An exchange that ends when somebody says so."""

    def __init__(self, rows: list[torch.Tensor], mine: torch.Tensor) -> None:
        for row in rows:
            row.copy_(mine)
        self.done = threading.Event()

    def wait(self, limit: Any = None) -> None:
        if not self.done.wait(limit and limit.total_seconds()):
            raise RuntimeError("not yet")

    def is_completed(self) -> bool:
        return self.done.is_set()


def test_of_many_ranks_the_missing_are_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(meeting, "PATIENCE", 0.1)
    monkeypatch.setattr(meeting, "_LOOK", 0.05)
    monkeypatch.setattr(logging.getLogger("phalanx"), "propagate", True)
    store, works = HashStore(), []
    ranks = [
        Meeting(store, rank, 12, lambda *row: works.append(Work(*row[:2])) or works[-1], list) for rank in range(2)
    ]
    other = threading.Thread(target=ranks[1].meet, args=("x",))
    other.start()
    threading.Timer(0.5, lambda: [work.done.set() for work in works]).start()
    assert ranks[0].meet("x", words=(1, 2, 3, 4)) == [[1, 2, 3, 4]] * 12
    other.join()
    assert caplog.text.count("in x for ranks 2, 3, 4, 5, 6, 7, 8, 9 and 2 more") == 2


def late(seconds: float) -> tuple[Any, float]:
    meeting.PATIENCE, meeting._LOOK = 0.5, 0.1
    with phalanx.init(progress=False) as run:
        begin = time.monotonic()
        time.sleep(seconds * (run.rank == 2))
        return [run.reduce(run.rank, "sum"), run.gather(run.rank), run.broadcast(run.rank, 2)], time.monotonic() - begin


def test_a_late_rank_is_waited_for(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Rank 0 says once whom it waits for, and torch's own library nothing."""
    for values, seconds in run_ranks(late, 3, 4.0, folder=tmp_path):
        assert values == [3, [0, 1, 2], 2]
        assert seconds > 3.5
    (log,) = tmp_path.glob("runs/*/*/logs/0.log")
    assert log.read_text().count("s in run.reduce() for rank 2. ") == 1
    assert "c10d" not in "".join(capfd.readouterr())


def apart(rank: int) -> str:
    """One rank of three makes another call."""
    with phalanx.init(progress=False) as run:
        try:
            run.save() if run.rank == rank else run.reduce({"loss": 1.0})
        except UsageError as error:
            return str(error)
    return "nothing"


@pytest.mark.parametrize("rank", [0, 2])
def test_one_of_three_in_another_call_is_named_on_all(tmp_path: Path, rank: int) -> None:
    begin = time.monotonic()
    first, *others = run_ranks(apart, 3, rank, folder=tmp_path)
    assert time.monotonic() - begin < 30
    assert others == [first, first]
    save = "run.save() or a checkpoint at step 0"
    here, there = (save, "rank 1 in run.reduce()") if rank == 0 else ("run.reduce()", f"rank 2 in {save}")
    assert f"rank 0 is in {here}, but {there}" in first


def test_only_failed_exchanges_are_renamed() -> None:
    with pytest.raises(RuntimeError, match=r"^connection to my own server lost$"), naming("run.reduce()"):
        raise RuntimeError("connection to my own server lost")
