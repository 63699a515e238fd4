"""A run that ends anywhere in an epoch of several loops or loaders goes on as if it had not ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import phalanx
from phalanx.errors import CheckpointError
from tests.dist.harness import run_ranks

pytestmark = pytest.mark.slow


class Ended(Exception):
    """The job's end, as a test has it."""


class Script:
    """A training script that notes each step, and saves and ends after given ones."""

    def __init__(self, run: phalanx.Run, save_at: int, end_at: int) -> None:
        self.run, self.save_at, self.end_at = run, save_at, end_at
        self.seen: list[Any] = []
        self.path: Path | None = None
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        a, b = (DataLoader(list(range(n)), 2, shuffle=n == 12) for n in (12, 8))
        val = DataLoader(list(range(4)), 2)
        self.model, self.optimizer, self.scheduler, self.a, self.b, self.val = run.prepare(
            model, optimizer, scheduler, a, b, val
        )

    def step(self, *batches: Any) -> None:
        with self.run.accumulate(self.model):
            self.run.backward(self.model(batches[0].float().unsqueeze(1)).mean())
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.note(*(b.tolist() for b in batches), self.scheduler.last_epoch)

    def note(self, *what: Any) -> None:
        self.seen.append((self.run.epoch, *what))
        if len(self.seen) == self.save_at:
            self.path = self.run.save() or self.path
        if len(self.seen) >= self.end_at:
            raise Ended

    def between(self) -> None:
        """A point outside of loops, at which a script may save."""
        self.note("between")


def two_loops(s: Script) -> None:
    for _ in s.run.epochs(2):
        for x in s.run.steps(s.a):
            s.step(x)
        s.scheduler.step()
        s.between()
        for x in s.run.steps(s.b):
            s.step(x)
        s.scheduler.step()
        for _x in s.run.evaluate(s.val):
            pass
        s.note("end")


def one_loader_twice(s: Script) -> None:
    for _ in s.run.epochs(2):
        for part in range(2):
            for x in s.run.steps(s.a):
                s.step(x)
            s.note("part", part)


def in_turn(s: Script) -> None:
    for epoch in s.run.epochs(3):
        for _x in s.run.evaluate(s.val):
            pass
        for x in s.run.steps((s.a, s.b)[epoch % 2]):
            s.step(x)
        s.scheduler.step()
        s.note("end")


