"""DeepSpeed and Horovod beyond parity: gradients with weights, checkpoints, exports, and what they refuse.

Each launch makes several checks: the ranks of an engine take seconds to import it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.engines import environ_for, needs
from tests.dist.harness import run_ranks
from tests.dist.test_api import exported
from tests.dist.test_checkpoint import assert_same, load_only, train
from tests.dist.test_gradients import token_weights, two_losses

pytestmark = pytest.mark.slow
ENGINES = [pytest.param(name, marks=needs(name)) for name in ("deepspeed-0", "deepspeed-2", "deepspeed-3", "horovod")]


def engine_name(strategy: str) -> str:
    return strategy.partition("-")[0]


def weights_and_losses(strategy: str) -> dict[str, Any]:
    name = engine_name(strategy)
    return {
        "tokens": token_weights(name, 2, "fp32"),
        "losses": two_losses(name, False),
        "weighted": two_losses(name, True),
        "export": exported(name)[0],
    }


@pytest.mark.parametrize("strategy", ENGINES)
def test_weights_of_losses_and_two_losses_are_a_single_processs(tmp_path: Path, strategy: str) -> None:
    """Explicit weights with accumulation and clipping, two backward passes a step, and the export afterwards."""
    (alone,) = run_ranks(weights_and_losses, 1, "single", folder=tmp_path)
    ranks = run_ranks(weights_and_losses, 2, strategy, folder=tmp_path, env=environ_for(strategy, 2))
    for rank in ranks:
        torch.testing.assert_close(rank["tokens"]["weights"], alone["tokens"]["weights"], rtol=1e-5, atol=1e-6)
        assert rank["tokens"]["norm"] == pytest.approx(alone["tokens"]["norm"], rel=1e-4)
        for part in ("losses", "weighted"):
            torch.testing.assert_close(rank[part], alone[part])
    torch.testing.assert_close(ranks[0]["export"], alone["export"])
    assert ranks[1]["export"] == {}


STATEFUL = ("deepspeed-1", "deepspeed-3", "horovod")


@pytest.mark.parametrize("strategy", [pytest.param(name, marks=needs(name)) for name in STATEFUL])
def test_resume_and_moves_are_exact(tmp_path: Path, strategy: str) -> None:
    """Interrupted and resumed it is bit-identical to a run left alone; its checkpoint is one for any strategy and
    world size, and any strategy's is one for it."""
    name, settings = engine_name(strategy), {"checkpoint": {"every_steps": 4}, "run_root": "interrupted"}
    left_alone = run_ranks(train, 2, name, 3, folder=tmp_path, env=environ_for(strategy, 2))
    run_ranks(train, 2, name, 3, 11, settings, folder=tmp_path, env=environ_for(strategy, 2))
    (moved,) = run_ranks(load_interrupted, 1, "single", folder=tmp_path)
    resumed = run_ranks(
        train, 2, name, 3, None, {**settings, "resume": "latest"}, folder=tmp_path, env=environ_for(strategy, 2)
    )
    for whole, rest in zip(left_alone, resumed, strict=True):
        assert_same(whole, rest, exact=True)
        assert rest["step"] == 21
    (reference,) = run_ranks(train, 1, "single", 2, 5, {"checkpoint": {"every_steps": 4}}, folder=tmp_path)
    assert reference["step"] == 5
    (saved,) = run_ranks(load_only, 1, "single", folder=tmp_path)
    for rank in run_ranks(load_only, 2, name, folder=tmp_path, env=environ_for(strategy, 2)):
        assert_same(saved, rank, exact=True)
    assert moved["step"] == 8
    assert moved["moments"].keys() == saved["moments"].keys()


def load_interrupted(strategy: str) -> dict[str, Any]:
    import os

    os.environ["PHALANX_RUN_ROOT"] = "interrupted"
    return load_only(strategy)
