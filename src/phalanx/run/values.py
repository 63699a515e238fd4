"""`Run.gather` and `Run.broadcast`: tensors of any type travel as bytes, other objects pickled."""

from __future__ import annotations

import operator
import pickle
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError
from ..strategies.comm import WORDS, Comm
from ..strategies.overlap import as_bytes


def plain(tensor: Tensor, call: str, path: str = "") -> Tensor:
    """The tensor, if it has its elements here and nothing else; UsageError otherwise."""
    where = f" at {path}" if path else ""
    if hasattr(tensor, "full_tensor"):
        raise UsageError(f"{call}() got a DTensor{where}, of which ranks hold parts: pass tensor.full_tensor()")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
        kind = "quantized" if tensor.is_quantized else "meta" if tensor.is_meta else tensor.layout
        raise UsageError(
            f"{call}() got a tensor{where} that is {kind}: expected a dense one, as tensor.to_dense() gives"
        )
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def described(tensor: Tensor, rows: bool = False) -> str:
    """Its type and shape (without the first dimension's length for `rows`), in words that ranks compare."""
    shape = f"({', '.join(['*'] * rows + [str(length) for length in tensor.shape[rows:]])})"
    device = " on cuda" if tensor.device.type == "cuda" else ""
    return f"a {str(tensor.dtype).removeprefix('torch.')} tensor of shape {shape}{device}"


def gather(comm: Comm, value: Any) -> Any:
    """See `Run.gather`."""
    what, data, problem = "", torch.empty(0), ""
    try:
        if isinstance(value, Tensor):
            data = plain(value.detach(), "gather")
            data = data.reshape(1) if data.dim() == 0 else data
            what = described(data, rows=True)
        else:
            what = "an object that is no tensor"
            data = _pickled(value, "gather") if comm.world_size > 1 else data
    except UsageError as error:  # every rank's, once they have met
        problem = str(error)
    rows = comm.meet("run.gather()", what=(what,), words=(len(data), *WORDS[1:]), problem=problem)
    if not isinstance(value, Tensor) and comm.world_size == 1:
        return [value]
    parts = _parts(comm, data, [row[0] for row in rows])
    if isinstance(value, Tensor):
        return torch.cat(parts)
    return [pickle.loads(part.numpy().tobytes()) for part in parts]


def _parts(comm: Comm, data: Tensor, sizes: list[int]) -> list[Tensor]:
    """Every rank's `data`, which differ in the first dimension only."""
    rest = data.shape[1:]
    width = data.dtype.itemsize * rest.numel()
    padded = torch.zeros(max(sizes) * width, dtype=torch.uint8, device=data.device)
    padded[: len(data) * width] = as_bytes(data)
    found = comm.all_gather(padded) if len(padded) else [padded] * comm.world_size
    return [part[: size * width].view(data.dtype).reshape(size, *rest) for part, size in zip(found, sizes, strict=True)]


def _pickled(value: Any, call: str) -> Tensor:
    try:
        return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    except Exception as error:
        raise UsageError(
            f"{call}() can't send {type(value).__name__!r} to other ranks: {error}. Pass a tensor or what pickle takes"
        ) from error


def broadcast(comm: Comm, value: Any, src: int) -> Any:
    """See `Run.broadcast`."""
    what, data, problem = "an object that is no tensor", torch.empty(0), ""
    try:
        _check_source(src, comm.world_size)
        if isinstance(value, Tensor):
            data = plain(value.detach(), "broadcast")
            what = described(data)
        elif comm.world_size > 1 and comm.rank == src:
            data = _pickled(value, "broadcast")
    except UsageError as error:
        problem = str(error)
    size = 0 if isinstance(value, Tensor) else len(data)
    rows = comm.meet("run.broadcast()", what=(f"src={src!r}", what), words=(size, *WORDS[1:]), problem=problem)
    if isinstance(value, Tensor):
        return comm.broadcast(data.clone(memory_format=torch.contiguous_format), src)
    if comm.rank == src:
        comm.broadcast(data, src)
        return value
    sent = comm.broadcast(torch.empty(rows[src][0], dtype=torch.uint8), src)
    return pickle.loads(sent.numpy().tobytes())


def _check_source(src: Any, world_size: int) -> None:
    try:
        fine = 0 <= operator.index(src) < world_size
    except TypeError:
        fine = False
    if not fine:
        raise UsageError(f"broadcast(src={src!r}): expected a rank from 0 to {world_size - 1}")
