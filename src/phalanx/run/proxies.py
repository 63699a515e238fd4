"""What `prepare` gives back for optimizers and schedulers: thin proxies, whose steps obey the group in hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ..config.schema import LrScalingSettings
from ..errors import UsageError
from .gradients import Gradients
from .loops import Turns

_MOST = 100  # steps of a fused optimizer until it is seen which were taken


def _passed_on(name: str) -> Any:
    return property(
        lambda self: getattr(self.optimizer, name),
        lambda self, value: setattr(self.optimizer, name, value),
        lambda self: delattr(self.optimizer, name),
    )


class OptimizerProxy(Optimizer):
    """Shares the user's optimizer's state; `step` and `zero_grad` wait for the group's last micro-batch."""

    def __init__(
        self, optimizer: Optimizer, gradients: Gradients, scaling: LrScalingSettings, models: list[nn.Module]
    ) -> None:
        self.optimizer = optimizer
        self.models = models  # the user's modules that it trains
        # In numbers of micro-batches, as `Gradients` counts them.
        self.called = self.cleared_first = self.reached_at = self.mixed = 0
        self._gradients = gradients
        self._factor = learning_rate_factor(scaling, gradients.world_size)
        self._steps = 0
        self.in_group: bool | None = None  # whether its last step was an accumulation group's
        self._left_out = self._at = 0
        self._overflow: Any = None  # of the step in hand
        self._unread: list[torch.Tensor] = []  # those of steps since `_look`
        self._scales = scaling.rule != "none"
        self.after_step: list[Callable[[], None]] = []  # called after each step that was taken
        self._ran = False
        optimizer.register_step_post_hook(self._note)

    def _note(self, *_: Any) -> None:
        """An engine may call the optimizer more than once for a step, or not at all.

        Fused optimizers look for overflows themselves, and are called by the scaler also where they leave a step out.
        """
        self._ran = True
        # The scaler's, which is there for the time of the call.
        self._overflow = getattr(self.optimizer, "found_inf", None)

    def _look(self) -> None:
        """Which steps a fused optimizer has left out. It waits for the device, hence late."""
        if self._unread:
            overflows = torch.stack(self._unread).ne(0).tolist()
            self._unread.clear()
            self._steps -= sum(overflows)
            self._left_out = self._at if overflows[-1] else 0

    @property
    def left_out(self) -> int:
        """The micro-batch of the last step, if fp16 left that out for an overflow; else 0."""
        self._look()
        return self._left_out

    @left_out.setter
    def left_out(self, number: int) -> None:
        self._look()
        self._left_out = number

    def reached(self, *_: Any) -> None:
        """A backward pass has made a gradient of one of the parameters."""
        self.reached_at = self._gradients.number
        if self.called == self.reached_at and not self._gradients.last:
            self.mixed = self._gradients.group  # another loss's, after this optimizer's step

    @property
    def steps(self) -> int:
        """Steps taken, which the learning rate's warm-up follows."""
        self._look()
        return self._steps

    @steps.setter
    def steps(self, count: int) -> None:
        self._look()
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

    # What a gradient scaler of the script's own sets for the time of a fused optimizer's step.
    grad_scale, found_inf = _passed_on("grad_scale"), _passed_on("found_inf")

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
        gradients = self._gradients
        if gradients.grouped and not gradients.clears(self):
            return
        gradients.strategy.zero_grad(self.optimizer, set_to_none)
        if gradients.weights.own:
            gradients.cleared()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        gradients = self._gradients
        if closure is not None and gradients.accumulating and gradients.grouped:
            raise UsageError("an optimizer with a closure (LBFGS) cannot accumulate: use accumulate=1")
        self.called = gradients.number
        self.in_group = gradients.accumulating if gradients.micro is not None else None
        if gradients.grouped and gradients.waits(self):
            return None
        self._ran, self._overflow = False, None
        factor = self._factor(self.steps) if self._scales else 1.0
        if factor == 1.0:
            result = gradients.step(self.optimizer, closure)
        else:
            result = self._scaled_step(factor, closure)
        self._at = gradients.number
        if isinstance(self._overflow, torch.Tensor):
            self._unread.append(self._overflow)  # this step's own: the scaler makes one each time
        else:
            self.left_out = 0 if self._ran else gradients.number
        self._steps += self._ran
        if len(self._unread) == _MOST or (self._unread and self.after_step):
            self._look()
        if self._ran and not self._left_out:
            for follow in self.after_step:
                follow()
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

    def __init__(
        self, scheduler: LRScheduler, gradients: Gradients, optimizers: list[OptimizerProxy], turns: Turns
    ) -> None:
        self.scheduler = scheduler
        self._gradients = gradients
        self._optimizers = optimizers
        self._turns = turns
        self._seen = 0  # what `left_out` of its optimizer was at its last step

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def step(self, *arguments: Any, **keywords: Any) -> None:
        if self._gradients.holding or (self._gradients.micro is None and self._turns.again()):
            return
        if self._gradients.micro is not None and (self._repeats() or self._follows_one_left_out()):
            return
        self.scheduler.step(*arguments, **keywords)

    def _repeats(self) -> bool:
        """Whether it comes before `accumulate`, where a group's first call is the one that counts,
        and isn't that: if its optimizer steps once a group, as far as is known."""
        gradients, proxy = self._gradients, self._optimizer()
        if gradients.accumulating or gradients.first:
            return False
        known = None if proxy is None else proxy.in_group
        return gradients.accumulated if known is None else known

    def _follows_one_left_out(self) -> bool:
        """Whether it counts a step of its optimizer that was left out: the micro-batch's own or, where the scheduler
        comes first in the loop's body, the one before."""
        if isinstance(self.scheduler, ReduceLROnPlateau):  # counts values of a metric
            return False
        left_out, before = self._left_out(), self._seen
        self._seen = left_out
        return left_out != 0 and (left_out == self._gradients.number or left_out != before)

    def _left_out(self) -> int:
        proxy = self._optimizer()
        return 0 if proxy is None else proxy.left_out

    def _optimizer(self) -> OptimizerProxy | None:
        own = getattr(self.scheduler, "optimizer", None)  # the script's, or the prepared one
        return next((proxy for proxy in self._optimizers if own in (proxy, proxy.optimizer)), None)

    @property
    def owes(self) -> bool:
        """Whether its next step counts one of its optimizer's that was left out: a resumed run must know."""
        return self._left_out() not in (0, self._seen)

    @owes.setter
    def owes(self, owes: bool) -> None:
        self._seen = 0 if owes else self._left_out()


def learning_rate_factor(scaling: LrScalingSettings, world_size: int) -> Callable[[int], float]:
    """The factor on the learning rate after `steps` steps: it grows linearly from 1 over the warm-up."""
    goal = {"none": 1.0, "linear": float(world_size), "sqrt": math.sqrt(world_size)}[scaling.rule]
    warmup = scaling.warmup_steps

    def factor(steps: int) -> float:
        return goal if steps >= warmup else 1.0 + (goal - 1.0) * steps / warmup

    return factor
