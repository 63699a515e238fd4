"""Weights of backward passes that the script gives itself: `run.backward(loss, weight=tokens)`.

Their sum over a step is known only after its last pass. Until then losses are multiplied by weight / reference, where
the reference is the sum of the step before, which keeps fp16 in range; then gradients are scaled by reference / sum.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..data.groups import Micro
from ..errors import UsageError
from ..strategies.comm import Comm


class Weights:
    def __init__(self) -> None:
        self.reference = 1.0
        self.own: list[Any] = []  # of this rank's batches in the step
        self._weighed: Micro | None = None  # the batch whose weight is the last of these
        self._total: float | None = None  # over all ranks, once it is known
        self._done: set[int] = set()  # parameters whose gradients have been divided by it, by identity

    @property
    def next_reference(self) -> float:
        """The reference of the step that follows: near enough to its own sum."""
        return self.reference if self._total is None else self._total

    @property
    def divided(self) -> bool:
        """Whether a step has divided by the sum."""
        return self._total is not None

    def forget(self) -> None:
        """The step is over, or its gradients are gone."""
        self.reference = self.next_reference
        self.own.clear()
        self._done.clear()
        self._weighed = self._total = None

    def note(self, weight: Any, micro: Micro | None) -> None:
        """A batch counts once, however many losses it has."""
        if micro is not None and self._weighed is micro:
            if float(weight) != float(self.own[-1]):
                raise UsageError(
                    f"backward(weight={float(weight):g}) after weight={float(self.own[-1]):g} on the same "
                    "batch: add such losses up, or give them one weight"
                )
            return
        self.own.append(weight)
        self._weighed, self._total = micro, None

    def share(self, weight: Any, trained: Iterable[nn.Parameter]) -> Any:
        """What a loss of this weight is multiplied by; `trained` is all that optimizers hold."""
        if self._done and self._total is not None and all(id(p) in self._done for p in trained):
            return weight / self._total  # it adds to gradients that have been divided already
        return weight / self.reference

    def left(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Those of `parameters` whose gradients are still to be divided; from now on they count as done."""
        found = {id(p): p for p in parameters if id(p) not in self._done}
        self._done |= found.keys()
        return list(found.values())

    def divisor(self, comm: Comm) -> float:
        """What gradients are to be multiplied by. All ranks call it, at the same places."""
        if self._total is None:
            mine = sum(float(weight) for weight in self.own)
            self._total = comm.all_reduce(torch.tensor([mine], dtype=torch.float64), "sum").item()
            if not self._total > 0:
                raise UsageError(
                    f"the weights of this step's backward passes sum to {self._total}: expected a sum above 0"
                )
        return self.reference / self._total
