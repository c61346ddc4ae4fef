"""States of sessions as torch tensors, so that ``torch.save`` and ``torch.load(weights_only=True)`` take them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch

from ..session import Session

K = TypeVar("K", bound="KeepsState")


class KeepsState:
    """The base class of objects whose whole state is that of their session.

    They are context managers, which close at the end of the with-block. If an exception leaves it, the session that the
    object opened is given up, so that the other ranks hear of it.
    """

    session: Session
    _owns: bool

    def close(self) -> None:
        """Close the session if this opened it. Collective then."""
        if self._owns:
            self.session.close()

    def __enter__(self: K) -> K:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if kind is None:
            self.close()
        elif self._owns:
            self.session.__exit__(kind, error, trace)

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
