"""State that an optimizer has before it is prepared: Adagrad's from its making, or from earlier steps or a file.

It is rank 0's on all ranks, as the weights are, and goes where the parameters went.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from ..errors import UsageError
from ..strategies.base import parameters_of
from ..strategies.comm import Comm
from ..strategies.overlap import dense


@dataclass(frozen=True)
class Like:
    """A tensor that rank 0 is about to send."""

    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class Carried:
    """Whole tensors and plain values of each parameter's state, by the parameter's place in the optimizer."""

    state: dict[int, dict[str, Any]]
    groups: list[dict[str, Any]]  # rank 0's hyperparameters


def take(optimizer: Optimizer, comm: Comm) -> Carried | None:
    """Rank 0's state, on all ranks; afterwards the optimizer has none. None if there was none. Collective.

    Raises UsageError, under every strategy alike, for state that a sharded parameter could not have.
    """
    kind, parameters = type(optimizer).__name__, list(parameters_of(optimizer))
    if any(isinstance(value, DTensor) for state in optimizer.state.values() for value in state.values()):
        return None  # made from the prepared model: it lies where it belongs
    problem, groups = None, None
    state: dict[int, dict[str, Any]] = {}
    if comm.rank == 0:
        problem = _problem(kind, optimizer, parameters)
        state = {at: dict(optimizer.state[p]) for at, p in enumerate(parameters) if optimizer.state.get(p)}
        groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    outline = {at: {key: _outline(value) for key, value in values.items()} for at, values in state.items()}
    problem, outline, groups = comm.broadcast_object((problem, outline, groups if outline else None))
    if problem is not None:
        raise UsageError(problem)
    optimizer.state.clear()
    if not outline:
        return None
    whole = {
        at: {key: _sent(comm, state.get(at, {}).get(key), value) for key, value in values.items()}
        for at, values in outline.items()
    }
    return Carried(whole, groups)


def _problem(kind: str, optimizer: Optimizer, parameters: list[nn.Parameter]) -> str | None:
    own = {id(parameter) for parameter in parameters}
    advice = "Prepare it before its first step, or let run.resume() load it"
    for parameter, state in optimizer.state.items():
        if id(parameter) not in own:
            return f"{kind} has state that belongs to no parameter of its groups. {advice}"
        for key, value in state.items():
            fits = isinstance(value, Tensor) and (value.shape == parameter.shape or value.numel() == 1)
            if not (fits or value is None or isinstance(value, bool | int | float | str)):
                what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                return (
                    f"{kind} has stepped already, and its state {key!r} of {what} can't be moved with a parameter "
                    f"of shape {tuple(parameter.shape)}. {advice}"
                )
    return None


def _outline(value: Any) -> Any:
    return Like(value.shape, value.dtype) if isinstance(value, Tensor) else value


def _sent(comm: Comm, value: Any, outline: Any) -> Any:
    if not isinstance(outline, Like):
        return outline
    tensor = dense(value.detach()) if isinstance(value, Tensor) else torch.empty(outline.shape, dtype=outline.dtype)
    return comm.broadcast(tensor, 0)


def put(carried: Carried, optimizer: Any, parameters: list[nn.Parameter]) -> None:
    """Give it to the optimizer as a checkpoint would. `parameters` are the prepared ones, in the optimizer's order."""
    state = {
        at: {key: _placed(key, value, parameters[at]) for key, value in values.items()}
        for at, values in carried.state.items()
    }
    groups, first = [], 0
    for group, values in zip(optimizer.param_groups, carried.groups, strict=True):
        count = len(group["params"])
        groups.append({**values, "params": list(range(first, first + count))})
        first += count
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _placed(key: str, value: Any, parameter: nn.Parameter) -> Any:
    data = parameter.data
    if not isinstance(value, Tensor) or not isinstance(data, DTensor):
        return value
    if value.shape == data.shape and (value.dim() > 0 or key != "step"):  # a scalar's might be a plain count
        return distribute_tensor(value.to(data.device), data.device_mesh, data.placements)
    return value
