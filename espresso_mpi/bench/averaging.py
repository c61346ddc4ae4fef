"""What averages the gradients of a model in PyTorch: DDP over gloo with torch's hooks, or this library.

Nothing imports this file but suites that train with PyTorch, when they run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import espresso_mpi.torch as adapter

from ..errors import ConfigError
from ..session import Session
from ..tuning import Tuning
from .harness.replicas import node_of
from .session_options import with_options

WAYS = ("alone", "gloo", "ddp", "push", "sync", "gradsync", "plain")
"""Computing alone; DDP over gloo; DDP over this library; ``GradientSync`` with overlap, all at once, or as it finds out
to be quicker; and ``Session.sync`` of the gradients after the backward pass."""

_OVERLAP: Mapping[str, Any] = {"push": True, "sync": False, "gradsync": "auto"}

_OWN = {"none": None, "fp16": default_hooks.fp16_compress_hook}
"""Torch's own hooks for gloo; ``powersgd`` takes a state."""


def open_groups() -> Any:
    """The process group of this library as the default one, if there is none yet, and gloo's of the same ranks.

    Collective.

    Raises:
        ConfigError: nothing says where the ranks meet.
    """
    if not distributed.is_initialized():
        if "RANK" not in os.environ:
            raise ConfigError("gloo: this process has no launcher; start it by espresso-mpi run or espresso-mpi lab")
        distributed.init_process_group(adapter.process_group.BACKEND)
    return distributed.new_group(backend="gloo", timeout=timedelta(minutes=10))


@contextmanager
def gloo_group() -> Iterator[Any]:
    """Gloo's group of ``open_groups`` for a with-block; what was opened is closed. Collective."""
    before = distributed.is_initialized()
    group = open_groups()
    try:
        yield group
    finally:
        distributed.destroy_process_group(group if before else None)


def tuning_of(method: str) -> Tuning | None:
    """The settings of ``auto``; of ``auto=onebit+int8``, with these compressors, whatever they do to the loss; and of
    ``auto@FILE``, with a file for the plan. None for others.
    """
    head, at, file = method.partition("@")
    auto, _, allowed = head.partition("=")
    if auto != "auto":
        return None
    if at and not file:
        raise ConfigError(f"{method!r}: expected the name of a file after @, such as auto@chosen.json")
    tuning = Tuning(tuple(allowed.split("+")), accuracy="fast") if allowed else Tuning()
    return replace(tuning, plan_file=file or None)


