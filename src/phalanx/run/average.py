"""`run.ema`: an exponential moving average of a model's weights, sharded as they are, under every strategy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.former import matched
from ..errors import UsageError
from .export import full_state
from .register import register
from .session import Session

_HALVES = (torch.float16, torch.bfloat16)  # too coarse to add a thousandth to


class Average:
    """After each step of the model's optimizer: average = decay · average + (1 − decay) · weights. It begins as these.

    Floating-point parameters are averaged; buffers are the model's own. With several optimizers for one model, the one
    that was prepared last counts the steps.
    """

    def __init__(self, session: Session, model: nn.Module, decay: float, name: str) -> None:
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0.0 <= decay <= 1.0:
            raise UsageError(f"ema(decay={decay!r}): expected a number from 0 to 1, such as 0.999")
        if not any(model is own for own in session.models):
            raise UsageError("ema() got a model that isn't prepared: give it what run.prepare() returned")
        self._session, self._model, self._decay = session, model, decay
        self._strategy = session.strategy
        self._optimizers = self._find_optimizers()
        self._strategy.gather_done(model)
        self._parameters = {name: p for name, p in self._strategy.held(model) if p.is_floating_point()}
        with torch.no_grad():
            self._shadow = [part.to(torch.float32) if part.dtype in _HALVES else part.clone() for part in self._parts()]
        self._updates = 0
        register(session, name, _Saved(self), False, f"an average of decay {decay:g}")
        self._optimizers[-1].after_step.append(self._update)

    def _find_optimizers(self) -> list[Any]:
        own = {id(parameter) for _, parameter in self._strategy.held(self._model)}
        pairs = zip(self._session.optimizers, self._session.contents.optimizers, strict=True)
        found = [
            proxy
            for proxy, saved in pairs
            if any(id(parameter) in own for group in saved.param_groups for parameter in group["params"])
        ]
        if not found:
            raise UsageError("ema() needs the model's optimizer, whose steps it follows: prepare it before")
        return found

    def is_of(self, model: nn.Module) -> bool:
        """Whether it averages this model."""
        return self._strategy.unwrap(model) is self._strategy.unwrap(self._model)

    def _parts(self) -> list[Tensor]:
        """What this rank holds of each parameter."""
        return [self._strategy.part(parameter) for parameter in self._parameters.values()]

    @torch.no_grad()
    def _update(self) -> None:
        parts = [part.to(kept.dtype) for part, kept in zip(self._parts(), self._shadow, strict=True)]
        torch._foreach_lerp_(self._shadow, parts, 1.0 - self._decay)
        self._updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within it the model has the averaged weights, for evaluation; afterwards its own again, bit for bit.

        All ranks enter it. Steps and checkpoints inside are errors.
        """
        session = self._session
        if session.averaged is not None:
            raise UsageError("ema.applied() inside another: leave that one first")
        session.comm.meet("ema.applied()")
        session.averaged = self
        with ExitStack() as stack:
            for proxy in self._optimizers:
                stack.callback(proxy.optimizer.register_step_pre_hook(_refuse).remove)
            stack.callback(setattr, session, "averaged", None)
            own = self._swapped_in()
            stack.callback(self._write, own)
            yield

    def _swapped_in(self) -> list[Tensor]:
        """The weights that the averaged ones have replaced."""
        self._strategy.gather_done(self._model)
        with torch.no_grad():
            own = [part.clone() for part in self._parts()]
        self._write(self._shadow)
        return own

    @torch.no_grad()
    def _write(self, values: list[Tensor]) -> None:
        self._strategy.gather_done(self._model)
        for part, value in zip(self._parts(), values, strict=True):
            part.copy_(value)
        self._strategy.parts_written(self._model)

    def state_dict(self) -> dict[str, Any]:
        """The averaged model as `run.state_dict` gives the model: whole, on the CPU, on rank 0; all ranks call it."""
        session = self._session
        session.comm.meet("ema.state_dict()")
        self._strategy.gather_done(self._model)
        saved = self._strategy.saved_model(self._model)
        state = full_state(saved, session.comm.rank == 0)
        names: dict[int, str] = {}
        for name, parameter in saved.named_parameters(remove_duplicate=False):
            first = names.setdefault(id(parameter), name)
            if name != first and state:
                state[name] = state[first]
        for name, value in self._whole().items():
            if state:
                value = value.to("cpu", state[name].dtype, copy=True)
                state |= {key: value for key, old in state.items() if old is state[name]}
        return state

    def _whole(self) -> dict[str, Tensor]:
        pairs = zip(self._parameters.items(), self._shadow, strict=True)
        return {name: self._strategy.whole(parameter, part) for (name, parameter), part in pairs}

    def saved(self) -> dict[str, Any]:
        """For a checkpoint: sharded tensors as such, where torch's checkpoints can have them."""
        pairs = zip(self._parameters.items(), self._shadow, strict=True)
        return {
            "updates": self._updates,
            "weights": {name: self._strategy.shown(parameter, part) for (name, parameter), part in pairs},
        }

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        names = matched(state["weights"], self._parameters)
        weights = {names.get(name, name): value for name, value in state["weights"].items()}
        lacking = sorted(set(self._parameters) ^ set(weights))
        if lacking:
            raise ValueError(f"the averages of {', '.join(lacking[:3])} are on one side only")
        self._updates = state["updates"]
        for (name, parameter), part in zip(self._parameters.items(), self._shadow, strict=True):
            part.copy_(self._strategy.own_part(parameter, weights[name]))


class _Saved:
    """The average as checkpoints see it."""

    def __init__(self, average: Average) -> None:
        self._average = average

    def state_dict(self) -> dict[str, Any]:
        return self._average.saved()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._average.load(state)


def _refuse(*_: Any) -> None:
    raise UsageError("an optimizer's step inside ema.applied() would train the averaged weights: leave it first")
