"""torch.distributed's process group: made, used and ended here, for every strategy that needs it."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import AllgatherOptions, HashStore, PrefixStore, Store
from torch.distributed.distributed_c10d import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from ..errors import PlanError, TopologyError, UsageError
from ..rank.gloo_end import let_gloo_finish_at_exit
from ..rank.topology import Topology
from . import agreement as meeting
from .agreement import Meeting
from .base import Strategy
from .comm import WORDS, Comm
from .overlap import as_bytes, once
from .turns import Turn

_EVER = 1e8  # seconds
_OPS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


class GroupComm(Comm):
    """Collectives by torch.distributed; host tensors by gloo also where nccl serves the device's."""

    _made = 0  # in this process, and so on every rank

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        super().__init__(rank, world_size)
        GroupComm._made += 1
        self._store = PrefixStore(f"phalanx/{GroupComm._made}", dist.distributed_c10d._get_default_store())
        self._turns = 0
        self._device = device
        self._on_host = "cpu:" in dist.get_backend_config()
        self._meeting = self._own_meeting() if world_size > 1 else None

    def _own_meeting(self) -> Meeting:
        """In a group of its own: what it carries must never meet a collective of the training's."""
        if not dist.is_gloo_available():
            return Meeting(self._store, self.rank, self.world_size, self._gather_on_device, self.gather_objects)
        group = dist.new_group(backend="gloo")

        def tell(value: Any) -> list[Any]:
            values = [None] * self.world_size
            dist.all_gather_object(values, value, group)
            return values

        def gather(table: Tensor, mine: Tensor, limit: float) -> Any:
            options = AllgatherOptions()
            options.timeout = timedelta(seconds=min(limit, _EVER))
            # As torch.distributed's own functions do, which know no limit.
            return group._allgather_base(table.view(-1), mine, options)

        return Meeting(self._store, self.rank, self.world_size, gather, tell)

    def _gather_on_device(self, table: Tensor, mine: Tensor, limit: float) -> Any:
        """Where no gloo was built: a wait that can't be cut short."""
        table.copy_(torch.stack(self.all_gather(mine)))
        return _Done()

    @property
    def active(self) -> bool:
        return True

    def _home(self, tensor: Tensor) -> Tensor:
        """Where the backend can reach it."""
        return tensor if self._on_host or tensor.device == self._device else tensor.to(self._device)

    def all_reduce(self, tensor: Tensor, op: str) -> Tensor:
        there = self._home(tensor).contiguous()
        dist.all_reduce(there, _OPS[op])
        return tensor if there is tensor else tensor.copy_(there)

    def start_max(self, tensor: Tensor) -> Any:
        return dist.all_reduce(tensor, dist.ReduceOp.MAX, async_op=True) if self._on_host else None

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        there = self._home(tensor).contiguous()
        parts = [torch.empty_like(there) for _ in range(self.world_size)]
        dist.all_gather(parts, there)
        return [part.to(tensor.device) for part in parts]

    def broadcast(self, tensor: Tensor, src: int) -> Tensor:
        if tensor.layout != torch.strided or tensor.is_quantized:
            return tensor.copy_(self.broadcast_object(tensor, src))
        part = once(tensor)
        there = self._home(part).resolve_conj().resolve_neg().contiguous()
        dist.broadcast(as_bytes(there), src)  # backends know a few types only
        if there is not part:
            part.copy_(there)
        return tensor

    def gather_objects(self, value: Any) -> list[Any]:
        values = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        values = [value]
        dist.broadcast_object_list(values, src)
        return values[0]

    def barrier(self) -> None:
        self.all_reduce(torch.zeros(1), "sum")

    def meet(
        self,
        call: str,
        limit: float | None = None,
        what: Sequence[str] = (),
        words: Sequence[int] = WORDS,
        problem: str = "",
    ) -> list[list[int]]:
        if self.world_size == 1:
            return super().meet(call, limit, what, words, problem)
        self.check_together(call)
        if self._meeting is None:
            raise UsageError(f"{call} after the end of the run: call it before run.close() or inside the with block")
        return self._meeting.meet(call, meeting.LIMIT if limit is None else limit, what, words, problem)

    def turn(self) -> Turn | None:
        if self.world_size == 1:
            return None
        self._turns += 1
        store = PrefixStore(f"first/{self._turns}", self._store)
        return Turn(store, self.rank, self.world_size, lambda: self._store.add("left", 0) > 0)

    def leave(self) -> Meeting | None:
        """Announce that this rank makes no more calls."""
        left, self._meeting = self._meeting, None
        if left is not None:
            left.leave()
        return left


