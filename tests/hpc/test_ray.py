"""Workers of Ray Train."""

from __future__ import annotations

import os

import pytest

import phalanx

from .training import check_places, me, weights

pytestmark = [pytest.mark.hpc, pytest.mark.ray_dist, pytest.mark.filterwarnings("default")]


def test_every_worker_has_a_place_of_its_own_in_rays_cluster() -> None:
    import ray

    with phalanx.init(progress=False) as run:
        check_places(run.gather(me(run)))
        if run.is_main:
            ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False)
            assert len(ray.nodes()) == run.topology.num_nodes
            ray.shutdown()
        run.gather(0)  # the others wait


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_training_ends_at_the_closed_form(strategy: str) -> None:
    found, expected = weights(strategy=strategy)
    assert found == pytest.approx(expected, rel=1e-5)
