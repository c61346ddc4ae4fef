"""Which parameter each name of a session stands for, so that two models never share residuals."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping, Sequence
from typing import Any
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
                f"one torch.nn.ModuleDict; pass named_parameters() to optimizers, whose names are numbers otherwise"
            )
    taken[name] = weakref.ref(parameter)


def take_all(session: Session, given: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Take several names, or none if one is an error."""
    taken = _TAKEN.setdefault(session, {})
    new = [(name, parameter) for name, parameter in given if name not in taken or taken[name]() is None]
    try:
        for name, parameter in given:
            take(session, name, parameter)
    except ConfigError:
        for name, parameter in new:
            free(session, name, parameter)
        raise


def free_all(session: Session, known: Mapping[torch.Tensor, str]) -> None:
    """Take back ``take`` of parameters."""
    for parameter, name in known.items():
        free(session, name, parameter)


def of_group(number: int, group: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """The names and parameters of an optimizer's group: as they were given, or numbers."""
    given = group.get("param_names") or [f"{number}.{index}" for index in range(len(group["params"]))]
    return list(zip(given, group["params"]))


def free(session: Session, name: str, parameter: torch.Tensor) -> None:
    """Take back ``take``."""
    taken = _TAKEN.get(session, {})
    if name in taken and taken[name]() is parameter:
        del taken[name]


def _is_other(taken: dict[str, weakref.ref[torch.Tensor]], name: str, parameter: torch.Tensor) -> bool:
    known = taken[name]() if name in taken else None
    return known is not None and known is not parameter
