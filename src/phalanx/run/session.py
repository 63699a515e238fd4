"""The state of one rank's run, which the parts of the API share."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from ..checkpoint.best import Monitor
from ..checkpoint.manager import Contents, Manager
from ..config import JobConfig
from ..config.schema import CheckpointSettings
from ..data.loader import PreparedLoader
from ..data.passes import Whereabouts
from ..rank.cpus import cpus_of_rank
from ..records import RecordWriter
from ..rundir import DRY_CHECKPOINTS, PER_RANK_LIMIT
from ..strategies.base import Strategy
from ..strategies.comm import Comm
from .dry import Dry
from .gradients import Gradients
from .loops import Loops
from .measure import Measure
from .progress import Progress
from .proxies import OptimizerProxy, SchedulerProxy
from .stop import Stop


@dataclass
class Session:
    """Made by `open_session`; the parts of the API change it, each its own fields."""

    strategy: Strategy
    config: JobConfig
    run_dir: Path
    writer: RecordWriter
    restarted: bool  # whether to go on from the run directory's newest checkpoint
    gradients: Gradients
    stop: Stop
    progress: Progress
    measure: Measure
    checkpoints: Manager
    contents: Contents  # what checkpoints hold
    dry: Dry | None = None  # a dry run's
    source: Manager | None = None  # the checkpoints that a dry run goes on from, if it does
    step: int = 0  # optimizer steps done
    epoch: int = 0  # the current pass of `epochs`
    in_steps: bool = False
    in_epoch: bool = False
    inside_epochs: bool = False  # whether the code runs in the body of `epochs`
    trained: bool = False  # whether the current epoch has come to the end of a `steps` loop
    save_asked: bool = False
    begun: bool = False  # whether it has looked for a checkpoint to go on from, or would have
    on_resume: Callable[[int], None] = lambda step: None  # told of the step that this start goes on from
    averaged: Any = None  # the average whose weights the model has now
    # When prepared, where that is for good; two models may have the same names.
    frozen: list[tuple[str, nn.Parameter]] = field(default_factory=list)
    models: list[nn.Module] = field(default_factory=list)  # as given back, wrappers included
    optimizers: list[OptimizerProxy] = field(default_factory=list)
    schedulers: list[SchedulerProxy] = field(default_factory=list)
    loaders: list[PreparedLoader] = field(default_factory=list)
    training_loaders: int = 0  # of them
    loops: Loops = field(default_factory=Loops)  # of the epoch in hand
    where: Whereabouts = field(default_factory=Whereabouts)

    def __post_init__(self) -> None:
        self.where.micro = lambda: self.gradients.micro
        self.where.stopped = lambda: self.stop.agreed

    @property
    def comm(self) -> Comm:
        return self.strategy.comm

    @property
    def over(self) -> bool:
        """Whether no step is to be taken any more, on any rank: an agreed stop, or `max_steps`."""
        most = self.config.max_steps
        return self.stop.agreed or (most is not None and self.step >= most)

    @property
    def device_type(self) -> str:
        return self.strategy.device.type

    @property
    def auto_workers(self) -> int:
        """Loader workers for `num_workers: auto`: the plan's, else the rank's CPUs less one for the training."""
        planned = os.environ.get("PHALANX_NUM_WORKERS_AUTO", "")
        if planned.isdecimal():
            return int(planned)
        topology = self.strategy.topology
        return max(1, cpus_of_rank(topology.local_world_size, topology.source == "slurm") - 1)

    def agree_on_buffers(self) -> None:
        """Rank 0's buffers everywhere: BatchNorm's statistics drift apart in training, and one set is to be used."""
        if self.comm.world_size > 1:
            for model in self.models:
                for buffer in model.buffers():
                    self.comm.broadcast(buffer.detach(), 0)

    def writes_steps(self) -> bool:
        """Whether this rank keeps step records: see the setting `records`."""
        rule, comm = self.config.records, self.comm
        if rule == "auto":
            return comm.world_size <= PER_RANK_LIMIT or comm.rank in (0, self.stop.slowest)
        return rule == "rank" or comm.rank == 0 or (rule == "node" and self.strategy.topology.local_rank == 0)


def _manager(comm: Comm, root: Path, settings: CheckpointSettings) -> Manager:
    name = settings.monitor
    monitor = None if name is None else Monitor(root, name, settings.mode, settings.keep_best)
    return Manager(comm, root, settings.keep, monitor)


def open_session(
    strategy: Strategy, config: JobConfig, run_dir: Path, writer: RecordWriter, restarted: bool, source: Path | None
) -> Session:
    """A session with nothing prepared yet. `source` is the run directory that a dry run goes on from."""
    comm = strategy.comm
    dry = Dry(comm, run_dir / DRY_CHECKPOINTS) if config.dry_run else None
    checkpoints = _manager(comm, dry.root if dry else run_dir / "checkpoints", config.checkpoint)
    scaler = strategy.grad_scaler() if config.precision == "fp16" else None
    return Session(
        strategy=strategy,
        config=config,
        run_dir=run_dir,
        writer=writer,
        restarted=restarted,
        gradients=Gradients(strategy, scaler),
        stop=Stop(comm),
        progress=Progress(config.progress and comm.rank == 0),
        measure=Measure(strategy, config, writer),
        checkpoints=checkpoints,
        dry=dry,
        source=replace(checkpoints, root=source / "checkpoints") if source else None,
        contents=Contents(stateful={"scaler": strategy.saved_scaler(scaler)} if config.precision == "fp16" else {}),
    )
