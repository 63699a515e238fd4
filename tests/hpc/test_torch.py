"""PyTorch's own strategies, in a launch over torch.distributed."""

from __future__ import annotations

import pytest
import torch
from torch import distributed as dist

import phalanx

from .training import check_places, me, weights

pytestmark = [pytest.mark.hpc, pytest.mark.torch_dist, pytest.mark.filterwarnings("default")]


def test_a_sum_over_all_workers_is_that_of_the_numbers_from_1() -> None:
    with phalanx.init(progress=False) as run:
        number = torch.tensor([run.topology.rank + 1.0], device=run.device)
        if run.topology.world_size > 1:
            dist.all_reduce(number)
        assert number.item() == run.topology.world_size * (run.topology.world_size + 1) / 2


def test_every_worker_has_a_place_of_its_own() -> None:
    with phalanx.init(progress=False) as run:
        check_places(run.gather(me(run)))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_training_ends_at_the_closed_form(strategy: str) -> None:
    found, expected = weights(strategy=strategy)
    assert found == pytest.approx(expected, rel=1e-5)
