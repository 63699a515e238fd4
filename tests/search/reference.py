"""The same training by hand: plain torch in one process, on the batches that the documentation says ranks get."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.search import models, values
from tests.search.cases import Case

Parts = list[list[int]]  # the ids of one micro-batch, by rank; none where a rank has no data
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Misdealt(AssertionError):
    """Ranks were not given what the documentation says."""


@dataclass
class Expected:
    """Each event's value by rank (None: not defined there), and the weights in the end."""

    events: list[tuple[str, list[Any]]] = field(default_factory=list)
    weights: dict[str, Any] = field(default_factory=dict)


def sizes(case: Case, loader: str) -> int:
    """Samples (or batches, where the loader doesn't make them) of loader a or b."""
    return case.size + (loader == "b" and case.pair == "then")


def dealt(case: Case, world: int, loader: str, fed: list[list[list[int]]]) -> list[Parts]:
    """The micro-batches of a pass. `fed` is what each rank got: its order is free where the script shuffles, but each
    sample must be in it once, and be dealt as documented."""
    n = sizes(case, loader)
    if case.loader in models.UNITS:
        units = models.Batches(case, n).units if case.loader == "batches" else [models.unit(case, k) for k in range(n)]
        micros = [units[k : k + world] for k in range(0, n, world)]
        micros = [micro + [[]] * (world - len(micro)) for micro in micros]
    elif case.loader == "stream":
        own = [list(range(rank, n, world)) for rank in range(world)]
        longest = range(0, len(own[0]), case.batch)
        micros = [[items[k : k + case.batch] for items in own] for k in longest]
    else:
        micros = _stretches(case, world, n, loader, fed)
    for rank, batches in enumerate(fed):
        wanted = [micro[rank] for micro in micros]
        if len(batches) != len(wanted) or any(part and part != got for part, got in zip(wanted, batches, strict=True)):
            raise Misdealt(f"rank {rank} got {batches} of loader {loader}: expected {wanted}")
    return micros


def _stretches(case: Case, world: int, n: int, loader: str, fed: list[list[list[int]]]) -> list[Parts]:
    step = world * case.batch
    shuffled = case.shuffle or (loader == "b" and case.pair == "zip")
    complete = case.drop_last and shuffled
    counts = [min(step, n - low) for low in range(0, n, step) if not complete or n - low >= step]
    shares = [[count // world + (rank < count % world) for rank in range(world)] for count in counts]
    order, micros = [], []
    for number, share in enumerate(shares):
        micros.append([fed[rank][number] if count and number < len(fed[rank]) else [] for rank, count in enumerate(share)])
        if [len(part) for part in micros[-1]] != share:
            raise Misdealt(f"batch {number} of loader {loader} was dealt as {micros[-1]}: expected {share} samples")
        order += [i for part in micros[-1] for i in part]
    free = shuffled or case.loader in ("sampler", "hidden")
    if (len(set(order)) != len(order) or (not complete and sorted(order) != list(range(n)))) if free else order != list(range(n)):
        raise Misdealt(f"a pass over loader {loader} was {order}: expected each of {n} samples once")
    return micros


def by_hand(case: Case, world: int, passes: dict[tuple[str, int], list[Parts]]) -> Expected:
    return _Hand(case, world).train(passes)


class _Hand:
    def __init__(self, case: Case, world: int) -> None:
        self.case, self.world, self.out = case, world, Expected()
        self.nets = models.build(case, 0)
        self.opts = models.optimizers(case, self.nets)
        self.plans = models.schedulers(case, self.opts)

    def train(self, passes: dict[tuple[str, int], list[Parts]]) -> Expected:
        case = self.case
        for epoch in range(case.epochs):
            for name in "ab" if case.pair == "then" else "a":
                micros = passes[name, epoch]
                beside = passes["b", epoch] if case.pair == "zip" else [None] * len(micros)
                for first in range(0, len(micros), case.accumulate):
                    stop = first + case.accumulate
                    self._group(micros[first:stop], beside[first:stop])
            if case.validate:
                self._evaluate()
            for plan in self.plans if case.scheduler == "epoch" else ():
                plan.step()
        if case.value and not case.save:
            self._see("value", [values.expected(case.value, self.world)])
        for at, net in enumerate(self.nets):
            state = net.state_dict()
            self.out.weights |= {f"{at}.{name}": value.double().tolist() for name, value in state.items()}
        return self.out

    def _see(self, name: str, value: Any) -> None:
        self.out.events.append((name, [value] * self.world))

    def _group(self, micros: list[Parts], beside: list[Any]) -> None:
        """One optimizer step: the gradient of the mean over all its samples, or tokens."""
        total = sum(self._weight(part) for micro in micros for part in micro)
        for one in self.opts:
            one.zero_grad()
        for number, micro in enumerate(micros):
            hints: list[Any] = [None] * self.world
            for at, net in enumerate(self.nets):
                own = [at] if self.case.second != "half" else [0, 1]
                hints = self._model(net, own, micro, beside[number], total, hints, number == len(micros) - 1)

    def _weight(self, ids: list[int]) -> float:
        return float(models.rows(self.case, ids)[2].sum()) if self.case.weighted and ids else float(len(ids))

    def _model(
        self, net: nn.Module, own: list[int], micro: Parts, beside: Any, total: float, hints: list[Any], last: bool
    ) -> list[Any]:
        case, outs, losses = self.case, [], []
        self._aside(net, micro, "before")
        for rank, ids in enumerate(micro):
            outs.append(None)
            losses.append(None)
            if ids:
                x, y, w = models.rows(case, ids)
                out = self._forward(net, x, rank)
                loss = models.loss_of(case, out, y if hints[rank] is None else hints[rank], w)
                if beside is not None:
                    x, y, w = models.rows(case, beside[rank])
                    loss = loss + models.loss_of(case, self._forward(net, x, rank), y, w)
                (loss * (self._weight(ids) / total)).backward()
                outs[-1], losses[-1] = out.detach(), loss.item()
        self.out.events.append(("loss", losses))
        self._aside(net, micro, "between")
        if case.clip and last:
            self._see("norm", float(nn.utils.clip_grad_norm_(net.parameters(), case.clip, case.norm)))
        for at in own if last else ():
            self.opts[at].step()
            if case.scheduler == "step":
                self.plans[at].step()
        self._aside(net, micro, "after")
        self._see("rate", self.opts[own[0]].param_groups[0]["lr"])
        return outs

    def _forward(self, net: nn.Module, x: Any, rank: int) -> Tensor:
        net.counting = rank == 0
        low = _DTYPES.get(self.case.precision)
        with torch.autocast("cpu", low) if low else nullcontext():
            return net(x).float()

    def _aside(self, net: nn.Module, micro: Parts, at: str) -> None:
        case = self.case
        if not case.aside or case.at != at:
            return
        if case.aside == "evaluate":
            self._evaluate()
            return
        with torch.no_grad():
            means = [self._forward(net, models.rows(case, ids)[0], rank).mean().item() if ids else None for rank, ids in enumerate(micro)]
        self.out.events.append(("aside", means))

    def _evaluate(self) -> None:
        case = self.case
        if case.loader in models.UNITS:
            ids = [i for k in (models.Batches(case, 5).units if case.loader == "batches" else map(lambda k: models.unit(case, k), range(5))) for i in k]
        else:
            ids = list(range(5))
        x, y, _ = models.rows(case, ids)
        self.nets[0].eval()
        with torch.no_grad():
            total = ((self._forward(self.nets[0], x, 0) - y) ** 2).sum().item()
        self.nets[0].train()
        self._see("evaluation", [total, len(ids), *sorted(ids)])
