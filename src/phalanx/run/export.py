"""A model's weights for use elsewhere: whole, on the CPU, under the names of the user's own module."""

from __future__ import annotations

from itertools import chain
from typing import Any

from torch import Tensor

from ..strategies.saved import SavedModel


def full_state(model: SavedModel, keep: bool) -> dict[str, Any]:
    """The `state_dict` of a model, gathered from all ranks; empty unless `keep`. Collective.

    One tensor is gathered at a time, so that the device needs room for a single whole one. Tied tensors stay tied.
    """
    own = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    owners = {name: id(tensor) for name, tensor in own}
    copies: dict[Any, Any] = {}
    result: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        owner = owners.get(name, name)
        if owner not in copies:
            copies[owner] = _whole(value, keep)
        if keep:
            result[name] = copies[owner]
    return result


def _whole(value: Any, keep: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    gather = getattr(value, "full_tensor", None)
    whole: Tensor = value if gather is None else gather()
    return whole.detach().to("cpu", copy=True) if keep else None
