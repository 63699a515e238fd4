"""PyTorch's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .overlap import overlaps
from .process_group import ProcessGroupStrategy, broadcast_state, broadcast_tensors

# torch 2.13 renamed the argument.
_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in signature(DistributedDataParallel.__init__).parameters
)


_IGNORED = "_ddp_params_and_buffers_to_ignore"  # the attribute by which a module tells DDP names to pass over
_SENT = {
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64,
}  # fmt: skip


def _can_be_sent(buffer: torch.Tensor) -> bool:
    """Whether DDP's own broadcast takes it, by every backend."""
    strided = buffer.layout == torch.strided and not buffer.is_quantized
    return strided and buffer.dtype in _SENT and not overlaps(buffer)


@contextmanager
def _ignoring(model: nn.Module, names: list[str]) -> Iterator[None]:
    """Within it, DDP's constructor is told to pass over these."""
    before = vars(model).get(_IGNORED)
    setattr(model, _IGNORED, names)
    try:
        yield
    finally:
        delattr(model, _IGNORED) if before is None else setattr(model, _IGNORED, before)


class Ddp(ProcessGroupStrategy):
    name = "ddp"
    may_unfreeze = False
    averages_held = False

    def wrap(self, model: nn.Module) -> nn.Module:
        model = model.to(self.device)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            broadcast_state(model, self.comm)
            return model  # a frozen model has no gradients to average, and DDP refuses it
        settings = self.config.ddp
        buffers: dict[str, Any] = {} if settings.broadcast_buffers else {_BUFFERS: False}
        own = getattr(model, _IGNORED, ())
        names = [name for name, _ in model.named_buffers() if name not in own]
        odd = [name for name, buffer in model.named_buffers() if name in names and not _can_be_sent(buffer)]
        with _ignoring(model, [*own, *odd]):
            wrapped = self._wrapped(model, buffers)
        self._send(names if buffers else odd, wrapped)  # told to send none at forwards, an older DDP sends none here
        if odd and settings.broadcast_buffers:
            wrapped.register_forward_pre_hook(partial(self._before_forward, odd))
        return wrapped

    def _send(self, names: list[str], wrapped: Any) -> None:
        buffers = dict(wrapped.module.named_buffers()) if names else {}
        broadcast_tensors([buffers[name] for name in names if name in buffers], self.comm)

    def _before_forward(self, names: list[str], wrapped: nn.Module, _: Any) -> None:
        """When DDP sends the other buffers."""
        if wrapped.require_forward_param_sync:
            self._send(names, wrapped)

    def _wrapped(self, model: nn.Module, buffers: dict[str, Any]) -> DistributedDataParallel:
        settings = self.config.ddp
        return DistributedDataParallel(
            model,
            device_ids=[self.device.index] if self.device.type == "cuda" else None,
            find_unused_parameters=settings.find_unused_parameters,
            static_graph=settings.static_graph,
            bucket_cap_mb=settings.bucket_cap_mb,
            gradient_as_bucket_view=True,
            **buffers,
        )

    def inside(self, model: nn.Module) -> nn.Module | None:
        return model.module if isinstance(model, DistributedDataParallel) else super().inside(model)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        while not isinstance(model, DistributedDataParallel):
            inner = self.inside(model)  # what torch.compile has taken after prepare()
            if inner is None:
                return super().no_sync(model)
            model = inner
        return model.no_sync()
