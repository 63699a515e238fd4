"""Which devices a rank sees, and which is its own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.errors import TopologyError
from phalanx.rank.devices import device_index, visible_devices
from phalanx.rank.topology import Topology


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("0,1", ["0", "1"]),
        ("3", ["3"]),
        (" 2 , 0 ", ["2", "0"]),
        # words that are no numbers hide all devices
        ("", []),
        ("NoDevFiles", []),
        ("-1", []),
        ("none", []),
        # UUIDs
        ("GPU-3fa8,GPU-77b1", ["GPU-3fa8", "GPU-77b1"]),
        ("MIG-9c1e", ["MIG-9c1e"]),
        ("MIG-GPU-3fa8/1/0", ["MIG-GPU-3fa8/1/0"]),
        # CUDA stops at the first entry that is not valid
        ("0,-1,1", ["0"]),
        ("0,x,1", ["0"]),
        ("0,", ["0"]),
        ("GPU-3fa8,1", ["GPU-3fa8"]),
        # CUDA shows nothing if an entry is repeated
        ("0,1,0", []),
        ("GPU-3fa8,GPU-3fa8", []),
    ],
)
def test_cuda_lists_are_read_as_cuda_does(text: str, devices: list[str]) -> None:
    assert visible_devices({"CUDA_VISIBLE_DEVICES": text}) == devices


@pytest.mark.parametrize(
    ("environ", "devices"),
    [
        ({}, None),
        ({"ROCR_VISIBLE_DEVICES": "2,3"}, ["2", "3"]),
        ({"HIP_VISIBLE_DEVICES": "1"}, ["1"]),
        ({"HIP_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": "0,1"}, []),
        # HIP counts within what ROCR leaves
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}, ["3"]),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "0,2,1"}, ["2"]),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "CUDA_VISIBLE_DEVICES": "0,1,4"}, ["0", "1", "4"]),
    ],
)
def test_rocm_lists_count_where_cuda_has_none(environ: dict[str, str], devices: list[str] | None) -> None:
    assert visible_devices(environ) == devices


def _rank(local_rank: int, local_world_size: int) -> Topology:
    size = local_world_size
    return Topology(local_rank, size, local_rank, size, 0, 1, "127.0.0.1", 29500, "slurm")


@pytest.mark.parametrize(
    ("local_rank", "cuda", "count", "index"),
    [
        # each task sees one device, its own
        (0, "0", None, 0),
        (1, "1", None, 0),
        (3, "GPU-77b1", None, 0),
        (1, "MIG-9c1e", None, 0),
        # each task sees all of its node's
        (1, "0,1", None, 1),
        (1, "GPU-3fa8,GPU-77b1", None, 1),
        (2, None, None, 2),
        # the real count, where the caller knows it, is what matters
        (1, "0,7", 1, 0),
        (3, None, 4, 3),
        (1, None, 1, 0),
    ],
)
def test_one_visible_device_is_index_0(local_rank: int, cuda: str | None, count: int | None, index: int) -> None:
    environ = {} if cuda is None else {"CUDA_VISIBLE_DEVICES": cuda}
    assert device_index(_rank(local_rank, 4), environ, count) == index


@pytest.mark.parametrize(
    ("local_rank", "cuda", "count", "said"),
    [
        (2, "0,1", None, ["local rank 2", "2 visible", "CUDA_VISIBLE_DEVICES='0,1'"]),
        (0, "", None, ["local rank 0", "0 visible", "CUDA_VISIBLE_DEVICES=''"]),
        (3, None, 2, ["local rank 3", "2 visible"]),
    ],
)
def test_a_rank_without_a_device_says_so(local_rank: int, cuda: str | None, count: int | None, said: list[str]) -> None:
    environ = {} if cuda is None else {"CUDA_VISIBLE_DEVICES": cuda}
    with pytest.raises(TopologyError) as caught:
        device_index(_rank(local_rank, 4), environ, count)
    assert all(part in str(caught.value) for part in [*said, "ranks per node"])


@pytest.mark.parametrize(
    "said",
    [
        {"SLURM_GPUS_PER_TASK": "2"},
        {"SLURM_GPUS_PER_TASK": "a100:2"},
        {"SLURM_TRES_PER_TASK": "cpu=4,gres/gpu=2"},
        {"SLURM_TRES_PER_TASK": "cpu:4,gres/gpu:a100:2"},
    ],
)
@pytest.mark.parametrize("visible", ["0,1", "2,3"])
def test_of_several_that_are_bound_to_each_task_the_first_is_the_ranks(said: dict[str, str], visible: str) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": visible, **said}
    for local_rank in range(4):
        assert device_index(replace(_rank(local_rank, 4), source="slurm"), environ) == 0
    assert device_index(replace(_rank(1, 2), source="torchrun"), environ) == 1  # the agent's are for all its ranks
    with pytest.raises(TopologyError):
        device_index(replace(_rank(2, 4), source="slurm"), {"CUDA_VISIBLE_DEVICES": visible})
