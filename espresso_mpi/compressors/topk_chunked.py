"""``topk_chunked``: the J chunks of largest energy over all ranks (TopKC), values only: about 32·ratio + 32/chunk bits.

The ranks first sum their chunks' squared norms, 32/chunk bits per element. So all choose the same chunks, the payloads
are summed as they are, and what is left of all ranks together obeys ``Σ‖x - C(x)‖² ≤ (1 - δ) Σ‖x‖²`` with
``δ = J/chunks``; so does that of a rank alone. For independent normal values the squared error relative to ``‖x‖²`` is
``1 - P(χ²[chunk + 2] > t)`` with ``P(χ²[chunk] > t) = J/chunks``: little better than chance. It wins by locality, where
large values stand together, as they do in the rows of weight matrices (Han et al., 2024).

With ``values=float16`` the ranks derive a common power of two from the agreed energies: neither a value nor the sum
over the ranks can leave the range of float16, whatever the scale of the gradients. What rounding loses stays in the
residual.

A summary holds the energy E itself between 2⁻¹⁰⁰ and 2¹⁰⁰, values of magnitude 1e-15 to 1e15. Beyond, where the squares
would leave float32, it grows as the eighth root of E: the order of the chunks is still that of E, but the energies of
several ranks do not add up exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .base import Compressor
from .by_address import KernelCall
from .checks import check_choice, check_number, check_positive_int
from .context import Context, Summary
from .kernels.cpu import chunked_entries as chunked
from .kernels.cpu import host, kept_entries
from .kernels.cpu import linear_sparse as sparse
from .kernels.cpu.sparse import zero
from .kernels.cpu.topk_chunked import (
    LANES,
    doublings_of,
    error_of_halves,
    kept_of_gaussian,
    put,
    scale_of,
    summarise,
    take,
)
from .registry import register


@register
@dataclass(frozen=True)
class TopKChunked(Compressor):
    """Chunked top-k. Payload: one float32 scale, J uint32 chunk indices in rising order, zeros up to a multiple of 16;
    then the J chunks' values divided by the scale, the last chunk filled up with zeros: J·chunk float32 or float16.

    The scale is 1 for float32. Equal energies are taken in order of their index.

    Args:
        ratio: share of the chunks that are sent, in (0, 1]; at least one chunk is.
        chunk: elements of a chunk, rounded up to a multiple of 16; tensors of fewer elements have one smaller chunk.
            Large chunks have a small summary, small ones choose better: at 1.6 bits per element, the summary's
            included, 256 loses least of normal values.
        values: "float32" or "float16".
    """

    ratio: float = 0.01
    chunk: int = 256
    values: str = "float32"
    name = "topk_chunked"
    examples = (
        "topk_chunked:ratio=0.3,chunk=16",
        "topk_chunked:ratio=0.1,chunk=48,values=float16",
        "topk_chunked:ratio=1.0",
    )
    common = True

    def __post_init__(self) -> None:
        check_number("topk_chunked", "ratio", self.ratio, 0, 1, above=True)
        check_positive_int("topk_chunked", "chunk", self.chunk, high=1 << 20)
        check_choice("topk_chunked", "values", self.values, ("float32", "float16"))

    # --- sizes ---

    def length(self, n: int) -> int:
        """Elements of a chunk."""
        return -(-min(self.chunk, n) // LANES) * LANES

    def chunks(self, n: int) -> int:
        return -(-n // self.length(n)) if n else 0

    def count(self, n: int) -> int:
        """How many chunks are sent."""
        chunks = self.chunks(n)
        return min(chunks, max(1, round(self.ratio * chunks)))

    def header(self, n: int) -> int:
        return sparse.padded(4 * (1 + self.count(n))) if n else 0

    def nbytes(self, n: int) -> int:
        return self.header(n) + self.count(n) * self.length(n) * self._kind.itemsize

    @property
    def element(self) -> str:
        return self.values

    @property
    def _kind(self) -> np.dtype[Any]:
        """The type of the values; halves are handled as their bits."""
        return np.dtype(np.float32 if self.values == "float32" else np.uint16)

    def summary(self, n: int) -> Summary:
        return Summary(self.chunks(n), "sum")

    # --- promises ---

    def contraction(self, n: int) -> float:
        share = self.count(n) / self.chunks(n)
        return share if self.values == "float32" else share * (1 - 2.0**-20)

    def gaussian_error(self, n: int) -> float:
        kept = kept_of_gaussian(self.length(n), self.count(n) / self.chunks(n))
        return 1 - kept + (kept * error_of_halves() if self.values == "float16" else 0)

    def decode_traffic(self, n: int) -> int:
        return 8 * min(n, self.count(n) * self.length(n)) + self.nbytes(n)

    # --- the work ---

    def _summarise_cpu(self, x: np.ndarray, summary: np.ndarray, residual: np.ndarray | None, context: Context) -> None:
        summarise(x, host.EMPTY if residual is None else residual, summary, self.length(x.size))

    def _encode_cpu(self, x: np.ndarray, payload: np.ndarray, residual: np.ndarray | None, context: Context) -> None:
        head, indices, values = self._split(payload, x.size)
        chosen = context.scratch("energies", indices.size, np.float32, x)
        sparse.choose(context.summary, indices, chosen, context)
        scale = np.float32(1) if self.values == "float32" else scale_of(chosen, doublings_of(context.ranks))
        head[0] = scale
        head[1 + indices.size :] = 0
        take(values, indices, x, host.EMPTY if residual is None else residual, scale, self.length(x.size))

    def _decode_cpu(self, payload: np.ndarray, out: np.ndarray, add: bool, context: Context) -> None:
        head, indices, values = self._split(payload, out.size)
        if not add:
            zero(out)
        put(values, indices, out, head[0], self.length(out.size), add)

    # --- by address ---

    def summariser(self, n: int) -> KernelCall | None:
        if not n:
            return None
        return KernelCall(chunked.summarise_at, self._numbers(n), grain=self.length(n), summary=self.chunks(n))

    def encoder(self, n: int) -> KernelCall | None:
        if not n:
            return None
        choice, scratch = kept_entries.choice_of_largest(self.chunks(n), self.count(n))
        scratch += sparse.padded(4 * self.count(n))
        numbers, summary = (*self._numbers(n), *choice), self.chunks(n)
        return KernelCall(chunked.encode_at, numbers, summary=summary, scratch=scratch, needs_context=True)

    def decoder(self, n: int) -> KernelCall | None:
        return KernelCall(chunked.decode_at, self._numbers(n)) if n else None

    def _numbers(self, n: int) -> tuple[float, ...]:
        return self.length(n), self.chunks(n), self.count(n), self.header(n), float(self.values == "float16")

    # --- on GPUs ---

    def _summarise_cuda(self, x: Any, summary: Any, residual: Any, context: Context) -> None:
        from .kernels.cuda import topk_chunked as cuda_topk_chunked

        cuda_topk_chunked.summarise(x, summary, residual, self.length(x.size))

    def _encode_cuda(self, x: Any, payload: Any, residual: Any, context: Context) -> None:
        from .kernels.cuda import topk_chunked as cuda_topk_chunked

        doublings = doublings_of(context.ranks) if self.values == "float16" else None
        parts = self._split(payload, x.size)
        cuda_topk_chunked.encode(x, residual, *parts, self.length(x.size), doublings, context)

    def _decode_cuda(self, payload: Any, out: Any, add: bool, context: Context) -> None:
        from .kernels.cuda import topk_chunked as cuda_topk_chunked

        cuda_topk_chunked.decode(out, *self._split(payload, out.size), self.length(out.size), add)

    def _split(self, payload: Any, n: int) -> tuple[Any, Any, Any]:
        """The payload's header as float32, its indices as uint32, its values as float32 or the bits of float16."""
        header = self.header(n)
        indices = payload[4 : 4 + 4 * self.count(n)].view(np.uint32)
        return payload[:header].view(np.float32), indices, payload[header:].view(self._kind)
