"""``count_sketch``: about the k = ratio·n largest elements of the sum over all ranks, found in a count sketch.

Sketched-SGD (Ivkin et al., 2019) with the sketch of FetchSGD (Rothchild et al., 2020) in two rounds. The ranks first
sum a sketch: ``rows`` tables of ``columns·n`` buckets; in each every element is added to one bucket with a sign. The
median over the rows of an element's signed buckets estimates the summed element: without bias in each row, and there
with a variance of at most ``‖x‖²/buckets``, so elements well above ``‖x‖/√buckets`` are found. All ranks then send the
exact values of the k elements with the largest estimates, which are summed as they are: 32·(2·ratio + rows·columns)
bits per element, most of them for the sketch.

Unlike top-k it finds what is large in the sum and not what is large somewhere, and its messages do not grow with the
ranks. It needs a few large elements among many small ones; of normal values it chooses little better than chance.

A sketch promises nothing for every x, and equal values are its worst case. So a share ``explore`` of the k is drawn at
random, as Ivkin et al. fill up their choice: a contraction with ``δ = explore·k/n`` in expectation.

In a row the vector is cut into segments as long as the table, and each is rotated by a random number of buckets and
given a random sign. Two elements of one segment then never meet, two of different ones with probability 1/buckets
exactly, and signs of those that meet are independent: all that the estimates' mean and variance rest on. And memory is
read in order; a bucket sums its segments in order, so that its bits do not depend on threads or device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import get_num_threads

from .base import Compressor
from .by_address import Entry, KernelCall
from .checks import check_number, check_positive_int
from .context import Context, Summary
from .kernels.cpu import host, kept_entries, sketch_entries
from .kernels.cpu import linear_sparse as sparse
from .kernels.cpu import sparse as cpu_sparse
from .kernels.cpu.count_sketch import LEAST_BUCKETS, draws_of, estimate, mark, sketch, take
from .registry import register


@register
@dataclass(frozen=True)
class CountSketch(Compressor):
    """Heavy hitters of the sum. Payload: k uint32 indices in rising order, zeros up to a multiple of 16, then their k
    float32 values. Summary: the rows of the sketch one after another.

    Args:
        ratio: share of the elements that are sent, in (0, 1]; at least one element is.
        rows: independent estimates, at most 7; an even number counts as the next odd one.
        columns: buckets of a row as a share of the elements, in (0, 1]; at least 16.
        explore: share of the elements sent that is drawn at random, in [0, 1]; 0 allows no error feedback.
    """

    ratio: float = 0.01
    rows: int = 5
    columns: float = 0.02
    explore: float = 0.1
    name = "count_sketch"
    examples = ("count_sketch:ratio=0.2,rows=3,columns=0.1", "count_sketch:rows=1,columns=1.0,explore=0.0")
    common = True
    sparse = True

    def __post_init__(self) -> None:
        check_number("count_sketch", "ratio", self.ratio, 0, 1, above=True)
        check_positive_int("count_sketch", "rows", self.rows, high=7)
        check_number("count_sketch", "columns", self.columns, 0, 1, above=True)
        check_number("count_sketch", "explore", self.explore, 0, 1)

    # --- sizes ---

    def count(self, n: int) -> int:
        """How many of n elements are sent."""
        return cpu_sparse.count(n, self.ratio)

    def depth(self) -> int:
        """Rows of the sketch."""
        return self.rows | 1

    def buckets(self, n: int) -> int:
        """Buckets of a row."""
        return min(n, max(LEAST_BUCKETS, round(self.columns * n)))

    def header(self, n: int) -> int:
        return sparse.padded(4 * self.count(n))

    def nbytes(self, n: int) -> int:
        return self.header(n) + 4 * self.count(n)

    @property
    def element(self) -> str:
        return "float32"

    def summary(self, n: int) -> Summary:
        return Summary(self._agreed(n), "sum")

    # --- promises ---

    def contraction(self, n: int) -> float:
        return self.explore * self.count(n) / n if self.count(n) < n else 1.0

    def decode_traffic(self, n: int) -> int:
        return cpu_sparse.scattered_traffic(n, self.count(n)) + self.nbytes(n)

    # --- the work ---

    def _summarise_cpu(self, x: np.ndarray, summary: np.ndarray, residual: np.ndarray | None, context: Context) -> None:
        if residual is not None:
            sparse.sanitised_sum(residual, x)
        tiles = 1 if x.size < host.PARALLEL_MIN else get_num_threads()
        sketch(x if residual is None else residual, summary, self.depth(), sparse.seed_of(context), tiles)

    def _encode_cpu(self, x: np.ndarray, payload: np.ndarray, residual: np.ndarray | None, context: Context) -> None:
        indices, values = self._split(payload, x.size)
        seed = sparse.seed_of(context)
        scores = context.scratch("scores", x.size, np.float32, x)
        estimate(scores, context.summary, self.depth(), seed)
        mark(scores, _drawn(self, x.size, context), seed)
        sparse.choose(scores, indices, values, context)
        payload[4 * indices.size : self.header(x.size)] = 0
        take(values, indices, x, host.EMPTY if residual is None else residual)

    def _decode_cpu(self, payload: np.ndarray, out: np.ndarray, add: bool, context: Context) -> None:
        cpu_sparse.decode(out, *self._split(payload, out.size), add)

    # --- by address ---

    def summariser(self, n: int) -> KernelCall | None:
        return self._kernel(sketch_entries.summarise_at, n, shares=True, summary=self._agreed(n)) if n else None

    def encoder(self, n: int) -> KernelCall | None:
        if not n:
            return None
        choice, scratch = kept_entries.choice_of_largest(n, self.count(n))
        scratch += sketch_entries.scratch_of(n)
        agreed = self._agreed(n)
        return self._kernel(sketch_entries.encode_at, n, choice, shares=True, summary=agreed, scratch=scratch)

    def decoder(self, n: int) -> KernelCall | None:
        return self._kernel(sketch_entries.decode_at, n) if n else None

    def _kernel(self, entry: Entry, n: int, choice: tuple[float, ...] = (), **needs: Any) -> KernelCall:
        numbers = (self.count(n), self.depth(), self.buckets(n), self.header(n), self.explore)
        return KernelCall(entry, (*numbers, *choice), **needs)

    def _agreed(self, n: int) -> int:
        return self.depth() * self.buckets(n)

    # --- on GPUs ---

    def _summarise_cuda(self, x: Any, summary: Any, residual: Any, context: Context) -> None:
        from .kernels.cuda import count_sketch as cuda_count_sketch

        cuda_count_sketch.summarise(x, summary, residual, self.depth(), context.shared)

    def _encode_cuda(self, x: Any, payload: Any, residual: Any, context: Context) -> None:
        from .kernels.cuda import count_sketch as cuda_count_sketch

        header = payload[: self.header(x.size)].view(np.uint32)
        draws = _drawn(self, x.size, context)
        cuda_count_sketch.encode(x, residual, header, *self._split(payload, x.size), self.depth(), draws, context)

    def _decode_cuda(self, payload: Any, out: Any, add: bool, context: Context) -> None:
        from .kernels.cuda import topk as cuda_topk

        cuda_topk.decode(*self._split(payload, out.size), out, add)

    def _split(self, payload: Any, n: int) -> tuple[Any, Any]:
        """The payload's two parts as (uint32 indices, float32 values) views."""
        return payload[: 4 * self.count(n)].view(np.uint32), payload[self.header(n) :].view(np.float32)


def _drawn(method: CountSketch, n: int, context: Context) -> int:
    """How many positions are drawn at random: ``explore·k`` on average, if that is no whole number."""
    return int(draws_of(method.count(n), method.explore, sparse.seed_of(context)))
