"""Parameters that a rank's batch does not reach, under FSDP with `fsdp.find_unused_parameters`.

FSDP then reduces zeros for them, so that all ranks reduce alike. What no rank has reached is told apart here: it keeps
no gradient, as under DDP, so that an optimizer leaves it alone.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from .base import parameters_of
from .comm import Comm

SWITCH = "set_reduce_scatter_unused_params"  # of FSDPModule; torch 2.13 has it


class Unused:
    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._parameters: list[nn.Parameter] = []  # sharded ones, in an order that all ranks share
        self._reached: set[int] = set()  # of these, by this rank's passes since gradients were cleared
        self._known = True  # whether all ranks know of all passes

    def watch(self, model: nn.Module, units: list[FSDPModule]) -> None:
        """From now on, note what backward passes reach."""
        getattr(model, SWITCH)(True)
        for unit in units:
            for group in unit._get_fsdp_state()._fsdp_param_groups:
                for parameter in group.fsdp_params:
                    number = len(self._parameters)
                    self._parameters.append(parameter.sharded_param)
                    gathered_later = partial(self._hook, parameter, number)
                    unit.register_forward_hook(gathered_later)  # type: ignore[attr-defined]

    def _hook(self, parameter: Any, number: int, *_: Any) -> None:
        """The gathered parameter, which autograd sees, is made by the first forward."""
        gathered = getattr(parameter, "_unsharded_param", None)
        if gathered is not None and gathered.requires_grad and not hasattr(gathered, "_phalanx_watched"):
            gathered._phalanx_watched = True
            gathered.register_post_accumulate_grad_hook(lambda _: self._reached.add(number))

    def changed(self) -> None:
        """A backward pass begins."""
        self._known = False

    def settle(self) -> None:
        """Take the zeros away from what no rank has reached. All ranks call it."""
        if self._known or not self._parameters:
            return
        self._known = True
        mask = torch.zeros(len(self._parameters), dtype=torch.int32)
        mask[list(self._reached)] = 1
        for parameter, reached in zip(self._parameters, self._comm.all_reduce(mask, "max"), strict=True):
            if not reached:
                parameter.grad = None

    def cleared(self, optimizer: Optimizer) -> None:
        """The gradients of the optimizer's parameters are gone."""
        if self._reached:
            own = set(map(id, parameters_of(optimizer)))
            self._reached = {number for number in self._reached if id(self._parameters[number]) not in own}
