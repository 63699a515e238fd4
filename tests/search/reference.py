"""The same training by hand: plain torch in one process, on the batches that the docs promise."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.search import models, values
from tests.search.cases import UNITS, Case

Parts = list[list[int]]  # the ids of one micro-batch, by rank; none where a rank has no data
Fed = list[list[list[int]]]  # what each rank got: ids of its batches
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Misdealt(AssertionError):
    """Ranks were not given what the documentation says."""


@dataclass
class Expected:
    """Each event's value by rank (None: not defined there), and the weights in the end."""

    events: list[tuple[str, list[Any]]] = field(default_factory=list)
    weights: dict[str, Any] = field(default_factory=dict)


def dealt(case: Case, world: int, loader: str, fed: Fed) -> list[Parts]:
    """The micro-batches of a pass, after a check of what ranks got.

    The order is free where the script shuffles, but each sample must be in it once.
    """
    if case.loader in UNITS:
        micros = _in_turn(models.units(case, loader), world)
    elif case.loader == "stream":
        own = [models.numbers(case, loader)[rank::world] for rank in range(world)]
        starts = range(0, len(own[0]), case.batch)
        micros = [[items[low : low + case.batch] for items in own] for low in starts]
    else:
        micros = _stretches(case, world, loader, fed)
    for rank, batches in enumerate(fed):
        wanted = [micro[rank] for micro in micros]
        same = len(batches) == len(wanted)
        if not same or any(part and part != got for part, got in zip(wanted, batches, strict=True)):
            raise Misdealt(f"rank {rank} got {batches} of loader {loader}: expected {wanted}")
    return micros


def _in_turn(units: list[list[int]], world: int) -> list[Parts]:
    """Whole batches, one for each rank in turn."""
    micros = [units[low : low + world] for low in range(0, len(units), world)]
    return [micro + [[]] * (world - len(micro)) for micro in micros]


def _stretches(case: Case, world: int, loader: str, fed: Fed) -> list[Parts]:
    """Stretches of one order, each dealt evenly to within one sample."""
    numbers, step = models.numbers(case, loader), world * case.batch
    whole = models.drops_last(case, loader)
    counts = [min(step, len(numbers) - low) for low in range(0, len(numbers), step)]
    micros: list[Parts] = []
    for at, count in enumerate(count for count in counts if not whole or count == step):
        share = [count // world + (rank < count % world) for rank in range(world)]
        parts = [batches[at] if n and at < len(batches) else [] for n, batches in zip(share, fed, strict=True)]
        if [len(part) for part in parts] != share:
            raise Misdealt(f"batch {at} of loader {loader} was dealt as {parts}: expected {share} samples")
        micros.append(parts)
    order = [i for micro in micros for part in micro for i in part]
    if not models.shuffles(case, loader):
        right = order == numbers[: len(order)]
    else:
        right = len(set(order)) == len(order) and set(order) <= set(numbers)
    if not right or (not whole and len(order) != len(numbers)):
        raise Misdealt(f"a pass over loader {loader} was {order}: expected each of {len(numbers)} samples once")
    return micros


def by_hand(case: Case, world: int, passes: dict[tuple[str, int], list[Parts]]) -> Expected:
    """Train on these micro-batches, which stand by loader and epoch."""
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
                for low in range(0, len(micros), case.accumulate):
                    high = low + case.accumulate
                    self._group(micros[low:high], beside[low:high])
            if case.validate:
                self._evaluate()
            for plan in self.plans if case.scheduler == "epoch" else ():
                plan.step()
        if case.value:
            self._see("value", [values.expected(case.value, self.world)])
        for at, net in enumerate(self.nets):
            state = net.state_dict()
            self.out.weights |= {f"{at}.{name}": v.double().tolist() for name, v in state.items()}
        return self.out

    def _see(self, name: str, value: Any) -> None:
        self.out.events.append((name, [value] * self.world))

    def _group(self, micros: list[Parts], beside: list[Any]) -> None:
        """One optimizer step: the gradient of the mean over all its samples, or tokens."""
        total = sum(self._weight(part) for micro in micros for part in micro)
        for one in self.opts:
            one.zero_grad()
        for number, micro in enumerate(micros):
            targets: list[Any] = [None] * self.world
            for net, own in models.pairs(self.case, self.nets):
                targets = self._backward(net, micro, beside[number], targets, total)
                self._step(net, own, micro, last=number == len(micros) - 1)

    def _weight(self, ids: list[int]) -> float:
        if self.case.weighted and ids:
            return float(models.rows(self.case, ids)[2].sum())
        return float(len(ids))

    def _backward(self, net: nn.Module, micro: Parts, beside: Any, targets: list[Any], total: float) -> list[Any]:
        """Each rank's part of a micro-batch; the outputs."""
        case, losses = self.case, [None] * self.world
        outs: list[Any] = [None] * self.world
        self._aside(net, micro, "before")
        for rank, ids in enumerate(micro):
            if not ids:
                continue
            x, y, w = models.rows(case, ids)
            out = self._forward(net, x, rank)
            loss = models.loss_of(case, out, y if targets[rank] is None else targets[rank], w)
            if beside is not None:
                x, y, w = models.rows(case, beside[rank])
                loss = loss + models.loss_of(case, self._forward(net, x, rank), y, w)
            (loss * (self._weight(ids) / total)).backward()
            outs[rank], losses[rank] = out.detach(), loss.item()
        self.out.events.append(("loss", losses))
        return outs

    def _step(self, net: nn.Module, own: list[int], micro: Parts, last: bool) -> None:
        case = self.case
        self._aside(net, micro, "between")
        if case.clip and last:
            norm = nn.utils.clip_grad_norm_(net.parameters(), case.clip, case.norm)
            self._see("norm", float(norm))
        for at in own if last else ():
            self.opts[at].step()
            if case.scheduler == "step":
                self.plans[at].step()
        self._aside(net, micro, "after")
        self._see("rate", self.opts[own[0]].param_groups[0]["lr"])

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
        means: list[Any] = [None] * self.world
        with torch.no_grad():
            for rank, ids in enumerate(micro):
                if ids:
                    means[rank] = self._forward(net, models.rows(case, ids)[0], rank).mean().item()
        self.out.events.append(("aside", means))

    def _evaluate(self) -> None:
        ids, net = models.numbers(self.case, "val"), self.nets[0]
        x, y, _ = models.rows(self.case, ids)
        net.eval()
        with torch.no_grad():
            total = ((self._forward(net, x, 0) - y) ** 2).sum().item()
        net.train()
        self._see("evaluation", [total, len(ids), *sorted(ids)])
