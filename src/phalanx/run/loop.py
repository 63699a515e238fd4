"""The loops of a training script: epochs, steps and evaluation. `steps` alone sees each step boundary."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ..data.batch import move
from ..data.groups import Group
from ..data.loader import PreparedLoader
from ..errors import UsageError
from ..records import Epoch
from ..strategies.comm import naming
from .evaluation import EvalMode, forwards_apart
from .saver import Saver
from .session import Session

log = logging.getLogger("phalanx")


class Loop:
    def __init__(self, session: Session, saver: Saver) -> None:
        self._session = session
        self._saver = saver
        self._open: tuple[PreparedLoader, Group] | None = None  # handed out, not yet counted
        self._begin = 0.0  # of the step in hand
        self._eval_mode = EvalMode()

    def epochs(self, count: int | None) -> Iterator[int]:
        """The numbers of the epochs that are still to do, up to `count` in all and to `max_steps`."""
        session = self._session
        if count is None and session.config.max_steps is None:
            raise UsageError(
                "run.epochs() without a count ends at max_steps, which is unset: set max_steps=N, or call epochs(N)"
            )
        return self._epochs(math.inf if count is None else count)

    def _epochs(self, count: float) -> Iterator[int]:
        session = self._session
        self._saver.resume_if_asked()
        idle = 0
        while session.epoch < count and not session.over:
            begin, first = time.perf_counter(), session.step
            session.in_epoch, session.trained = True, False
            session.where.epoch = session.epoch
            session.loops.begin_epoch(session.epoch)
            session.inside_epochs = True
            try:
                yield session.epoch
            finally:
                session.inside_epochs = False
            self._saver.save_if_due(ended=not self._stopped())
            session.in_epoch, session.where.epoch = False, None
            if self._stopped():
                return  # in the middle of this epoch
            self._saver.amend(ended=True)
            session.loops.end_epoch()
            for loader in session.loaders:
                loader.epoch_over()
            session.measure.wait()
            seconds = time.perf_counter() - begin
            session.writer.write(Epoch(epoch=session.epoch, step=session.step, seconds=seconds))
            session.measure.peak(session.step)
            if session.comm.rank == 0:
                log.info("epoch %d done: %d steps in %.1f s", session.epoch, session.step - first, seconds)
            session.epoch += 1
            session.comm.meet("the end of an epoch of run.epochs()")
            session.stop.loop_done()
            if session.dry is not None:
                session.epoch = session.epoch if count == math.inf else int(count)  # as if all were done
                return
            idle = 0 if session.step > first else idle + 1
            if idle > 1 and count == math.inf:  # one may be the rest, without a step, of a resumed epoch
                raise UsageError(
                    f"an epoch of run.epochs() had no step of run.steps(): max_steps={session.config.max_steps} would "
                    "never be reached"
                )

    def _stopped(self) -> bool:
        return self._session.stop.agreed

    def steps(self, loader: Any) -> Iterator[Any]:
        """The batches of one pass, on the run's device."""
        session = self._session
        if not isinstance(loader, PreparedLoader):
            raise UsageError(f"steps() got {type(loader).__name__!r}: pass the loader through run.prepare() first")
        if session.in_steps:
            raise UsageError("steps() was called inside another steps() loop: end that one first")
        if self._eval_mode.open:
            raise UsageError("steps() was called before an evaluate() loop was over: end or leave that one first")
        self._saver.resume_if_asked()
        self._saver.save_if_due(ended=False)
        if session.over:
            session.stop.agreed = True  # this pass isn't done, nor is the epoch that it belongs to
            return
        self._check_frozen()
        session.comm.meet("the beginning of run.steps()")
        if self._repeated(loader):
            return
        loader.share_steps(session.config)
        session.measure.begin(loader)
        session.in_steps = True
        left = self._steps_left(loader)
        session.progress.start(f"epoch {session.epoch}", left)
        try:
            with naming("run.steps()"):
                yield from self._groups(loader)
        except GeneratorExit:
            self._left(loader)
            raise
        finally:
            self._open = None
            session.loops.end(over=loader.pass_over)
            session.in_steps = False
            session.gradients.end()
            session.measure.window.end()
            session.progress.stop()

    def _steps_left(self, loader: PreparedLoader) -> int | None:
        """Steps of the pass to come; of a stream's, the most that it can have, if that is known."""
        counts = [loader.steps_left(loader.accumulate or self._session.config.accumulate)]
        if self._session.config.max_steps is not None:
            counts.append(self._session.config.max_steps - self._session.step)
        if self._session.dry is not None:
            counts.append(1)
        return min((count for count in counts if count is not None), default=None)

    def _repeated(self, loader: PreparedLoader) -> bool:
        """Whether this loop was over when the checkpoint was taken that the run resumed from."""
        session = self._session
        number = next((n for n, known in enumerate(session.loaders) if known is loader), -1)
        if session.in_epoch and session.loops.repeated(number, session.epoch):
            session.trained = True
            for known in session.loaders:
                known.rewind()
            return True
        if session.in_epoch:
            self._saver.amend(ended=False)
            session.loops.begin(number)
        session.where.loop += 1
        return False

    def _check_frozen(self) -> None:
        thawed = [name for name, parameter in self._session.frozen if parameter.requires_grad]
        if thawed:
            raise UsageError(
                f"{', '.join(thawed[:3])}{', …' if len(thawed) > 3 else ''} became trainable after prepare(), where "
                f"strategy {self._session.strategy.name} doesn't average its gradients: let it be trainable at "
                "prepare() (a learning rate of 0 keeps it still until it is to learn)"
            )

    def _left(self, loader: PreparedLoader) -> None:
        """The script broke off the loop: its last step counts if it was taken, and this pass is over.

        No exchange with other ranks here, as the script may be failing: a checkpoint waits for the next call.
        """
        session = self._session
        if session.gradients.last and session.gradients.stepped and self._open is not None:
            samples = session.gradients.micro.local if session.gradients.micro else 0
            self._count()
            if session.writes_steps():
                session.writer.step(session.step, session.epoch, time.perf_counter() - self._begin, 0.0, samples)
            session.save_asked = session.save_asked or self._due()
        loader.finish()
        session.trained = True

    def _due(self) -> bool:
        every = self._session.config.checkpoint.every_steps
        return every is not None and self._session.step % every == 0

    def _groups(self, loader: PreparedLoader) -> Iterator[Any]:
        session = self._session
        gradients, device, clock = session.gradients, session.strategy.device, time.perf_counter
        window = session.measure.window
        stays = device.type == "cpu"  # where loaders leave their batches
        most = session.config.max_steps or math.inf
        count = 0
        begin = mark = self._begin = clock()
        accumulate = loader.accumulate or session.config.accumulate
        groups = loader.groups(accumulate, train=True)
        if session.dry is not None:
            groups = session.dry.first_group(groups, loader, accumulate)
        for group in groups:
            if session.step >= most:  # with data left
                session.comm.meet("the end of run.steps()")
                session.stop.now()
                return
            self._open = (loader, group)
            if window.wanted:
                window.before_step(session.step)
            waited, samples, last = 0.0, 0, group.size - 1
            for index, micro in enumerate(group.micros):
                waited += clock() - mark
                samples += micro.local
                gradients.begin(micro, group.total, index == last, index == 0)
                yield micro.batch if stays else move(micro.batch, device)
                mark = clock()
            count += 1
            seconds = mark - begin
            if window.wanted:
                window.after_step()
            if self._boundary(count, seconds, waited, samples):
                return
            begin = mark = self._begin = clock()
        session.trained = True
        session.comm.meet("the end of run.steps()")
        session.stop.loop_done()

    def _boundary(self, count: int, seconds: float, waited: float, samples: int) -> bool:
        """One optimizer step is over; whether to end the loop."""
        session = self._session
        self._count()
        session.gradients.update_scale()
        if session.writes_steps():
            session.writer.step(session.step, session.epoch, seconds, waited, samples)
        session.progress.advance()
        if session.save_asked or self._due():
            self._saver.save()
        return session.stop.step_done(count, seconds)

    def _count(self) -> None:
        """The group that was handed out is done: once, though a save may come before the boundary."""
        if self._open is not None:
            loader, group = self._open
            self._open = None
            self._session.step += 1
            loader.commit(group)

    def save(self) -> Path | None:
        """Save now, or at the end of the current step if its gradients are still in the making."""
        session = self._session
        if session.in_steps and not session.gradients.complete:
            session.save_asked = True
            return None
        if not session.in_steps:
            return self._saver.save()
        self._count()
        session.where.in_body = True
        try:
            return self._saver.save()
        finally:
            session.where.in_body = False

    def evaluate(self, loader: Any, even: bool = True) -> Iterator[Any]:
        """The batches of an evaluation, models in eval mode and gradients off until its end."""
        if not isinstance(loader, PreparedLoader):
            raise UsageError(f"evaluate() got {type(loader).__name__!r}: pass the loader through run.prepare() first")
        self._saver.resume_if_asked()
        self._saver.save_if_due()
        loader.evaluated = True
        self._session.comm.meet("run.evaluate()")
        self._session.agree_on_buffers()
        session = self._session
        with naming("run.evaluate()"), ExitStack() as stack:
            if not even:
                stack.enter_context(forwards_apart(session.strategy, session.models, loader))
            stack.enter_context(self._eval_mode.on(session.models))
            batches = loader.evaluation(even)
            for batch in batches if session.dry is None else session.dry.first_batch(batches, loader):
                yield move(batch, session.strategy.device)
