"""`Run`: what a training script calls. Each call works alike at any world size and under any strategy."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable

from ..config import JobConfig
from ..config.hidden import referring
from ..errors import UsageError
from ..rank.topology import Topology
from ..records import Metric
from ..strategies.comm import naming
from ..trackers.copies import Copies
from .average import Average
from .ending import end
from .exact import Op
from .export import full_state
from .first import main_first
from .gradients import AccumulateContext
from .loop import Loop
from .prepare import prepare
from .reduce import reduce
from .register import register
from .saver import Saver
from .session import Session
from .values import broadcast, gather

_T = TypeVar("_T")


class Run:
    """One rank's view of a training run; made by `phalanx.init()`."""

    def __init__(self, session: Session, on_close: Callable[[], None]) -> None:
        self._session = session
        self._saver = Saver(session)
        self._loop = Loop(session, self._saver)
        self._on_close = on_close
        self._begin = time.perf_counter()
        self._contexts: dict[tuple[nn.Module, ...], AccumulateContext] = {}
        self._closed = False
        self.grad_norm: Tensor | None = None
        """The total gradient norm that the last clipping found."""
        names = self.config.trackers if self.is_main else ()
        self._trackers = Copies(names, self.run_dir, lambda: referring(self.config.model_dump(mode="json")))
        session.on_resume = self._trackers.resumed

    # Who and where.

    @property
    def config(self) -> JobConfig:
        """The settings, the same on all ranks; the script's own are in `config.params`."""
        return self._session.config

    @property
    def topology(self) -> Topology:
        """Rank, world size and place of this process."""
        return self._session.strategy.topology

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors live."""
        return self._session.strategy.device

    @property
    def run_dir(self) -> Path:
        """The run directory, the same on all ranks."""
        return self._session.run_dir

    @property
    def rank(self) -> int:
        return self._session.comm.rank

    @property
    def world_size(self) -> int:
        return self._session.comm.world_size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self._session.comm.rank == 0

    @property
    def step(self) -> int:
        """Optimizer steps done so far."""
        return self._session.step

    @property
    def epoch(self) -> int:
        """The current epoch, counted from 0."""
        return self._session.epoch

    @property
    def sync_gradients(self) -> bool:
        """Whether the micro-batch in hand is its group's last, whose step is taken; True outside `steps`."""
        return self._session.gradients.last

    # Models, and the loop.

    def prepare(self, *things: Any) -> Any:
        """Models, optimizers, schedulers and loaders, made ready for this run, in the order given.

        A model comes back on the run's device with rank 0's weights, as a real DDP or FSDP module; optimizers and
        schedulers as thin proxies that share state; a loader as this rank's share of it, whose `batch_size` is per
        rank. The first loader that is passed beside an optimizer, and every shuffling one, is for training.

        Raises:
            DataError: there are fewer training samples than ranks.
            UsageError: a thing is none of these, or an optimizer's model is missing.
        """
        self._session.comm.check_together("run.prepare()")
        return prepare(self._session, things)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The module that was passed to `prepare`, for its own methods and attributes.

        Call the prepared model itself in training: its wrappers average gradients and set the precision.
        """
        return self._session.strategy.unwrap(model)

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """The whole weights of a model on the CPU, as its own `state_dict` names them: on rank 0, and elsewhere {}.

        All ranks call it. The tensors are copies, the same under every strategy: for `torch.save`, or
        `load_state_dict` of a module that nobody prepared.
        """
        average = self._session.averaged
        if average is not None and average.is_of(model):
            found: dict[str, Any] = average.state_dict()
            return found
        self._session.comm.meet("run.state_dict()")
        with naming("run.state_dict()"):
            return full_state(self._session.strategy.saved_model(model), self.is_main)

    def ema(self, model: nn.Module, decay: float = 0.999, name: str = "ema") -> Average:
        """An exponential moving average of a prepared model's weights, updated after each optimizer step that is taken.

        It is sharded as the weights are, and saved and resumed with the run. `with ema.applied(): …` puts it into the
        model, for evaluation; `ema.state_dict()` gives whole weights, as `run.state_dict` does.
        """
        return Average(self._session, model, decay, name)

    def epochs(self, count: int | None = None) -> Iterator[int]:
        """The numbers of the epochs to do, up to `count` in all: a resumed run goes on where it stopped.

        The setting `max_steps` ends them too, after exactly that step; without a count it is what ends them.
        What the script does after its `steps` loop is still done then.

        Raises:
            UsageError: there is neither a count nor `max_steps`.
        """
        return self._loop.epochs(count)

    def steps(self, loader: Any) -> Iterator[Any]:
        """One pass over a prepared training loader: its batches, on the run's device.

        Each boundary between optimizer steps writes a record, moves the progress bar, takes checkpoints by
        `checkpoint.every_steps`, and ends the loop on all ranks together after `stop()`.
        """
        return self._loop.steps(loader)

    def evaluate(self, loader: Any, even: bool = True) -> Iterator[Any]:
        """The batches of a prepared loader, every sample once over all ranks.

        Until the loop ends, prepared models are in eval mode and gradients are off. A rank that has run out gets
        batches of zero rows, so that all ranks call the model equally often; `reduce(x, weight=rows)` ignores them.
        With `even=False` each rank gets its own batches only, for batches of a kind that can't be empty; where a
        forward needs all ranks (fsdp, ZeRO-3), the ranks must have equally many then.
        """
        return self._loop.evaluate(loader, even)

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Within it, gradients add up over `accumulate` batches, and steps act on the last of them only.

        Steps and clearing that follow in the same batch belong to it. Name all models that the loop trains.
        """
        context = self._contexts.get(models)
        if context is None:
            context = self._contexts[models] = AccumulateContext(self._session.gradients, models)
        return context

    def backward(self, loss: Tensor, weight: float | Tensor | None = None) -> None:
        """Gradients of `loss`, a mean over this rank's part of the batch.

        The ranks' and micro-batches' losses are weighted by their number of samples, so that together they give
        the gradient of the mean over all samples of the step. `weight` replaces that number where the loss is a
        mean over something else, such as unmasked tokens.
        """
        self._session.gradients.backward(loss, weight)

    def clip_grad_norm(self, model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor | None:
        """Clip the model's gradients over all ranks; the norm before clipping (None while accumulating)."""
        if self._session.gradients.holds(model):
            return None
        self.grad_norm = self._session.gradients.clip(model, max_norm, norm_type)
        return self.grad_norm

    def stop(self) -> None:
        """Ask to end training: all ranks leave `steps` and `epochs` after the same step."""
        self._session.stop.asked = True

    def join(self, *parts: Any) -> AbstractContextManager[Any]:
        """torch's `Join` for loops of one's own over uneven inputs; does nothing in one process."""
        joinable = [part for part in parts if isinstance(part, Joinable)]
        if self.world_size == 1 or not joinable:
            return nullcontext()
        return Join(joinable)

    # Ranks one after another.

    def main_first(self, local: bool = False) -> AbstractContextManager[None]:
        """Within it, rank 0 goes first and the others follow when it is through: for downloads and caches.

        All ranks come to it, and leave it together. Waiting has no limit. If a rank fails inside, all others get a
        RuntimeError that names it and its error. Calls that all ranks make together are refused inside.

        Args:
            local: each node's first rank goes first, where every node has a disk of its own.
        """
        return main_first(self._session.comm, self.topology, local)

    def barrier(self) -> None:
        """Return when every rank has come here, however long that takes; it does not wait for GPUs' queued work."""
        self._session.comm.meet("run.barrier()", math.inf)

    # Values.

    def reduce(self, value: Any, op: Op = "mean", weight: float | Tensor | None = None) -> Any:
        """`value` over all ranks, on all ranks: a tensor, a number, or a dict or list of them.

        Exact up to the rounding to the result's type, which is the value's own: floats keep theirs, a sum of integers
        is an int or int64, a mean of integers a float or float64. Dicts are paired by their keys.

        Args:
            op: "mean", "sum", "min" or "max".
            weight: this rank's weight; a rank of weight 0 does not count, whatever its value is (NaN too). A sum of
                integers by weights that are floats is a float.

        Raises:
            UsageError: on all ranks, where they differ in keys, types, shapes or `op`; a value or weight can't be
                reduced; a sum of integers is beyond 64 bits (Python's own have no limit).
        """
        with naming("run.reduce()"):
            return reduce(self._session.comm, value, op, weight)

    def gather(self, value: Any) -> Any:
        """All ranks' tensors joined along the first dimension, whose length may differ; of other objects, a list.

        Raises:
            UsageError: on all ranks, where types or the other dimensions differ.
        """
        with naming("run.gather()"):
            return gather(self._session.comm, value)

    def broadcast(self, value: Any, src: int = 0) -> Any:
        """Rank `src`'s tensor (the same shape and type on all ranks) or picklable object, on all ranks.

        Raises:
            UsageError: on all ranks, where `src`, types or shapes differ.
        """
        with naming("run.broadcast()"):
            return broadcast(self._session.comm, value, src)

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Record metrics (numbers or tensors of one element) at `step`, by default the current one; main rank only."""
        if not self.is_main:
            for name, value in values.items():
                if isinstance(value, str) or (isinstance(value, Tensor) and value.numel() != 1):
                    _number(name, value)  # raises, as on the main rank
            return
        numbers = {name: _number(name, value) for name, value in values.items()}
        at = self.step if step is None else step
        self._session.writer.write(Metric(step=at, epoch=self.epoch, values=numbers))
        if self._session.dry is not None:
            self._session.dry.metrics |= numbers
        self._trackers.log(numbers, at)
        if self._session.checkpoints.monitor is not None:
            self._session.checkpoints.monitor.note(numbers, self.step)

    def print(self, *values: Any, all_ranks: bool = False, **keywords: Any) -> None:
        """`print` on the main rank, or on all ranks with the rank in front (each into its own log or terminal)."""
        if all_ranks:
            print(f"[rank {self.rank}]", *values, **keywords, flush=True)
        elif self.is_main:
            print(*values, **keywords, flush=True)

    # Checkpoints.

    def save(self) -> Path | None:
        """Save a checkpoint; all ranks call it. On return every rank can read it.

        Inside `steps` it needs an optimizer boundary: called before the step is taken, it saves at the step's end
        and returns None.
        """
        return self._loop.save()

    def resume(self, path: str | Path | None = None) -> int | None:
        """Load this run's newest checkpoint, another run directory's, or one `checkpoints/<step>`; all ranks call it.

        A run started with `--resume` does this by itself before its first epoch. `"best"` is this run's best by the
        setting `checkpoint.monitor`.

        Returns:
            The step that was loaded, or None if this run has no checkpoint.

        Raises:
            CheckpointError: it does not fit what was prepared, or `path` holds none.
        """
        return self._saver.resume(path)

    @property
    def best_checkpoint(self) -> Path | None:
        """The best one by the setting `checkpoint.monitor`, or None. Not collective; rank 0's view is what counts."""
        monitor = self._session.checkpoints.monitor
        return next(iter(monitor.best()), None) if monitor is not None else None

    def register(self, name: str, thing: _T, optional: bool = False) -> _T:
        """Put state of the script's own into checkpoints, and give it back at a resume; returns `thing`. All ranks call
        it, before `resume` and the first loop.

        Args:
            name: a name of its own, the same in later runs.
            thing: something with `state_dict` and `load_state_dict`, or a container (a dict, say) of plain values and
                tensors, which is saved by value and restored in place. What isn't sharded is rank 0's, on all ranks.
            optional: a checkpoint without it (from before it was registered) can be loaded, and leaves it as it is.
        """
        register(self._session, name, thing, optional)
        return thing

    # The end.

    def close(self, exception: BaseException | None = None) -> None:
        """End the run: records to the disk, total time into the log, ranks disconnected."""
        if self._closed:
            return
        self._closed = True
        if isinstance(exception, SystemExit) and not exception.code:
            exception = None
        failure = exception
        try:
            if exception is None:
                self._saver.save_if_due()
                self._saver.check_monitor()
            self._saver.end_dry(failed=exception is not None)
        except BaseException as error:
            failure = failure or error
            raise
        finally:
            try:
                end(self._session, self._trackers, time.perf_counter() - self._begin, failure)
            finally:
                self._on_close()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exception: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(exception)


def _number(name: str, value: Any) -> float | int:
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        raise UsageError(f"log() got the text {value!r} for {name!r}: expected a number or a tensor of one element")
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(f"log() got {value!r} for {name!r}: expected a number or a tensor of one element") from None
