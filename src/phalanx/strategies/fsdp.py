"""PyTorch's FSDP2 (`fully_shard`), with a replicated dimension if asked for (HSDP)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ..errors import ConfigError, did_you_mean
from .process_group import ProcessGroupStrategy, broadcast_state

_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Fsdp(ProcessGroupStrategy):
    name = "fsdp"
    whole_parameters = False

    def setup(self) -> None:
        replicate, world_size = self.config.fsdp.replicate, self.topology.world_size
        if world_size % replicate:
            raise ConfigError(
                f"fsdp.replicate={replicate} does not divide the world size {world_size}: "
                "each replica needs equally many ranks"
            )
        super().setup()

    def _mesh(self) -> DeviceMesh:
        replicate, world_size = self.config.fsdp.replicate, self.topology.world_size
        if replicate == 1:
            return init_device_mesh(self.device.type, (world_size,), mesh_dim_names=("shard",))
        shape, names = (replicate, world_size // replicate), ("replicate", "shard")
        return init_device_mesh(self.device.type, shape, mesh_dim_names=names)

    def wrap(self, model: nn.Module) -> nn.Module:
        model = model.to(self.device)
        broadcast_state(model, self.comm)
        settings, mesh = self.config.fsdp, self._mesh()
        policy = MixedPrecisionPolicy(_DTYPES[settings.param_dtype], _DTYPES[settings.reduce_dtype])
        for unit in shard_units(model, settings.wrap):
            fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=settings.reshard_after_forward)
        # The root's parameters are needed first in the backward: torch's own default keeps them gathered.
        root = None if settings.reshard_after_forward else False
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=root)
        return model

    @contextmanager
    def _without_sync(self, model: FSDPModule) -> Iterator[None]:
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        return self._without_sync(model) if isinstance(model, FSDPModule) else super().no_sync(model)

    def clip_grad_norm(self, model: nn.Module, max_norm: float, norm_type: float) -> Tensor:
        norm = super().clip_grad_norm(model, max_norm, norm_type)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm


def shard_units(model: nn.Module, wrap: tuple[str, ...]) -> list[nn.Module]:
    """The modules below the root that are gathered one at a time, inner ones first."""
    inside = [module for name, module in model.named_modules() if name]
    chosen: set[nn.Module] = set()
    for rule in wrap:
        if rule == "none":
            continue
        if rule == "auto":
            chosen |= {block for part in inside if isinstance(part, nn.ModuleList) for block in part}
        elif rule.startswith("size:") and rule[5:].isdecimal():
            chosen |= {part for part in inside if _size(part) >= int(rule[5:])}
        else:
            chosen |= _of_class(rule, inside)
    units = [part for part in inside if part in chosen and not isinstance(part, nn.ModuleList | nn.ModuleDict)]
    return [unit for unit in reversed(units) if any(True for _ in unit.parameters())]


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _of_class(name: str, modules: list[nn.Module]) -> set[nn.Module]:
    found = {module for module in modules if type(module).__name__ == name}
    if not found:
        known = sorted({type(module).__name__ for module in modules})
        raise ConfigError(
            f"fsdp.wrap={name!r} matches no module of the model: expected auto, none, size:N or one of its "
            f"classes: {', '.join(known)}.{did_you_mean(name, known)}"
        )
    return found
