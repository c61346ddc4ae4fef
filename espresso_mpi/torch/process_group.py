"""The process group ``"espresso"`` of ``torch.distributed``: its collectives by a session, its messages by MPI."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import distributed

from ..errors import ConfigError, EspressoError
from ..session import Session
from ..sessions.handles import Handle
from .monitored_barrier import monitored_barrier
from .sparse import allreduce_sparse
from .untraced import untraced
from .work import EndedWork, HandleWork, RequestWork, work_of

_LOG = logging.getLogger("espresso_mpi")

BACKEND = "espresso"

_OPS = {
    "SUM": "sum", "AVG": "mean", "PRODUCT": "prod", "MIN": "min", "MAX": "max", "BAND": "band", "BOR": "bor",
    "BXOR": "bxor",
}  # fmt: skip

_LAUNCHERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")
"""What launchers of MPI set: without them this process is no rank, and MPI is not started."""

_CHOSEN: set[str] = set()
"""Ports of torch's stores that this library chose: nobody else relies on them."""


def _mpi() -> Any:
    from mpi4py import MPI

    return MPI


def register() -> None:
    """Make ``init_process_group("espresso")`` known to torch; what ``torchrun`` sets is MPI's if it is not set."""
    if BACKEND.upper() in dir(distributed.Backend):
        return
    distributed.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
    if "RANK" not in os.environ and any(name in os.environ for name in _LAUNCHERS):
        found = _as_torchrun()
        if "MASTER_PORT" not in os.environ:
            _CHOSEN.add(found["MASTER_PORT"])
        for name, value in found.items():
            os.environ.setdefault(name, value)


def _as_torchrun() -> dict[str, str]:
    """The variables that ``torchrun`` sets, by MPI. Collective."""
    world = _mpi().COMM_WORLD
    host, port = world.bcast((_mpi().Get_processor_name(), _free_port()) if world.rank == 0 else None)
    node = world.Split_type(_mpi().COMM_TYPE_SHARED)
    found = {
        "RANK": world.rank, "WORLD_SIZE": world.size, "LOCAL_RANK": node.rank, "LOCAL_WORLD_SIZE": node.size,
        "MASTER_ADDR": host, "MASTER_PORT": port,
    }  # fmt: skip
    node.Free()
    return {name: str(value) for name, value in found.items()}


def _free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("", 0))
        return int(found.getsockname()[1])


def _create(options: Any, *_: Any) -> ProcessGroup:
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    world = _mpi().COMM_WORLD
    if world.size < len(ranks):
        raise ConfigError(
            f"init_process_group('espresso'): {len(ranks)} ranks, but MPI started {world.size}; start the program by "
            f"mpirun -n {len(ranks)}, or by espresso-mpi run -n {len(ranks)}"
        )
    group = world.group.Incl(ranks)
    comm = world.Create_group(group, tag=_tag(str(options.group_id)))
    made = ProcessGroup(comm, options.timeout)
    if not options.global_ranks_in_group:
        made.open()
        if os.environ.get("MASTER_PORT") in _CHOSEN:
            made.next_port = str(comm.bcast(_free_port() if comm.rank == 0 else None))
    return made


def _tag(name: str) -> int:
    return sum(map(ord, name)) % 30000


class _GroupSession(Session):
    """Torch's programs order their operations themselves, and wait for futures, which this library does not see."""

    guards_memory = False

    def abort(self, why: str) -> None:
        """End without the other ranks, whose calls fail."""
        self._engine.shutdown(why)