class Averaged:
    """A model whose gradients become their mean over the ranks. Collective, as are its methods.

    Args:
        spec: way and method, such as ``gloo:fp16`` or ``push:int8``; ``push:auto`` and its like plan, see
            ``tuning_of``; a way can have ``session_options``.
        gloo: its process group.
        dense: steps of torch's PowerSGD, at the beginning, that are dense; at least 2.
        seed: of stochastic compressors.
        share: of the time, which trials of ``push:auto`` may cost; with 1, they end soonest.

    Attributes:
        run: computes the loss of inputs and targets; its backward pass leaves gradients, or begins to average them.
        wait: to be called between the backward pass and what reads the gradients.
        session: of this library, if it is used.
        settled: returns whether the next steps run as all later ones do.
    """

    def __init__(
        self, comm: Any, spec: str, model: nn.Module, gloo: Any, dense: int = 2, seed: int = 0, share: float = 1.0
    ) -> None:  # fmt: skip
        self._comm, self._model = comm, model
        self.run: Callable[..., torch.Tensor] = model
        self.wait: Callable[[], object] = lambda: None
        self.settled: Callable[[], bool] = lambda: self.session is None or not self.session.planning
        self.session: Session | None = None
        self._gloo: _Gloo | None = None
        named, _, method = spec.partition(":")
        way, options = with_options(named)
        if options and way in ("gloo", "alone"):
            raise ConfigError(f"{spec!r}: {way} has no session; expected {way} without options")
        if way == "gloo":
            self._gloo = _Gloo(comm, method, model, gloo, dense)
            self.run = self._gloo.run
        elif way in ("ddp", "push", "sync", "gradsync", "plain"):
            self._by_us(way, method, seed, share, options)
        elif way != "alone":
            raise ConfigError(f"{spec!r}: expected one of {', '.join(WAYS)}, and a method after a colon")

    def _by_us(self, way: str, method: str, seed: int, share: float, options: dict[str, Any]) -> None:
        how: dict[str, Any] = {"compressor": method}
        tuning = tuning_of(method)
        if tuning is not None:
            how = {"plan": "auto", "tuning": replace(tuning, share=share)}
        self.session = Session(self._comm, seed=seed, **how, **options)
        self.session.judge_for(None)
        if way == "plain":
            named = dict(self._model.named_parameters())
            session = self.session
            self.wait = lambda: session.sync({name: p.grad for name, p in named.items()})
            return
        if way != "ddp":
            sync = adapter.GradientSync(self._model, self.session, overlap=_OVERLAP[way], broadcast=False)
            self.wait, self.settled = sync.wait, lambda: sync.overlaps is not None and not sync.session.planning
            return
        ddp = DistributedDataParallel(self._model)
        if method != "none":  # dense by the process group itself
            session = self.session
            ddp.register_comm_hook(session, adapter.ddp_hook)
            self.settled = lambda: adapter.ddp.overlaps(session) is not None and not session.planning
        self.run = ddp

    def sent(self) -> Mapping[str, int]:
        """Bytes that this rank has sent to others so far, by level. Those of ``ddp:none`` are not known."""
        if self._gloo is not None:
            return self._gloo.sent()
        return {"intra": 0, "inter": 0} if self.session is None else self.session.stats().bytes_by_level

    def close(self) -> None:
        """Give back the session."""
        if self.session is not None:
            self.session.close()


class _Gloo:
    """DDP over gloo.

    Gloo does not count bytes. It sums in a ring, in which each of p ranks sends 2(p-1)/p of the data to the next one.
    """

    def __init__(self, comm: Any, method: str, model: nn.Module, gloo: Any, dense: int) -> None:
        name, _, rank = method.partition(":rank=")
        # Torch's PowerSGD over gloo mixes up the messages of several buckets: it gets one.
        cap = {"bucket_cap_mb": 10**4} if name == "powersgd" else {}
        self._ddp = DistributedDataParallel(model, process_group=gloo, **cap)
        self._numel = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self._bytes, self._steps, self._state = 4, 0, None
        if name == "powersgd":
            self._state = powerSGD_hook.PowerSGDState(gloo, int(rank or 4), start_powerSGD_iter=dense)
            self._ddp.register_comm_hook(self._state, powerSGD_hook.powerSGD_hook)
        elif name not in _OWN:
            raise ConfigError(f"gloo:{method}: torch has hooks for fp16 and powersgd:rank=4, and none")
        elif (hook := _OWN[name]) is not None:
            self._bytes = 2
            self._ddp.register_comm_hook(gloo, hook)
        nodes = node_of(comm)
        self._level = "intra" if nodes[comm.rank] == nodes[(comm.rank + 1) % comm.size] else "inter"
        self._share = 2 * (comm.size - 1) / comm.size

    def run(self, *batch: torch.Tensor) -> torch.Tensor:
        """The model's loss, by DDP."""
        self._steps += 1
        return self._ddp(*batch)

    def sent(self) -> Mapping[str, int]:
        """Bytes that this rank has sent so far."""
        dense, summed = self._steps, 0
        if self._state is not None:
            dense = min(self._steps, self._state.start_powerSGD_iter)
            summed = self._state.total_numel_after_compression
        numel = dense * self._numel + summed
        return {"intra": 0, "inter": 0, self._level: round(self._share * self._bytes * numel)}
