"""Typed records of a run, as JSON lines: one writer a file, one write a line.

`records/<rank>.<attempt>.jsonl` is the source of truth for reports and verdicts. A line is whole or (a
killed writer's last one) cut off, and readers pass over the cut one. A restart writes a new attempt;
`read_records` shows each step, epoch and metric once, from the newest attempt that reached it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from .linefile import LineFile
from .rundir import make_folder

VERSION = 1


@dataclass(frozen=True)
class Record:
    """What all records have: Unix `time` in seconds, and (set by the reader) the rank and attempt."""

    kind: ClassVar[str] = ""
    time: float = field(default_factory=time.time, kw_only=True)
    rank: int = field(default=-1, kw_only=True)
    attempt: int = field(default=-1, kw_only=True)


@dataclass(frozen=True)
class Start(Record):
    """A rank begins."""

    kind = "start"
    world_size: int
    local_rank: int
    node_rank: int
    host: str
    pid: int
    device: str
    strategy: str
    versions: dict[str, str]
    num_nodes: int = 0  # 0: written by a version that didn't say
    launched_by: str = ""  # the topology's source
    api: str = "run"  # or "epoch-timer", for a script without the API
    dry: bool = False  # a dry run: no training to report


@dataclass(frozen=True)
class Workload(Record):
    """What a run trains, once known (at the first step): runs that differ in it aren't one scaling curve.

    `parameters` are those of all prepared models; `gradient_bytes` what an all-reduce of all gradients would move;
    `batch_size` samples per rank and micro-batch; `dataset` samples of a pass over all ranks. None: not known.
    """

    kind = "workload"
    parameters: int
    gradient_bytes: int
    batch_size: int | None
    accumulate: int
    dataset: int | None
    precision: str


@dataclass(frozen=True)
class Resume(Record):
    """A checkpoint was loaded: what an earlier attempt did after `step` is void."""

    kind = "resume"
    step: int
    epoch: int
    path: str


@dataclass(frozen=True)
class Step(Record):
    """One optimizer step: wall `seconds`, of which `wait` for data; `samples` of this rank."""

    kind = "step"
    step: int
    epoch: int
    seconds: float
    wait: float
    samples: int


@dataclass(frozen=True)
class Epoch(Record):
    """One pass of `run.epochs`, evaluation included; `step` is the count at its end."""

    kind = "epoch"
    epoch: int
    step: int
    seconds: float


@dataclass(frozen=True)
class Profile(Record):
    """A profiled window: steps `step` to `step + steps - 1` took `seconds` of wall time on this rank. Its device (its
    CPU, without one) was `compute` seconds in kernels, `communication` seconds in collectives, `exposed` of these with
    no kernel beside them. Such steps are slower than others."""

    kind = "profile"
    step: int
    steps: int
    seconds: float
    compute: float
    communication: float
    exposed: float


@dataclass(frozen=True)
class Gpu(Record):
    """This rank's GPU in the `seconds` since its last such record, by NVML: mean `utilisation` in percent, most
    `memory` in use in MiB, `energy` in joules. NaN: the GPU doesn't tell."""

    kind = "gpu"
    seconds: float
    utilisation: float
    memory: float
    energy: float


@dataclass(frozen=True)
class Peak(Record):
    """Most memory that this rank has had by `step`, MiB: `device` by torch (0 on a CPU), `host` resident."""

    kind = "peak"
    step: int
    device: float
    host: float


@dataclass(frozen=True)
class AllReduce(Record):
    """One size of an all-reduce benchmark: the median `seconds` of `repeats` all-reduces of `bytes` over all ranks."""

    kind = "allreduce"
    bytes: int
    seconds: float
    repeats: int
    backend: str


@dataclass(frozen=True)
class Metric(Record):
    """What the script logged at `step`."""

    kind = "metric"
    step: int
    epoch: int
    values: dict[str, Any]


@dataclass(frozen=True)
class Checkpoint(Record):
    """A checkpoint was committed, in `seconds` of blocked training."""

    kind = "checkpoint"
    step: int
    path: str
    seconds: float


@dataclass(frozen=True)
class Exit(Record):
    """The rank's end: `exception` is empty on success; `seconds` since the start."""

    kind = "exit"
    step: int
    seconds: float
    exception: str
    dry: bool = False


