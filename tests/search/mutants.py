"""Faults that were mended, put back: each mutant makes the product as wrong as it was, for `make search-proof`.

A mutant breaks what the fix does, at a name of torch's or of the product; where the name has gone, it raises
AttributeError, and is to be written anew for the code that does it now.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    setattr(owner, name, make(getattr(owner, name)))


def _keep_gathered(training: bool) -> None:
    """FSDP's own `reshard`, by which any remedy gives gathered weights back after a forward without gradients."""
    from torch.distributed.fsdp import FSDPModule

    def make(reshard: Any) -> Any:
        return lambda module: None if module.training is training else reshard(module)

    _replace(FSDPModule, "reshard", make)


def gathered_after_evaluation() -> None:
    """After an evaluation FSDP's root module stayed gathered, and checkpoints missed its parameters."""
    _keep_gathered(training=False)


def gathered_after_forward() -> None:
    """A forward without gradients between backward and step hid FSDP's gradients from clipping."""
    _keep_gathered(training=True)


def reduced_in_parameters_type() -> None:
    """FSDP took no type for reductions as that of the parameters, and reduced bf16 gradients in bf16."""
    import torch

    from phalanx.strategies import fsdp

    def make(policy: Any) -> Any:
        return lambda param, reduce: policy(param, None if reduce is torch.float32 else reduce)

    _replace(fsdp, "MixedPrecisionPolicy", make)


MUTANTS: dict[str, Callable[[], None]] = {
    "fsdp: gathered weights are kept after an evaluation": gathered_after_evaluation,
    "fsdp: gathered weights are kept after a forward without gradients": gathered_after_forward,
    "fsdp: gradients are reduced in the type of the parameters": reduced_in_parameters_type,
}


def apply(name: str) -> None:
    """Break the product in this process."""
    if name:
        MUTANTS[name]()
