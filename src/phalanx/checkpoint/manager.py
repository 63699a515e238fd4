"""Saving and loading all that a run needs to go on exactly, under any world size and strategy."""

from __future__ import annotations

import logging
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..errors import CheckpointError
from ..strategies.comm import Comm
from ..strategies.overlap import dense, writable
from . import store, tensors
from .best import Monitor
from .former import matched, renamed
from .registered import Registered, check_names, room

log = logging.getLogger("phalanx")


@dataclass
class Contents:
    """What a checkpoint holds. `stateful` things have state_dict and load_state_dict."""

    models: list[Any] = field(default_factory=list)  # as `Strategy.saved_model` gives them
    optimizers: list[Optimizer] = field(default_factory=list)
    stateful: dict[str, Any] = field(default_factory=dict)  # schedulers, scaler, loaders by name
    registered: dict[str, Registered] = field(default_factory=dict)  # of the script's own


@contextmanager
def _one_process_is_meant() -> Iterator[None]:
    """Without torch's warning that it takes one process to be meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _free(folder: Path) -> str:
    """How much space there is: torch's errors often lack the disk's own."""
    try:
        return f"The disk has {shutil.disk_usage(folder.parent).free / 2**20:,.0f} MiB left."
    except OSError:
        return ""


class _Failed(Exception):
    """What one rank alone did has failed: said on all ranks."""


_PLACE = re.compile(r"^\[enforce fail at [^]]*\] ?\. ?")  # of torch's C++ sources


def _cause(error: BaseException) -> str:
    """What failed on the lowest rank, in a sentence: torch's own text is all ranks' tracebacks and C++ stacks."""
    if not isinstance(error, CheckpointException):
        return str(error)
    rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
    return _brief(cause, rank)


def _brief(cause: BaseException, rank: int) -> str:
    text = _PLACE.sub("", str(cause).strip())
    sentence = text.partition("\n")[0].partition(". ")[0]
    return f"{type(cause).__name__} on rank {rank}{': ' if sentence else ''}{sentence}"


@dataclass
class Manager:
    """The checkpoints of one run directory. Every method that takes part in I/O is called by all ranks."""

    comm: Comm
    root: Path
    keep: int
    monitor: Monitor | None = None

    def save(self, contents: Contents, rng: dict[str, Tensor], progress: dict[str, Any]) -> Path:
        """Write and commit one; on return every rank can read it. `progress` holds at least the step.

        Raises CheckpointError on all ranks if one of them can't write; older checkpoints are then as they were.
        """
        step = progress["step"]
        try:
            self._on_main(lambda: store.begin(self.root, step))
            self._write(contents, rng, progress)
            models = [tensors.facts(model) for model in contents.models]
            self._on_main(lambda: self._commit(step, progress, models))
        except (_Failed, CheckpointException) as error:  # on all ranks alike
            if self.comm.rank == 0:
                store.abandon(self.root, step)
            raise CheckpointError(
                f"cannot write the checkpoint {self.root / str(step)}: {_cause(error)}. {_free(self.root)} Older "
                "checkpoints are as they were; where disk or quota is full, free some space or lower checkpoint.keep"
            ) from error.__cause__
        return self.root / str(step)

    def _on_main(self, work: Callable[[], Any]) -> None:
        """Let rank 0 do it while the others wait. Its failure is everybody's, or they would wait for good."""
        failure: Exception | None = None
        if self.comm.rank == 0:
            try:
                work()
            except Exception as error:
                failure = error
        said = self.comm.broadcast_object(None if failure is None else _brief(failure, 0))
        if said is not None:
            raise _Failed(said) from failure

    def _write(self, contents: Contents, rng: dict[str, Tensor], progress: dict[str, Any]) -> None:
        names = tensors.parameter_names(contents.models)
        entries, other = tensors.split(
            tensors.model_entries(contents.models) | tensors.optimizer_entries(contents.optimizers, names)
        )
        entries |= {f"rng.{self.comm.rank}/{key}": value for key, value in rng.items()}
        frames, own = self._registered(contents)
        entries |= own
        part = store.staging(self.root, progress["step"])
        groups = [tensors.optimizer_groups(optimizer, names) for optimizer in contents.optimizers]

        def write_state() -> None:
            state = {
                "progress": {**progress, "world_size": self.comm.world_size},
                "optimizers": [tensors.kind(optimizer) for optimizer in contents.optimizers],
                "groups": groups,
                "other": other,
                "stateful": {name: thing.state_dict() for name, thing in contents.stateful.items()},
                "registered": frames,
            }
            with (part / "state.pt").open("wb") as file:  # torch's own writer would hide the disk's error
                torch.save(state, file)

        self._on_main(write_state)
        with _one_process_is_meant():
            save(entries, checkpoint_id=part, no_dist=not self.comm.active)

    def _registered(self, contents: Contents) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The registered things without their tensors, and these: on ranks other than 0 the sharded ones only."""
        frames: dict[str, Any] = {}
        found: dict[str, Tensor] = {}
        problem = None
        for name, item in contents.registered.items():
            try:
                frames[name], values = item.parts()
                found |= {key: v for key, v in values.items() if self.comm.rank == 0 or isinstance(v, DTensor)}
            except Exception as error:
                problem = f"{_brief(error, self.comm.rank)} (registered as {name!r})"
                break
        if contents.registered and (problems := [said for said in self.comm.gather_objects(problem) if said]):
            raise _Failed(problems[0])
        return frames, found

    def _commit(self, step: int, progress: dict[str, Any], models: list[dict[str, Any]]) -> None:
        monitor = self.monitor
        facts = {"world_size": self.comm.world_size, "epoch": progress.get("epoch", 0), "models": models}
        path = store.commit(self.root, step, {**facts, **(monitor.facts(step) if monitor else {})})
        later = store.set_aside(self.root, step)
        if later:
            log.warning(
                "the run had gone back to step %d or before: its later checkpoints %s are set aside, as <step>.left",
                step, ", ".join(later),
            )  # fmt: skip
        if monitor is not None:
            monitor.committed(path)
        store.prune(self.root, self.keep, monitor.spared() if monitor else ())

    def newest(self, skip: set[str]) -> Path | None:
        """Rank 0's choice, told to all: the newest whole checkpoint; broken ones are passed over, said aloud."""
        choice = None
        if self.comm.rank == 0:
            for path in store.steps(self.root):
                if path.name in skip:
                    continue
                problem = store.defect(path)
                if problem is None:
                    choice = path
                    break
                log.warning("checkpoint %s is broken and skipped: %s", path, problem)
        chosen = self.comm.broadcast_object(choice)
        return chosen if chosen is None else Path(chosen)

    def best(self) -> Path | None:
        """Rank 0's choice, told to all: the best whole checkpoint by the monitored value."""
        choice = None
        if self.comm.rank == 0 and self.monitor is not None:
            choice = next((path for path in self.monitor.best() if store.defect(path) is None), None)
        chosen = self.comm.broadcast_object(choice)
        return chosen if chosen is None else Path(chosen)

    def load_newest(self, contents: Contents, restore_rng: Callable[[dict[str, Tensor] | None, int], None]) -> Any:
        """Load the newest that can be read; (path, progress), or None if there is none."""
        broken: set[str] = set()
        while (path := self.newest(broken)) is not None:
            try:
                return path, self.load(path, contents, restore_rng)
            except CheckpointException as error:  # raised on all ranks alike
                log.warning("checkpoint %s cannot be read and is skipped: %s", path, _cause(error))
                broken.add(path.name)
        if broken:  # a failed attempt has written into the weights: not a state to start from
            raise CheckpointError(f"no checkpoint in {self.root} can be read; delete them to start anew")
        return None

    def load(
        self, path: Path, contents: Contents, restore_rng: Callable[[dict[str, Tensor] | None, int], None]
    ) -> dict[str, Any]:
        """Load one, strictly. `restore_rng` gets this rank's generators, or None under another world size."""
        state = torch.load(path / "state.pt", map_location="cpu", weights_only=False)  # written by a run of the user's
        metadata = FileSystemReader(path).read_metadata().state_dict_metadata
        names = tensors.parameter_names(contents.models)
        here, other = tensors.split(tensors.model_entries(contents.models))
        wanted = {key: dense(value) for key, value in here.items()}
        keys = renamed(metadata, state, {*here, *other}, names.values())
        saved = {keys.get(key, key): value for key, value in metadata.items()}
        for index, optimizer in enumerate(contents.optimizers):
            wanted |= tensors.room_for_optimizer(index, optimizer, names, saved)
        frames = state.get("registered", {})
        check_names(frames, contents.registered)
        for name, frame in frames.items():
            own = contents.registered[name].parts()[1]
            own |= {key: own[now] for key, now in matched(saved, own).items()}
            wanted |= room(frame, own, saved)
        same_world = state["progress"]["world_size"] == self.comm.world_size
        rng = tensors.room_for_rng(self.comm.rank, saved) if same_world else {}
        tensors.check_keys(wanted, saved)
        self._check_counts(state, contents, other)
        before = {now: key for key, now in keys.items()}
        with _one_process_is_meant():
            entries = {before.get(key, key): value for key, value in (wanted | rng).items()}
            load(entries, checkpoint_id=path, no_dist=not self.comm.active)
        self._apply(state, contents, wanted, names)
        states = {key.rpartition("/")[2]: value for key, value in rng.items()}
        restore_rng(states or None, state["progress"]["step"])
        progress: dict[str, Any] = state["progress"]
        return progress

    def _check_counts(self, state: dict[str, Any], contents: Contents, other: dict[str, Any]) -> None:
        """What is no tensor must match too."""
        pairs = [
            ("optimizers", len(state["groups"]), len(contents.optimizers)),
            ("schedulers, scaler and loaders", sorted(state["stateful"]), sorted(contents.stateful)),
            (
                "model entries that are no tensors",
                *(sorted(k for k in d if k.startswith("model.")) for d in (state["other"], other)),
            ),
        ]
        for what, saved, here in pairs:
            if saved != here:
                raise CheckpointError(
                    f"the checkpoint has {what} {saved}, but this run has {here}: prepare the same ones"
                )
        for index, optimizer in enumerate(contents.optimizers):
            tensors.check_kind(index, optimizer, state["optimizers"][index], state["groups"][index])

    def _apply(
        self, state: dict[str, Any], contents: Contents, loaded: dict[str, Tensor], names: dict[int, str]
    ) -> None:
        values = {**loaded, **state["other"]}
        for index, model in enumerate(contents.models):
            prefix = f"model.{index}/"
            with writable(model):
                model.load_state_dict({key[len(prefix) :]: v for key, v in values.items() if key.startswith(prefix)})
        for index, optimizer in enumerate(contents.optimizers):
            tensors.load_optimizer(index, optimizer, names, state["groups"][index], values)
        for name, thing in contents.stateful.items():
            thing.load_state_dict(state["stateful"][name])
        for name, frame in state.get("registered", {}).items():
            contents.registered[name].load(frame, loaded)
