"""Models in eval mode and gradients off, from the first evaluation that begins to the end of the last one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ..data.loader import PreparedLoader
from ..errors import UsageError
from ..strategies.base import Strategy


class EvalMode:
    """Evaluations may be nested, zipped and broken off, so they end in any order."""

    def __init__(self) -> None:
        self.open = 0  # evaluations in hand
        self._modules: list[nn.Module] = []  # set to eval mode here
        self._gradients = True  # as it was before

    @contextmanager
    def on(self, models: Iterable[nn.Module]) -> Iterator[None]:
        if not self.open:
            self._gradients = torch.is_grad_enabled()
            torch.set_grad_enabled(False)
        self.open += 1
        training = [module for model in models for module in model.modules() if module.training]
        self._modules += training
        for module in training:
            module.training = False
        try:
            yield
        finally:
            self.open -= 1
            if not self.open:
                self._end()

    def _end(self) -> None:
        for module in self._modules:
            module.training = True
        self._modules = []
        torch.set_grad_enabled(self._gradients)


@contextmanager
def forwards_apart(strategy: Strategy, models: list[nn.Module], loader: PreparedLoader) -> Iterator[None]:
    """Ranks may call the models unequally often: without what a forward exchanges, else UsageError."""
    if strategy.gathers_in_forward and strategy.comm.world_size > 1 and not loader.even():
        raise UsageError(
            f"evaluate(even=False): the ranks have different numbers of batches of this loader, or nobody knows them, "
            f"and under strategy {strategy.name} every rank must call the model equally often: use even=True, or a "
            "number of samples that leaves no rank without a last batch (drop_last=True does)"
        )
    # DistributedDataParallel sends buffers before a forward; they were agreed on when the evaluation began.
    sending = [model for model in models if getattr(model, "require_forward_param_sync", False)]
    for model in sending:
        model.require_forward_param_sync = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for model in sending:
            model.require_forward_param_sync = True  # type: ignore[assignment]
