"""Samples of the gradients of the first steps, by which a session judges compressors (``fidelity``)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence, Set

import numpy as np

from ..arrays import device
from ..arrays.buffers import Gradient
from ..types import TensorSpec

WINDOW = 7
"""Steps whose gradients are kept, the last ones: all that are watched by default."""

SAMPLED = 1 << 19
"""Elements of a step that are kept at most, of all tensors together, on every rank: 2 MiB per step. Judging takes
time in proportion to it, in which the ranks do not train."""

SAMPLED_WHOLE = 1 << 21
"""The same if a method for matrices is judged, which needs whole tensors: 8 MiB per step."""

LEAST = 4096
"""Elements of a large tensor that are kept nevertheless: by fewer, the error of a single tensor is not known well."""

RUNS, SHORTEST = 8, 2048
"""Pieces that the sample of a large tensor consists of, at equal distances: rows of embeddings differ. And their least
elements: the blocks of compressors have up to so many, which should not mix rows that lie apart."""


class Samples:
    """The gradients of the last steps of this rank, or pieces of them.

    Args:
        whole: whether whole tensors are needed, as far as possible (``SAMPLED_WHOLE``).
    """

    def __init__(self, whole: bool = False) -> None:
        self._total = SAMPLED_WHOLE if whole else SAMPLED
        self.steps: deque[dict[str, tuple[TensorSpec, np.ndarray]]] = deque(maxlen=WINDOW)
        self._now: dict[str, tuple[TensorSpec, np.ndarray]] = {}
        self._sizes: dict[str, int] = {}
        self._most = 0

    def take(self, gradients: Iterable[Gradient]) -> None:
        """Copy what is needed of gradients that are about to be synchronised. The first step only tells the sizes."""
        for gradient in gradients:
            spec = gradient.spec
            if spec.dtype is None or not spec.size:
                continue
            self._sizes[spec.name] = spec.size
            if self._most:
                self._now[spec.name] = spec, _sampled(gradient, self._most)

    def end_step(self, begun: Set[str] = frozenset()) -> None:
        """The step that these gradients belong to is over; those in ``begun`` belong to the next one."""
        if self._most:
            self.steps.append({name: taken for name, taken in self._now.items() if name not in begun})
        elif self._sizes:
            self._most = max(LEAST, largest_share(list(self._sizes.values()), self._total))
        self._now = {name: taken for name, taken in self._now.items() if name in begun}

    def clear(self) -> None:
        """Forget everything."""
        self.steps.clear()
        self._now, self._sizes, self._most = {}, {}, 0

    def of(self, name: str, size: int) -> np.ndarray:
        """The gradients of a tensor, float32 (steps, elements); steps with other sizes or infinite values are left out.

        Empty, if there are none.
        """
        found = [step[name] for step in self.steps if name in step]
        rows = [values for spec, values in found if spec.size == size and np.isfinite(values).all()]
        return np.array([row for row in rows if row.size == rows[-1].size], np.float32)


def largest_share(sizes: Sequence[int], total: int) -> int:
    """The largest number of elements such that no tensor gives more, and all together give at most ``total``.

    Example:
        >>> from espresso_mpi.autotune.samples import largest_share
        >>> largest_share([10, 100, 200], 150)
        70
    """
    left = total
    for place, size in enumerate(sorted(sizes)):
        share = left // (len(sizes) - place)
        if size > share:
            return max(1, share)
        left -= size
    return max(sizes)


def _sampled(gradient: Gradient, most: int) -> np.ndarray:
    """Up to so many elements of a gradient as float32 in host memory."""
    array, n = gradient.array, gradient.array.size
    count = 1 if n <= most else max(1, min(RUNS, most // SHORTEST))
    length = min(n, most // count)
    starts = [(n - length) * run // max(1, count - 1) for run in range(count)]
    raw = np.concatenate([device.to_host(array[start : start + length]) for start in starts])
    if gradient.spec.dtype == "float16":
        return raw.view(np.float16).astype(np.float32)
    if gradient.spec.dtype == "bfloat16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.astype(np.float32)
