"""The communication hook of DistributedDataParallel.

torch reads the annotations of a hook, so they must not be texts: no ``from __future__ import annotations`` here.
"""

import gc
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import ConfigError
from ..session import Session
from ..sessions.handles import Handle
from . import advice, names
from .loss_scale import follow
from .overlap import Overlap


def ddp_hook(session: Session, bucket: distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages the gradients of a DDP bucket by a session: ``ddp.register_comm_hook(session, ddp_hook)``.

    Each gradient is pushed under the name of its parameter, so residuals stay with their parameters when DDP rebuilds
    its buckets. The result is that of ``session.sync``, bit for bit. The process group of DDP (gloo, nccl, …) carries
    the rest: parameters at the start, and buffers. The first 16 steps find out what is quicker, as in ``GradientSync``:
    to push each bucket during the backward pass, or to synchronise all of them at its end. A loop with a ``GradScaler``
    calls ``follow_scaler(session, scaler)`` once.

    Raises:
        ConfigError: the state is no session, the ranks of the process group are not those of the session, the bucket
            is of no DDP model, or another model of the session has parameters of the same names; others as
            ``Handle.wait``; from ``backward()``.

    Example:
        >>> ddp.register_comm_hook(session, espresso_mpi.torch.ddp_hook)  # doctest: +SKIP
    """
    if not isinstance(session, Session):
        raise ConfigError(
            f"ddp_hook: got {session!r} as its state; expected a Session: register_comm_hook(session, ddp_hook)"
        )
    known = _KNOWN.get(session)
    if known is None:
        known = _KNOWN[session] = _Backward(session)
    return known.take(bucket)


@dataclass(eq=False)
class _Model:
    """A model whose buckets come to the hook.

    Attributes:
        overlap: whether its buckets travel during the backward pass.
        held: gradients that travel at the end of this one, by name.
        complete: whether the last bucket of this one has come.
    """

    overlap: Overlap
    held: dict[str, torch.Tensor] = field(default_factory=dict)
    complete: bool = False


class _Backward:
    """The buckets of a backward pass that are on their way by one session.

    Attributes:
        models: whose buckets have come, by number; what a dropped DDP model leaves is dropped too.
    """

    def __init__(self, session: Session) -> None:
        ranks = distributed.get_world_size()
        if ranks != session.topology.size:
            raise ConfigError(
                f"ddp_hook: the process group has {ranks} ranks, the session {session.topology.size}; start the "
                f"program by mpirun, and init_process_group with MPI's rank and size"
            )
        self._session = weakref.ref(session)  # the session is the key of what holds this
        self._known = WeakTensorKeyDictionary()  # by identity; a freed tensor's id may be another's
        self.models: WeakValueDictionary[int, _Model] = WeakValueDictionary()  # in the same order on every rank
        self._count = count()
        self._under_way: list[tuple[Sequence[Handle], torch.futures.Future[Any], torch.Tensor]] = []

    def take(self, bucket: distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        parameters = bucket.parameters()
        session = self._session()
        assert session is not None
        known = [self._known.get(p) for p in parameters]  # looking up is slow: once
        if None in known:
            self._meet(session, parameters[0])
            known = [self._known[p] for p in parameters]
        model: _Model = known[0][1]
        if bucket.index() == 0:  # a pass before this one may have failed
            model.held, model.complete = {}, False
            model.overlap.begin()
            follow(session)
        handles = _sent(session, model, {name: gradient for (name, _), gradient in zip(known, bucket.gradients())})
        model.complete = bucket.is_last()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self._under_way.append((handles, future, bucket.buffer()))
        if _in_backward():  # DDP waits for the futures in a callback of this kind that it adds after the last bucket
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)  # each: a pass may have failed
        elif handles or model.complete:
            self._finish()
        return future

    def _meet(self, session: Session, parameter: torch.Tensor) -> None:
        """Note the names of the parameters of a model that has this one."""
        found = _named_with(parameter)
        for name, p in found:
            names.take(session, name, p)
        model = _Model(Overlap("auto", weakref.proxy(session), f"ddp_hook {found[0][0]}"))
        self._known.update({p: (name, model) for name, p in found})
        self.models[next(self._count)] = model
        advice.watch(session, [p for _, p in found])

    def _finish(self) -> None:
        under_way, self._under_way = self._under_way, []
        complete = [model for model in self.models.values() if model.complete]
        for model in complete:
            held, model.held, model.complete = model.held, {}, False
            session = self._session()
            if held and session is not None:
                session.sync(held)  # what this raises, ``backward`` raises
        for handles, _, _ in under_way:
            for handle in handles:
                handle.wait()
        for _, future, buffer in under_way:
            future.set_result(buffer)
        for model in complete:
            model.overlap.step_ended()


def _in_backward() -> bool:
    """Whether DDP calls the hook while gradients are computed. Otherwise no parameter of the bucket is used on this
    rank, or it is the first pass of a static graph: DDP then waits in the callback from which it calls the hook."""
    return torch._C._current_autograd_node() is not None


def _sent(session: Session, model: _Model, named: Mapping[str, torch.Tensor]) -> list[Handle]:
    """Push the gradients of a bucket, or hold them."""
    if not model.overlap.now:
        model.held.update(named)
        return []
    if model.overlap.singly:
        return [session.push(name, gradient) for name, gradient in named.items()]
    return [session.push_together(named)]


_KNOWN: WeakKeyDictionary[Session, _Backward] = WeakKeyDictionary()


def overlaps(session: Session) -> bool | None:
    """Whether buckets travel during the backward pass, of any model; None until the first steps have found it out."""
    known = _KNOWN.get(session)
    if known is None or not known.models or not all(model.overlap.settled for model in known.models.values()):
        return None
    return any(model.overlap.now for model in known.models.values())


def _named_with(parameter: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The parameters of the DDP model that has one of them. A hook is not told whose hook it is."""
    for found in gc.get_objects():
        if issubclass(type(found), DistributedDataParallel):
            named = list(found.module.named_parameters())
            if any(p is parameter for _, p in named):
                return named
    raise ConfigError("ddp_hook: the bucket's parameters are of no DistributedDataParallel; register the hook on one")
