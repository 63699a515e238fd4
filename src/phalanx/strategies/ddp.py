"""PyTorch's DistributedDataParallel."""

from __future__ import annotations

from contextlib import AbstractContextManager
from inspect import signature
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .process_group import ProcessGroupStrategy

# torch 2.13 renamed the argument.
_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in signature(DistributedDataParallel.__init__).parameters
)


class Ddp(ProcessGroupStrategy):
    name = "ddp"
    may_unfreeze = False
    averages_held = False

    def wrap(self, model: nn.Module) -> nn.Module:
        model = model.to(self.device)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return model  # a frozen model has no gradients to average, and DDP refuses it
        settings = self.config.ddp
        buffers: dict[str, Any] = {} if settings.broadcast_buffers else {_BUFFERS: False}
        return DistributedDataParallel(
            model,
            device_ids=[self.device.index] if self.device.type == "cuda" else None,
            find_unused_parameters=settings.find_unused_parameters,
            static_graph=settings.static_graph,
            bucket_cap_mb=settings.bucket_cap_mb,
            gradient_as_bucket_view=True,
            **buffers,
        )

    def _inside(self, model: nn.Module) -> nn.Module | None:
        return model.module if isinstance(model, DistributedDataParallel) else super()._inside(model)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        while not isinstance(model, DistributedDataParallel):
            inner = self._inside(model)  # what torch.compile has taken after prepare()
            if inner is None:
                return super().no_sync(model)
            model = inner
        return model.no_sync()
