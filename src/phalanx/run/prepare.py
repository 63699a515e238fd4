"""`prepare`: the one place where a model, optimizer, scheduler or loader is changed for the run."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, RandomSampler

from ..data.loader import PreparedLoader, prepare_loader
from ..errors import UsageError
from ..strategies.base import parameters_of
from ..strategies.overlap import overlaps
from ..strategies.saved import named_parameters
from .batchnorm import synchronised
from .carried import Carried, put, take
from .precision import DTYPES, AutocastForward
from .proxies import OptimizerProxy, SchedulerProxy
from .seeding import seed_rank
from .session import Session

_Moved = dict[int, tuple[nn.Parameter, nn.Parameter]]  # by the old one's identity: old, new


def prepare(session: Session, things: tuple[Any, ...]) -> Any:
    """All `things`, prepared, in the order given. See `Run.prepare`."""
    _check(things)
    order = (_is_model, _is_optimizer, _is_scheduler, _is_loader)  # each needs the ones before it
    prepared: dict[int, Any] = {}
    moved: _Moved = {}
    state: dict[int, Carried | None] = {}
    training = any(_is_optimizer(thing) for thing in things)
    first = not session.models
    for is_kind in order:
        for index, thing in enumerate(things):
            if not is_kind(thing):
                continue
            if is_kind is _is_model:
                prepared[index] = _model(session, thing, moved)
            elif is_kind is _is_optimizer:
                fresh = not isinstance(thing, OptimizerProxy)
                state[index] = take(thing, session.comm) if fresh else None
                prepared[index] = _optimizer(session, thing, moved)
            elif is_kind is _is_scheduler:
                prepared[index] = _scheduler(session, thing)
            else:
                prepared[index] = _loader(session, thing, training)
                training = False
    parameters = {index: list(parameters_of(things[index])) for index in state}
    _bind(session, things, prepared)
    for index, carried in state.items():
        if carried is not None:
            put(carried, session.strategy.saved_optimizer(things[index]), parameters[index])
    if first and session.models and session.comm.rank > 0:
        seed_rank(session.config.seed, session.comm.rank)  # dropout differs by rank; the weights do not
    results = tuple(prepared[index] for index in range(len(things)))
    return results[0] if len(results) == 1 else results


def _is_model(thing: Any) -> bool:
    return isinstance(thing, nn.Module)


def _is_optimizer(thing: Any) -> bool:
    return isinstance(thing, Optimizer)


def _is_loader(thing: Any) -> bool:
    return isinstance(thing, DataLoader | PreparedLoader)


def _is_scheduler(thing: Any) -> bool:
    own_kind = hasattr(thing, "step") and hasattr(thing, "state_dict") and hasattr(thing, "optimizer")
    return isinstance(thing, LRScheduler | SchedulerProxy) or (own_kind and not _is_optimizer(thing))


def _check(things: tuple[Any, ...]) -> None:
    if not things:
        raise UsageError("prepare() was called without anything to prepare")
    for index, thing in enumerate(things):
        if not (_is_model(thing) or _is_optimizer(thing) or _is_loader(thing) or _is_scheduler(thing)):
            raise UsageError(
                f"prepare() got {type(thing).__name__!r} at position {index}: expected a torch module, optimizer, "
                "learning-rate scheduler or DataLoader"
            )


def _model(session: Session, model: nn.Module, moved: _Moved) -> nn.Module:
    strategy = session.strategy
    inner = strategy.unwrap(model)
    if any(strategy.unwrap(done) is inner for done in session.models):
        raise UsageError(f"prepare() got the model {type(inner).__name__!r} a second time")
    unready = [name for name, parameter in named_parameters(inner) if parameter.is_meta]
    if unready:
        raise UsageError(
            f"{type(inner).__name__} has parameters on the meta device ({unready[0]}, …): build it with data"
        )
    _check_memory(inner)
    model = synchronised(model, strategy)
    inner = strategy.unwrap(model)
    before = dict(named_parameters(inner, remove_duplicate=False))
    session.measure.count(inner)
    wrapped = strategy.wrap(model)
    after = dict(named_parameters(strategy.unwrap(wrapped), remove_duplicate=False))
    moved.update({id(old): (old, after[name]) for name, old in before.items()})
    if session.config.precision in DTYPES:
        AutocastForward(session.device_type, DTYPES[session.config.precision]).attach(wrapped)
    if not strategy.may_unfreeze:
        session.frozen += [(name, p) for name, p in after.items() if not p.requires_grad]
    session.models.append(wrapped)
    session.gradients.models.append(wrapped)
    session.contents.models.append(strategy.saved_model(wrapped))
    return wrapped


def _check_memory(model: nn.Module) -> None:
    """An optimizer updates each element by itself: also torch's own fail, at their first step."""
    for name, parameter in named_parameters(model):
        if overlaps(parameter):
            raise UsageError(
                f"the parameter {name} of {type(model).__name__} has elements that share memory (shape "
                f"{tuple(parameter.shape)}, strides {parameter.stride()}, as expand() makes them), so "
                "that no optimizer can update each of them: make it of a copy, "
                "nn.Parameter(tensor.clone()), or expand it in forward"
            )


