"""`phalanx.init()`: from the environment and the settings to a `Run` that is the same on all ranks."""

from __future__ import annotations

import atexit
import logging
import os
import platform
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .. import claims, registry
from ..config import JobConfig, Loaded, load_config, load_run_config, save_run_config
from ..errors import PlanError, UsageError
from ..rank import network
from ..rank.devices import device_index
from ..rank.topology import Topology
from ..records import RecordWriter, Start
from ..rundir import find_run_dir, log_path, mark_dry, new_run_dir, next_attempt, share
from ..strategies.base import Strategy
from .api import Run
from .seeding import seed_all
from .session import open_session

log = logging.getLogger("phalanx")
_current: Run | None = None
_claim: claims.Claim | None = None  # rank 0's, of a run directory that no launch has claimed
_started = False  # whether this process has had a run: the launch's own directory is the first one's


@dataclass(frozen=True)
class Shared:
    """What rank 0 decides for all."""

    loaded: Loaded
    run_dir: Path
    attempt: int
    restarted: bool  # whether to go on from this directory's newest checkpoint
    source: Path | None = None  # the run directory that a dry run goes on from


def current() -> Run:
    """The run that `init` made, from any module."""
    if _current is None:
        raise UsageError("there is no current run: call phalanx.init() first")
    return _current


def init(**settings: Any) -> Run:
    """Start the run in this rank.

    Args:
        settings: any setting by its name (`precision="bf16"`, `accumulate=2`, `checkpoint={"every_steps": 100}`).
            They lie above the defaults only: site profile, files, environment and command line win.

    Returns:
        The run; use it as a context manager, so that its end is orderly.

    Raises:
        ConfigError: a setting is unknown or wrong, or `strategy` differs from the one launched.
        TopologyError: the environment's rank variables contradict each other.
        PlanError: the device, backend or strategy cannot work here.
    """
    global _current, _started
    if _current is not None:
        raise UsageError("phalanx.init() was called twice: use phalanx.current() for the run, or close() it first")
    if "dry_run" in settings:
        raise UsageError("dry_run is the launch's to say, not init()'s: phalanx run --dry-run, or PHALANX_DRY_RUN=1")
    topology = Topology.current()
    loaded = _settings(settings)
    config = loaded.config
    device = choose_device(config, topology)
    if topology.world_size > 1:
        os.environ.update(topology.environ())
        network.choose(topology)
    strategy = _strategy(config, topology, device)
    strategy.setup()
    try:
        run = _start(strategy, loaded)
    except BaseException:
        _release()
        strategy.teardown(failed=True)
        raise
    _current, _started = run, True
    atexit.register(run.close)
    return run


def _settings(settings: dict[str, Any]) -> Loaded:
    launched = os.environ.get("PHALANX_RUN_DIR")
    if launched:
        loaded = load_run_config(Path(launched), script=settings)
        return replace(loaded, overridden=(*loaded.overridden, *_too_late(settings, loaded.config, Path(launched))))
    return load_config(environ=os.environ, script=settings)


def _too_late(settings: dict[str, Any], config: JobConfig, launched: Path) -> list[str]:
    """A sentence for each argument of `init` that would have put the run directory elsewhere."""
    there = {"run_root": launched.parent.parent, "name": launched.parent.name}
    wished = {"run_root": Path(config.run_root).expanduser().absolute(), "name": config.name}
    return [
        f"{key}={settings[key]!r} of phalanx.init() came too late: the launch has made the run directory {launched}; "
        f"give {key}={settings[key]} to the command"
        for key in there
        if not _started and settings.get(key) is not None and wished[key] != there[key]
    ]


def choose_device(config: JobConfig, topology: Topology) -> torch.device:
    """The rank's device: the setting, else CUDA, MPS for one process, or the CPU."""
    wanted = "cpu" if config.device == "auto" and config.gpus_per_node == 0 else config.device
    if wanted == "auto":
        mps = topology.world_size == 1 and torch.backends.mps.is_available()
        wanted = "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
    if wanted == "cuda":
        if not torch.cuda.is_available():
            raise PlanError("device 'cuda' was asked for, but torch sees no CUDA device here: use --device cpu")
        index = device_index(topology, os.environ, torch.cuda.device_count())
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    if wanted == "mps" and not torch.backends.mps.is_available():
        raise PlanError("device 'mps' was asked for, but torch has none here: use --device cpu")
    if wanted == "mps" and topology.world_size > 1:
        raise PlanError(f"device 'mps' serves one process, not {topology.world_size}: use --device cpu")
    return torch.device(wanted)


def _strategy(config: JobConfig, topology: Topology, device: torch.device) -> Strategy:
    name = config.strategy
    if name == "auto":
        name = "ddp" if topology.world_size > 1 else "single"
    strategy: Strategy = registry.load("strategy", registry.STRATEGIES, name)(topology, config, device)
    return strategy


def _run_name(config: JobConfig) -> str:
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    return config.name or (Path(script).stem if script else "interactive")