class _Done:
    """Work that needs no waiting."""

    def wait(self, *_: Any) -> None: ...


class ProcessGroupStrategy(Strategy):
    """A strategy on top of torch's default process group (the user's own, if there is one)."""

    _ours = False
    comm: GroupComm

    def backend(self) -> str:
        """The setting, else nccl on CUDA and gloo elsewhere; with nccl, gloo serves host tensors."""
        wanted = self.config.backend or ("nccl" if self.device.type == "cuda" else "gloo")
        if wanted == "nccl" and self.device.type != "cuda":
            raise PlanError(
                f"backend 'nccl' needs CUDA devices, but this rank's device is {self.device.type!r}: "
                "use --backend gloo or leave it out"
            )
        return "cpu:gloo,cuda:nccl" if wanted == "nccl" else wanted

    def setup(self) -> None:
        backend = self.backend()
        let_gloo_finish_at_exit()  # before the callbacks that disconnect: it comes after them
        if not dist.is_initialized():
            self._connect(backend)
            self._ours = True
        self.comm = GroupComm(dist.get_rank(), dist.get_world_size(), self.device)

    def _connect(self, backend: str) -> None:
        topology = self.topology
        if topology.world_size == 1:
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
            return
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
        if missing:
            raise TopologyError(
                f"rank {topology.rank} of {topology.world_size} cannot find the others: {' and '.join(missing)} "
                "not set; start the script by phalanx run or torchrun, or set them"
            )
        try:
            dist.init_process_group(
                backend, store=_own_part(topology), rank=topology.rank, world_size=topology.world_size
            )
        except dist.DistNetworkError as error:
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            raise PlanError(f"rank {topology.rank} cannot rendezvous at {where}: {error}") from error

    def teardown(self, failed: bool) -> None:
        left = self.comm.leave()
        if not self._ours:
            return
        if not failed:
            _disconnect()
            if left is not None and self.topology.rank == 0 and not _agent_keeps_store():
                atexit.register(left.see_off)
        elif self.device.type != "cuda":  # nccl's end would wait for ranks that never come
            # Closed connections make the other ranks fail too: ours is to be reported before theirs.
            atexit.register(_disconnect)


def _agent_keeps_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


_stores: dict[tuple[str | None, ...], Store] = {}
_parts = 0  # of them that were given out, in this process, and so on every rank


def _own_part(topology: Topology) -> Store:
    """Where the ranks of a new group find each other.

    One store serves a process's runs, one after the other: of two at one port, a quick rank may enter the old one.
    """
    global _parts
    _parts += 1
    key = (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], str(topology.rank), str(topology.world_size))
    if key not in _stores:
        meeting = rendezvous("env://", topology.rank, topology.world_size, timeout=default_pg_timeout)
        _stores[key] = next(iter(meeting))[0]
    return PrefixStore(f"phalanx/{_parts}", _stores[key])


def _disconnect() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def broadcast_state(model: nn.Module, comm: Comm) -> None:
    """Rank 0's parameters and buffers on every rank."""
    broadcast_tensors((*model.parameters(), *model.buffers()), comm)


def broadcast_tensors(tensors: Iterable[Tensor], comm: Comm) -> None:
    """Rank 0's on every rank, in place."""
    if comm.world_size == 1:
        return
    with torch.no_grad():
        for tensor in tensors:
            comm.broadcast(tensor.detach(), 0)
