"""Steps along momenta in few bits where the variance is zero, for the variants of Adam that freeze it.

A parameter whose gradient was zero in the whole warm-up has v = 0: the row of a token that had not come, a layer that
was not trained. Its first gradient after that, or the noise of a compressor, would move it by η m/ε, a step that is
millions of times too long. So v = 0 counts as a typical v: the geometric mean of the positive ones of the same
parameter, or else of all. If none is positive, it counts as so large a v that only weight decay moves parameters. The
papers do not treat this case; DeepSpeed asks for a mask of such parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numba import prange

from ..compressors.kernels.cpu import host
from .rules import Slot
from .tensors import NumPy, Torch

LARGEST = 100
"""Exponent up to which a product with a correction of the bias is still a float32."""


@host.Kernel
def _exponents(bits):  # type: ignore[no-untyped-def]
    """Number of positive float32, given as int32, and the sum of their exponents, as of ``frexp``."""
    count, total = 0, 0
    for i in prange(bits.size):
        if bits[i] > 0:
            count += 1
            total += (bits[i] >> 23) - 126
    return count, total


def typical(count: int, total: int) -> float:
    """The geometric mean of positive numbers, as a power of two: from integers, so that all ranks find the same."""
    return 2.0 ** min(total // count, LARGEST) if count else 0.0


class TypicalVariances:
    """What counts as v where v is zero, by name of the parameter; 0 where no v is zero."""

    def __init__(self) -> None:
        self._arrays: dict[str, Any] = {}
        self._found: dict[str, float] = {}

    def forget(self) -> None:
        """The variances have changed."""
        self._arrays = {}

    def of(self, slots: Sequence[Slot[Any]], resting: Callable[[], Sequence[Slot[Any]]]) -> Mapping[str, float]:
        """The numbers of these parameters. The rule keeps their variances as ``v``.

        Args:
            resting: the other parameters of the optimizer: all of these may be new.
        """
        arrays = {slot.tensor.name: slot.kept["v"] for slot in slots}
        known = self._arrays
        if known.keys() != arrays.keys() or any(known[name] is not v for name, v in arrays.items()):
            self._arrays, self._found = arrays, _typical_of(slots, resting())
        return self._found


def _typical_of(slots: Sequence[Slot[Any]], resting: Sequence[Slot[Any]]) -> dict[str, float]:
    counts = {slot.tensor.name: _counted(slot.tensor.library, slot.kept["v"]) for slot in slots}
    others = [_counted(slot.tensor.library, slot.kept["v"]) for slot in resting]
    among_all = typical(*(sum(numbers) for numbers in zip((0, 0), *counts.values(), *others))) or 2.0**LARGEST
    sizes = {slot.tensor.name: slot.tensor.size for slot in slots}
    return {
        name: 0.0 if count == sizes[name] else typical(count, total) or among_all
        for name, (count, total) in counts.items()
    }


def _counted(library: NumPy | Torch, v: Any) -> tuple[int, int]:
    """Number of positive elements, and the sum of their exponents."""
    view = library.host_view(v)
    if view is not None:
        count, total = _exponents(view.view(np.int32))
        return int(count), int(total)
    positive = v[v > 0]
    return len(positive), int(library.exponents(positive).sum())
