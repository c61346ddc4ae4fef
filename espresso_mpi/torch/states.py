"""States of sessions as torch tensors, so that ``torch.save`` and ``torch.load(weights_only=True)`` take them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from ..session import Session


class KeepsState:
    """The base class of objects whose whole state is that of their session."""

    session: Session

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals and counters as tensors, for ``torch.save``. Collective."""
        state: dict[str, Any] = to_tensors(self.session.state_dict())
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``state_dict`` returned on this rank. Collective."""
        self.session.load_state_dict(from_tensors(state))


def to_tensors(state: Any) -> Any:
    """Replace the numpy arrays of a state by tensors.

    Args:
        state: what ``Session.state_dict`` returns: arrays in nested dicts, lists and tuples.

    Returns:
        The same containers. Each tensor shares the memory of its array.

    Example:
        >>> espresso_mpi.torch.to_tensors({"arrays": {"w": np.zeros(2, np.float32)}, "version": 4})
        {'arrays': {'w': tensor([0., 0.])}, 'version': 4}
    """
    return _mapped(state, lambda value: torch.from_numpy(value) if isinstance(value, np.ndarray) else value)


def from_tensors(state: Any) -> Any:
    """Replace the tensors of a state by numpy arrays, as ``Session.load_state_dict`` expects them.

    Example:
        >>> import torch
        >>> espresso_mpi.torch.from_tensors({"w": torch.zeros(2)})["w"].dtype
        dtype('float32')
    """
    return _mapped(state, lambda value: value.cpu().numpy() if isinstance(value, torch.Tensor) else value)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, Mapping):
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(item, change) for item in value)
    return change(value)
