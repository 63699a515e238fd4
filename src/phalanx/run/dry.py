"""A dry run: one group of each training loop, one batch of each evaluation, one checkpoint; then what it saw.

Loops ask it for their groups, so an ordinary run has nothing to ask in its steps.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data.groups import Group, Micro
from ..data.loader import PreparedLoader
from ..strategies.comm import Comm

log = logging.getLogger("phalanx")
_SHOWN = 4  # items of a list or dict that are described


@dataclass
class Seen:
    """One loader's loop on this rank."""

    kind: str
    dataset: str
    length: str
    batch: str = "no batch"
    batches: int = 0
    samples: int = 0  # over all ranks, in training
    passes: int = 0

    def text(self, number: int) -> str:
        times = f", {self.passes} times" if self.passes > 1 else ""
        batches = f"{self.batches} batch{'es' * (self.batches != 1)}"
        samples = f", {self.samples} samples over all ranks" if self.samples else ""
        seen = f"{batches} of {self.batch} on this rank{samples}"
        return f"{self.kind} {number}{times}: {self.dataset}, {seen}; {self.length}"


@dataclass
class Dry:
    """One rank's. `root` is where the one checkpoint is written, and removed again."""

    comm: Comm
    root: Path
    loops: dict[tuple[str, int], Seen] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    saved: Path | None = None
    _checkpoint: str = "no checkpoint: nothing was prepared"

    def first_group(self, groups: Iterator[Group], loader: PreparedLoader, accumulate: int) -> Iterator[Group]:
        """The first of a training pass's groups, looked at on its way; then the pass is over."""
        seen = self._seen("training loop", loader, accumulate)
        for group in groups:
            yield replace(group, micros=_looked_at(group.micros, seen)) if seen.passes == 1 else group
            loader.finish()
            return

    def first_batch(self, batches: Iterator[Any], loader: PreparedLoader) -> Iterator[Any]:
        """The first of an evaluation's batches."""
        seen = self._seen("evaluation", loader, 1)
        for batch in islice(batches, 1):
            seen.batches, seen.batch = 1, describe(batch)
            yield batch

    def _seen(self, kind: str, loader: PreparedLoader, accumulate: int) -> Seen:
        seen = Seen(kind, type(loader.dataset).__name__, _length(loader, accumulate))
        seen = self.loops.setdefault((kind, id(loader)), seen)
        seen.passes += 1
        return seen

    def saw_checkpoint(self, path: Path, seconds: float) -> None:
        self.saved = path
        if self.comm.rank == 0:
            size = sum(file.stat().st_size for file in path.iterdir())
            self._checkpoint = f"checkpoint of {_size(size)} in {seconds:.2f} s, removed again"

    def close(self, parameters: int, peak_device: float, peak_host: float) -> None:
        """All ranks, after a run that came to its end: rank 0 says what it saw. Memory is in MiB."""
        most = self.comm.all_reduce(torch.tensor([peak_device, peak_host], dtype=torch.float64), "max").tolist()
        self.discard()
        if self.comm.rank == 0:
            for line in self._lines(parameters, *most):
                log.info("dry run: %s", line)

    def _lines(self, parameters: int, peak_device: float, peak_host: float) -> Iterator[str]:
        yield f"{parameters:,} parameters, world size {self.comm.world_size}"
        kinds = [kind for kind, _ in self.loops]
        if "training loop" not in kinds:
            yield "no loop of run.steps() had a batch: nothing was trained"
        for index, seen in enumerate(self.loops.values()):
            yield seen.text(kinds[: index + 1].count(seen.kind))
        if self.metrics:
            yield "logged: " + ", ".join(f"{name} {_number(value)}" for name, value in self.metrics.items())
        yield self._checkpoint
        on_gpu = f"{peak_device:,.0f} MiB of a GPU, " if peak_device else ""
        yield f"at most {on_gpu}{peak_host:,.0f} MiB of memory in one rank"

    def discard(self) -> None:
        """Take the checkpoint away; after a failure any rank may."""
        shutil.rmtree(self.root, ignore_errors=True)


def _looked_at(micros: Iterator[Micro], seen: Seen) -> Iterator[Micro]:
    for micro in micros:
        if not seen.batches:
            seen.batch = describe(micro.batch)
        seen.batches += 1
        seen.samples += micro.total
        yield micro


def _length(loader: PreparedLoader, accumulate: int) -> str:
    try:
        batches = len(loader)
    except TypeError:
        return "nobody knows how long a whole pass is"
    steps = -(-batches // accumulate)
    return f"a whole pass has {batches} batches a rank" + (f", {steps} steps" if accumulate > 1 else "")


def describe(batch: Any) -> str:
    """A batch's types and shapes: `[float32 (16, 3), int64 (16,)]`."""
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')} {tuple(batch.shape)}"
    if isinstance(batch, Mapping):
        parts = [f"{key}: {describe(value)}" for key, value in list(batch.items())[:_SHOWN]]
        return "{" + ", ".join([*parts, *["…"] * (len(batch) > _SHOWN)]) + "}"
    if isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        parts = [describe(value) for value in batch[:_SHOWN]]
        return "[" + ", ".join([*parts, *["…"] * (len(batch) > _SHOWN)]) + "]"
    return type(batch).__name__


def _size(count: float) -> str:
    return f"{count / 2**20:,.1f} MiB" if count >= 2**20 else f"{count / 2**10:,.1f} KiB"


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
