"""One warning for a session whose compressor is known not to train with the optimizer that uses its results."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..options import POOR_UNDER_ADAM, POOR_UNDER_MOMENTUM
from ..session import Session
from ..sessions.advice import DIVIDE, kind_of, warn_of

_DIVIDING = (
    torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax, torch.optim.Adagrad,
    torch.optim.RMSprop,
)  # fmt: skip
"""Optimizers that divide by a root of second moments of gradients; AdamW is an Adam."""


def watch(session: Session, parameters: Iterable[torch.Tensor], sharded: bool = False) -> None:
    """Look at the first optimizer that steps one of the parameters: tell a session that plans for itself, and warn on
    rank 0 of one that does not go with the compressor.

    Args:
        sharded: the optimizers of this package do not know the parameters.
    """
    session.judge_for(None)
    spec = session.compressor or "none"
    kind = kind_of(spec)
    poor = kind in (*POOR_UNDER_ADAM, *POOR_UNDER_MOMENTUM) and session.rank == 0
    if session.topology.size == 1 or not (poor or session.planning):
        return
    known = weakref.ref(session)
    own, done = {id(p): weakref.ref(p) for p in parameters}, list[bool]()

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if done or not any(_is_known(own, p) for group in optimizer.param_groups for p in group["params"]):
            return
        done.append(True)  # a hook may not remove itself while hooks run
        session = known()
        if session is not None and type(optimizer) is torch.optim.SGD:  # of others only they know what they divide by
            session.judge_for("sgd")
        found = _poor_for(optimizer, kind) if poor else None
        if found is not None:
            what, (whose, better) = f"{type(optimizer).__name__} with compressor {spec!r}", found
            warn_of(what, whose, "" if sharded else f"espresso_mpi.torch.{better}, or ")

    weakref.finalize(session, register_optimizer_step_pre_hook(look).remove)


def _poor_for(optimizer: torch.optim.Optimizer, kind: str) -> tuple[str, str] | None:
    """Which optimizers do not go with a compressor of gradients, and what to take instead, if this is or may be one."""
    if isinstance(optimizer, torch.optim.SGD):
        poor = kind in POOR_UNDER_MOMENTUM and any(group["momentum"] for group in optimizer.param_groups)
        return ("this optimizer", "MomentumSGD") if poor else None
    own = any(kind_.__module__.startswith(__package__ + ".") for kind_ in type(optimizer).__mro__)
    if kind not in POOR_UNDER_ADAM or own or isinstance(optimizer, (torch.optim.ASGD, torch.optim.LBFGS)):
        return None  # those of this package are made for such gradients
    whose = "this optimizer" if isinstance(optimizer, _DIVIDING) else f"AdamW and others that {DIVIDE}, if it does"
    return whose, "OnebitAdam"


def _is_known(own: dict[int, weakref.ref[torch.Tensor]], parameter: torch.Tensor) -> bool:
    known = own.get(id(parameter))
    return known is not None and known() is parameter
