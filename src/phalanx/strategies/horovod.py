"""Horovod: a replica per rank, gradients averaged by Horovod while the backward pass still runs.

What `hvd.DistributedOptimizer` does (average with predivide factor, fp16 compression, Adasum of the ranks' updates),
on Horovod's own collectives, without its second optimizer object: that one has no state to save, raises when a step
has more backward passes than it was told of, and when gradients are cleared before a step.
torch's process group stays the way by which ranks agree on all else.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import PlanError, TopologyError
from ..rank import horovod_ranks
from ..rank.ports import claim, job_ports
from ..rank.rendezvous import own_host
from ..registry import require
from .base import parameters_of
from .process_group import ProcessGroupStrategy, broadcast_state
from .saved import named_parameters


class Horovod(ProcessGroupStrategy):
    name = "horovod"
    may_unfreeze = False

    def setup(self) -> None:
        how = horovod_ranks.controller(self.topology, os.environ, horovod_ranks.built_with())
        self._hvd = require("horovod.torch", "horovod")
        if how == "gloo":
            self._check_adasum(by_mpi=False)
            super().setup()
            self._set_variables()
        if self.topology.world_size > 1:
            # Until the process exits, for its next run too: MPI can't begin a second time, and gloo's ranks may then
            # read each other's former addresses, whereupon the process aborts.
            self._hvd.init()
            self._check_world()
            self._check_adasum(self._hvd.mpi_enabled())
        if how != "gloo":
            self._agree_on_port()
            super().setup()
        self._reducer = Reducer(self._hvd, self._compression(), self.config.horovod.gradient_predivide_factor)

    def _set_variables(self) -> None:
        """Nobody has set them: the script was started by srun itself."""
        places = self.comm.gather_objects((self.topology.node_rank, self.topology.local_world_size))
        counts = list(dict(places).values())
        place = self.comm.broadcast_object(
            (own_host(self.topology, os.environ), horovod_ranks.serve(counts)) if self.topology.rank == 0 else None
        )
        os.environ.update(horovod_ranks.gloo_variables(self.topology, counts, *place))

    def _check_world(self) -> None:
        here, wanted = (self._hvd.rank(), self._hvd.size()), (self.topology.rank, self.topology.world_size)
        if here != wanted:
            raise TopologyError(
                f"Horovod is rank {here[0]} of {here[1]} here, but the launcher says rank {wanted[0]} of {wanted[1]}"
                f"{': each process would train alone' if here[1] == 1 else ''}. Under mpirun, use the MPI that Horovod "
                "was built with; under srun, set mpi to a plugin that it knows (pmix), or HOROVOD_CONTROLLER=gloo"
            )

    def _agree_on_port(self) -> None:
        """Where torch's ranks meet, if nothing else has told: horovodrun doesn't, and not every mpirun."""
        if self.topology.world_size == 1 or os.environ.get("MASTER_PORT"):
            return
        place = None
        if self.topology.rank == 0:
            bound = claim(job_ports(os.getpid()))
            if bound is None:
                raise TopologyError(f"no port is free on host {socket.gethostname()}: set MASTER_PORT to one that is")
            place = own_host(self.topology, os.environ), bound.getsockname()[1]
            bound.close()
        host, port = self._hvd.broadcast_object(place, 0, "phalanx.master")
        os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))

    def _compression(self) -> Any:
        return self._hvd.Compression.fp16 if self.config.horovod.fp16_allreduce else self._hvd.Compression.none

    def _check_adasum(self, by_mpi: bool) -> None:
        settings, size = self.config.horovod, self.topology.world_size
        if not settings.use_adasum:
            return
        if settings.gradient_predivide_factor != 1.0:
            raise PlanError(
                f"horovod.gradient_predivide_factor={settings.gradient_predivide_factor:g} divides an average, which "
                "horovod.use_adasum replaces: set one of them"
            )
        if self.config.precision == "fp16":
            raise PlanError(
                "horovod.use_adasum can't have precision=fp16, where ranks must leave out the same "
                "steps: use precision=bf16 or fp32"
            )
        if not by_mpi:
            raise PlanError("horovod.use_adasum needs Horovod with MPI: use a build with it under --launcher mpirun")
        if size & (size - 1):
            raise PlanError(f"horovod.use_adasum needs a power of two as world size, and it is {size}")

    def wrap(self, model: nn.Module) -> nn.Module:
        model = model.to(self.device)
        if self.topology.world_size > 1:
            broadcast_state(model, self.comm)  # also buffers that state_dict leaves out
            if not self.config.horovod.use_adasum:
                self._reducer.watch(self.unwrap(model))
        return model

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        return self._reducer.held()

    def settle(self, parameters: Iterable[nn.Parameter]) -> None:
        self._reducer.settle(parameters)

    def zero_grad(self, optimizer: Optimizer, set_to_none: bool) -> None:
        self._reducer.forget(parameters_of(optimizer))
        super().zero_grad(optimizer, set_to_none)

    def step(self, optimizer: Optimizer, take: Callable[[], Any] | None = None) -> Any:
        if not self.config.horovod.use_adasum or self.topology.world_size == 1:
            return super().step(optimizer, take)
        # Also those without a gradient here: another rank may have one, or the closure makes it.
        parameters = [p for p in parameters_of(optimizer) if p.requires_grad]
        before = [parameter.detach().clone() for parameter in parameters]
        result = super().step(optimizer, take)
        with torch.no_grad():
            handles = [
                self._hvd.allreduce_async_(parameter - start, name=f"adasum.{at}", op=self._hvd.Adasum)
                for at, (parameter, start) in enumerate(zip(parameters, before, strict=True))
            ]
            for parameter, start, handle in zip(parameters, before, handles, strict=True):
                parameter.copy_(start + self._hvd.synchronize(handle))
        return result


class Reducer:
    """Averages each parameter's gradient as soon as a backward pass has made it; at the pass's end all averages are in.

    A parameter of the model without a gradient counts as zeros, since another rank may have one: as Horovod's own
    optimizer does.
    """

    def __init__(self, hvd: Any, compression: Any, predivide: float) -> None:
        self._hvd = hvd
        self._compression = compression
        self._predivide = predivide
        self._models: list[dict[nn.Parameter, str]] = []  # the names of each one's trainable parameters
        self._place: dict[nn.Parameter, int] = {}  # in these
        self._flying: dict[nn.Parameter, tuple[Any, Any]] = {}  # being averaged: Horovod's handle, and compression's
        self._own: set[nn.Parameter] = set()  # with gradients of this rank alone
        self._passing: set[int] = set()  # models that the backward pass has reached
        self._holding = False

    def watch(self, model: nn.Module) -> None:
        """From now on, average the gradients of this model."""
        number, parameters = len(self._models), named_parameters(model)
        names = {p: f"model{number}.{name}" for name, p in parameters if p.requires_grad}
        self._models.append(names)
        for parameter in names:
            self._place[parameter] = number
            parameter.register_hook(partial(self._before, parameter))  # type: ignore[no-untyped-call]
            parameter.register_post_accumulate_grad_hook(self._after)  # type: ignore[no-untyped-call]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within it, gradients stay this rank's own."""
        self._holding = True
        try:
            yield
        finally:
            self._holding = False

    def _before(self, parameter: nn.Parameter, _: Tensor) -> None:
        """What comes now adds to an average that must have come in."""
        self._land(parameter)

    def _after(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        self._own.add(parameter)
        if self._holding:
            return
        if not self._passing:  # the way in which DDP and FSDP learn of the end
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        self._passing.add(self._place[parameter])
        self._launch(parameter)

    def _finish(self) -> None:
        """The backward pass is over: whoever looks at gradients now sees averages."""
        reached, self._passing = sorted(self._passing), set()
        for number in reached:
            for parameter in self._models[number]:
                # Also what this rank's pass did not reach: another rank's may have, and would wait. What is an average
                # already stays one.
                if parameter not in self._flying:
                    self._launch(parameter)
        for parameter in list(self._flying):
            self._land(parameter)

    def _launch(self, parameter: nn.Parameter) -> None:
        self._own.discard(parameter)
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient, name = parameter.grad, self._models[self._place[parameter]][parameter]
        if gradient.is_sparse:
            self._flying[parameter] = self._hvd.sparse_allreduce_async(gradient, name, self._hvd.Average), None
            return
        sent, context = self._compression.compress(gradient)
        handle = self._hvd.allreduce_async_(
            sent, name=name, op=self._hvd.Average, prescale_factor=1 / self._predivide, postscale_factor=self._predivide
        )
        self._flying[parameter] = handle, context

    def _land(self, parameter: nn.Parameter) -> None:
        """Wait for the average, if one is on its way."""
        if parameter not in self._flying:
            return
        handle, context = self._flying.pop(parameter)
        if callable(handle):
            parameter.grad = handle()
            return
        average = self._compression.decompress(self._hvd.synchronize(handle), context)
        if parameter.grad is not None and average is not parameter.grad:
            parameter.grad.copy_(average)

    def settle(self, parameters: Iterable[nn.Parameter]) -> None:
        """Averages also of what was held back and not followed by a pass that wasn't."""
        left = [parameter for parameter in parameters if parameter in self._own]
        for parameter in left:
            self._launch(parameter)
        for parameter in left:
            self._land(parameter)

    def forget(self, parameters: Iterable[nn.Parameter]) -> None:
        """The gradients are about to be cleared."""
        self._own.difference_update(parameters)
