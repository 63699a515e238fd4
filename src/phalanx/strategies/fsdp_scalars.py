"""Parameters of no dimension under FSDP, which shards along the first one and so refuses them.

They stay whole in the module on every rank. The optimizer holds an alias of each: a replicated DTensor over the same
memory, since it can't step DTensors and plain tensors together. Their gradients are averaged here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from .base import parameters_of
from .comm import Comm


class Scalars:
    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._aliases: dict[nn.Parameter, nn.Parameter] = {}  # by the module's own parameter
        self._averaged = True  # whether gradients are those over all ranks

    def take(self, model: nn.Module, mesh: DeviceMesh) -> dict[str, Any]:
        """What `fully_shard` is to be told of the model's scalars."""
        # A list: all ranks must have them in one order.
        found = [parameter for parameter in model.parameters() if parameter.dim() == 0]
        for parameter in found:
            whole = DTensor.from_local(parameter.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)
            self._aliases[parameter] = nn.Parameter(whole, parameter.requires_grad)
        return {"ignored_params": set(found)} if found else {}

    def held(self, parameter: nn.Parameter) -> nn.Parameter:
        """What the optimizer holds of a module's parameter."""
        return self._aliases.get(parameter, parameter)

    def changed(self) -> None:
        """A backward pass begins: its gradients are this rank's own."""
        self._averaged = False

    def average(self) -> None:
        """Gradients over all ranks, for the aliases too. A gradient that is averaged already stays what it is."""
        if self._averaged or not self._aliases:
            return
        self._averaged = True
        own = list(self._aliases)
        words = torch.zeros(2, len(own), dtype=torch.float64, device=own[0].device)
        for at, parameter in enumerate(own):
            if parameter.grad is not None:
                words[0, at], words[1, at] = parameter.grad, 1.0
        sums, reached = self._comm.all_reduce(words, "sum")
        for at, (parameter, alias) in enumerate(self._aliases.items()):
            if parameter.grad is None:
                if not reached[at]:
                    continue
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.copy_(sums[at] / self._comm.world_size)
            alias.grad = _like(alias, parameter.grad)

    def agree(self, found: Iterable[torch.Tensor]) -> None:
        """Whether any rank has found an overflow. All ranks call it."""
        if self._aliases:
            for word in found:
                self._comm.all_reduce(word, "max")

    def clear(self, optimizer: Optimizer, set_to_none: bool) -> None:
        """The optimizer has cleared its aliases' gradients; the module's follow."""
        if not self._aliases:
            return
        cleared = {id(parameter) for parameter in parameters_of(optimizer)}
        for parameter, alias in self._aliases.items():
            if id(alias) in cleared and parameter.grad is not None:
                parameter.grad = None if set_to_none else torch.zeros_like(parameter)


class Scaler(torch.amp.GradScaler):
    """For DTensors torch tells by an optimizer's first gradient alone whether ranks must agree on
    overflows, and a scalar's is whole on each of them."""

    def __init__(self, device: str, scalars: Scalars) -> None:
        super().__init__(device)
        self._scalars = scalars

    def _unscale_grads_(self, *arguments: Any) -> dict[torch.device, torch.Tensor]:
        found = super()._unscale_grads_(*arguments)
        self._scalars.agree(found.values())
        return found


def _like(alias: nn.Parameter, local: torch.Tensor) -> torch.Tensor:
    """A gradient for the alias, over the memory of the module's."""
    data: Any = alias.data
    return DTensor.from_local(local, data.device_mesh, data.placements, run_check=False)
