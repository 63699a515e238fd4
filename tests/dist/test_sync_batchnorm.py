"""`ddp.sync_batchnorm` without GPUs: what is replaced, what is kept, and what is refused before training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import phalanx
from phalanx.config import load_config
from phalanx.errors import UsageError
from phalanx.rank.topology import Topology
from phalanx.run.batchnorm import synchronised
from phalanx.strategies.ddp import Ddp
from tests.dist.harness import RankFailed, rank_environ, run_ranks


@dataclass
class OnGpu:
    type: str = "cuda"


def ddp(world_size: int, **settings: Any) -> Ddp:
    config = load_config((), [("ddp.sync_batchnorm", "true")], {}).config
    topology = Topology.from_environ(rank_environ(0, world_size, 1))
    return Ddp(topology, config, OnGpu())  # type: ignore[arg-type]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, eps=0.1, momentum=None))
        self.shared = self.first[1]
        self.frozen = nn.BatchNorm2d(2, affine=False).eval()
        self.mine = nn.SyncBatchNorm(4, process_group="mine")
        self.none = None
        self.frozen.requires_grad_(False)


def test_modules_are_replaced_and_their_tensors_kept() -> None:
    net = Net()
    tensors = dict((*net.named_parameters(), *net.named_buffers()))
    names = list(net.state_dict())
    mine = net.mine
    assert synchronised(net, ddp(2)) is net
    assert list(net.state_dict()) == names
    assert all(value is tensors[name] for name, value in (*net.named_parameters(), *net.named_buffers()))
    assert type(net.first[1]) is type(net.frozen) is nn.SyncBatchNorm
    assert net.shared is net.first[1]
    assert (net.shared.eps, net.shared.momentum, net.shared.num_features) == (0.1, None, 3)
    assert (net.shared.training, net.frozen.training, net.frozen.affine) == (True, False, False)
    assert net.mine is mine
    assert net.mine.process_group == "mine"
    alone = nn.BatchNorm1d(3)
    assert type(synchronised(alone, ddp(2))) is nn.SyncBatchNorm
    assert synchronised(alone, ddp(1)) is alone  # one rank has the whole batch


class Own(nn.BatchNorm1d):
    pass


def test_another_kind_of_batchnorm_is_named() -> None:
    with pytest.raises(UsageError, match=r"can't replace 1, a Own"):
        synchronised(nn.Sequential(nn.Linear(1, 1), Own(1)), ddp(2))


def prepare(strategy: str, norm: bool) -> str:
    with phalanx.init(strategy=strategy, progress=False, ddp={"sync_batchnorm": True}) as run:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2) if norm else nn.ReLU())
        model = run.prepare(model)
        return type(run.unwrap(model)[1]).__name__


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_cpus_are_refused_before_training(tmp_path: Path, strategy: str) -> None:
    with pytest.raises(RankFailed) as caught:
        run_ranks(prepare, 2, strategy, True, folder=tmp_path)
    for trace in caught.value.traces.values():
        assert "ddp.sync_batchnorm needs CUDA devices" in trace
    assert run_ranks(prepare, 2, strategy, False, folder=tmp_path) == ["ReLU", "ReLU"]
    assert run_ranks(prepare, 1, "single", True, folder=tmp_path) == ["BatchNorm1d"]