def left_by_break(s: Script) -> None:
    of_b = -(-len(s.b) // s.run.config.accumulate)
    for epoch in s.run.epochs(2):
        for x in s.run.steps(s.a):
            if s.run.step - epoch * (2 + of_b) == 2:
                break
            s.step(x)
        s.between()
        for x in s.run.steps(s.b):
            s.step(x)
        s.note("end")


def beside(s: Script) -> None:
    for _ in s.run.epochs(2):
        for x, y in zip(s.run.steps(s.b), s.a, strict=False):
            s.step(x, y)
        s.note("end")


def before(s: Script) -> None:
    for _ in s.run.epochs(2):
        for x, y in zip(s.a, s.run.steps(s.b), strict=False):
            s.step(y, x)
        s.note("end")


def beside_the_shorter(s: Script) -> None:
    for _ in s.run.epochs(2):
        others = iter(s.b)
        for x in s.run.steps(s.a):
            try:
                y = next(others)
            except StopIteration:
                others = iter(s.b)
                y = next(others)
            s.step(x, y)
        s.note("end")


def _forever(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def before_for_ever(s: Script) -> None:
    others = _forever(s.b)
    for _ in s.run.epochs(2):
        for x, y in zip(others, s.run.steps(s.a), strict=False):
            s.step(y, x)


def beside_for_ever(s: Script) -> None:
    others = _forever(s.b)
    for _ in s.run.epochs(2):
        for x, y in zip(s.run.steps(s.a), others, strict=False):
            s.step(x, y)


def plain_ones(s: Script) -> None:
    for _ in s.run.epochs(2):
        for x, y in zip(s.a, s.b, strict=False):
            s.note(x.tolist(), y.tolist())


def ended_by_the_other(s: Script) -> None:
    for _ in s.run.epochs(2):
        for x, y in zip(s.run.steps(s.a), s.b, strict=False):
            s.step(x, y)
        s.between()
        for x in s.run.steps(s.a):
            s.step(x)
        s.note("end")


SCRIPTS: list[Callable[[Script], None]] = [
    two_loops,
    in_turn,
    one_loader_twice,
    left_by_break,
    beside,
    before,
    beside_the_shorter,
    beside_for_ever,
    before_for_ever,
    plain_ones,
    ended_by_the_other,
]
# What nobody can know when the job ends at once: that a loader which has had its pass gets another in this epoch.
FORETOLD = {one_loader_twice: [(0, "part", 0)], ended_by_the_other: [(0, "between")]}


def attempt(script: Any, accumulate: int, save_at: int, end_at: int, path: Path | None = None) -> Script:
    with phalanx.init(name="loops", progress=False, accumulate=accumulate) as run:
        s = Script(run, save_at, end_at)
        if path is not None:
            run.resume(path)
        try:
            script(s)
        except Ended:
            pass
    return s


def every_end(accumulate: int, every: int) -> list[Any]:
    """For each script and each place to save: what was seen in all, which should be what the whole run saw."""
    problems: list[Any] = []
    for script in SCRIPTS:
        whole = attempt(script, accumulate, -1, 10**6).seen
        for place in range(every, len(whole) + 1, every):
            for later in (0,) if isinstance(whole[place - 1][1], list) else (0, 1):
                first = attempt(script, accumulate, place, place + later)
                if first.path is None or (not later and whole[place - 1] in FORETOLD.get(script, [])):
                    continue
                rest = attempt(script, accumulate, -1, 10**6, first.path).seen
                # A resumed epoch passes its marks between loops again.
                rest = [note for note in rest if isinstance(note[1], list)]
                expected = [note for note in whole[place:] if isinstance(note[1], list)]
                if rest != expected:
                    problems.append((script.__name__, place, later, whole[place - 1], rest[:3], expected[:3]))
    return problems


@pytest.mark.parametrize(("world_size", "accumulate", "every"), [(1, 1, 1), (2, 1, 3), (1, 2, 2)])
def test_each_sample_once_wherever_the_run_ends(tmp_path: Path, world_size: int, accumulate: int, every: int) -> None:
    for problems in run_ranks(every_end, world_size, accumulate, every, folder=tmp_path, timeout=500):
        assert not problems, "\n".join(map(str, problems))


def other_order(path: Path) -> None:
    with phalanx.init(name="loops", progress=False) as run:
        s = Script(run, -1, 10**6)
        run.resume(path)
        for _ in run.epochs(1):
            for x in run.steps(s.b):
                s.step(x)


def saved_in_the_first_loop() -> None:
    path = attempt(two_loops, 1, 3, 3).path
    assert path is not None
    said = r"epoch 0, where loop 1 .* over loader 0 .* now it is over loader 1"
    with pytest.raises(CheckpointError, match=said):
        other_order(path)


def test_another_order_of_loops_is_an_error(tmp_path: Path) -> None:
    run_ranks(saved_in_the_first_loop, 1, folder=tmp_path)


def train_on(size: int, path: Path | None, save_at: int) -> Any:
    """The batches of two epochs, or up to the checkpoint after step `save_at` (0: after the first epoch)."""
    with phalanx.init(name="grown", progress=False) as run:
        model = nn.Linear(1, 1)
        m, o, d = run.prepare(
            model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(list(range(size)), 2, shuffle=True)
        )
        if path is not None:
            run.resume(path)
        seen, saved = [], None
        for _ in run.epochs(2):
            for x in run.steps(d):
                run.backward(m(x.float().unsqueeze(1)).mean())
                o.step()
                o.zero_grad()
                seen.append(x.tolist())
                if run.step + 1 == save_at:
                    saved = run.save()
            if save_at == 0:
                saved = run.save()
            if saved:
                break
        return seen, saved


def grown() -> None:
    _, inside = train_on(12, None, 3)
    for size in (14, 10):
        with pytest.raises(CheckpointError, match=f"a dataset of 12, which has {size} now"):
            train_on(size, inside, -1)
    _, at_end = train_on(12, None, 0)
    seen, _ = train_on(14, at_end, -1)
    assert sorted(chain.from_iterable(seen)) == list(range(14))
    _, last = train_on(12, None, 6)  # the last step of an epoch: nothing of it is left
    seen, _ = train_on(14, last, -1)
    assert sorted(chain.from_iterable(seen)) == list(range(14))


def test_a_dataset_that_grew_or_shrank_is_refused_inside_a_pass(tmp_path: Path) -> None:
    run_ranks(grown, 1, folder=tmp_path)
