"""The script under test: a case by the API, as a user would write it, and what was seen."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import phalanx
from tests.search import models, values
from tests.search.cases import Case
from tests.search.ranks import Place


@dataclass
class Trace:
    """What one rank saw; `fed` has the ids of each batch, by loader and epoch."""

    events: list[tuple[str, Any]] = field(default_factory=list)
    fed: dict[tuple[str, int], list[list[int]]] = field(default_factory=dict)
    weights: dict[str, Any] = field(default_factory=dict)
    replica: str = ""  # a digest of this rank's weights; empty where they are sharded
    resumed: bool = False

    def see(self, name: str, value: Any) -> None:
        self.events.append((name, value.item() if isinstance(value, Tensor) else value))

    def feed(self, loader: str, epoch: int, batch: Any) -> None:
        self.fed.setdefault((loader, epoch), []).append(models.parts_of(batch)[3])


def play(case: Case, place: Place) -> Trace:
    """The case in this rank: to its end, or to its checkpoint and on from there in a new run."""
    trace = Trace()
    path = _Script(case, place, trace, None).run()
    if path is not None:
        trace.resumed = True
        _Script(case, place, trace, path).run()
    return trace


def settings(case: Case, place: Place) -> dict[str, Any]:
    """The arguments of `phalanx.init`."""
    name, _, stage = place.strategy.partition("-")
    unused = {"find_unused_parameters": "conditional" in case.parts}
    fsdp = {"reshard_after_forward": case.gather, "param_dtype": case.sharded, **unused}
    return {
        **{"strategy": name, "name": "case", "run_root": ".", "progress": False, "num_workers": 0},
        **{"seed": case.seed, "accumulate": case.accumulate, "precision": case.precision},
        **{"fsdp": fsdp, "ddp": unused},
        **({"deepspeed": {"zero_stage": int(stage)}} if stage else {}),
    }


class _Script:
    """One run. It ends at the case's checkpoint, unless it began from it (`path`)."""

    def __init__(self, case: Case, place: Place, trace: Trace, path: Path | None) -> None:
        self.case, self.place, self.trace, self.path = case, place, trace, path
        self.micro = 0  # micro-batches begun
        self.due: int | None = None  # the checkpoint is taken once the run has more steps than this

    def run(self) -> Path | None:
        """The checkpoint, if the run ended there."""
        case = self.case
        with phalanx.init(**settings(case, self.place)) as self.api:
            self._prepare()
            if self.path is not None:
                self.api.resume(self.path)
            for epoch in self.api.epochs(case.epochs):
                if self._epoch(epoch):
                    return max((self.api.run_dir / "checkpoints").iterdir(), key=lambda p: int(p.name))
            if case.value:
                self.trace.see("value", [values.measured(self.api, case.value)])
            self._finish()
        return None

    def _prepare(self) -> None:
        case, run = self.case, self.api
        nets = models.build(case, run.rank)
        opts = models.optimizers(case, nets)
        plans = models.schedulers(case, opts)
        loaders = [models.loader(case, "a")] + ([models.loader(case, "b")] if case.pair else [])
        _small_scale(run)
        ready = iter(run.prepare(*nets, *opts, *plans, *loaders, models.loader(case, "val")))
        self.nets, self.opts = [next(ready) for _ in nets], [next(ready) for _ in opts]
        self.plans, self.loaders = [next(ready) for _ in plans], [next(ready) for _ in loaders]
        self.val = next(ready)

    def _saves(self, where: str, number: int) -> bool:
        """Whether the case's checkpoint is to be taken here."""
        return self.path is None and self.case.save == where and self.case.save_at == number

    def _epoch(self, epoch: int) -> bool:
        """One epoch; whether the run has ended by a checkpoint."""
        case, run = self.case, self.api
        if self._pass(epoch, "a"):
            return True
        if case.pair == "then":
            if self._saves("between", epoch):
                run.save()
                return True
            if self._pass(epoch, "b"):
                return True
        if case.validate:
            self._evaluate()
        for plan in self.plans if case.scheduler == "epoch" else ():
            plan.step()
        if self._saves("end", epoch):
            run.save()
            return True
        return False

    def _batches(self, name: str) -> Iterator[tuple[Any, Any]]:
        """A pass of `steps`, with what is iterated beside it."""
        steps = self.api.steps(self.loaders["ab".index(name)])
        if self.case.pair == "zip":
            return zip(steps, self.loaders[1], strict=False)
        return ((batch, None) for batch in steps)

    def _pass(self, epoch: int, name: str) -> bool:
        for batch, beside in self._batches(name):
            if self._saved():
                return True
            self.trace.feed(name, epoch, batch)
            if beside is not None:
                self.trace.feed("b", epoch, beside)
            self._micro(batch, beside)
            if self._saved():
                return True
        return self.due is not None

    def _saved(self) -> bool:
        return self.due is not None and self.api.step > self.due

    def _micro(self, batch: Any, beside: Any) -> None:
        case, run, number = self.case, self.api, self.micro
        self.micro += 1
        before = run.step
        if self._saves("asked", number):
            run.save()
            self.due = before
        with run.accumulate(*self.nets):
            target = None
            for net, own in models.pairs(case, self.nets):
                target = self._train(net, own, batch, beside, target)
        if self._saves("inside", number):
            run.save()
            self.due = before

    def _train(self, net: nn.Module, own: list[int], batch: Any, beside: Any, target: Any) -> Tensor:
        """A micro-batch of one model, whose optimizers are `own`; its output."""
        case, run = self.case, self.api
        opts, plans = [self.opts[i] for i in own], [self.plans[i] for i in own if self.plans]
        x, y, w, _ = models.parts_of(batch)
        for one in opts if case.clear == "first" else ():
            one.zero_grad()
        self._aside(net, x, "before")
        out = net(x)
        loss = models.loss_of(case, out, y if target is None else target, w)
        if beside is not None:
            x2, y2, w2, _ = models.parts_of(beside)
            loss = loss + models.loss_of(case, net(x2), y2, w2)
        run.backward(loss, weight=w.sum() if case.weighted else None)
        self.trace.see("loss", loss.detach())
        self._aside(net, x, "between")
        if case.clip and (norm := run.clip_grad_norm(net, case.clip, case.norm)) is not None:
            self.trace.see("norm", norm)
        for one in opts:
            one.step()
        for plan in plans if case.scheduler == "step" else ():
            plan.step()
        for one in opts if case.clear == "last" else ():
            one.zero_grad()
        self._aside(net, x, "after")
        self.trace.see("rate", opts[0].param_groups[0]["lr"])
        return out.detach()

    def _aside(self, net: nn.Module, x: Any, at: str) -> None:
        case = self.case
        if not case.aside or case.at != at:
            return
        if case.aside == "evaluate":
            self._evaluate()
            return
        with torch.no_grad():
            out = (net if case.aside == "forward" else self.api.unwrap(net))(x)
        self.trace.see("aside", out.float().mean())

    def _evaluate(self) -> None:
        """Sums over all validation samples, and which they were."""
        run, total, count, seen = self.api, 0.0, 0, []
        for batch in run.evaluate(self.val):
            x, y, _, ids = models.parts_of(batch)
            total += float(((self.nets[0](x) - y) ** 2).sum())
            count += len(ids)
            seen += ids
        sums = run.reduce({"loss": total, "count": count}, "sum")
        everyone = sorted(i for part in run.gather(tuple(seen)) for i in part)
        self.trace.see("evaluation", [sums["loss"], sums["count"], *everyone])

    def _finish(self) -> None:
        run, trace = self.api, self.trace
        for at, net in enumerate(self.nets):
            state = run.state_dict(net)
            trace.weights |= {f"{at}.{name}": v.double().tolist() for name, v in state.items()}
        if self.place.strategy not in ("fsdp", "deepspeed-3"):
            held = [p.detach().double().tolist() for net in self.nets for p in run.unwrap(net).parameters()]
            trace.replica = hashlib.sha256(str(held).encode()).hexdigest()


def _small_scale(run: Any) -> None:
    """fp16 without the overflows by which its scale is found."""
    scaler = run._session.gradients.scaler
    if scaler is not None:
        scaler.load_state_dict({**scaler.state_dict(), "scale": 256.0})
