"""Faults that were mended, put back, for `make search-proof`.

A mutant breaks what a fix does, at a name of torch's or of the product. Where the name has gone it
raises AttributeError or ImportError, and is to be written anew for the code that does it now.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Put `make(old)` in the place of the function `name`."""
    setattr(owner, name, make(getattr(owner, name)))


def _keep_gathered(training: bool) -> None:
    """FSDP's own `reshard` does nothing, in eval mode or in training mode."""
    from torch.distributed.fsdp import FSDPModule

    def make(reshard: Any) -> Any:
        return lambda module: None if module.training is training else reshard(module)

    _replace(FSDPModule, "reshard", make)


def gathered_after_evaluation() -> None:
    """After an evaluation FSDP's root stayed gathered, and checkpoints missed its parameters."""
    from phalanx.strategies.fsdp import Fsdp

    _keep_gathered(training=False)
    _replace(Fsdp, "_shard", lambda old: lambda self, inner: None)


def gathered_after_forward() -> None:
    """A forward without gradients between backward and step hid FSDP's gradients from clipping."""
    _keep_gathered(training=True)


def reduced_in_parameters_type() -> None:
    """FSDP took no type for reductions as that of the parameters: bf16."""
    import torch

    from phalanx.strategies import fsdp

    def make(policy: Any) -> Any:
        return lambda param, reduce: policy(param, None if reduce is torch.float32 else reduce)

    _replace(fsdp, "MixedPrecisionPolicy", make)


def counted_by_first_tensor() -> None:
    """The first tensor's first dimension counted, whatever the other tensors said."""
    from phalanx.data import feed
    from phalanx.data.batch import count

    _replace(feed, "weigh", lambda old: lambda batch: (count(batch), ""))


def loops_repeated() -> None:
    """A resumed epoch began with its first loop, though that had been over."""
    from phalanx.run.loops import Loops

    _replace(Loops, "repeated", lambda old: lambda *arguments: False)


def iterated_one_behind() -> None:
    """A loader beside `steps` counted a batch as used when the next one was asked for."""
    from phalanx.data.passes import Passes

    def make(hand_out: Any) -> Any:
        def late(self: Any, after: Any) -> None:
            before, self.__dict__["pending"] = self.__dict__.get("pending"), after
            if before is not None:
                hand_out(self, before)

        return late

    _replace(Passes, "_hand_out", make)


def cleared_in_group() -> None:
    """`zero_grad` before an optimizer's own backward, but after another's, cleared what it had from
    earlier micro-batches."""
    from phalanx.run.gradients import Gradients

    def clears(self: Any, proxy: Any) -> bool:
        begun = self._backed or self._gathered
        return not self.inside or ((self._backed or not begun) if self.last else (self._used and not begun))

    _replace(Gradients, "clears", lambda old: clears)


def divided_at_first_step() -> None:
    """The first step divided all gradients by the weights until then, and forgot them."""
    from phalanx.run.gradients import Gradients

    def normalise(self: Any, parameters: Any) -> None:
        if self.weights.own:
            everything = [p for model in self.models for _, p in self.strategy.held(model)]
            factor = self.weights.divisor(self.strategy.comm)
            self.strategy.settle(everything)
            self.strategy.scale_gradients(everything, factor)
            self.weights.forget()

    _replace(Gradients, "normalise", lambda old: normalise)


def reduced_as_floats() -> None:
    """Dicts were paired by order, and all numbers went through float64."""
    import torch

    from phalanx.run import api

    def reduce(comm: Any, value: Any, op: str, weight: Any) -> Any:
        if isinstance(value, dict):
            return {key: reduce(comm, item, op, weight) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)([reduce(comm, item, op, weight) for item in value])
        if not isinstance(value, torch.Tensor):
            return reduce(comm, torch.tensor(float(value), dtype=torch.float64), op, weight).item()
        if op in ("min", "max"):
            return comm.all_reduce(value.clone(), op)
        value = value if op == "sum" or value.is_floating_point() else value.double()
        share = 1.0 if weight is None else float(weight)
        total = comm.all_reduce(value * share if weight is not None else value.clone(), "sum")
        shares = comm.all_reduce(torch.tensor([share], dtype=torch.float64), "sum").item()
        return total if op == "sum" else total / shares

    _replace(api, "reduce", lambda old: reduce)


MUTANTS: dict[str, Callable[[], None]] = {
    "fsdp: gathered weights are kept after an evaluation": gathered_after_evaluation,
    "fsdp: gathered weights are kept after a forward without gradients": gathered_after_forward,
    "fsdp: gradients are reduced in the type of the parameters": reduced_in_parameters_type,
    "data: a batch counts what its first tensor says": counted_by_first_tensor,
    "resume: loops that were over are repeated": loops_repeated,
    "resume: a loader beside steps is one batch behind": iterated_one_behind,
    "two optimizers: zero_grad clears within a group": cleared_in_group,
    "two optimizers: weights are forgotten at the first step": divided_at_first_step,
    "values: reduced in the order of a dict, and as floats": reduced_as_floats,
}


def apply(name: str) -> None:
    """Break the product in this process."""
    if name:
        MUTANTS[name]()
