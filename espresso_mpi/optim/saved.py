"""Checks of saved states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec
import numpy as np

from ..errors import StateError
from .tensors import Tensor, difference

C = TypeVar("C")


def entries(owner: str, state: Any, expected: Iterable[str], part: str | None = None) -> Mapping[str, Any]:
    """What a saved state has for each tensor.

    Args:
        owner: names the optimizer in errors.
        expected: the names of the parameters.
        part: the key of the tensors in the state; None: the state has nothing else.

    Raises:
        StateError: the state is none, or it belongs to other parameters.
    """
    saved = state.get(part) if part is not None and isinstance(state, Mapping) else state
    if not isinstance(saved, Mapping):
        got = "" if saved is state else f" of {part!r}"
        raise StateError(f"{owner}: the state{got} is a {type(saved).__name__}; pass what state_dict() returned")
    names = set(expected)
    if set(saved) != names:
        raise StateError(f"{owner}: the state {difference(set(saved), names)}; load the state of this model")
    return saved


def array(tensor: Tensor, entry: Any, key: str, kind: type = np.float32, positive: bool = False) -> np.ndarray:
    """One array of one tensor from a saved state: flat, of a type.

    Args:
        positive: values below zero are an error.

    Raises:
        StateError: it is missing or damaged, or does not fit.
    """
    try:
        value: np.ndarray = np.asarray(entry[key], kind)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise StateError(
            f"{tensor.name}: cannot read {key} of its state ({error!r}); load what state_dict returned"
        ) from None
    if value.shape != (tensor.size,) or not np.isfinite(value).all() or (positive and (value < 0).any()):
        kinds = "finite values, none below zero," if positive else "finite values"
        raise StateError(
            f"{tensor.name}: got {key} of shape {value.shape}; expected {kinds} of shape ({tensor.size},); load the "
            f"state of this model"
        )
    return value


def counters(owner: str, state: Any, kind: type[C]) -> C:
    """The counters of an optimizer, a dataclass, from what a saved state holds.

    Raises:
        StateError: they are missing or damaged.
    """
    try:
        return msgspec.convert(state, kind)
    except msgspec.ValidationError as error:
        raise StateError(f"{owner}: cannot read its counters ({error}); load what state_dict returned") from None