def _optimizer(session: Session, optimizer: Optimizer, moved: _Moved) -> OptimizerProxy:
    if isinstance(optimizer, OptimizerProxy):
        return optimizer
    strategy = session.strategy
    known = {id(p): model for model in session.models for _, p in strategy.held(model)}
    for group in optimizer.param_groups:
        # In place: LBFGS keeps the list itself.
        group["params"][:] = [strategy.optimized(moved.get(id(p), (p, p))[1]) for p in group["params"]]
        if any(id(p) not in known for p in group["params"]):
            raise UsageError(
                f"{type(optimizer).__name__} holds a parameter of no prepared model: pass the model and its optimizer "
                "to prepare() together, or build the optimizer from the prepared model"
            )
    trained = {known[id(p)]: None for p in parameters_of(optimizer)}
    models = [strategy.unwrap(model) for model in trained]
    proxy = OptimizerProxy(optimizer, session.gradients, session.config.lr_scaling, models)
    session.optimizers.append(proxy)
    session.gradients.optimizers.append(proxy)
    session.contents.optimizers.append(optimizer)
    return proxy


def _bind(session: Session, things: tuple[Any, ...], prepared: dict[int, Any]) -> None:
    """Join each model to its optimizer, for engines that train both as one."""
    batch_size = next((thing.batch_size for thing in things if isinstance(thing, DataLoader)), None)
    for index, thing in enumerate(things):
        if isinstance(prepared[index], OptimizerProxy) and thing is not prepared[index]:
            for at, model in enumerate(session.models):
                own = {id(parameter) for parameter in model.parameters()}
                if any(id(parameter) in own for parameter in parameters_of(thing)):
                    _join(session, at, thing, batch_size, prepared)
                    break


def _join(session: Session, at: int, optimizer: Optimizer, batch_size: int | None, prepared: dict[int, Any]) -> None:
    model, strategy = session.models[at], session.strategy
    bound = strategy.bind(model, optimizer, batch_size)
    if bound is model:
        return
    session.models[at] = bound
    session.gradients.models[at] = bound
    session.contents.models[at] = strategy.saved_model(bound)
    which = next(i for i, saved in enumerate(session.contents.optimizers) if saved is optimizer)
    session.contents.optimizers[which] = strategy.saved_optimizer(optimizer)
    for index, thing in prepared.items():
        if thing is model:
            prepared[index] = bound


def _scheduler(session: Session, scheduler: Any) -> SchedulerProxy:
    if isinstance(scheduler, SchedulerProxy):
        return scheduler
    number = sum(name.startswith("scheduler.") for name in session.contents.stateful)
    session.contents.stateful[f"scheduler.{number}"] = scheduler
    proxy = SchedulerProxy(scheduler, session.gradients, session.optimizers, session.loops.scheduler())
    session.schedulers.append(proxy)
    return proxy


def _loader(session: Session, loader: DataLoader[Any] | PreparedLoader, training: bool) -> PreparedLoader:
    if isinstance(loader, PreparedLoader):
        return loader
    config = session.config
    workers = session.auto_workers if config.num_workers == "auto" else config.num_workers
    shuffles = isinstance(loader.sampler, RandomSampler) or getattr(loader.sampler, "shuffle", False) is True
    train = training or shuffles
    number = session.training_loaders if train else 0
    prepared = prepare_loader(loader, session.comm, config.seed, workers, train, number, session.where, config)
    prepared.only = None if session.dry is None else 1
    session.training_loaders += train
    session.contents.stateful[f"loader.{len(session.loaders)}"] = prepared
    session.loaders.append(prepared)
    return prepared
