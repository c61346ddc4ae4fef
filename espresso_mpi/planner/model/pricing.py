"""What every operation of every option takes, for tensors of many sizes at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from espresso_mpi.compressors import Compressor
from espresso_mpi.errors import ConfigError

from .compiled_routes import Compiled
from .cost import Prices, price_table
from .needs import visited
from .profile import Profile

LONGEST = 1e15
"""Seconds of an option, 30 million years: sums and products of as many as there are, and of errors, stay finite."""


@dataclass(frozen=True)
class Block:
    """The dense options, or those of one compressor, at every size.

    Attributes:
        method: as in ``CandidateSet``; routes: int64 (options,), of each option.
        slots: float64 (sizes, slots), seconds of the operations; repeats: of each size the number of segments.
    """

    method: int
    routes: np.ndarray
    slots: np.ndarray
    repeats: list[int]


def priced(
    tables: Compiled, methods: Sequence[Compressor], profile: Profile, sizes: Sequence[tuple[int, int]],
    free_codecs: bool,
) -> list[Block]:  # fmt: skip
    """The operations of all options of tensors of each size: the dense ones, then of one compressor after the other.

    Args:
        sizes: (elements, bytes of one of them).
    """
    groups: list[tuple[int, Compressor | None, np.ndarray]] = [(-1, None, ~tables.packed)]
    groups += [(number, m, tables.packed & (m.linear | ~tables.sums)) for number, m in enumerate(methods)]
    return [
        _block(
            tables, number, np.flatnonzero(routes),
            [Prices(profile, size[0], method, size[1], free_codecs) for size in sizes],
        )
        for number, method, routes in groups
    ]  # fmt: skip


def _block(tables: Compiled, method: int, routes: np.ndarray, prices: Sequence[Prices]) -> Block:
    """The operations of options of one compressor, or of the dense ones, at every size."""
    segments = [one.segments() for one in prices]
    used = np.flatnonzero(visited(routes, tables.index, tables.count, len(tables.slots)))
    seconds = np.zeros((len(prices), max(1, len(tables.slots))))  # a single rank may have nothing to do
    seconds[:, used] = price_table([one for _, one in segments], [tables.slots[place] for place in used])
    repeats = [count for count, _ in segments]
    longest = float((seconds.max(axis=1, initial=0.0) * np.array(repeats)).max(initial=0.0))
    if not longest <= LONGEST:
        raise ConfigError(
            f"profile: with compressor {prices[0].compressor or 'none'} an operation takes {longest:.3g} s, by the "
            f"curves for tensors of up to {max(one.n for one in prices)} elements; expected at most {LONGEST:g}: is a "
            f"curve or a size in the wrong unit?"
        )
    return Block(method, routes, seconds, repeats)
