"""What a backward pass weighs, and when clipping, stepping and clearing act.

The gradient of a group (the micro-batches of one optimizer step) is that of the mean loss over all its
samples on all ranks, however unevenly they lie: rank r's mean loss over n samples is weighted n·W/N, where
N counts the group's samples over W ranks and the engine averages over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..data.groups import Micro, doubtful
from ..errors import UsageError
from ..strategies.base import Strategy, parameters_of
from .reduce import reduce
from .weights import Weights

if TYPE_CHECKING:
    from .proxies import OptimizerProxy


class Gradients:
    """The state of the current group that backward, clip and step share."""

    def __init__(self, strategy: Strategy, scaler: torch.amp.GradScaler | None) -> None:
        self.strategy = strategy
        self.world_size = strategy.comm.world_size
        self.scaler = scaler
        self.models: list[nn.Module] = []
        self.optimizers: list[OptimizerProxy] = []
        self.weights = Weights()
        self.micro: Micro | None = None
        self.group_total = 0
        self.number = 0  # of the micro-batch in hand, over the whole run
        self.group = 0  # of its group
        self.first = True  # whether `micro` is its group's first
        self.last = True  # … or last
        self.grouped = False  # whether the group has more than one micro-batch
        self.inside = False  # whether the code runs in `accumulate`
        self.accumulating = False  # whether `micro` is, or was, in it: what follows belongs to the group too
        self.holding = False  # whether steps must wait for the group's last micro-batch
        self.stepped = False  # whether an optimizer stepped since the group began
        self._entered: Collection[nn.Module] = ()  # what `accumulate` was told of in this micro-batch
        self._accumulates = False  # whether the group has been in `accumulate`
        self.accumulated = False  # whether the loop has
        self._backed = False  # whether `micro` has had a backward pass
        self._gathered = False  # whether earlier ones of its group have
        self._used = False  # whether `backward` is what makes gradients
        self._watching = False  # whether each optimizer learns which passes reach it
        self._update_scale = False
        self._unscaled: set[int] = set()
        self._taken: set[int] = set()  # optimizers that stepped since the last scale

    # Where the code is.

    @property
    def complete(self) -> bool:
        """Whether the group's steps have all been taken."""
        return self.last and self.stepped and all(proxy.called == self.number for proxy in self.optimizers)

    def begin(self, micro: Micro, group_total: int, last: bool, first: bool) -> None:
        """The loop hands out `micro`."""
        self.micro, self.group_total, self.first, self.last = micro, group_total, first, last
        self.number += 1
        self._gathered, self._backed = not first and (self._gathered or self._backed), False
        self.accumulating = self.holding = False
        if first:
            self.stepped = self._accumulates = False
            self.group, self.grouped = self.number, not last
            if self.weights.divided:  # else the script adds batches up for a step of its own, still to come
                self.weights.forget()
            if not last and len(self.optimizers) > 1 and not self._watching:
                self._watch()

    def end(self) -> None:
        """The loop is over; a backward outside it weighs 1."""
        if self.weights.divided:
            self.weights.forget()
        self.micro, self.first, self.last = None, True, True
        self.grouped = self.accumulating = self.holding = False
        self._accumulates = self.accumulated = False
        self.number += 1

    def enter(self, models: Collection[nn.Module]) -> None:
        """`accumulate` begins, for these of the user's modules."""
        self.inside = True
        if self.micro is not None:  # else there is no group, and every call acts
            self.accumulating = self._accumulates = self.accumulated = True
            self.holding = not self.last
            self._entered = models

    def _told(self, models: Iterable[nn.Module]) -> bool:
        """Whether `accumulate` was told of one of `models`; without any it means all."""
        return not self._entered or any(model in self._entered for model in models)

    def _watch(self) -> None:
        """With several optimizers, note which of them each backward pass reaches."""
        self._watching = True
        for proxy in self.optimizers:
            for parameter in parameters_of(proxy.optimizer):
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(proxy.reached)  # type: ignore[no-untyped-call]

    # Backward.

    def factor(self, weight: Any) -> Any:
        """What the loss of the current micro-batch is multiplied with."""
        if weight is not None:
            if self.micro is not None and self.micro.local == 0:
                weight = 0.0  # a repeated batch, which another step has counted
            self.weights.note(weight, self.micro)
            return self.weights.share(weight, self._trained()) * self.world_size
        if self.weights.own:
            raise UsageError(
                "backward(loss) after backward(loss, weight=…) in one step: give all of a step's a weight, or none"
            )
        if self.micro is None:
            return 1.0
        total = self.group_total if self.accumulating else self.micro.total
        if self.micro.doubt and (self.world_size > 1 or total != self.micro.total):
            raise UsageError(doubtful(self.micro.doubt))
        return self.micro.local * self.world_size / total if total else 0.0

    def _trained(self) -> Iterator[nn.Parameter]:
        for proxy in self.optimizers:
            yield from parameters_of(proxy.optimizer)

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

    # Clip, step, clear.

    def normalise(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divide by the sum of explicit weights, which is known only now.

        In a group each parameter is divided at its own first clipping or step, as another model's passes may still be
        to come; outside, where nobody knows what a step's passes are, all are at the first.
        """
        if not self.weights.own:
            return
        factor = self.weights.divisor(self.strategy.comm)
        if not self.accumulating:
            parameters = [p for model in self.models for _, p in self.strategy.held(model)]
        left = self.weights.left(parameters)
        self.strategy.settle(left)
        self.strategy.scale_gradients(left, factor)
        if not self.accumulating:
            self.weights.forget()

    def unscale(self, optimizer: Optimizer) -> None:
        """True gradients again under fp16, once a step."""
        if self.scaler is not None and id(optimizer) not in self._unscaled:
            self.scaler.unscale_(optimizer)
            self._unscaled.add(id(optimizer))

    def holds(self, model: nn.Module) -> bool:
        """Whether clipping `model` must wait for the group's last micro-batch."""
        return self.holding and (self.inside or self._told([self.strategy.unwrap(model)]))

    def clip(self, model: nn.Module, max_norm: float, norm_type: float) -> Tensor:
        self.strategy.settle(p for _, p in self.strategy.held(model))
        if self.scaler is not None:
            own = {id(p) for _, p in self.strategy.held(model)}
            for proxy in self.optimizers:
                if any(id(parameter) in own for parameter in parameters_of(proxy.optimizer)):
                    self.unscale(proxy.optimizer)
        self.normalise(p for _, p in self.strategy.held(model))
        return self.strategy.clip_grad_norm(model, max_norm, norm_type)

    def waits(self, proxy: OptimizerProxy) -> bool:
        """Whether a step of `proxy` must wait for the group's last micro-batch."""
        if self.accumulating and not self.inside and not self._told(proxy.models):
            raise UsageError(
                "optimizer.step() after run.accumulate(), of a model that it was not told of: its backward pass was "
                "weighed as a part of the group. Name all models of the loop, run.accumulate(a, b), or train this one "
                "before the accumulate block"
            )
        return self.holding

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        self.stepped = True
        if closure is not None:
            take = partial(optimizer.step, self._agreeing(optimizer, closure))
            return self.strategy.step(optimizer, take)
        if self.grouped:
            self._check_averaged()
        self.strategy.settle(parameters_of(optimizer))
        if self.weights.own:
            self.normalise(parameters_of(optimizer))
        if self.scaler is None:
            return self.strategy.step(optimizer)
        self._update_scale = True
        self._taken.add(id(optimizer))
        return self.strategy.step(optimizer, partial(self.scaler.step, optimizer))

    def _check_averaged(self) -> None:
        """Gradients that were held back are averaged by the last micro-batch's backward pass, with its own."""
        if self._gathered and not self._backed and not self.strategy.averages_held and self.accumulating:
            raise UsageError(
                "the last batch of this accumulation group had no run.backward(), by which strategy "
                f"{self.strategy.name} averages the group's gradients over ranks: call it on every batch (a loss that "
                "shall not count can be multiplied by 0)"
            )

    def clears(self, proxy: OptimizerProxy) -> bool:
        """Whether clearing gradients is meant, in a group of several: at its beginning, or once its step is done. In
        between it would lose what the group has gathered."""
        if not (self.inside or self._accumulates):
            return True
        if proxy.called == self.number:  # the order backward, step, zero_grad
            return self.last
        if proxy.mixed == self.group:
            raise UsageError(
                f"{type(proxy.optimizer).__name__}.zero_grad() can't take away what another loss has added to its "
                "gradients after its step, without losing what the accumulation group has gathered: keep that loss "
                "from them by requires_grad_(False) (docs/api.md, two models with losses of their own)"
            )
        in_group, in_micro = self._reaches(proxy)
        if self.first:  # the order zero_grad, backward, step
            proxy.cleared_first = self.group
            return not in_group
        # On the last one, a step that is to be left out.
        return self.last and (in_micro or not (self._used or proxy.cleared_first == self.group))

    def _reaches(self, proxy: OptimizerProxy) -> tuple[bool, bool]:
        """Whether backward passes of the group, and of the micro-batch in hand, have made gradients of `proxy`'s."""
        if self._watching:
            return proxy.reached_at >= self.group, proxy.reached_at == self.number
        return self._backed or self._gathered, self._backed

    def cleared(self) -> None:
        """An optimizer's gradients are gone; so are, if it is the only one, the weights of their backward passes."""
        if len(self.optimizers) == 1:
            self.weights.forget()

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
            self.normalise(parameters_of(optimizer))
            return reduce(self.strategy.comm, loss, "mean", weight)

        return agreeing

    def update_scale(self) -> None:
        """After all optimizers of a step: fp16's next scale."""
        if self._update_scale and self.scaler is not None:
            left = self._left_scaled()
            before = self.scaler.get_scale() if left else 1.0  # this waits for the device
            self.scaler.update()
            after = self.scaler.get_scale() if left else 1.0
            if after != before:
                self.strategy.scale_gradients(left, after / before)
            self._update_scale = False
            self._unscaled.clear()
            self._taken.clear()

    def _left_scaled(self) -> list[nn.Parameter]:
        """Those with gradients of the present scale, which a step to come divides by the next."""
        if len(self.optimizers) < 2:
            return []
        done = self._taken | self._unscaled
        others = [proxy.optimizer for proxy in self.optimizers if id(proxy.optimizer) not in done]
        own = (p for optimizer in others for p in parameters_of(optimizer))
        return list({id(p): p for p in own if p.grad is not None}.values())


class AccumulateContext:
    """`with run.accumulate(model)`: gradients stay on the rank until the group's last micro-batch."""

    def __init__(self, gradients: Gradients, models: tuple[nn.Module, ...]) -> None:
        self._gradients = gradients
        self._models = models
        self._inner = [gradients.strategy.unwrap(model) for model in models]
        self._stack: ExitStack | None = None

    def __enter__(self) -> None:
        gradients = self._gradients
        gradients.enter(self._inner)
        if not gradients.last:
            self._stack = ExitStack()
            for model in self._models:
                self._stack.enter_context(gradients.strategy.no_sync(model))

    def __exit__(self, *error: Any) -> None:
        self._gradients.inside = False
        if self._stack is not None:
            self._stack.close()
            self._stack = None
