"""What a backward pass weighs, when an optimizer may step, and the proxies that obey it.

The gradient of a group (the micro-batches of one optimizer step) is that of the mean loss over all its
samples on all ranks, however unevenly they lie: rank r's mean loss over n samples is weighted n·W/N, where
N counts the group's samples over W ranks and the engine averages over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ..config.schema import LrScalingSettings
from ..data.groups import Micro
from ..errors import UsageError
from ..strategies.base import Strategy, parameters_of
from .reduce import reduce


class Gradients:
    """The state of the current group that backward, clip and step share."""

    def __init__(self, strategy: Strategy, scaler: torch.amp.GradScaler | None) -> None:
        self.strategy = strategy
        self.world_size = strategy.comm.world_size
        self.scaler = scaler
        self.models: list[nn.Module] = []
        self.micro: Micro | None = None
        self.group_total = 0
        self.last = True  # whether `micro` is its group's last
        self.inside = False  # whether the code runs in `accumulate`
        self.stepped = False  # whether an optimizer stepped since the group began
        self.optimizers = 0  # how many are prepared
        self._backed = False  # whether `micro` has had a backward pass
        self._gathered = False  # whether earlier ones of its group have
        self._used = False  # whether `backward` is what makes gradients
        self._own_weights: list[Any] = []  # of backward passes with an explicit weight, until normalised
        self._weighed: Micro | None = None  # the batch whose weight is the last of these
        self._reference = 1.0
        self._update_scale = False
        self._unscaled: set[int] = set()

    @property
    def holding(self) -> bool:
        """Whether steps must wait for the group's last micro-batch."""
        return self.inside and not self.last

    def begin(self, micro: Micro, group_total: int, last: bool, first: bool) -> None:
        """The loop hands out `micro`."""
        self.micro, self.group_total, self.last = micro, group_total, last
        self._gathered, self._backed = not first and (self._gathered or self._backed), False
        if first:
            self.stepped = False

    @property
    def clearing(self) -> bool:
        """Whether clearing gradients is meant: at a group's beginning, and once its last batch has had its pass. In
        between it would lose what the group has gathered. (Who calls `loss.backward()` is seen at the end only.)"""
        if not self.inside:
            return True
        begun = self._backed or self._gathered
        return (self._backed or not begun) if self.last else (self._used and not begun)

    def cleared(self) -> None:
        """An optimizer's gradients are gone; so are, if it is the only one, the weights of their backward passes."""
        if self.optimizers == 1:
            self._own_weights.clear()
            self._weighed = None

    @property
    def grouped(self) -> bool:
        """Whether the group in hand has more than one micro-batch."""
        return self.micro is not None and self.group_total != self.micro.total

    def end(self) -> None:
        """The loop is over; a backward outside it weighs 1."""
        self.micro, self.last = None, True

    def factor(self, weight: Any) -> Any:
        """What the loss of the current micro-batch is multiplied with."""
        if weight is not None:
            if self.micro is not None and self.micro.local == 0:
                weight = 0.0  # a repeated batch, which another step has counted
            self._note_weight(weight)
            return weight * (self.world_size / self._reference)
        if self._own_weights:
            raise UsageError(
                "backward(loss) after backward(loss, weight=…) in one step: give all of a step's a weight, or none"
            )
        if self.micro is None:
            return 1.0
        total = self.group_total if self.inside else self.micro.total
        return self.micro.local * self.world_size / total if total else 0.0

    def _note_weight(self, weight: Any) -> None:
        """A batch counts once, however many losses it has."""
        if self.micro is not None and self._weighed is self.micro:
            if float(weight) != float(self._own_weights[-1]):
                raise UsageError(
                    f"backward(weight={float(weight):g}) after weight={float(self._own_weights[-1]):g} on the same "
                    "batch: add such losses up, or give them one weight"
                )
            return
        self._own_weights.append(weight)
        self._weighed = self.micro

    def backward(self, loss: Tensor, weight: Any) -> None:
        self.update_scale()
        self._backed = self._used = True
        factor = self.factor(weight)
        if not isinstance(factor, float) or factor != 1.0:
            loss = loss * factor
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        self.strategy.backward(loss)
        if not self.holding:
            self.strategy.settle(())

    def normalise(self) -> None:
        """Divide by the sum of explicit weights, which is known only now."""
        if not self._own_weights:
            return
        mine = sum(float(weight) for weight in self._own_weights)
        self._own_weights.clear()
        self._weighed = None
        total = self.strategy.comm.all_reduce(torch.tensor([mine], dtype=torch.float64), "sum").item()
        if not total > 0:
            raise UsageError(f"the weights of this step's backward passes sum to {total}: expected a sum above 0")
        for model in self.models:
            self.strategy.settle(model.parameters())
        self.strategy.scale_gradients(self.models, self._reference / total)
        self._reference = total  # near enough to the next step's to keep fp16 in range

    def unscale(self, optimizer: Optimizer) -> None:
        """True gradients again under fp16, once a step."""
        if self.scaler is not None and id(optimizer) not in self._unscaled:
            self.scaler.unscale_(optimizer)
            self._unscaled.add(id(optimizer))

    def clip(self, model: nn.Module, optimizers: list[Optimizer], max_norm: float, norm_type: float) -> Tensor:
        self.strategy.settle(model.parameters())
        if self.scaler is not None:
            own = {id(parameter) for parameter in model.parameters()}
            for optimizer in optimizers:
                if any(id(parameter) in own for parameter in parameters_of(optimizer)):
                    self.unscale(optimizer)
        self.normalise()
        return self.strategy.clip_grad_norm(model, max_norm, norm_type)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        self.stepped = True
        if closure is not None:
            return optimizer.step(self._agreeing(optimizer, closure))
        self.strategy.settle(parameters_of(optimizer))
        self.normalise()
        if self.scaler is None:
            return self.strategy.step(optimizer)
        self._update_scale = True
        return self.scaler.step(optimizer)

    def _agreeing(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure whose loss is the same on all ranks: on it hangs how often the optimizer calls it."""
        if self.scaler is not None:
            raise UsageError("an optimizer with a closure (LBFGS) cannot run in fp16: use precision=bf16 or fp32")
        if not self.strategy.whole_parameters:
            raise UsageError(
                f"an optimizer with a closure (LBFGS) needs whole parameters, which strategy {self.strategy.name!r} "
                "shards: use --strategy ddp"
            )
        weight = None if self.micro is None else self.micro.local

        def agreeing() -> Any:
            loss = closure()
            self.strategy.settle(parameters_of(optimizer))
            self.normalise()
            return reduce(self.strategy.comm, loss, "mean", weight)

        return agreeing

    def update_scale(self) -> None:
        """After all optimizers of a step: fp16's next scale."""
        if self._update_scale and self.scaler is not None:
            self.scaler.update()
            self._update_scale = False
            self._unscaled.clear()


class AccumulateContext:
    """`with run.accumulate(model)`: gradients stay on the rank until the group's last micro-batch."""

    def __init__(self, gradients: Gradients, models: tuple[nn.Module, ...]) -> None:
        self._gradients = gradients
        self._models = models
        self._stack: ExitStack | None = None

    def __enter__(self) -> None:
        gradients = self._gradients
        gradients.inside = True
        if not gradients.last:
            self._stack = ExitStack()
            for model in self._models:
                self._stack.enter_context(gradients.strategy.no_sync(model))

    def __exit__(self, *error: Any) -> None:
        self._gradients.inside = False
        if self._stack is not None:
            self._stack.close()
            self._stack = None


class OptimizerProxy(Optimizer):
    """Shares the user's optimizer's state; `step` and `zero_grad` wait for the group's last micro-batch."""

    def __init__(self, optimizer: Optimizer, gradients: Gradients, scaling: LrScalingSettings) -> None:
        self.optimizer = optimizer
        self._gradients = gradients
        self._factor = learning_rate_factor(scaling, gradients.world_size)
        self._steps = 0
        self.skipped = False  # fp16: whether the last step met an overflow and was left out
        self._ran = False
        optimizer.register_step_post_hook(self._note)

    def _note(self, *_: Any) -> None:
        """An engine may call the optimizer more than once for a step, or not at all."""
        self._ran = True

    @property
    def steps(self) -> int:
        """Steps taken, which the learning rate's warm-up follows."""
        return self._steps

    @steps.setter
    def steps(self, count: int) -> None:
        self._steps = count
        # Else torch's schedulers would warn that it hasn't stepped yet, which a resumed optimizer has.
        self.optimizer._opt_called = count > 0  # type: ignore[attr-defined]

    # Optimizer's own attributes, which torch's schedulers and scaler read and write.
    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        return self.optimizer.defaults

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not made yet: copy and pickle ask
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"OptimizerProxy({self.optimizer!r})"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._gradients.strategy.check_new_group()
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._gradients.clearing:
            self._gradients.strategy.zero_grad(self.optimizer, set_to_none)
            self._gradients.cleared()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if closure is not None and self._gradients.inside and self._gradients.grouped:
            raise UsageError("an optimizer with a closure (LBFGS) cannot accumulate: use accumulate=1")
        if self._gradients.holding:
            return None
        self._ran = False
        factor = self._factor(self._steps)
        if factor == 1.0:
            result = self._gradients.step(self.optimizer, closure)
        else:
            result = self._scaled_step(factor, closure)
        self.skipped = not self._ran
        self._steps += self._ran
        return result

    def _scaled_step(self, factor: float, closure: Callable[[], Any] | None) -> Any:
        """A step at `factor` times the learning rate, which schedulers do not see."""
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] = group["lr"] * factor
        try:
            return self._gradients.step(self.optimizer, closure)
        finally:
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = rate


class SchedulerProxy:
    """Shares the user's scheduler's state; `step` waits like the optimizer's, and is left out with it."""

    def __init__(self, scheduler: LRScheduler, gradients: Gradients, optimizers: list[OptimizerProxy]) -> None:
        self.scheduler = scheduler
        self._gradients = gradients
        self._optimizers = optimizers

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def step(self, *arguments: Any, **keywords: Any) -> None:
        if self._gradients.holding:
            return
        own = getattr(self.scheduler, "optimizer", None)
        inside = self._gradients.inside and not isinstance(self.scheduler, ReduceLROnPlateau)
        if inside and any(proxy.optimizer is own and proxy.skipped for proxy in self._optimizers):
            return
        self.scheduler.step(*arguments, **keywords)


def learning_rate_factor(scaling: LrScalingSettings, world_size: int) -> Callable[[int], float]:
    """The factor on the learning rate after `steps` steps: it grows linearly from 1 over the warm-up."""
    goal = {"none": 1.0, "linear": float(world_size), "sqrt": math.sqrt(world_size)}[scaling.rule]
    warmup = scaling.warmup_steps

    def factor(steps: int) -> float:
        return goal if steps >= warmup else 1.0 + (goal - 1.0) * steps / warmup

    return factor
