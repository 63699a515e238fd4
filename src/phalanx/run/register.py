"""`run.register`: what of the script's own belongs into checkpoints."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..checkpoint.registered import CONTAINERS, Registered
from ..errors import UsageError
from .proxies import OptimizerProxy, SchedulerProxy
from .session import Session


def register(session: Session, name: str, thing: Any, optional: bool, what: str = "") -> None:
    """See `Run.register`; `what` must be the same on all ranks too."""
    session.comm.meet(f"run.register({name!r}, {what or type(thing).__name__})")
    _check_name(session, name)
    _check_thing(session, name, thing)
    session.contents.registered[name] = Registered(name, thing, optional)


def _check_name(session: Session, name: Any) -> None:
    if not isinstance(name, str) or not name:
        raise UsageError(f"register({name!r}): expected a name, as text")
    if name in session.contents.registered:
        raise UsageError(f"register({name!r}) was called before: each thing needs a name of its own")
    if session.begun:
        raise UsageError(
            f"register({name!r}) came after the run began or resumed, when a checkpoint's state of it has no place to "
            "go: call it before run.resume() and before the first loop"
        )


def _check_thing(session: Session, name: str, thing: Any) -> None:
    models = [*session.models, *map(session.strategy.unwrap, session.models)]
    if isinstance(thing, OptimizerProxy | SchedulerProxy) or any(thing is own for own in (*models, *session.loaders)):
        raise UsageError(f"register({name!r}): checkpoints hold all that run.prepare() has returned already")
    stateful = [hasattr(thing, word) for word in ("state_dict", "load_state_dict")]
    if all(stateful) and not isinstance(thing, type):
        return
    if not any(stateful) and isinstance(thing, CONTAINERS) and not isinstance(thing, nn.Module):
        return
    raise UsageError(
        f"register({name!r}) got {type(thing).__name__!r}: expected something with state_dict() and load_state_dict(), "
        "or a container that can be restored in place: a number in one, as in run.register('best', {'loss': 9.9})"
    )
