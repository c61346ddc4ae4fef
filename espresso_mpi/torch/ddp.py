"""The communication hook of DistributedDataParallel.

torch reads the annotations of a hook, so they must not be texts: no ``from __future__ import annotations`` here.
"""

import gc
import weakref
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import ConfigError
from ..session import Session
from ..sessions.handles import Handle
from . import advice, names
from .overlap import singly


def ddp_hook(session: Session, bucket: distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages the gradients of a DDP bucket by a session: ``ddp.register_comm_hook(session, ddp_hook)``.

    Each gradient is pushed under the name of its parameter, so residuals stay with their parameters when DDP rebuilds
    its buckets. The result is that of ``session.sync``, bit for bit. The process group of DDP (gloo, nccl, …) carries
    the rest: parameters at the start, and buffers.

    Raises:
        ConfigError: the ranks of the process group are not those of the session, the bucket is of no DDP model, or
            another model of the session has parameters of the same names; others as ``Handle.wait``; from
            ``backward()``.

    Example:
        >>> ddp.register_comm_hook(session, espresso_mpi.torch.ddp_hook)  # doctest: +SKIP
    """
    known = _KNOWN.get(session)
    if known is None:
        known = _KNOWN[session] = _Backward(session)
    return known.take(bucket)


class _Backward:
    """The buckets of a backward pass that are on their way by one session."""

    def __init__(self, session: Session) -> None:
        ranks = distributed.get_world_size()
        if ranks != session.topology.size:
            raise ConfigError(
                f"ddp_hook: the process group has {ranks} ranks, the session {session.topology.size}; start the "
                f"program by mpirun, and init_process_group with MPI's rank and size"
            )
        self._session = weakref.ref(session)  # the session is the key of what holds this
        self._names = WeakTensorKeyDictionary()  # by identity; a freed tensor's id may be another's
        self._under_way: list[tuple[Sequence[Handle], torch.futures.Future[Any], torch.Tensor]] = []

    def take(self, bucket: distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        parameters = bucket.parameters()
        session = self._session()
        assert session is not None
        known = [self._names.get(p) for p in parameters]  # looking up is slow: once
        if None in known:
            found = _named_with(parameters[0])
            for name, p in found:
                names.take(session, name, p)
            self._names.update({p: name for name, p in found})
            advice.watch(session, [p for _, p in found])
            known = [self._names[p] for p in parameters]
        named = dict(zip(known, bucket.gradients()))
        if singly(session):
            handles = [session.push(name, gradient) for name, gradient in named.items()]
        else:
            handles = [session.push_together(named)]
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self._under_way.append((handles, future, bucket.buffer()))
        try:  # DDP waits for the futures in a callback of this kind that it adds after the last bucket
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)  # each: a pass may have failed
        except RuntimeError:  # no backward pass: no parameter of the bucket is used on this rank
            self._finish()
        return future

    def _finish(self) -> None:
        under_way, self._under_way = self._under_way, []
        for handles, future, buffer in under_way:
            for handle in handles:
                handle.wait()  # what this raises, ``backward`` raises
            future.set_result(buffer)


_KNOWN: WeakKeyDictionary[Session, _Backward] = WeakKeyDictionary()


def _named_with(parameter: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The parameters of the DDP model that has one of them. A hook is not told whose hook it is."""
    for found in gc.get_objects():
        if issubclass(type(found), DistributedDataParallel):
            named = list(found.module.named_parameters())
            if any(p is parameter for _, p in named):
                return named
    raise ConfigError("ddp_hook: the bucket's parameters are of no DistributedDataParallel; register the hook on one")
