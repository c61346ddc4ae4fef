"""Sessions whose gradients are multiplied by the scale of a ``torch.amp.GradScaler``."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.amp.grad_scaler import OptState

from ..errors import ConfigError
from ..session import Session


class _LossScale:
    """A scaler, and the scale in which the residuals of a session are."""

    def __init__(self, scaler: Any) -> None:
        self.scaler, self._scale = scaler, scaler.get_scale()
        self._optimizers: dict[int, weakref.ref[torch.optim.Optimizer]] = {}

    def follow(self, session: Session) -> None:
        scale = self.scaler.get_scale() if self.scaler.is_enabled() else self._scale
        if scale != self._scale:
            session.rescale(scale / self._scale)
            self._scale = scale

    def has_unscaled(self, parameters: Iterable[torch.Tensor]) -> bool:
        states = self.scaler._per_optimizer_states if self.scaler.is_enabled() else {}
        numbers = [number for number, state in states.items() if state["stage"] is OptState.UNSCALED]
        if not numbers:
            return False
        own = set(map(id, parameters))
        found = (self._optimizer(number) for number in numbers)
        return any(id(p) in own for one in found if one is not None for g in one.param_groups for p in g["params"])

    def _optimizer(self, number: int) -> torch.optim.Optimizer | None:
        """The optimizer with this id: a scaler notes nothing else of it."""
        known = self._optimizers.get(number)
        if known is None or known() is None:
            every = (found for found in gc.get_objects() if issubclass(type(found), torch.optim.Optimizer))
            self._optimizers = {id(found): weakref.ref(found) for found in every}
            known = self._optimizers.get(number)
        return None if known is None else known()


_KNOWN: WeakKeyDictionary[Session, _LossScale] = WeakKeyDictionary()


def follow_scaler(session: Session, scaler: torch.amp.GradScaler) -> None:
    """Scale the residuals of a session whenever the scale of its gradients changes.

    For ``ddp_hook`` and ``ShardSync``; ``GradientSync(scaler=)``, ``hook_accelerator`` and the strategy for Lightning
    call it. The residuals change before the next gradients travel, on all ranks.

    Args:
        session: with ``nonfinite="skip_all"``.
        scaler: of the loop.

    Raises:
        ConfigError: the session has another ``nonfinite``, or follows another scaler.

    Example:
        >>> import torch
        >>> session = espresso_mpi.Session(compressor="int8", nonfinite="skip_all")
        >>> espresso_mpi.torch.follow_scaler(session, torch.amp.GradScaler("cpu"))
        >>> session.close()
    """
    if session.nonfinite != "skip_all":
        raise ConfigError(
            f"the session has nonfinite={session.nonfinite!r}; a GradScaler needs 'skip_all', by which every rank "
            f"skips a step in which the gradients of one overflow; open the session with that"
        )
    known = _KNOWN.get(session)
    if known is not None and known.scaler is not scaler:
        raise ConfigError("the session follows another GradScaler; use one for both, or another session")
    if known is None:
        _KNOWN[session] = _LossScale(scaler)


def follow(session: Session) -> None:
    """Bring residuals to the scale of the gradients that travel next. Collective if the scale has changed."""
    known = _KNOWN.get(session)
    if known is not None:
        known.follow(session)


def has_unscaled(session: Session, parameters: Iterable[torch.Tensor]) -> bool:
    """Whether the scaler that a session follows has divided gradients of these parameters by the scale already."""
    known = _KNOWN.get(session)
    return known is not None and known.has_unscaled(parameters)
