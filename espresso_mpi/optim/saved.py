"""Checks of saved states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import StateError
from .tensors import difference


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
        raise StateError(f"{owner}: the state is a {type(state).__name__}; pass what state_dict() returned")
    names = set(expected)
    if set(saved) != names:
        raise StateError(f"{owner}: the state {difference(set(saved), names)}; load the state of this model")
    return saved
