"""Epoch times of scripts that don't use the API, as records that reports read like any run's."""

from __future__ import annotations

import atexit
import csv
import operator
import os
import platform
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import UsageError
from ..rank.gloo_end import let_gloo_finish_at_exit
from ..rank.topology import Topology
from ..records import Epoch, Exit, RecordWriter, Resume, Start, Step, Workload, read_records
from ..rundir import is_dry, new_run_dir, next_attempt

FOLDER = "scalability-metrics"
CSV_COLUMNS = ("name", "nodes", "epoch_id", "time", "ranks")  # others read the first four


class EpochTimer:
    """Times epochs, and steps if it is told of them; rank 0 writes, other ranks do nothing.

        timer = phalanx.EpochTimer("ddp", dataset=len(dataset), batch_size=64)
        for epoch in timer.epochs(10):
            for batch in loader:
                ...
                timer.step(64 * world_size)     # optional

    Records go into the run directory that `phalanx run` or `submit` made, else into a new one in `folder`. Any launcher
    will do: the rank is what its variables say. Before the clock is read, CUDA's queued work is waited for.

    Args:
        strategy: what the curve is called, such as "ddp"; reports add "(baseline)" and compare it with the strategy
            of that name.
        dataset: samples of an epoch over all ranks, if known; with `batch_size` (per rank), `parameters` and
            `precision` it tells the workload, so that only runs of one workload are compared.
        folder: where run directories are made without a launch of ours; also `<folder>/<name>/<id>` is their place.
        name: the run's name; by default the script's.
        csv_file: also append `name,nodes,epoch_id,time,ranks` to this file (those of these columns that it has).

    Raises:
        UsageError: a name that can't be one, or counts below 1.
        TopologyError: the environment contradicts itself about this rank.
    """

    def __init__(
        self,
        strategy: str,
        *,
        dataset: int | None = None,
        batch_size: int | None = None,
        parameters: int | None = None,
        accumulate: int = 1,
        precision: str | None = None,
        folder: str | Path = FOLDER,
        name: str | None = None,
        csv_file: str | Path | None = None,
    ) -> None:
        _refuse_dry_run()
        if not isinstance(strategy, str) or not strategy or strategy != strategy.strip():
            raise UsageError(f"EpochTimer({strategy!r}): expected a strategy's name, such as 'ddp'")
        for what, count in (("dataset", dataset), ("batch_size", batch_size), ("parameters", parameters)):
            if count is not None and not _at_least(count, 1):
                raise UsageError(f"EpochTimer({what}={count}): expected a number from 1, or None if it isn't known")
        self._topology = Topology.current()
        self._strategy, self._csv = strategy, Path(csv_file) if csv_file is not None else None
        self._writer: RecordWriter | None = None
        self._begin = self._mark = time.perf_counter()
        self._epoch: int | None = None
        self._steps = 0
        self._begun = False
        let_gloo_finish_at_exit()  # in each rank: here a launcher of another project may have started it
        if self._topology.rank != 0:
            return
        if self._csv is not None:
            _check_csv(self._csv)
        self.run_dir = _run_dir(folder, name)
        self._writer = RecordWriter(self.run_dir, 0, next_attempt(self.run_dir))
        self._pid = os.getpid()
        atexit.register(self._at_exit)
        self._writer.write(self._start())
        if dataset or batch_size or parameters:
            work = Workload(parameters or 0, 0, batch_size, accumulate, dataset, precision or "")
            self._writer.write(work)

    def _start(self) -> Start:
        topology, torch = self._topology, sys.modules.get("torch")
        cuda = torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized()
        versions = {"python": platform.python_version(), **({"torch": str(torch.__version__)} if torch else {})}
        return Start(
            world_size=topology.world_size,
            local_rank=topology.local_rank,
            node_rank=topology.node_rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            device=f"cuda ({torch.cuda.get_device_name()})" if cuda and torch is not None else "cpu",
            strategy=self._strategy,
            versions=versions,
            num_nodes=topology.num_nodes,
            launched_by=topology.source,
            api="epoch-timer",
        )

    def epochs(self, count: int, first: int = 0) -> Iterator[int]:
        """The numbers from `first` up to `count`, each timed."""
        if not (_at_least(count, 0) and _at_least(first, 0)):
            raise UsageError(f"EpochTimer.epochs({count!r}, first={first!r}): expected numbers of epochs from 0")
        for number in range(first, count):
            with self.epoch(number):
                yield number
        self.close()

    @contextmanager
    def epoch(self, number: int) -> Iterator[None]:
        """Times what is inside as epoch `number`; an epoch that raises isn't written."""
        if self._epoch is not None:
            raise UsageError(f"epoch({number}) was begun inside epoch {self._epoch}: end that one first")
        self._go_on(number)
        begin = self._mark = _now()
        self._epoch = number
        try:
            yield
            self.add_epoch_time(number, _now() - begin)
        finally:
            self._epoch = None

    def add_epoch_time(self, epoch_idx: int, seconds: float) -> None:
        """An epoch that was timed elsewhere."""
        if not _at_least(epoch_idx, 0) or not _is_time(seconds):
            raise UsageError(
                f"add_epoch_time({epoch_idx!r}, {seconds!r}): expected an epoch's number from 0, and its seconds"
            )
        if self._writer is None:
            return
        self._go_on(epoch_idx)
        self._writer.write(Epoch(epoch=epoch_idx, step=self._steps, seconds=seconds))
        if self._csv is not None:
            self._append(self._csv, epoch_idx, seconds)

    def _go_on(self, first: int) -> None:
        """A script that was started again in its run directory at a later epoch keeps the epochs before."""
        if self._writer is None or self._begun:
            return
        self._begun = True
        done = [record for record in read_records(self.run_dir) if isinstance(record, Epoch) and record.epoch < first]
        if done:
            self._steps = max(record.step for record in done)
            self._writer.write(Resume(step=self._steps, epoch=first - 1, path=""))  # that one is whole

    def step(self, samples: int) -> None:
        """An optimizer step is done, with `samples` over all ranks. On a GPU this waits for it: leave it out there
        where that costs."""
        if not _at_least(samples, 0):
            raise UsageError(f"EpochTimer.step({samples!r}): expected the samples of the step over all ranks")
        if self._writer is None or self._epoch is None:
            return
        now = _now()
        self._steps += 1
        mine = round(samples / self._topology.world_size)  # readers multiply what rank 0 tells
        unknown = float("nan")
        self._writer.write(
            Step(step=self._steps, epoch=self._epoch, seconds=now - self._mark, wait=unknown, samples=mine)
        )
        self._mark = now

    def _append(self, path: Path, epoch: int, seconds: float) -> None:
        topology = self._topology
        row = {"name": self._strategy, "nodes": topology.num_nodes, "epoch_id": epoch, "time": seconds}
        with path.open("a+", newline="") as file:
            file.seek(0)
            columns = next(csv.reader(file), None)
            rows = csv.DictWriter(file, columns or CSV_COLUMNS, extrasaction="ignore")
            if columns is None:
                rows.writeheader()
            rows.writerow({**row, "ranks": topology.world_size, "workers": topology.world_size})

    def close(self, exception: str = "") -> None:
        """The last record, and all to the disk; `epochs`, `with` and the script's end do it."""
        if self._writer is not None:
            self._writer.write(Exit(step=self._steps, seconds=time.perf_counter() - self._begin, exception=exception))
            self._writer.close()
            self._writer = None
            atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        """Of a script that left its loop by `break`, or failed: Python keeps what it failed of."""
        if os.getpid() == self._pid:
            failure = getattr(sys, "last_value", None)
            self.close("" if failure is None else f"{type(failure).__name__}: {failure}")

    def __enter__(self) -> EpochTimer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exception: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close("" if exception is None else f"{type(exception).__name__}: {exception}")


