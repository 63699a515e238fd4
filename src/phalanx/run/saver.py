"""Checkpoints of the run: when one may be taken, what stands in it, and how a run goes on from it."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from torch import Tensor

from ..checkpoint import store
from ..checkpoint.amend import ended as epoch_ended
from ..checkpoint.amend import set_ended
from ..checkpoint.manager import Manager
from ..errors import CheckpointError, UsageError
from ..records import Checkpoint, Resume
from ..strategies.comm import naming
from .seeding import rng_state, seed_rank, set_rng_state
from .session import Session

log = logging.getLogger("phalanx")


class Saver:
    """Saves at step boundaries; loads once, before the first epoch, step or evaluation."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._looked = not session.restarted
        self._undecided: tuple[Path, bool] | None = None  # saved between loops: what it says of its epoch

    @naming("run.save()")
    def save(self, ended: bool | None = None) -> Path:
        """Save now; the caller knows that no gradient is half accumulated, and perhaps if its epoch has ended."""
        session = self._session
        if session.averaged is not None:
            raise UsageError("run.save() inside ema.applied() would save averaged weights: call it after that")
        session.comm.meet(f"run.save() or a checkpoint at step {session.step}")
        if session.dry is not None and session.dry.saved is not None:
            session.save_asked = False
            return session.dry.saved
        begin = time.perf_counter()
        session.gradients.update_scale()
        session.agree_on_buffers()
        between = session.in_epoch and not session.in_steps and not session.stop.agreed
        if ended is None:
            ended = between and session.trained and session.loops.all_done(self._may_be_trained_on())
        progress = {
            "step": session.step,
            "epoch": session.epoch + ended,
            "loops": session.loops.state(session.epoch),
            "optimizer_steps": [proxy.steps for proxy in session.optimizers],
            "left_out": [proxy.left_out != 0 for proxy in session.optimizers],
            "owing": [proxy.owes for proxy in session.schedulers],
            "weights_reference": session.gradients.weights.next_reference,  # rounding depends on it
        }
        path = session.checkpoints.save(session.contents, rng_state(session.strategy.device), progress)
        seconds = time.perf_counter() - begin
        session.writer.write(Checkpoint(step=session.step, path=str(path), seconds=seconds))
        session.writer.sync()
        session.save_asked = False
        self._undecided = (path, ended) if between else None
        if session.dry is not None:
            session.dry.saw_checkpoint(path, seconds)
        return path

    def _may_be_trained_on(self) -> set[int]:
        """The loaders of which a pass may belong to each epoch, as far as its loops until now tell."""
        return {n for n, loader in enumerate(self._session.loaders) if not loader.evaluated}

    def save_if_due(self, ended: bool | None = None) -> None:
        """The checkpoint that a loop left by `break` could not take."""
        if self._session.save_asked and not self._session.in_steps:
            self.save(ended)

    def amend(self, ended: bool) -> None:
        """It has turned out whether the epoch's last loop was over when the script saved between loops."""
        undecided, self._undecided = self._undecided, None
        if undecided is not None and undecided[1] != ended and self._session.comm.rank == 0:
            set_ended(undecided[0], ended)

    def end_dry(self, failed: bool) -> None:
        """A dry run's end: its checkpoint, if there was none yet, and what it saw."""
        session, dry = self._session, self._session.dry
        if dry is None:
            return
        if failed:
            dry.discard()
            return
        try:
            if dry.saved is None and session.contents.models:
                self.save()
        except BaseException:  # this is what a dry run is for
            dry.discard()
            raise
        dry.close(session.measure.parameters, *session.measure.memory())

    def resume_if_asked(self) -> None:
        """Go on from this run's newest checkpoint, if the run was resumed or restarted."""
        self._session.begun = True
        if self._looked:
            return
        self._looked = True
        if self.resume(None) is None and self._session.comm.rank == 0:
            self._session.on_resume(0)
            log.warning("no checkpoint in %s: starting from the beginning", self._session.checkpoints.root)

    @naming("run.resume()")
    def resume(self, path: str | Path | None) -> int | None:
        """Load from this run, another run's directory or one checkpoint; the step, or None without any."""
        session = self._session
        if session.averaged is not None:
            raise UsageError("run.resume() inside ema.applied(): call it before that")
        if session.inside_epochs or session.in_steps:
            raise UsageError(
                "run.resume() inside run.epochs() or run.steps() would change the epoch under the loop: call it before "
                "the loop, or after its end"
            )
        self._looked = True
        session.begun = True
        session.comm.meet("run.resume()")
        manager, single = self._source(path)
        if single is not None:
            loaded: Any = (single, manager.load(single, session.contents, self._restore_rng))
        else:
            loaded = manager.load_newest(session.contents, self._restore_rng)
        if loaded is None:
            if path is not None:
                raise CheckpointError(
                    f"no checkpoint to load in {path}: expected a run directory or checkpoints/<step>"
                )
            return None
        where, progress = loaded
        session.step, session.epoch = progress["step"], progress["epoch"]
        self._resume_epoch(where, progress.get("loops"))
        self._resume_steps(progress)
        session.gradients.weights.reference = progress.get("weights_reference", 1.0)
        if manager.monitor is not None and session.comm.rank == 0:
            manager.monitor.committed(where)
        session.writer.write(Resume(step=session.step, epoch=session.epoch, path=str(where)))
        session.on_resume(session.step)
        if session.comm.rank == 0:
            log.info("resumed from %s: step %d, epoch %d", where, session.step, session.epoch)
        return session.step

    def _resume_steps(self, progress: dict[str, Any]) -> None:
        """How far optimizers are, and which of their schedulers have still to leave a step out."""
        session = self._session
        for proxy, steps in zip(session.optimizers, progress["optimizer_steps"], strict=True):
            proxy.steps = steps
        unknown = [False] * (len(session.optimizers) + len(session.schedulers))  # to versions that didn't keep them
        for proxy, left_out in zip(session.optimizers, progress.get("left_out", unknown), strict=False):
            proxy.left_out = -left_out  # a micro-batch that isn't any of this process
        for scheduler, owes in zip(session.schedulers, progress.get("owing", unknown), strict=False):
            scheduler.owes = owes

    def _resume_epoch(self, where: Path, loops: dict[str, Any] | None) -> None:
        """Go on inside the checkpoint's epoch, or after it."""
        session = self._session
        if loops is None:  # of a version that didn't keep them
            for loader in session.loaders:
                loader.go_on(False)
            return
        noted = session.comm.broadcast_object(epoch_ended(where) if session.comm.rank == 0 else None)
        ended = session.epoch > loops["epoch"] if noted is None else noted
        session.epoch = loops["epoch"] + ended
        session.loops.load(loops, ended)
        for loader in session.loaders:
            loader.go_on(ended)

    def _source(self, path: str | Path | None) -> tuple[Manager, Path | None]:
        """The checkpoints to choose from, and the one that was named."""
        own = self._session.checkpoints
        if path is None:
            return self._session.source or own, None
        if path == "best":
            return own, self._best()
        path = Path(path).expanduser().absolute()
        if (path / store.MARKER).exists() or (path / ".metadata").exists():
            problem = store.defect(path)
            if problem is not None:
                raise CheckpointError(f"checkpoint {path} is broken: {problem}")
            return own, path
        return Manager(own.comm, path / "checkpoints", own.keep), None

    def _best(self) -> Path:
        settings, best = self._session.config.checkpoint, self._session.checkpoints.best()
        if settings.monitor is None:
            raise CheckpointError('run.resume("best") needs the setting checkpoint.monitor: the name of a logged value')
        if best is None:
            raise CheckpointError(
                f"no checkpoint in {self._session.checkpoints.root} was saved with a number as {settings.monitor!r}: "
                "call run.log with it before run.save() (NaN is never the best)"
            )
        return best

    def check_monitor(self) -> None:
        """At the end of a run: a name that nothing logs is a slip of the pen."""
        monitor = self._session.checkpoints.monitor
        if monitor is not None and self._session.comm.rank == 0 and not monitor.logged and not monitor.best():
            log.warning(
                "checkpoint.monitor=%s was never logged, so that no checkpoint was kept as the best: log it by "
                "run.log({%r: …}) before run.save()", monitor.name, monitor.name,
            )  # fmt: skip

    def _restore_rng(self, state: dict[str, Tensor] | None, step: int) -> None:
        session = self._session
        if state is not None:
            set_rng_state(state, session.strategy.device)
            return
        seed_rank(session.config.seed, step, session.comm.rank)
        log.info(
            "saved under another world size: random generators are seeded anew from (seed %d, step %d, rank %d)",
            session.config.seed, step, session.comm.rank,
        )  # fmt: skip
