"""Which parameter each name of a session stands for, so that two models never share residuals."""

from __future__ import annotations

import gc
import weakref
from weakref import WeakKeyDictionary

import torch

from ..errors import ConfigError
from ..session import Session

_TAKEN: WeakKeyDictionary[Session, dict[str, weakref.ref[torch.Tensor]]] = WeakKeyDictionary()


def take(session: Session, name: str, parameter: torch.Tensor) -> None:
    """Note that a name stands for a parameter.

    Raises:
        ConfigError: it stands for one of another model.
    """
    taken = _TAKEN.setdefault(session, {})
    if _is_other(taken, name, parameter):
        gc.collect()  # a model and its hooks refer to each other
        if _is_other(taken, name, parameter):
            raise ConfigError(
                f"{name}: two models of one session have a parameter of this name, so they would share its residual; "
                f"open a session for each model, close() the GradientSync of the former one, or give both models to "
                f"one torch.nn.ModuleDict"
            )
    taken[name] = weakref.ref(parameter)


def free(session: Session, name: str, parameter: torch.Tensor) -> None:
    """Take back ``take``."""
    taken = _TAKEN.get(session, {})
    if name in taken and taken[name]() is parameter:
        del taken[name]


def _is_other(taken: dict[str, weakref.ref[torch.Tensor]], name: str, parameter: torch.Tensor) -> bool:
    known = taken[name]() if name in taken else None
    return known is not None and known is not parameter
