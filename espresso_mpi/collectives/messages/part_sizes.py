"""Whether what ranks send to each other has the size that is expected: all ranks compare the sizes of all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from espresso_mpi.errors import MismatchError

from .connection import Connection

Sizes = tuple[Sequence[int], Sequence[int]]
"""What a rank sends to each rank, and what it expects of each, in bytes or elements."""


def shown(sizes: Sizes) -> np.ndarray:
    """As flat uint8, for messages."""
    return np.array(sizes, np.int64).reshape(-1).view(np.uint8)


def unequal(rows: Sequence[np.ndarray]) -> tuple[int, int] | None:
    """(giver, taker) of the first part whose size they know differently; None: all fit.

    Args:
        rows: of all ranks, ``shown``.
    """
    sizes = np.array([row.view(np.int64) for row in rows]).reshape(len(rows), 2, len(rows))
    found = np.argwhere(sizes[:, 0] != sizes[:, 1].T)
    return (int(found[0, 0]), int(found[0, 1])) if found.size else None


def size_error(title: str, connection: Connection, ranks: tuple[int, int]) -> MismatchError:
    """The error for a part of which giver and taker know different sizes."""
    giver, taker = map(connection.describe, ranks)
    return MismatchError(
        f"{title}: what {giver} sends to {taker} has another size than what that rank expects; the splits of the one "
        f"must be what the other has received= for it"
    )
