"""DeepSpeed's engine, in each of its stages."""

from __future__ import annotations

import pytest

import phalanx

from .training import check_places, me, weights

pytestmark = [pytest.mark.hpc, pytest.mark.deepspeed_dist, pytest.mark.filterwarnings("default")]


def test_every_worker_has_a_place_of_its_own() -> None:
    with phalanx.init(progress=False, strategy="deepspeed") as run:
        check_places(run.gather(me(run)))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_ends_at_the_closed_form(stage: int) -> None:
    found, expected = weights(strategy="deepspeed", deepspeed={"zero_stage": stage})
    assert found == pytest.approx(expected, rel=1e-5)