@untraced
class ProcessGroup(distributed.ProcessGroup):
    """One group of ranks. Operations begin in the order in which they are called, which every rank must keep.

    Args:
        comm: over the group's ranks, for this group alone; timeout: of every operation.
    """

    def __init__(self, comm: Any, timeout: timedelta) -> None:
        super().__init__(comm.rank, comm.size)
        self._comm, self._timeout = comm, timeout
        self._opened: _GroupSession | None = None
        self._ended = False
        self._name, self._desc = BACKEND, ""
        # Of the default group after this one. On the same port, a rank that is ahead would connect to the store of this
        # group, which rank 0 has yet to end.
        self.next_port: str | None = None

    @property
    def _session(self) -> _GroupSession:
        return self._opened or self.open()

    def open(self) -> _GroupSession:
        """Open the session, with all ranks: of the default group at once, since a first collective that is to return at
        once cannot wait for them; of others by their first collective, since many groups only exist.
        """
        self._opened = _GroupSession(self._comm, timeout=self._timeout.total_seconds())
        return self._opened

    def _call(
        self, operation: Callable[..., Any], x: torch.Tensor, *arguments: Any, opts: Any = None, **more: Any
    ) -> list[Handle]:
        """Start a collective; those of one kind are matched in the order in which they are called.

        Where torch waits for it at once, as ``opts`` say, this thread makes it, which then has ended: no handle.
        """
        waits = x.is_cpu and not getattr(opts, "asyncOp", True)
        found = operation(x, *arguments, blocking=waits, **more)
        return [] if waits else [found]

    def shutdown(self) -> None:
        """Close the session, which ends its thread, and free the communicator.

        ``destroy_process_group`` calls it on every rank of the group. A group that is shut down stays so.
        """
        opened, self._opened = self._opened, None
        healthy = not self._ended and (opened is None or opened.usable)
        self._ended = True
        if self.next_port:
            _CHOSEN.add(self.next_port)
            os.environ["MASTER_PORT"] = self.next_port
        try:
            if opened is not None:
                opened.close()
            if healthy:  # messages of a group that failed may still arrive
                self._comm.Free()
        except EspressoError as error:  # the other groups must end too
            _LOG.warning("destroy_process_group: %s: %s", self._name, error)

    def abort(self) -> None:
        """End at once, whatever is under way: it fails on all ranks, none of which waits for this one any more."""
        if self._opened is not None:
            self._opened.abort(f"rank {self.getRank()} aborted the process group {self._name!r}")

    def _require_one_each(self, what: str, tensors: Sequence[Any]) -> None:
        if len(tensors) != self.getSize():
            raise ConfigError(f"{what}: a list of {len(tensors)} tensors; expected {self.getSize()}, one of each rank")

    # --- names --------------------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        return BACKEND

    def getSize(self) -> int:
        return int(self._comm.size)

    def getRank(self) -> int:
        return int(self._comm.rank)

    def _set_group_name(self, name: str) -> None:
        self._name = name

    setGroupName = _set_group_name

    def getGroupName(self) -> str:
        return self._name

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_desc(self, text: str) -> None:
        self._desc = text

    setGroupDesc = _set_group_desc

    def getGroupDesc(self) -> str:
        return self._desc

    @property
    def group_desc(self) -> str:
        return self._desc

    # --- reductions ---------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        op = _op(opts)
        if any(x.is_sparse for x in tensors):
            return allreduce_sparse(self._session, tensors, op)
        handles = [h for x in tensors for h in self._call(self._session.allreduce, x.detach(), op, opts=opts)]
        return work_of(handles, list(tensors))

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Sequence[torch.Tensor], opts: Any) -> Any:
        op, root = _op(opts), opts.rootRank
        mine = [x.detach() if self.getRank() == root else x.detach().clone() for x in tensors]
        handles = [h for x in mine for h in self._call(self._session.reduce, x, op, opts=opts, root=root)]
        return work_of(handles, list(tensors))

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        # the session sums in its input, which other operations, or the program, may read meanwhile
        return self._reduce_scatter(output, input.detach().clone(), opts)

    def _reduce_scatter(self, output: torch.Tensor, own: torch.Tensor, opts: Any) -> HandleWork | EndedWork:
        call, x, (out, after) = self._session.reduce_scatter, own.reshape(-1), _target(output)
        return work_of(self._call(call, x, _op(opts), opts=opts, out=out), [output], after)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        works = [self._reduce_scatter_base(output, input, opts) for output, input in zip(outputs, inputs)]
        return _joined(works, outputs)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def reduce_scatter(self, outputs: Sequence[torch.Tensor], inputs: Sequence[Any], opts: Any = None) -> Any:
        works = []
        for output, each in zip(outputs, inputs):
            self._require_one_each("reduce_scatter", each)
            if len({x.numel() for x in each}) > 1:
                works.append(self._scatter_uneven(output, each, _op(opts)))
            else:
                own = torch.cat([x.detach().reshape(-1) for x in each])
                works.append(self._reduce_scatter(output, own, opts))
        return works[0] if len(works) == 1 else _joined(works, outputs)

    def _scatter_uneven(self, output: torch.Tensor, parts: Sequence[torch.Tensor], op: str) -> HandleWork:
        """Each rank gets one reduced part: parts of different sizes, which all ranks know."""
        copies = [part.detach().clone(memory_format=torch.contiguous_format) for part in parts]
        reduce = self._session.reduce
        handles = [h for root, copy in enumerate(copies) for h in self._call(reduce, copy, op, root=root)]
        return HandleWork(handles, [output], [lambda: _copied([output], [copies[self.getRank()]])])

    # --- copies -------------------------------------------------------------------------------------------------------

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any) -> Any:
        call, root = self._session.broadcast, opts.rootRank
        handles = [h for x in tensors for h in self._call(call, x.detach(), root, opts=opts)]
        return work_of(handles, list(tensors))

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        out, after = _target(output)
        return work_of(self._call(self._session.allgather, _read(input), opts=opts, out=out), [output], after)

    all_gather_single = _allgather_base

    def allgather_coalesced(self, outputs: Sequence[Any], inputs: Sequence[torch.Tensor], opts: Any = None) -> Any:
        return self.allgather([list(each) for each in zip(*outputs)], inputs, opts)

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        works = [self._allgather_base(output, input, opts) for output, input in zip(outputs, inputs)]
        return _joined(works, outputs)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def allgather(self, outputs: Sequence[Any], inputs: Sequence[torch.Tensor], opts: Any = None) -> Any:
        handles, after = [], list[Callable[[], None]]()
        for each, x in zip(outputs, inputs):
            self._require_one_each("all_gather", each)
            if len({part.numel() for part in each}) > 1:
                handles += self._gather_uneven(each, x, after)
                continue
            whole = x.new_empty((self.getSize(), *x.shape))
            handles += self._call(self._session.allgather, _read(x), opts=opts, out=_flat(whole))
            after.append(partial(_copied, each, whole))
        return work_of(handles, [x for each in outputs for x in each], after)

    def _gather_uneven(self, parts: Sequence[torch.Tensor], own: torch.Tensor, after: list[Any]) -> list[Handle]:
        """Every rank gives its part to all: parts of different sizes, which all ranks know."""
        buffers = [part.new_empty(part.shape) for part in parts]
        buffers[self.getRank()].copy_(own.detach().view(buffers[self.getRank()].shape))
        after.append(partial(_copied, parts, buffers))
        call = self._session.broadcast
        return [h for root, buffer in enumerate(buffers) for h in self._call(call, buffer, root)]

    def gather(self, outputs: Sequence[Any], inputs: Sequence[torch.Tensor], opts: Any) -> Any:
        handles, after = [], list[Callable[[], None]]()
        for number, x in enumerate(inputs):
            if self.getRank() == opts.rootRank:
                self._require_one_each("gather", outputs[number])
            whole = x.new_empty((self.getSize(), *x.shape)) if self.getRank() == opts.rootRank else None
            out = None if whole is None else _flat(whole)
            handles += self._call(self._session.gather, _read(x), opts=opts, root=opts.rootRank, out=out)
            if whole is not None:
                after.append(partial(_copied, outputs[number], whole))
        return work_of(handles, [x for each in outputs for x in each], after)

    def scatter(self, outputs: Sequence[torch.Tensor], inputs: Sequence[Any], opts: Any) -> Any:
        root, me, size = opts.rootRank, self.getRank(), self.getSize()
        handles, after = [], list[Callable[[], None]]()
        for number, output in enumerate(outputs):
            if me == root:
                self._require_one_each("scatter", inputs[number])
            one = output.numel()
            given = torch.cat([x.reshape(-1) for x in inputs[number]]) if me == root else output.new_empty(0)
            splits = [one] * size if me == root else [0] * size
            received = [one if rank == root else 0 for rank in range(size)]
            call, (out, copied) = self._session.alltoall, _target(output)
            handles += self._call(call, given, opts=opts, splits=splits, received=received, out=out)
            after += copied
        return work_of(handles, list(outputs), after)

    def alltoall_base(
        self, output: torch.Tensor, input: torch.Tensor, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> Any:
        size = self.getSize()
        rows = int(np.prod(input.shape[1:], dtype=np.int64))
        sent = [n * rows for n in input_splits] or [input.numel() // size] * size
        got = [n * rows for n in output_splits] or [output.numel() // size] * size
        call, (out, after) = self._session.alltoall, _target(output)
        return work_of(self._call(call, _read(input), opts=opts, splits=sent, received=got, out=out), [output], after)

    all_to_all_single = alltoall_base

    def alltoall(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None) -> Any:
        for each in (outputs, inputs):
            self._require_one_each("all_to_all", each)
        whole = torch.cat([x.reshape(-1) for x in inputs])
        out = outputs[0].new_empty(sum(x.numel() for x in outputs))
        sent, got = [x.numel() for x in inputs], [x.numel() for x in outputs]
        handles = self._call(self._session.alltoall, whole, opts=opts, splits=sent, received=got, out=out)
        return work_of(handles, list(outputs), [lambda: _copied(outputs, out.split(got))])

    def barrier(self, opts: Any = None) -> Any:
        here = torch.zeros(1, dtype=torch.uint8, device="cpu")
        limit = timedelta(0) if opts is None else opts.timeout
        return HandleWork(self._call(self._session.allgather, here), [], limit=limit)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; rank 0's error says which did not come. torch's own function refuses all but gloo."""
        monitored_barrier(self._comm, self._timeout if timeout is None else timeout, wait_all_ranks)

    # --- messages -----------------------------------------------------------------------------------------------------

    def send(self, tensors: Sequence[torch.Tensor], rank: int, tag: int = 0) -> Any:
        host = [x.detach().contiguous().cpu() for x in tensors]
        return RequestWork([self._comm.Isend(_bytes(x), rank, tag) for x in host], list(tensors), host, self._timeout)

    def recv(self, tensors: Sequence[torch.Tensor], rank: int, tag: int = 0) -> Any:
        host = [
            x.detach()
            if x.is_contiguous() and x.device.type == "cpu"
            else torch.empty(x.shape, dtype=x.dtype, device="cpu")
            for x in tensors
        ]
        requests = [self._comm.Irecv(_bytes(x), rank, tag) for x in host]
        return RequestWork(requests, list(tensors), host, self._timeout, receives=True)

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int = 0) -> Any:
        return self.recv(tensors, _mpi().ANY_SOURCE, tag)

    recvAnysource = recv_anysource


def _op(opts: Any) -> str:
    """The name of an operator of torch."""
    if opts is None:
        return "sum"
    return _named(getattr(opts.reduceOp, "op", opts.reduceOp))


@lru_cache
def _named(op: Any) -> str:
    name = str(op).split(".")[-1].upper()
    if name not in _OPS:
        raise ConfigError(f"the process group 'espresso' has no operator {name}; expected one of {', '.join(_OPS)}")
    return _OPS[name]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """One dimension over the same memory."""
    return tensor.detach().view(-1)


def _target(tensor: torch.Tensor) -> tuple[torch.Tensor, list[Callable[[], None]]]:
    """One dimension for a result, and what brings it to a tensor whose memory is strided."""
    if tensor.is_contiguous():
        return _flat(tensor), []
    dense = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return _flat(dense), [partial(_copied, [tensor], [dense])]


def _read(tensor: torch.Tensor) -> torch.Tensor:
    """One dimension over the same memory, or over a copy if that is strided."""
    return tensor.detach().reshape(-1)


def _joined(works: Sequence[HandleWork | EndedWork], outputs: Sequence[torch.Tensor]) -> HandleWork:
    """Several operations as one."""
    return HandleWork([handle for work in works for handle in work.handles], list(outputs))


def _copied(targets: Sequence[torch.Tensor], parts: Iterable[torch.Tensor]) -> None:
    for target, part in zip(targets, parts):
        target.detach().copy_(part.view(target.shape))


def _bytes(tensor: torch.Tensor) -> Any:
    return [tensor.view(-1).view(torch.uint8).numpy(), _mpi().BYTE]
