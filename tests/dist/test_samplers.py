"""A sampler of the user's own over real ranks: rank 0 draws for all, and one rank alone can't begin a pass."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler

import phalanx
from phalanx.errors import UsageError
from tests.dist.harness import run_ranks

pytestmark = pytest.mark.slow


class Unseeded(Sampler):
    def __init__(self) -> None:
        self.rng = random.Random()

    def __len__(self) -> int:
        return 11

    def __iter__(self) -> Iterator[int]:
        order = list(range(11))
        self.rng.shuffle(order)
        while True:
            yield from order


def train() -> tuple[list[int], list[int], list[int], str]:
    with phalanx.init(name="sampler", progress=False) as run:
        model = nn.Linear(1, 1)
        data = DataLoader(range(11), 2, sampler=Unseeded())
        model, _, loader = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1), data)
        steps = [i for x in run.steps(loader) for i in x.tolist()]
        evaluated = [i for x in run.evaluate(loader) for i in x.tolist()]
        plain = [i for x in loader for i in x.tolist()]
        with pytest.raises(UsageError) as caught:
            list(loader if run.rank else run.evaluate(loader))
        return steps, evaluated, plain, str(caught.value)


def test_ranks_share_rank_0s_order_and_begin_together(tmp_path: Path) -> None:
    ranks = run_ranks(train, 2, folder=tmp_path)
    for way in range(3):
        assert sorted(i for rank in ranks for i in rank[way]) == list(range(11))
    for *_, said in ranks:
        assert "run.evaluate()" in said
        assert "the sampler Unseeded, which rank 0 draws for all" in said
