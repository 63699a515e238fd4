"""Tensors whose elements share memory, as `expand` and `as_strided` make them: torch reads them,
and can't write to them element by element.

They stay as the script made them, since it may write to the memory that they share; what has to be
written is written once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


def overlaps(tensor: Tensor) -> bool:
    """Whether elements of `tensor` share memory."""
    if tensor.layout != torch.strided or tensor.is_quantized or not tensor.numel():
        return False
    dimensions = zip(tensor.stride(), tensor.shape, strict=True)
    reach = 0  # of the dimensions until now
    for stride, size in sorted(each for each in dimensions if each[1] > 1):
        if stride == 0:
            return True
        if stride <= reach:  # interleaved, which needs not mean shared
            return bool(torch.bincount(_places(tensor).flatten()).max() > 1)
        reach += stride * (size - 1)
    return False


def _places(tensor: Tensor) -> Tensor:
    """Where each element lies in memory, as its number from the first one."""
    places = torch.zeros((), dtype=torch.int64)
    for stride, size in zip(tensor.stride(), tensor.shape, strict=True):
        places = places.unsqueeze(-1) + stride * torch.arange(size)
    return places


def dense(tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy whose elements have memory of their own."""
    return tensor.clone(memory_format=torch.contiguous_format) if overlaps(tensor) else tensor


def once(tensor: Tensor) -> Tensor:
    """The part of an expanded tensor that has each of its elements once."""
    return tensor[tuple(slice(1) if step == 0 else slice(None) for step in tensor.stride())]


def write(tensor: Tensor, values: Tensor) -> bool:
    """Give a tensor these values; False, and nothing is written, where elements that share memory
    had to differ."""
    if overlaps(tensor):
        trial = torch.empty_strided(tensor.shape, tensor.stride(), dtype=values.dtype, device=values.device)
        _put(trial, values)
        if not torch.equal(as_bytes(trial), as_bytes(values)):
            return False
    _put(tensor, values)
    return True


def _put(tensor: Tensor, values: Tensor) -> None:
    if tensor.layout != torch.strided:  # a sparse one has no strides
        tensor.copy_(values)
        return
    into = once(tensor)
    into.copy_(values[tuple(map(slice, into.shape))])


def as_bytes(tensor: Tensor) -> Tensor:
    """The elements as a flat tensor of bytes: a view, where the tensor is contiguous."""
    flat = tensor.resolve_conj().resolve_neg().contiguous()
    # Not by `view`: a dimension of one element may have stride 0, which `view` would keep.
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


@dataclass
class _Buffer:
    own: Tensor
    copy: Tensor
    version: int  # of the copy, before anything was written to it
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)

    def put(self, value: Tensor) -> None:
        for module, name in self.owners:
            if module._buffers[name] is self.own or module._buffers[name] is self.copy:
                module._buffers[name] = value


@contextmanager
def writable(model: nn.Module) -> Iterator[None]:
    """Within it, each buffer of the model can be written to; afterwards it shares memory as before.

    Where what was written differs between elements that share, the buffer keeps memory of its own:
    the script had put another tensor in its place when these values were saved.
    """
    found: dict[int, _Buffer] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and overlaps(buffer):
                if id(buffer) not in found:
                    copy = dense(buffer.detach())
                    found[id(buffer)] = _Buffer(buffer, copy, copy._version)
                found[id(buffer)].owners.append((module, name))
    for entry in found.values():
        entry.put(entry.copy)
    try:
        yield
    finally:
        with torch.no_grad():
            for entry in found.values():
                # What got no values (it isn't saved) may share memory with what got some.
                if entry.copy._version == entry.version or write(entry.own, entry.copy):
                    entry.put(entry.own)
