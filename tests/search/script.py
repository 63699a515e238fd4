"""The script under test: a case by the API, as a user would write it, and what was seen on the way."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import phalanx
from tests.search import models, values
from tests.search.cases import Case
from tests.search.ranks import Place


@dataclass
class Trace:
    """What one rank saw, or what the loop by hand computed for it."""

    events: list[tuple[str, Any]] = field(default_factory=list)
    fed: dict[tuple[str, int], list[list[int]]] = field(default_factory=dict)  # by loader and epoch: ids of batches
    weights: dict[str, Any] = field(default_factory=dict)
    replica: str = ""  # a digest of the weights that this rank holds; empty where they are sharded
    resumed: bool = False

    def see(self, name: str, value: Any) -> None:
        self.events.append((name, value.item() if isinstance(value, Tensor) else value))


class Left(Exception):
    """The run ends here, as if it had been killed; `path` is its checkpoint."""


def play(case: Case, place: Place) -> Trace:
    """The case in this rank: to its end, or to its checkpoint and on from there."""
    trace = Trace()
    path = _Script(case, place, trace).run(None)
    if path is not None:
        trace.resumed = True
        _Script(case, place, trace).run(path)
    return trace


def settings(case: Case, place: Place) -> dict[str, Any]:
    name, _, stage = place.strategy.partition("-")
    own: dict[str, Any] = {"fsdp": {"reshard_after_forward": case.gather, "param_dtype": case.sharded}}
    if stage:
        own["deepspeed"] = {"zero_stage": int(stage)}
    if "conditional" in case.parts:
        own["ddp"] = {"find_unused_parameters": True}
    kept = {"seed": case.seed, "accumulate": case.accumulate, "precision": case.precision}
    return {"strategy": name, "name": "case", "run_root": ".", "progress": False, "num_workers": 0, **kept, **own}


class _Script:
    def __init__(self, case: Case, place: Place, trace: Trace) -> None:
        self.case, self.place, self.trace = case, place, trace
        self.saved: Any = None
        self.micro = 0

    def run(self, path: Any) -> Any:
        """Train from the beginning or from `path`; where the checkpoint of a run that stopped early is."""
        case = self.case
        with phalanx.init(**settings(case, self.place)) as run:
            self.api, self.resuming = run, path is not None
            self._prepare()
            if path is not None:
                run.resume(path)
                self.micro = -(10**6)  # saved once
            for epoch in run.epochs(case.epochs):
                if self._epoch(epoch):
                    return self._checkpoint()
            if case.value and path is None and not case.save:
                self.trace.see("value", [values.measured(run, case.value)])
            self._finish()
        return None

    def _checkpoint(self) -> Any:
        return sorted((self.api.run_dir / "checkpoints").iterdir())[-1]

    def _prepare(self) -> None:
        case, run = self.case, self.api
        nets = models.build(case, run.rank)
        opts = models.optimizers(case, nets)
        plans = models.schedulers(case, opts)
        small_scale(run)
        loaders = [models.loader(case, case.size, case.shuffle)]
        loaders += [models.loader(case, case.size, case.shuffle)] * 0
        if case.pair:
            loaders.append(models.loader(case, case.size, True) if case.pair == "zip" else models.loader(case, case.size + 1, case.shuffle))
        val = models.loader(case, 5, False)
        ready = run.prepare(*nets, *opts, *plans, *loaders, val)
        counts = [len(nets), len(opts), len(plans), len(loaders)]
        ends = [sum(counts[: i + 1]) for i in range(4)]
        self.nets, self.opts = list(ready[: ends[0]]), list(ready[ends[0] : ends[1]])
        self.plans, self.loaders, self.val = list(ready[ends[1] : ends[2]]), list(ready[ends[2] : ends[3]]), ready[-1]

    def _epoch(self, epoch: int) -> bool:
        """One epoch; whether the run ends here."""
        case, run = self.case, self.api
        if case.pair == "zip":
            passes: Any = [("a", zip(run.steps(self.loaders[0]), self.loaders[1], strict=False))]
        else:
            passes = [(name, ((b, None) for b in run.steps(one))) for name, one in zip("ab", self.loaders, strict=False)]
        for number, (name, batches) in enumerate(passes):
            if number and case.save == "between" and case.save_at % case.epochs == epoch and not self.resuming:
                run.save()
                return True
            if self._pass(epoch, name, batches):
                return True
        if case.validate:
            self._evaluate()
        if case.scheduler == "epoch":
            for plan in self.plans:
                plan.step()
        if case.save == "end" and case.save_at % case.epochs == epoch and not self.resuming:
            run.save()
            return True
        return False

    def _pass(self, epoch: int, name: str, batches: Iterator[Any]) -> bool:
        asked = None
        for batch, beside in batches:
            if asked is not None and self.api.step > asked:  # the step that was to be saved is over
                return True
            self.trace.fed.setdefault((name, epoch), []).append(models.parts_of(batch)[3])
            if beside is not None:
                self.trace.fed.setdefault(("b", epoch), []).append(models.parts_of(beside)[3])
            before = self.api.step
            if self._micro(batch, beside):
                asked = before
            if asked is not None and self.saved is not None:
                return True
        return asked is not None

    def _micro(self, batch: Any, beside: Any) -> bool:
        """One micro-batch; whether a checkpoint was asked for."""
        case, run = self.case, self.api
        here = self.micro == case.save_at
        self.micro += 1
        if here and case.save == "asked":
            run.save()
        with run.accumulate(*self.nets):
            hint = None
            for at, net in enumerate(self.nets):
                own = [at] if case.second != "half" else [0, 1]
                hint = self._model(net, [self.opts[i] for i in own], [self.plans[i] for i in own if self.plans], batch, beside, hint)
        if here and case.save == "inside":
            self.saved = run.save()
        return here and case.save in ("inside", "asked")

    def _model(self, net: nn.Module, opts: list[Any], plans: list[Any], batch: Any, beside: Any, hint: Any) -> Tensor:
        case, run = self.case, self.api
        x, y, w, _ = models.parts_of(batch)
        if hint is not None:
            y = hint
        if case.clear == "first":
            for one in opts:
                one.zero_grad()
        self._aside(net, x, "before")
        out = net(x)
        loss = models.loss_of(case, out, y, w)
        if beside is not None:
            loss = loss + models.loss_of(case, net(models.parts_of(beside)[0]), *models.parts_of(beside)[1:3])
        run.backward(loss, weight=w.sum() if case.weighted else None)
        self.trace.see("loss", loss.detach())
        self._aside(net, x, "between")
        if case.clip:
            norm = run.clip_grad_norm(net, case.clip, case.norm)
            if norm is not None:
                self.trace.see("norm", norm)
        for one in opts:
            one.step()
        for plan in plans if case.scheduler == "step" else ():
            plan.step()
        if case.clear == "last":
            for one in opts:
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
            out = self.nets[0](x)
            total += float(((out - y) ** 2).sum())
            count += len(ids)
            seen += ids
        result = run.reduce({"loss": total, "count": count}, "sum")
        everyone = sorted(i for part in run.gather(tuple(seen)) for i in part)
        self.trace.see("evaluation", [result["loss"], result["count"], *everyone])

    def _finish(self) -> None:
        run, trace = self.api, self.trace
        for at, net in enumerate(self.nets):
            state = run.state_dict(net)
            trace.weights |= {f"{at}.{name}": value.double().tolist() for name, value in state.items()}
        if self.place.strategy not in ("fsdp", "deepspeed-3"):
            digest = hashlib.sha256()
            for net in self.nets:
                for parameter in run.unwrap(net).parameters():
                    digest.update(str(parameter.detach().double().tolist()).encode())
            trace.replica = digest.hexdigest()


def small_scale(run: Any) -> None:
    """fp16 without the overflows by which its scale is found."""
    scaler = run._session.gradients.scaler
    if scaler is not None:
        scaler.load_state_dict({**scaler.state_dict(), "scale": 256.0})
