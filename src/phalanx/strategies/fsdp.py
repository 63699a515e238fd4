"""PyTorch's FSDP2 (`fully_shard`), with a replicated dimension if asked for (HSDP)."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..errors import ConfigError, PlanError
from .base import parameters_of
from .fsdp_scalars import Scalars, Scaler
from .fsdp_units import by_type, shard_units, shared_with_outside
from .fsdp_unused import SWITCH, Unused
from .process_group import ProcessGroupStrategy, broadcast_state

log = logging.getLogger("phalanx")

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Fsdp(ProcessGroupStrategy):
    name = "fsdp"
    whole_parameters = False
    averages_held = False
    gathers_in_forward = True

    def setup(self) -> None:
        replicate, world_size = self.config.fsdp.replicate, self.topology.world_size
        if world_size % replicate:
            raise ConfigError(
                f"fsdp.replicate={replicate} does not divide the world size {world_size}: "
                "each replica needs equally many ranks"
            )
        if self.config.fsdp.find_unused_parameters and not hasattr(FSDPModule, SWITCH):
            raise PlanError(
                f"fsdp.find_unused_parameters=true needs torch 2.13 or newer, and this is {torch.__version__}: let "
                "every batch reach every parameter, or use --strategy ddp with ddp.find_unused_parameters=true"
            )
        super().setup()
        self._scalars = Scalars(self.comm)
        self._unused = Unused(self.comm)
        # By the user's modules: which of their units a forward may leave gathered.
        self._gathering: dict[nn.Module, list[FSDPModule]] = {}
        self._owner: dict[int, nn.Module] = {}  # the user's module of each parameter, by what optimizers hold
        self._trained: dict[Optimizer, set[nn.Module]] = {}  # the modules that an optimizer steps

    def _mesh(self) -> DeviceMesh:
        replicate, world_size = self.config.fsdp.replicate, self.topology.world_size
        if replicate == 1:
            return init_device_mesh(self.device.type, (world_size,), mesh_dim_names=("shard",))
        shape, names = (replicate, world_size // replicate), ("replicate", "shard")
        return init_device_mesh(self.device.type, shape, mesh_dim_names=names)

    def _policy(self) -> MixedPrecisionPolicy:
        settings = self.config.fsdp
        parameter, gradient = _DTYPES[settings.param_dtype], _DTYPES[settings.reduce_dtype]
        # Without a type for reductions, FSDP takes the parameters': None is right where both are fp32 only.
        return MixedPrecisionPolicy(
            None if parameter == torch.float32 else parameter,
            None if parameter == gradient == torch.float32 else gradient,
        )

    def wrap(self, model: nn.Module) -> nn.Module:
        model = model.to(self.device)
        broadcast_state(model, self.comm)
        inner = self.unwrap(model)  # what torch.compile has taken is sharded inside, under its own names
        settings, mesh = self.config.fsdp, self._mesh()
        common: dict[str, Any] = {"mesh": mesh, "mp_policy": self._policy()}
        common |= self._scalars.take(inner, mesh)
        units, shared = shared_with_outside(inner, by_type(inner, shard_units(inner, settings.wrap)))
        if shared and self.comm.rank == 0:
            log.info(
                "fsdp: %d modules share parameters with others (%s, …) and are sharded with what holds them",
                len(shared), type(shared[0]).__name__,
            )  # fmt: skip
        for unit in units:
            fully_shard(unit, reshard_after_forward=settings.reshard_after_forward, **common)
        # The root's parameters are needed first in the backward: torch's own default keeps them gathered.
        root = None if settings.reshard_after_forward else False
        fully_shard(inner, reshard_after_forward=root, **common)
        self._note(inner, [unit for unit in (*units, inner) if isinstance(unit, FSDPModule)])
        return model

    def _note(self, inner: nn.Module, units: list[FSDPModule]) -> None:
        """What is to be known of a model that has just been sharded."""
        if self.config.fsdp.find_unused_parameters:
            self._unused.watch(inner, units)
        for unit in units:
            unit.register_forward_hook(_reshard_without_backward)  # type: ignore[attr-defined]
        # The others are sharded again by their own forward.
        self._gathering[inner] = units[-1:] if self.config.fsdp.reshard_after_forward else units
        parameters = [parameter for _, parameter in self.held(inner)]
        self._owner |= {id(parameter): inner for parameter in parameters}
        # Between forward and backward, the module's own would clear the gathered parameters alone.
        inner.zero_grad = partial(_clear, parameters)  # type: ignore[method-assign]

    @contextmanager
    def _without_sync(self, model: FSDPModule) -> Iterator[None]:
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        inner = self.unwrap(model)
        return self._without_sync(inner) if isinstance(inner, FSDPModule) else super().no_sync(model)

    def optimized(self, parameter: nn.Parameter) -> nn.Parameter:
        return self._scalars.held(parameter)

    def held(self, model: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        self._shard(self.unwrap(model))
        return super().held(model, remove_duplicate)

    def gather_done(self, model: nn.Module) -> None:
        self._shard(self.unwrap(model))

    def _shard(self, inner: nn.Module) -> None:
        """A forward that no backward pass has followed leaves gathered parameters in the module, without gradients and
        soon out of date."""
        for unit in self._gathering.get(inner, ()):
            unit.reshard()

    def backward(self, loss: Tensor) -> None:
        self._scalars.changed()
        self._unused.changed()
        super().backward(loss)

    def settle(self, parameters: Iterable[nn.Parameter]) -> None:
        self._scalars.average()
        self._unused.settle()

    def grad_scaler(self) -> torch.amp.GradScaler:
        return Scaler(self.device.type, self._scalars)

    def step(self, optimizer: Optimizer, take: Callable[[], Any] | None = None) -> Any:
        for inner in self._models_of(optimizer):
            self._shard(inner)
        return super().step(optimizer, take)

    def _models_of(self, optimizer: Optimizer) -> set[nn.Module]:
        if optimizer not in self._trained:
            held = (self._owner.get(id(parameter)) for parameter in parameters_of(optimizer))
            self._trained[optimizer] = {inner for inner in held if inner is not None}
        return self._trained[optimizer]

    def check_new_group(self) -> None:
        self._trained.clear()

    def zero_grad(self, optimizer: Optimizer, set_to_none: bool) -> None:
        super().zero_grad(optimizer, set_to_none)
        self._scalars.clear(optimizer, set_to_none)
        self._unused.cleared(optimizer)

    def clip_grad_norm(self, model: nn.Module, max_norm: float, norm_type: float) -> Tensor:
        if math.isinf(norm_type):
            return self._clip_extreme(model, max_norm, norm_type)
        norm = super().clip_grad_norm(model, max_norm, norm_type)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _clip_extreme(self, model: nn.Module, max_norm: float, norm_type: float) -> Tensor:
        """By the largest (inf) or smallest (-inf) absolute value, which torch doesn't know of an empty shard."""
        gradients = [p.grad for _, p in self.held(model) if p.grad is not None]
        parts = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
        norms = [torch.linalg.vector_norm(part, norm_type) for part in parts if part.numel()]
        op = "max" if norm_type > 0 else "min"
        # Of a type that follows from all parts, empty ones too: the same on all ranks.
        kind = reduce(torch.promote_types, (part.dtype for part in parts), torch.float32)
        none = torch.full((), 0.0 if norm_type > 0 else math.inf, device=self.device, dtype=kind)
        norm: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(kind) for norm in (*norms, none)]), norm_type)
        self.comm.all_reduce(norm, op)
        torch._foreach_mul_(parts, float((max_norm / (norm + 1e-6)).clamp(max=1.0)))
        return norm


def _clear(parameters: list[nn.Parameter], set_to_none: bool = True) -> None:
    """`nn.Module.zero_grad` of parameters that may not be in the module just now."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = None if set_to_none else torch.zeros_like(parameter.grad)


def _reshard_without_backward(module: nn.Module, inputs: Any, output: Any) -> None:
    """Gathered parameters would else stay in the module until a backward pass that never comes."""
    if not torch.is_grad_enabled() and isinstance(module, FSDPModule):
        module.reshard()
