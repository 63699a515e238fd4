"""Tensors whose elements share memory, against their places in memory counted one by one."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from phalanx.strategies.overlap import as_bytes, dense, overlaps, writable, write

LAYOUTS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=4)


def laid_out(layout: list[tuple[int, int]]) -> Tensor:
    """A tensor of these sizes and strides, whose values are their places in memory."""
    return torch.arange(100.0).as_strided([size for size, _ in layout], [stride for _, stride in layout], 7)


def places(layout: list[tuple[int, int]]) -> list[int]:
    corners = product(*(range(size) for size, _ in layout))
    return [sum(at * stride for at, (_, stride) in zip(corner, layout, strict=True)) for corner in corners]


@given(LAYOUTS)
def test_elements_share_memory_where_two_lie_in_one_place(layout: list[tuple[int, int]]) -> None:
    tensor, all_places = laid_out(layout), places(layout)
    assert overlaps(tensor) is (len(set(all_places)) < len(all_places))
    assert dense(tensor).tolist() == tensor.tolist()
    assert not overlaps(dense(tensor))


@given(LAYOUTS)
def test_what_is_written_is_all_there_or_refused(layout: list[tuple[int, int]]) -> None:
    tensor = laid_out(layout)
    fitting = dense(tensor.clone() * 2 + 1)
    assert write(tensor, fitting)
    assert tensor.tolist() == fitting.tolist()
    each_its_own = torch.arange(float(tensor.numel())).reshape(tensor.shape)
    shares = overlaps(tensor)
    assert write(tensor, each_its_own) is not shares
    assert tensor.tolist() == (fitting if shares else each_its_own).tolist()


@given(LAYOUTS, st.sampled_from([torch.int16, torch.complex64, torch.bool, torch.float8_e4m3fn]))
def test_bytes_are_those_of_the_elements_in_turn(layout: list[tuple[int, int]], dtype: torch.dtype) -> None:
    tensor = laid_out(layout)
    changed = torch.arange(100.0).to(dtype).as_strided(tensor.shape, tensor.stride(), 7)
    plain = torch.stack([changed[at] for at in product(*map(range, tensor.shape))]) if tensor.numel() else None
    assert as_bytes(changed).tolist() == ([] if plain is None else plain.view(torch.uint8).flatten().tolist())


def model() -> nn.Module:
    made = nn.Module()
    made.register_buffer("base", torch.zeros(4))
    made.register_buffer("windows", made.base.unfold(0, 2, 1))
    made.register_buffer("wide", torch.zeros(1).expand(3))
    made.inner = nn.Module()
    made.inner.register_buffer("again", made.wide)
    return made


def test_a_models_buffers_share_memory_again_after_they_were_loaded() -> None:
    made, names = model(), ("wide", "windows")
    before = {name: made.get_buffer(name) for name in names}
    state = {
        "base": torch.arange(4.0),
        "windows": torch.tensor([[0.0, 1.0], [1.0, 2.0], [2.0, 3.0]]),
        "wide": torch.full((3,), 5.0),
        "inner.again": torch.full((3,), 5.0),
    }
    with writable(made):
        made.load_state_dict(state)
    assert {name: value.tolist() for name, value in made.state_dict().items()} == {
        name: value.tolist() for name, value in state.items()
    }
    assert all(made.get_buffer(name) is before[name] for name in names)
    made.base.add_(1)
    assert made.windows.tolist() == [[1, 2], [2, 3], [3, 4]]


def test_values_that_differ_get_memory_of_their_own_under_all_names() -> None:
    made = model()
    own = torch.arange(3.0)
    with writable(made):
        made.load_state_dict({**made.state_dict(), "wide": own, "inner.again": own})
    assert made.wide.tolist() == [0, 1, 2]
    assert made.inner.again is made.wide


def test_a_load_that_fails_leaves_the_buffers() -> None:
    made = model()
    wide = made.wide
    with pytest.raises(RuntimeError, match="Missing"), writable(made):
        made.load_state_dict({})
    assert made.wide is wide
