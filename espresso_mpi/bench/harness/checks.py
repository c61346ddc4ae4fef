"""What goes into a collective, the same in every run, and how many elements of what comes out are wrong."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ...types import Route, TensorSpec

# --- inputs -----------------------------------------------------------------------------------------------------------


class Inputs:
    """Normal float32 values of some tensors, different on every rank and reproducible on any.

    Args:
        shapes: by tensor name.
    """

    def __init__(self, comm: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._comm, self._shapes = comm, shapes
        self.mine = self._made(comm.rank)
        self._all: list[dict[str, np.ndarray]] = []

    def _made(self, rank: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng([rank, len(self._shapes)])
        return {name: rng.standard_normal(shape, np.float32) for name, shape in self._shapes.items()}

    def of_all(self) -> list[dict[str, np.ndarray]]:
        """Every rank's values, in rank order; only a rank that asks for them pays for the memory."""
        if not self._all:
            self._all = [self._made(rank) for rank in range(self._comm.size)]
        return self._all

    def copies(self) -> dict[str, np.ndarray]:
        """This rank's values in new arrays."""
        return {name: x.copy() for name, x in self.mine.items()}

    def refill(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Put this rank's values into arrays of the same names."""
        for name, x in self.mine.items():
            arrays[name][...] = x

    def error(self) -> float | None:
        """Of all results so far; None: it is not measured."""
        return None


# --- checks -----------------------------------------------------------------------------------------------------------


def wrong_together(comm: Any, results: Iterable[np.ndarray], count: Callable[[], int]) -> int:
    """Wrong elements over all ranks. Collective.

    Args:
        results: the arrays that are checked, contiguous.
        count: this rank's wrong elements of them. Where all ranks hold the same bits, only rank 0 counts, for all.
    """
    digest = hashlib.blake2b()
    for x in results:
        digest.update(x.data)
    if len(set(comm.allgather(digest.digest()))) == 1:
        return comm.bcast(count() if comm.rank == 0 else None) * comm.size
    return comm.allreduce(count())


def wrong_sum(comm: Any, total: np.ndarray, sources: Callable[[], Sequence[np.ndarray]]) -> int:
    """Elements over all ranks whose mean, from a sum over the ranks, is wrong. Collective.

    Args:
        sources: returns what every rank put in.
    """
    mean = total / np.float32(comm.size)
    return wrong_together(comm, [mean], lambda: wrong_mean(mean, sources()))


def wrong_mean(x: np.ndarray, sources: Sequence[np.ndarray]) -> int:
    """Elements further from the float64 mean than float32 sums of this many terms can be."""
    total, size = np.zeros(x.size), np.zeros(x.size)
    for source in sources:
        total += source
        size += np.abs(source)
    return int(np.count_nonzero(~(np.abs(x - total / len(sources)) <= size * 2.0**-23)))


def wrong_bits(x: np.ndarray, route: Route, topology: Any, sources: Sequence[np.ndarray], spec: str, name: str) -> int:
    """Elements that are not exactly the sum of decoded payloads along the route.

    Args:
        x: a session's first result, without feedback. sources: what every rank put in.
        spec: spec of the compressor, with the tensor's shape settled. name: the tensor's.
    """
    from ... import compressors
    from ..reference import synchronised

    compressor = compressors.get(spec).shaped(x.shape)
    flat = [source.reshape(-1) for source in sources]
    expected = synchronised(route, topology, flat, compressor, name=name)[0]
    return int(np.count_nonzero(x.reshape(-1).view(np.uint32) != expected.view(np.uint32)))


def wrong_of(session: Any, results: Mapping[str, np.ndarray], sources: Sequence[Mapping[str, np.ndarray]]) -> int:
    """Wrong elements of a session's first results without feedback, tensor by tensor as each was sent."""
    wrong = 0
    for name, x in results.items():
        strategy = session.strategy(TensorSpec(name, x.shape, "float32"))
        every = [source[name] for source in sources]
        if strategy.compressor == "none":
            wrong += wrong_mean(x.reshape(-1), [source.reshape(-1) for source in every])
        else:
            wrong += wrong_bits(x, strategy.route, session.topology, every, strategy.compressor, name)
    return wrong