def _share(strategy: Strategy, loaded: Loaded) -> Shared:
    """Rank 0's settings and run directory, on all ranks."""
    answer: Shared | Exception | None = None
    if strategy.comm.rank == 0:
        try:
            answer = _decide(loaded)
        except Exception as error:  # every rank must hear of it, not wait
            answer = error
    answer = strategy.comm.broadcast_object(answer)
    if isinstance(answer, Exception):
        raise answer
    assert answer is not None
    return answer


def _decide(loaded: Loaded) -> Shared:
    global _claim
    config = loaded.config
    source = _source(config)
    launched = None if _started else os.environ.get("PHALANX_RUN_DIR")
    if launched:
        run_dir = Path(launched)
    elif config.resume is not None and not _started and not config.dry_run:
        run_dir = find_run_dir(config.run_root, _run_name(config), config.resume)
    else:
        run_dir = new_run_dir(config.run_root, _run_name(config), config.run_permissions)
        share(run_dir)
    if not launched:
        _claim = claims.take(run_dir, claims.of_this_process())
        save_run_config(loaded, run_dir)
    attempt = next_attempt(run_dir)
    if config.dry_run:
        mark_dry(run_dir)
        return Shared(loaded, run_dir, attempt, source is not None, source)
    return Shared(loaded, run_dir, attempt, not _started and (config.resume is not None or attempt > 1))


def _source(config: JobConfig) -> Path | None:
    """The run directory that a dry run goes on from: it reads there, and writes in one of its own."""
    if not config.dry_run or config.resume is None or _started:
        return None
    return find_run_dir(config.run_root, _run_name(config), config.resume)


def _start(strategy: Strategy, loaded: Loaded) -> Run:
    shared = _share(strategy, loaded)
    topology, comm = strategy.topology, strategy.comm
    _reachable(strategy, shared.run_dir)
    _log_to(log_path(shared.run_dir, comm.rank, topology.node_rank, comm.world_size), comm.rank == 0)
    for line in shared.loaded.overridden if comm.rank == 0 else ():
        log.warning("%s", line)
    writer = RecordWriter(shared.run_dir, comm.rank, shared.attempt)
    start = Start(
        world_size=comm.world_size,
        local_rank=topology.local_rank,
        node_rank=topology.node_rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        device=_device_name(strategy.device),
        strategy=strategy.name,
        versions={"python": platform.python_version(), "torch": torch.__version__},
        num_nodes=topology.num_nodes,
        launched_by=topology.source,
        dry=shared.loaded.config.dry_run,
    )
    writer.write(start)
    log.info(
        "rank %d of %d on %s: node %d, local rank %d, %s, strategy %s, precision %s, pid %d, torch %s, %s",
        comm.rank, comm.world_size, start.host, start.node_rank, start.local_rank, start.device,
        start.strategy, shared.loaded.config.precision, start.pid, start.versions["torch"],
        "not launched" if topology.source == "single" else f"launched by {topology.source}",
    )  # fmt: skip
    if comm.rank == 0 and os.environ.get("PHALANX_RUN_DIR") != str(shared.run_dir):  # else the command has said so
        log.info("run directory: %s", shared.run_dir)
    seed_all(shared.loaded.config.seed)
    session = open_session(strategy, shared.loaded.config, shared.run_dir, writer, shared.restarted, shared.source)
    return Run(session, _forget)


def _device_name(device: torch.device) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def _reachable(strategy: Strategy, run_dir: Path) -> None:
    """Every rank must see the run directory; one that does not names its node, on all ranks."""
    host = socket.gethostname()
    seen = run_dir.is_dir() and os.access(run_dir, os.W_OK)
    blind = sorted({name for name, ok in strategy.comm.gather_objects((host, seen)) if not ok})
    if blind:
        raise PlanError(
            f"{', '.join(blind)} cannot write to the run directory {run_dir}: set run_root to a shared folder"
        )


class _File(logging.FileHandler):
    """A rank's log. A full disk is said once, not with each line and a traceback."""

    _said = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._said:
            self._said = True
            print(f"phalanx: cannot write the log {self.baseFilename}: {sys.exc_info()[1]}", file=sys.stderr)

    def close(self) -> None:
        with suppress(OSError):  # said when it began
            super().close()


class _Terminal(logging.Handler):
    """Prints on the stderr of the moment: while a progress bar is drawn, it is one that prints above it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


def _log_to(path: Path, main: bool) -> None:
    """The package's log: each rank's into its file, the main rank's also on the terminal."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log.setLevel(logging.INFO)
    log.propagate = False
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()
    into_file = _File(path, encoding="utf-8")
    into_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(into_file)
    if main:
        terminal = _Terminal()
        terminal.setFormatter(logging.Formatter("phalanx: %(message)s"))
        log.addHandler(terminal)


def _release() -> None:
    """Others may go on in the run directory now."""
    global _claim
    if _claim is not None:
        _claim.release()
    _claim = None


def _forget() -> None:
    global _current
    if _current is not None:
        atexit.unregister(_current.close)
    _current = None
    _release()
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()
