"""State of the script's own in a checkpoint: of things with a state_dict, or of containers, by value.

Tensors go where the run's own go (`user.<name>/<place>`), so that sharded ones are saved and loaded in parts; what is
left is pickled beside them. Of what isn't sharded, rank 0's is saved.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping, MutableSequence, MutableSet
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..errors import CheckpointError
from ..strategies.overlap import writable, write

CONTAINERS = (MutableMapping, MutableSequence, MutableSet)


@dataclass(frozen=True)
class Place:
    """Where a tensor was, in state that was taken apart."""

    key: str


@dataclass
class Registered:
    """One thing of the script's; `optional`: a checkpoint that lacks it leaves it as it is."""

    name: str
    thing: Any
    optional: bool

    def parts(self) -> tuple[Any, dict[str, Tensor]]:
        """Its state without tensors, and these by their names in a checkpoint."""
        state = self.thing.state_dict() if hasattr(self.thing, "state_dict") else self.thing
        found: dict[str, Tensor] = {}
        return _apart(state, f"user.{self.name}", found), found

    def load(self, frame: Any, values: Mapping[str, Tensor]) -> None:
        state = _together(frame, values)
        if not hasattr(self.thing, "load_state_dict"):
            _restore(self.thing, state)
            return
        try:
            with writable(self.thing) if isinstance(self.thing, nn.Module) else nullcontext():
                self.thing.load_state_dict(state)
        except Exception as error:
            raise CheckpointError(
                f"what is registered as {self.name!r} ({type(self.thing).__name__}) did not take the state that the "
                f"checkpoint has of it: {type(error).__name__}: {error}"
            ) from error


def room(frame: Any, here: Mapping[str, Tensor], saved: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors to load saved state into, placed as those that the thing has now."""
    found: dict[str, Tensor] = {}
    for key in _keys(frame):
        size, dtype = saved[key].size, saved[key].properties.dtype
        now = here.get(key)
        if isinstance(now, DTensor) and now.shape == size:
            found[key] = torch.zeros_like(now, dtype=dtype, requires_grad=False)
        else:
            found[key] = torch.zeros(size, dtype=dtype)
    return found


def check_names(saved: Mapping[str, Any], here: Mapping[str, Registered]) -> None:
    """Strictness: what either side has is on the other, unless it is optional here."""
    lacking = sorted(name for name, item in here.items() if name not in saved and not item.optional)
    unknown = sorted(set(saved) - set(here))
    if lacking:
        raise CheckpointError(
            f"the checkpoint has no state of {_list(lacking)}, which this run has registered. If it is from before "
            f"that, load it by run.register({lacking[0]!r}, …, optional=True)"
        )
    if unknown:
        raise CheckpointError(
            f"the checkpoint has state of {_list(unknown)}, which this run has not registered: call "
            f"run.register({unknown[0]!r}, …) before it resumes (with an empty dict to drop it)"
        )


def _list(names: list[str]) -> str:
    return ", ".join(map(repr, names))


def _apart(value: Any, key: str, found: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor) and (isinstance(value, DTensor) or value.layout == torch.strided):
        while key in found:  # names with slashes in them
            key += "'"
        found[key] = value.detach()
        return Place(key)
    if isinstance(value, MutableMapping):
        made = copy.copy(value)
        for name, item in value.items():
            made[name] = _apart(item, f"{key}/{name if isinstance(name, str) else repr(name)}", found)
        return made
    if isinstance(value, list | tuple):
        items = [_apart(item, f"{key}/{at}", found) for at, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _together(frame: Any, values: Mapping[str, Tensor]) -> Any:
    if isinstance(frame, Place):
        return values[frame.key]
    if isinstance(frame, MutableMapping):
        for name, item in frame.items():
            frame[name] = _together(item, values)
        return frame
    if isinstance(frame, list | tuple):
        items = [_together(item, values) for item in frame]
        return type(frame)(*items) if hasattr(frame, "_fields") else type(frame)(items)
    return frame


def _keys(frame: Any) -> list[str]:
    if isinstance(frame, Place):
        return [frame.key]
    if isinstance(frame, MutableMapping):
        return [key for item in frame.values() for key in _keys(item)]
    return [key for item in frame for key in _keys(item)] if isinstance(frame, list | tuple) else []


def _restore(into: Any, saved: Any) -> None:
    """A container's content, in place: also of containers and tensors in it, to which the script may hold names."""
    if isinstance(into, MutableMapping):
        items = {name: _renewed(into.get(name), item) for name, item in saved.items()}
        into.clear()
        for name, item in items.items():
            into[name] = item
    elif isinstance(into, MutableSequence):
        before = [*into, *[None] * len(saved)]
        renewed = [_renewed(old, item) for old, item in zip(before, saved, strict=False)]
        into.clear()
        into.extend(renewed)
    else:
        into.clear()
        into |= saved


def _renewed(old: Any, new: Any) -> Any:
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        if (old.shape, old.dtype, old.layout) != (new.shape, new.dtype, new.layout):
            return new.to(old.device)
        if old.layout not in (torch.strided, torch.sparse_coo):  # others take as many elements only
            return new.to(old.device)
        with torch.no_grad():
            return old if write(old, new) else new.to(old.device)
    if isinstance(old, CONTAINERS) and type(old) is type(new):
        _restore(old, new)
        return old
    return new
