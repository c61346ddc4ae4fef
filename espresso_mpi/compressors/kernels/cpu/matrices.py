"""How the low-rank methods see n values as a matrix, and the order of their sums.

A matrix M has ``rows`` rows of ``cols`` values, the last one filled up with zeros that are never stored. Its factors
hold one vector after another: P is ``rank`` vectors of length ``rows``, Q is ``rank`` vectors of length ``cols``.

The order of every sum is part of the format, so that any number of threads, and a GPU, write the same bytes:

- a row times a vector: LANES running sums side by side, then a tree over them;
- a column times a vector: running sums over CHUNK rows, then the sums of the chunks one after another;
- an element of P Qᵀ: a running sum over the vectors;
- a product of two vectors of a factor: as a row, in float64, where products of two float32 are exact.

The products take GROUP vectors at a time, held in registers, so M is read from memory once for ranks up to GROUP and
comes from the cache for the other groups. Factors are filled up with zero vectors to a multiple of GROUP.
"""

from __future__ import annotations

import math
from typing import NamedTuple

LANES = 32
CHUNK = 64
GROUP = 4

LARGEST_RANK = 256  # a GPU keeps as many products of vectors in its shared memory


class Matrix(NamedTuple):
    """How a method sees n values."""

    rows: int
    cols: int
    rank: int

    @property
    def groups(self) -> int:
        """The rank, filled up to whole groups."""
        return -(-self.rank // GROUP) * GROUP

    def length(self, factor: str) -> int:
        """How long the vectors of factor ``p`` or ``q`` are."""
        return self.rows if factor == "p" else self.cols

    def size(self, factor: str) -> int:
        """How many values that factor has."""
        return self.rank * self.length(factor)


def side(n: int) -> int:
    """The row length of a nearly square matrix of n values; a multiple of LANES unless that makes it much larger."""
    side = math.isqrt(max(0, n - 1)) + 1
    return side if n < 4096 else -(-side // LANES) * LANES


def share(rank: int, length: int) -> float:
    """How much of ‖M‖² a projection of its rows (or columns) of that length on random directions keeps on average.

    Exactly rank/length for any M, as the directions have independent entries of either sign; less what rounding takes.
    """
    return rank / max(1, length) * (1 - 2.0**-20)
