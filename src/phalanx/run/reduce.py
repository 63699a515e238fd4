"""Values over all ranks: means, sums, extremes and concatenations."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor

from ..comm import Comm
from ..errors import UsageError

Op = Literal["mean", "sum", "min", "max"]


def reduce(comm: Comm, value: Any, op: Op, weight: Any) -> Any:
    """See `Run.reduce`."""
    if op not in ("mean", "sum", "min", "max"):
        raise UsageError(f"reduce(op={op!r}): expected mean, sum, min or max")
    if isinstance(value, Mapping):
        return {key: reduce(comm, item, op, weight) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [reduce(comm, item, op, weight) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Tensor):
        return _tensor(comm, value.detach(), op, weight)
    if isinstance(value, Real):  # NumPy's scalars too
        return _tensor(comm, torch.tensor(float(value), dtype=torch.float64), op, weight).item()
    raise UsageError(f"reduce() got {type(value).__name__!r}: expected a tensor, a number, or a dict or list of them")


def _tensor(comm: Comm, value: Tensor, op: Op, weight: Any) -> Tensor:
    if op == "mean" and not value.is_floating_point():
        value = value.double() if value.device.type != "mps" else value.float()
    if op in ("min", "max"):
        if weight is not None and not float(weight) > 0:
            value = torch.full_like(value, _worst(value.dtype, op))
        return comm.all_reduce(value.clone(), op)
    share = 1.0 if weight is None else float(weight)
    # A rank without weight may hold NaN (the mean of nothing): it must not count, so it is not multiplied.
    part = value * share if share > 0 else torch.zeros_like(value)
    if weight is None and op == "sum":
        part = value.clone()
    total = comm.all_reduce(part, "sum")
    if op == "sum":
        return total
    weights = comm.all_reduce(torch.tensor([share], dtype=torch.float64), "sum").item()
    return total / weights if weights > 0 else torch.full_like(total, float("nan"))


def _worst(dtype: torch.dtype, op: Op) -> float:
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    if dtype.is_floating_point:
        return float("-inf") if op == "max" else float("inf")
    return limits.min if op == "max" else limits.max


def gather(comm: Comm, value: Any) -> Any:
    """See `Run.gather`."""
    if not isinstance(value, Tensor):
        return comm.gather_objects(value)
    value = value.detach()
    if value.dim() == 0:
        value = value.reshape(1)
    sizes = [counts[0] for counts in comm.counts([value.shape[0]])]
    longest = max(sizes)
    padded = value.new_zeros((longest, *value.shape[1:]))
    padded[: value.shape[0]] = value
    return torch.cat([part[:size] for part, size in zip(comm.all_gather(padded), sizes, strict=True)])
