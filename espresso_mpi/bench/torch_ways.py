"""The ways in which ``bench torch`` trains: each a model, an optimizer, and what synchronises the gradients.

Nothing imports this file but ``bench torch``, when it runs: it needs PyTorch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import espresso_mpi.torch as adapter

from ..errors import ConfigError
from ..options import Tuning
from ..session import Session
from .gpt import GPT
from .gpt_shape import Shape

WAYS = ("alone", "gloo", "ddp", "push", "sync", "plain")
"""Computing alone; DDP over gloo; DDP over this library; ``GradientSync``, with overlap or all at once; and
``Session.sync`` of the gradients after the backward pass."""

_OWN = {"none": None, "fp16": default_hooks.fp16_compress_hook}
"""Torch's own hooks for gloo; ``powersgd`` takes a state."""

_PLANNING_STEPS = 200
"""Steps after which a session that plans by itself must have a plan."""


def open_groups() -> Any:
    """The process group of this library as the default one, and gloo's of the same ranks. Collective."""
    distributed.init_process_group(adapter.process_group.BACKEND)
    return distributed.new_group(backend="gloo", timeout=timedelta(minutes=10))


class Way:
    """One way; ``step`` is one step of training on a batch that stays the same. Collective, as are its methods.

    Args:
        spec: way and method, such as ``gloo:fp16`` or ``push:int8``; ``push:auto`` plans by itself.
        gloo: its process group.
    """

    def __init__(self, comm: Any, spec: str, shape: Shape, batch: int, gloo: Any) -> None:
        self.spec, (way, _, method) = spec, spec.partition(":")
        self._comm, self._model = comm, GPT(shape, seed=0)
        self._run: Callable[..., torch.Tensor] = self._model
        self._wait: Callable[[], object] = lambda: None
        self.session: Session | None = None
        self.planning: tuple[float, int] | None = None
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        generator = torch.Generator().manual_seed(comm.rank)
        self._data = torch.randint(0, shape.alphabet, (2, batch, shape.context), generator=generator)
        if way == "gloo":
            self._by_gloo(method, gloo)
        elif way in ("ddp", "push", "sync", "plain"):
            self._by_us(way, method)
        elif way != "alone":
            raise ConfigError(f"bench torch: {spec!r}; expected one of {', '.join(WAYS)}, and a method after a colon")

    def _by_gloo(self, method: str, gloo: Any) -> None:
        name, _, rank = method.partition(":rank=")
        # Torch's PowerSGD over gloo mixes up the messages of several buckets: it gets one.
        cap = {"bucket_cap_mb": 10**4} if name == "powersgd" else {}
        ddp = DistributedDataParallel(self._model, process_group=gloo, **cap)
        if name == "powersgd":
            state = powerSGD_hook.PowerSGDState(gloo, int(rank or 4), start_powerSGD_iter=2)
            ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif name not in _OWN:
            raise ConfigError(f"bench torch: gloo:{method}; torch has hooks for fp16 and powersgd:rank=4, and none")
        elif (hook := _OWN[name]) is not None:
            ddp.register_comm_hook(gloo, hook)
        self._run = ddp

    def _by_us(self, way: str, method: str) -> None:
        options: dict[str, Any] = {"compressor": method}
        if method == "auto":
            options = {"plan": "auto", "tuning": Tuning()}
        self.session = Session(self._comm, **options)
        if way == "plain":
            named = dict(self._model.named_parameters())
            session = self.session
            self._wait = lambda: session.sync({name: p.grad for name, p in named.items()})
            return
        if way != "ddp":
            sync = adapter.GradientSync(self._model, self.session, overlap=way == "push", broadcast=False)
            self._wait = sync.wait
            return
        ddp = DistributedDataParallel(self._model)
        if method != "none":  # dense by the process group itself
            ddp.register_comm_hook(self.session, adapter.ddp_hook)
        self._run = ddp

    def settle(self) -> None:
        """Compile, rebuild buckets, and plan."""
        start = time.perf_counter()
        for _ in range(4):
            self.step()
        if self.spec.endswith(":auto") and self.session is not None:
            steps = 4
            while self.session.planning and steps < _PLANNING_STEPS:
                self.step()
                steps += 1
            self.planning = (time.perf_counter() - start, steps)

    def step(self) -> None:
        """Forward, backward, synchronise, update."""
        self._optimizer.zero_grad()
        self._run(*self._data).backward()
        self._wait()
        self._optimizer.step()

    def close(self) -> None:
        """Give back the session."""
        if self.session is not None:
            self.session.close()
