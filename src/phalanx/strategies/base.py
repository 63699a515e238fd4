"""What the API needs of a strategy. A new one is one file with a subclass, and a line in the registry."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..config import JobConfig
from ..errors import PlanError
from ..rank.topology import Topology
from .comm import Comm
from .saved import HELD_AS, SavedModel, is_compiled, named_parameters


@dataclass
class Strategy:
    """One way of training a model over the ranks. Methods take and return real torch objects."""

    topology: Topology
    config: JobConfig
    device: torch.device

    name: ClassVar[str] = ""
    whole_parameters: ClassVar[bool] = True  # whether each rank holds them unsharded
    averages_held: ClassVar[bool] = True  # whether gradients that were held back need no further backward pass
    gathers_in_forward = False  # whether a forward needs all ranks
    may_unfreeze: ClassVar[bool] = True  # whether parameters that become trainable after `wrap` are
    comm: Comm = None  # type: ignore[assignment]  # set by `setup`

    def setup(self) -> None:
        """Connect the ranks; afterwards `comm` works."""
        if self.topology.world_size > 1:
            raise PlanError(
                f"strategy 'single' is for one process, but the world size is {self.topology.world_size}: "
                "use --strategy ddp or fsdp, or --nproc 1"
            )
        self.comm = Comm()

    def teardown(self, failed: bool) -> None:
        """Disconnect; after a failure without waiting for other ranks."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model on its device, equal on all ranks, ready to train."""
        return model.to(self.device)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The user's own module inside `wrap`'s and torch.compile's, in whatever order these lie."""
        while (inner := self.inside(model)) is not None:
            model = inner
        return model

    def inside(self, model: nn.Module) -> nn.Module | None:
        """What a wrapper holds; None for a module of the user's."""
        return model._modules[HELD_AS] if is_compiled(model) else None

    def optimized(self, parameter: nn.Parameter) -> nn.Parameter:
        """What an optimizer holds in place of a prepared module's parameter."""
        return parameter

    def held(self, model: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of a prepared model as optimizers hold them, under the plain names of the user's module."""
        for name, parameter in named_parameters(self.unwrap(model), remove_duplicate):
            yield name, self.optimized(parameter)

    def bind(self, model: nn.Module, optimizer: Optimizer, batch_size: int | None) -> nn.Module:
        """The model as it trains with that optimizer, both prepared; `batch_size` is a rank's, if it is known."""
        return model

    def saved_model(self, model: nn.Module) -> SavedModel:
        """What has the state_dict and load_state_dict of the user's model, with whole tensors or DTensors."""
        return SavedModel(self, self.unwrap(model))

    def saved_optimizer(self, optimizer: Optimizer) -> Any:
        """The same for an optimizer: its state, param_groups and load_state_dict."""
        return optimizer

    def check_new_group(self) -> None:
        """Raises UsageError where a prepared optimizer can't get another group of parameters."""

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Within it, backward passes add to the gradients of this rank only."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss."""
        loss.backward()  # type: ignore[no-untyped-call]

    def settle(self, parameters: Iterable[nn.Parameter]) -> None:
        """Afterwards the gradients of `parameters` are those over all ranks. Called before they are looked at, and with
        none after a backward pass whose gradients are a step's."""

    def scale_gradients(self, parameters: Iterable[nn.Parameter], factor: float) -> None:
        """Multiply the gradients of `parameters` in place. A step's parameters are given once."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def step(self, optimizer: Optimizer, take: Callable[[], Any] | None = None) -> Any:
        """Take the optimizer's step, by `take` where it has a closure or fp16's gradient scaler."""
        return optimizer.step() if take is None else take()

    def zero_grad(self, optimizer: Optimizer, set_to_none: bool) -> None:
        """Forget the gradients of the optimizer's parameters."""
        optimizer.zero_grad(set_to_none)

    def clip_grad_norm(self, model: nn.Module, max_norm: float, norm_type: float) -> Tensor:
        """Clip in place; return the total norm over all ranks before clipping."""
        return nn.utils.clip_grad_norm_([p for _, p in self.held(model)], max_norm, norm_type)

    # What this rank holds of a model's weights, for those who read and write them beside the training.

    def gather_done(self, model: nn.Module) -> None:
        """Give up what the last forward has gathered, which writes to the parts would not reach."""

    def part(self, parameter: nn.Parameter) -> Tensor:
        """This rank's part of a parameter, which may be written to."""
        data = parameter.detach()
        local: Tensor = data.to_local() if hasattr(data, "to_local") else data
        return local

    def parts_written(self, model: nn.Module) -> None:
        """Called after parts were written to."""

    def shown(self, parameter: nn.Parameter, part: Tensor) -> Tensor:
        """What a part like the parameter's is to a checkpoint: whole, or a DTensor."""
        data = parameter.detach()
        if not hasattr(data, "to_local"):
            return part
        from torch.distributed.tensor import DTensor

        sharded: Any = data
        return DTensor.from_local(
            part, sharded.device_mesh, sharded.placements, run_check=False, shape=data.shape, stride=data.stride()
        )

    def whole(self, parameter: nn.Parameter, part: Tensor) -> Tensor:
        """All ranks' parts as one tensor. Collective."""
        shown = self.shown(parameter, part)
        found: Tensor = shown.full_tensor() if hasattr(shown, "full_tensor") else shown
        return found

    def own_part(self, parameter: nn.Parameter, value: Tensor) -> Tensor:
        """This rank's part of what `shown` gave."""
        local: Tensor = value.to_local() if hasattr(value, "to_local") else value
        return local

    def saved_scaler(self, scaler: Any) -> Any:
        """What has the state_dict of fp16's gradient scaler for a checkpoint."""
        return scaler

    def grad_scaler(self) -> torch.amp.GradScaler | None:
        """fp16's gradient scaler, agreeing over ranks on overflows; None if the engine has one of its own."""
        return torch.amp.GradScaler(self.device.type)


def parameters_of(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    """All parameters that an optimizer steps."""
    for group in optimizer.param_groups:
        yield from group["params"]
