"""Horovod, by its own launcher or MPI."""

from __future__ import annotations

import pytest
import torch

import phalanx

from .training import check_places, me, weights

pytestmark = [pytest.mark.hpc, pytest.mark.horovod_dist, pytest.mark.filterwarnings("default")]


def test_a_sum_over_all_workers_is_that_of_the_numbers_from_1() -> None:
    import horovod.torch as hvd

    with phalanx.init(progress=False, strategy="horovod") as run:
        size = run.topology.world_size
        assert (hvd.rank(), hvd.size()) == (run.topology.rank, size)
        total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum)
        assert total.item() == size * (size + 1) / 2


def test_every_worker_has_a_place_of_its_own() -> None:
    with phalanx.init(progress=False, strategy="horovod") as run:
        check_places(run.gather(me(run)))


def test_training_ends_at_the_closed_form() -> None:
    found, expected = weights(strategy="horovod")
    assert found == pytest.approx(expected, rel=1e-5)
