"""Memory of a session that the ranks of a node share."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..collectives.messages.agreement import on_every_rank
from ..errors import ConfigError, MismatchError
from .base import SessionBase

_LOG = logging.getLogger("espresso_mpi")


class Memory(SessionBase):
    """A session that makes arrays."""

    def empty(self, shape: int | Sequence[int], dtype: Any = np.float32) -> np.ndarray:
        """Make an array in memory that all ranks of the node share, so that dense sums are quicker. Collective.

        ``sync``, ``push``, ``allreduce`` and ``reduce`` sum in place if all ranks of the node pass the same part of the
        same array, such as a view of a layer. Otherwise they work as with any array. The results have the same bits.
        The memory is freed when no rank has the array or a view of it, also after ``close``, and at the end of the
        processes. See docs/collectives.md.

        Args:
            shape: the same on every rank.
            dtype: of numpy; the same on every rank.

        Returns:
            An uninitialised numpy array. If the ranks of a node cannot share memory, it is an ordinary array.

        Raises:
            ConfigError: the shape or the element type is invalid.
            MismatchError: ranks ask for different arrays.

        Example:
            >>> with espresso_mpi.Session() as session:
            ...     flat = session.empty(1000)  # torch.from_numpy(flat) is a tensor of it
            ...     layers = {"w": flat[:900].reshape(30, 30), "b": flat[900:]}
            ...     flat[:] = 0.5
            ...     session.sync(layers)["b"].shape
            (100,)
        """
        dims, kind, memory = self._together("empty", lambda: self._made_by_all(shape, dtype))
        return np.empty(dims, kind) if memory is None else memory.view(kind).reshape(dims)

    def _made_by_all(
        self, shape: int | Sequence[int], dtype: Any
    ) -> tuple[tuple[int, ...], np.dtype[Any], np.ndarray | None]:
        """Its dimensions and element type, and the shared memory for it as flat uint8, None if there is none."""
        (dims, kind), said = on_every_rank(
            self._transport,
            lambda: _checked(shape, dtype),
            ConfigError,
            say=lambda found: [found[0], found[1].str, found[1].name],
        )
        other = next((rank for rank, told in enumerate(said) if told != said[0]), None)
        if other is not None:
            describe = self._transport.describe
            raise MismatchError(
                f"empty: {describe(0)} asks for shape {tuple(said[0][0])} of {said[0][2]}, {describe(other)} for shape "
                f"{tuple(said[other][0])} of {said[other][2]}; pass the same on every rank"
            )
        return dims, kind, self._transport.shared_memory(math.prod(dims) * kind.itemsize)


def _checked(shape: Any, dtype: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """The dimensions and the element type."""
    try:
        kind = np.dtype(dtype)
        dims = np.broadcast_to(np.empty((), kind), shape).shape  # which checks that so much can be addressed
    except (TypeError, ValueError) as error:
        raise ConfigError(f"empty: shape={shape!r}, dtype={dtype!r}: {error}") from error
    if kind.hasobject:
        raise ConfigError(f"empty: dtype={dtype!r}; expected numbers")
    return dims, kind
