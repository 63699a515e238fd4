"""What ended a launch other than a rank's failure: a step that didn't start, a lost node, Slurm,
a user."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from .launcher_output import CANCELLED, Death, by_srun, unix
from .unlaunched import unlaunched

_NODE_FAILED = re.compile(r"srun: error: Node failure on (?P<node>\S+)")
_NODE_LOST = re.compile(
    r"has lost communication with a remote daemon\..*?Remote daemon: .*? on node (?P<node>\S+)", re.DOTALL
)
TIME_LIMIT = (
    "the time limit was reached: set time to more, or go on in a further job from a checkpoint "
    "(checkpoint.every_steps, --chain)"
)
_REASONS = {
    "TIME LIMIT": TIME_LIMIT,
    "PREEMPTION": "the job was preempted by another of higher priority",
    "NODE FAILURE": "a node of the job failed",
    "JOB REQUEUE": "the job was requeued",
}


@dataclass(frozen=True)
class Stop:
    """Something that is no rank's failure ended the launch: at `time` (Unix, whole seconds) if that
    is known. `launched` False: not all of its tasks began. `passing`: the same job may well go on
    when it is started again."""

    what: str
    position: int
    time: float | None = None
    node: str | None = None
    launched: bool = True
    passing: bool = True


def stop(text: str, before: list[Death]) -> Stop | None:
    """Who or what else ended the launch: the first such sign in the text, told by the most telling
    one.

    `before` are the deaths: Slurm cancels a step also because one of its tasks failed, and says no
    more then.
    """
    tasks = list(by_srun(text))
    first = min((death.position for death in (*before, *tasks)), default=len(text))
    stops = [*_nodes(text), *_cancelled(text, first)]
    failed = _failed_launch(text, tasks, before)
    if failed is not None and all(failed.position < found.position for found in stops):
        return failed
    if not stops:
        return None
    told = next((found for found in stops if found.node), stops[0])
    times = [found.time for found in stops if found.time is not None]
    return Stop(told.what, min(found.position for found in stops), min(times, default=None), told.node)


def _failed_launch(text: str, tasks: list[Death], before: list[Death]) -> Stop | None:
    found = unlaunched(text, tasks, before)
    if found is None:
        return None
    return Stop(found.words, found.position, None, found.node, launched=False, passing=found.passing)


def _nodes(text: str) -> Iterator[Stop]:
    for found in _NODE_FAILED.finditer(text):
        yield Stop(f"{found['node']} failed: Slurm lost the node", found.start(), node=found["node"])
    for found in _NODE_LOST.finditer(text):
        what = f"mpirun lost {found['node']}: the node or its network failed, or Slurm ended the step there"
        yield Stop(what, found.start(), node=found["node"])


def _cancelled(text: str, first_death: int) -> Iterator[Stop]:
    for found in CANCELLED.finditer(text):
        why = (found["why"] or "").partition(",")[0].strip().upper()
        if why in _REASONS:
            yield Stop(_REASONS[why], found.start(), unix(found["time"]))
        elif found["what"] == "JOB" or (why != "TASK FAILURE" and found.start() < first_death):
            yield Stop(f"{found['what'].lower()} {found['id']} was cancelled", found.start(), unix(found["time"]))
