"""State of the script's own that is taken apart and put back, without a checkpoint between."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.checkpoint.registered import Registered


def moved(source: Any, target: Any) -> None:
    frame, found = Registered("it", source, False).parts()
    values = {key: value.clone() for key, value in found.items()}
    Registered("it", target, False).load(pickle.loads(pickle.dumps(frame)), values)


DENSE = torch.tensor([[0.0, 2.0], [3.0, 0.0]])


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("of", [Tensor.to_sparse, Tensor.to_sparse_csr, Tensor.clone])
@pytest.mark.parametrize("before", [Tensor.to_sparse, Tensor.to_sparse_csr, Tensor.clone])
def test_a_container_with_tensors_of_any_layout(of: Any, before: Any) -> None:
    """The one that is there may have other elements, or another layout."""
    target = {"x": before(torch.eye(2)[:, :1] * torch.ones(1, 2))}
    own = target["x"]
    moved({"x": of(DENSE)}, target)
    assert target["x"].layout == of(DENSE).layout
    assert target["x"].to_dense().tolist() == DENSE.tolist()
    if of is before and of is not Tensor.to_sparse_csr:
        assert target["x"] is own


class Shares(nn.Module):
    """Buffers that aren't saved, over the memory of a buffer and of a parameter that are."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((1, 4), value))
        self.register_buffer("wide", self.scale.expand(3, 4), persistent=False)
        self.weight = nn.Parameter(torch.full((1, 2), value))
        self.register_buffer("seen", self.weight.detach().expand(3, 2), persistent=False)


def test_a_module_whose_unsaved_buffers_share_memory_with_what_is_loaded() -> None:
    target = Shares(1.0)
    moved(Shares(7.0), target)
    for tensor in (target.scale, target.wide, target.weight, target.seen):
        assert set(tensor.flatten().tolist()) == {7.0}
    target.scale.add_(1)
    assert target.wide[2, 3] == 8
