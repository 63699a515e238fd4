"""What the tests of all engines share: a training whose weights have a closed form, and who the workers are."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from tests.slurm.train import FEATURES, RATE, SAMPLES, closed_form, data

STEPS = 4


def weights(**settings: Any) -> tuple[list[float], list[float]]:
    """Those after full-batch gradient descent with every worker's share of the data, and the closed form's."""
    with phalanx.init(progress=False, **settings) as run:
        assert run.config.strategy == settings["strategy"]
        model = nn.Linear(FEATURES, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        loader = DataLoader(TensorDataset(*data()), batch_size=SAMPLES // run.topology.world_size)
        model, optimizer, loader = run.prepare(model, optimizer, loader)
        for _ in run.epochs(STEPS):
            for x, y in run.steps(loader):
                run.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
        found = run.broadcast([weight.flatten().tolist() for weight in run.state_dict(model).values()])
    return found[0], closed_form(STEPS).flatten().tolist()


def me(run: phalanx.Run) -> torch.Tensor:
    """Who this worker is, as a row: rank, place on its node, size of both, and a number for the host."""
    host = int.from_bytes(platform.node().encode()[-6:].rjust(6, b"\0"), "big")
    place = run.topology
    assert (place.rank, place.world_size) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    return torch.tensor([[place.rank, place.local_rank, place.world_size, place.local_world_size, host]])


def check_places(rows: torch.Tensor) -> None:
    """Each rank is there once, and the places on each host are numbered from 0."""
    found = rows.tolist()
    assert [row[0] for row in found] == list(range(len(found)))
    assert {row[2] for row in found} == {len(found)}
    for host in {row[4] for row in found}:
        here = [row for row in found if row[4] == host]
        assert [row[1] for row in here] == list(range(len(here)))
        assert {row[3] for row in here} == {len(here)}
