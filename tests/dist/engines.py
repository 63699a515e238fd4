"""Engines of other projects in the tests: which of them are here, and what their ranks need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec

import pytest

from phalanx.rank import horovod_ranks
from phalanx.rank.topology import Topology
from tests.dist.harness import rank_environ


def engine_of(strategy: str) -> str:
    """`deepspeed-3` is DeepSpeed with ZeRO at stage 3."""
    return strategy.partition("-")[0] if strategy.startswith(("deepspeed", "horovod")) else "torch"


def needs(strategy: str) -> list[pytest.MarkDecorator]:
    """A loud skip where the engine is missing."""
    engine = engine_of(strategy)
    there = find_spec(engine) is not None
    return [pytest.mark.skipif(not there, reason=f"{engine} is not installed: `make engines` does it")]


def environ_for(strategy: str, world_size: int) -> Callable[[int], Mapping[str, str]]:
    """Variables that choose the strategy, and those that Horovod's launcher gives each rank, from a server here."""
    name, _, stage = strategy.partition("-")
    chosen = {"PHALANX_STRATEGY": name, **({"PHALANX_DEEPSPEED__ZERO_STAGE": stage} if stage else {})}
    if name == "deepspeed":
        chosen["DS_ACCELERATOR"] = "cpu"
    if name != "horovod" or world_size == 1:
        return lambda rank: chosen
    port = horovod_ranks.serve([world_size])

    def of(rank: int) -> dict[str, str]:
        topology = Topology.from_environ(rank_environ(rank, world_size, 1))
        return chosen | horovod_ranks.gloo_variables(topology, [world_size], "127.0.0.1", port)

    return of