def _refuse_dry_run() -> None:
    launched = os.environ.get("PHALANX_RUN_DIR")
    if launched and is_dry(Path(launched)):
        raise UsageError(
            "EpochTimer in a dry run: it times a loop of your own, which a dry run can't shorten, so the script would "
            "train in full; leave --dry-run out"
        )


def _at_least(value: object, least: int) -> bool:
    """Whether it is a whole number, of Python's or another library's kind, that isn't below."""
    try:
        return operator.index(value) >= least  # type: ignore[arg-type]
    except TypeError:
        return False


def _is_time(value: Any) -> bool:
    try:
        return 0 <= float(value) < float("inf") and not isinstance(value, str)
    except (TypeError, ValueError):
        return False


def _check_csv(path: Path) -> None:
    """Better now than at the end of an epoch."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a"):
            pass
    except OSError as error:
        raise UsageError(
            f"EpochTimer(csv_file={str(path)!r}) can't be written: {error.strerror}; choose another file"
        ) from None


def _run_dir(folder: str | Path, name: str | None) -> Path:
    launched = os.environ.get("PHALANX_RUN_DIR")
    if launched:
        return Path(launched)
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    return new_run_dir(folder, name or (Path(script).stem if script else "interactive"))


def _now() -> float:
    """The clock, once queued GPU work is done; torch is not imported for it."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