KINDS: dict[str, type[Record]] = {
    cls.kind: cls
    for cls in (Start, Workload, Resume, Step, Epoch, Profile, Gpu, Peak, AllReduce, Metric, Checkpoint, Exit)
}


_NAMES = {cls: frozenset(item.name for item in fields(cls)) for cls in KINDS.values()}

_STEP_LINE = (
    b'{"v": %d, "kind": "step", "time": %%.6f, "step": %%d, "epoch": %%d, "seconds": %%.9g, "wait": %%.9g, '
    b'"samples": %%d}\n' % VERSION
)


class RecordWriter:
    """Appends one rank's records of one attempt. A full disk does not end the training: see `LineFile`."""

    def __init__(self, run_dir: Path, rank: int, attempt: int) -> None:
        folder = run_dir / "records"
        make_folder(folder)
        self._file = LineFile(folder / f"{rank}.{attempt}.jsonl")

    def write(self, record: Record) -> None:
        values = {"v": VERSION, "kind": record.kind, **asdict(record)}
        del values["rank"], values["attempt"]  # in the file's name
        self._file.write((json.dumps(values) + "\n").encode())

    def step(self, step: int, epoch: int, seconds: float, wait: float, samples: int) -> None:
        """`write(Step(…))` without its cost: this one runs every step."""
        self._file.write(_STEP_LINE % (time.time(), step, epoch, seconds, wait, samples))

    def sync(self) -> None:
        """To the disk: at checkpoints and at the end."""
        self._file.sync()

    def close(self) -> None:
        self._file.close()


def parse(line: str, rank: int, attempt: int) -> Record | None:
    """The record of a line; None for a cut line and for kinds of a later version."""
    try:
        values = json.loads(line)
        cls = KINDS[values["kind"]]
        known = {k: v for k, v in values.items() if k in _NAMES[cls]}
        return cls(**{**known, "rank": rank, "attempt": attempt})
    except (ValueError, KeyError, TypeError):
        return None


def read_file(path: Path) -> Iterator[Record]:
    """All whole records of one file, in order."""
    rank, attempt = (int(part) for part in path.name.split(".")[:2])
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            record = parse(line, rank, attempt)
            if record is not None:
                yield record


def _identity(record: Record) -> tuple[Any, ...] | None:
    """What two attempts can both hold of one thing; None for what belongs to an attempt itself."""
    if isinstance(record, Step):
        return ("step", record.step)
    if isinstance(record, Epoch):
        return ("epoch", record.epoch)
    if isinstance(record, Metric):
        return ("metric", record.step, *sorted(record.values))
    return None


def _resumed_at(records: list[Record]) -> float:
    """The step that an attempt went on from: what older attempts did after it is void."""
    steps = [record.step for record in records if isinstance(record, Resume)]
    if steps:
        return steps[0]
    return 0 if any(_identity(record) for record in records) else float("inf")


def _merge(attempts: list[tuple[float, list[Record]]]) -> list[Record]:
    """One rank's attempts, oldest first, as one history; each with the step it went on from."""
    kept: list[Record] = []
    for limit, records in attempts:
        again = {_identity(record) for record in records}
        kept = [
            record
            for record in kept
            if not isinstance(record, Step | Epoch | Metric)
            or (record.step <= limit and _identity(record) not in again)
        ]
        kept += records
    return kept


def read_records(run_dir: str | Path) -> list[Record]:
    """The run's history, rank by rank; of steps, epochs and metrics that attempts share, the newest."""
    files: dict[tuple[int, int], list[Record]] = {}
    for path in Path(run_dir).glob("records/*.*.jsonl"):
        rank, attempt = (int(part) for part in path.name.split(".")[:2])
        files[rank, attempt] = list(read_file(path))
    limits: dict[int, float] = {}  # a rank may be missing from a later, smaller attempt
    for (_, attempt), records in files.items():
        limits[attempt] = min(limits.get(attempt, float("inf")), _resumed_at(records))
    history: list[Record] = []
    for rank in sorted({rank for rank, _ in files}):
        attempts = [(limits[attempt], files.get((rank, attempt), [])) for attempt in sorted(limits)]
        history += _merge(attempts)
    return history
