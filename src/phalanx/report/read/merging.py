"""Steps and epochs of many ranks and attempts as those of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...records import Epoch, Resume
from ..model import Numbers
from ..text import count, numbers
from .steplines import Lines

# Columns of all ranks' steps while they are put together.
_RANK, _ATTEMPT, _STEP, _EPOCH, _SECONDS, _WAIT, _SAMPLES = range(7)


@dataclass(frozen=True)
class Steps:
    """`rows` as in RunData.steps, and the rows at which a later attempt went on."""

    rows: Numbers = field(default_factory=lambda: np.empty((0, 5)))
    restarts: tuple[int, ...] = ()


def merged_steps(
    files: Sequence[Lines], limits: Mapping[int, float], world_size: int, everywhere: bool, left_out: list[str]
) -> Steps:
    """One row a step: the slowest rank's seconds, the mean wait, and the samples of all ranks.

    Ranks deal samples evenly, so that ranks without records are taken to have as many as the others. `everywhere`: all
    ranks keep records of all steps, so that a step which some lack is one that the run didn't finish.
    """
    if alike := _alike(files, world_size):
        return alike
    table = np.concatenate([_table(file, limits) for file in files] or [np.empty((0, 7))])
    if not len(table):
        return Steps()
    table = _once(table[np.lexsort((table[:, _ATTEMPT], table[:, _RANK], table[:, _STEP]))], left_out)
    table = table[~np.isin(table[:, _STEP], _unsound(table[:, _STEP], table[:, _SECONDS], "step", left_out))]
    _, first, ranks = np.unique(table[:, _STEP], return_index=True, return_counts=True)
    if not len(first):
        return Steps()
    seconds = np.maximum.reduceat(table[:, _SECONDS], first)
    wait, samples = (np.add.reduceat(table[:, column], first) / ranks for column in (_WAIT, _SAMPLES))
    rows = np.column_stack([table[first, _STEP], table[first, _EPOCH], seconds, wait, samples * world_size])
    attempts = np.maximum.reduceat(table[:, _ATTEMPT], first)
    if everywhere and (few := ranks < ranks.max()).any():
        left_out.append(f"{numbers('step', rows[few, 0])}: some ranks have no record of it")
        rows, attempts = rows[~few], attempts[~few]
    return Steps(rows, tuple(int(row) for row in np.flatnonzero(np.diff(attempts)) + 1))


def _alike(files: Sequence[Lines], world_size: int) -> Steps | None:
    """The same for what nearly all runs are: one attempt, in which ranks recorded the same sound steps, in order."""
    tables = [file.steps for file in files if len(file.steps)]
    if not tables or len({file.attempt for file in files}) > 1 or len({len(table) for table in tables}) > 1:
        return None
    stack = np.stack(tables)
    steps, seconds = stack[0, :, 1], stack[:, :, 3]
    sound = (seconds > 0).all() and np.isfinite(seconds).all()
    if not sound or (stack[:, :, 1] != steps).any() or (np.diff(steps) <= 0).any():
        return None
    wait, samples = stack[:, :, 4].mean(axis=0), stack[:, :, 5].mean(axis=0) * world_size
    return Steps(np.column_stack([steps, stack[0, :, 2], seconds.max(axis=0), wait, samples]))


def _table(file: Lines, limits: Mapping[int, float]) -> Numbers:
    """A file's steps with rank and attempt, less what a later attempt made void."""
    steps = file.steps[file.steps[:, 1] <= _limit(file.attempt, limits)]
    place = np.broadcast_to([float(file.rank), float(file.attempt)], (len(steps), 2))
    return np.column_stack([place, steps[:, 1:]])


def _limit(attempt: int, limits: Mapping[int, float]) -> float:
    return min((limit for later, limit in limits.items() if later > attempt), default=float("inf"))


def _once(table: Numbers, left_out: list[str]) -> Numbers:
    """Each rank's steps once, from the newest attempt, of rows that are sorted so."""
    same = (np.diff(table[:, _STEP]) == 0) & (np.diff(table[:, _RANK]) == 0)
    if not same.any():
        return table
    twice = same & (np.diff(table[:, _ATTEMPT]) == 0)
    if twice.any():
        left_out.append(f"{count(int(twice.sum()), 'row')} of steps that a rank recorded twice: the last counts")
    return np.asarray(table[np.append(~same, True)])


def _unsound(of: Numbers, seconds: Numbers, what: str, left_out: list[str]) -> Numbers:
    """The numbers of steps or epochs whose times can't be used; they are named."""
    unknown, backwards = ~np.isfinite(seconds), seconds <= 0
    for bad, why in ((unknown, "not a number"), (backwards, "no time, or less than none: a clock ran backwards")):
        if bad.any():
            left_out.append(f"{numbers(what, of[bad])}: {why}")
    return np.unique(of[unknown | backwards])


def merged_epochs(files: Sequence[Lines], limits: Mapping[int, float], left_out: list[str]) -> Numbers:
    """(epoch, seconds) of the slowest rank, without those in which an attempt went on: only a part was timed."""
    newest: dict[tuple[int, int], Epoch] = {}
    first: dict[int, int] = {}
    for file in sorted(files, key=lambda file: file.attempt):
        limit = _limit(file.attempt, limits)
        for record in file.others:
            if isinstance(record, Epoch) and record.step <= limit and _is_number(record.seconds):
                newest[file.rank, record.epoch] = record
            elif isinstance(record, Resume):
                first[file.attempt] = record.epoch
    begun = min((record.attempt for record in newest.values()), default=0)
    partial = {record.epoch for record in newest.values()
               if record.attempt > begun and first.get(record.attempt) == record.epoch}  # fmt: skip
    if partial:
        left_out.append(f"{numbers('epoch', partial)}: the run went on from a checkpoint in it")
    longest: dict[int, float] = {}
    for (_, epoch), record in newest.items():
        if epoch not in partial:
            longest[epoch] = max(longest.get(epoch, record.seconds), record.seconds)
    rows: Numbers = np.array(sorted(longest.items()), dtype=float).reshape(-1, 2)
    return rows[~np.isin(rows[:, 0], _unsound(rows[:, 0], rows[:, 1], "epoch", left_out))]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
