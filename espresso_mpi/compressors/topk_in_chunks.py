"""``topk_in_chunks``: the k elements of largest magnitude in each chunk of neighbours; SparseLoCo's choice.

A contraction with ``δ = k/chunk``, for it loses no more of any chunk than its smallest elements (Sarfi et al., 2025).
For normal values it loses little more than ``topk`` of the same share: 0.8808 against 0.8806 of ``‖x‖²`` at 64 of 4096.
Every part of a tensor sends its share, which layers of unlike scale, or the memory of error feedback, may need.

Positions are in the code of ``kept``: 8 bits for each of 64 in 4096, where an index within the chunk has 12.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from . import kept
from .checks import check_positive_int
from .context import Context
from .kernels.cpu import chunk_choice, host, kept_entries
from .registry import register


@dataclass(frozen=True)
class InChunks(kept.Rounded):
    """What ``topk_in_chunks`` and ``dct_topk`` share.

    Args:
        chunk: neighbours among which k are chosen.
        k: elements of a chunk that are sent; of a shorter one all, if it has no more.
        values: "fp32", or "fp16", "int8", "int4", "int2" or "onebit".
    """

    chunk: int = 4096
    k: int = 64
    values: str = "fp32"

    def __post_init__(self) -> None:
        check_positive_int(self.name, "chunk", self.chunk, high=1 << 20)
        check_positive_int(self.name, "k", self.k, high=1 << 20)
        self._check_values()

    def count(self, n: int) -> int:
        return chunk_choice.count(n, self.chunk, self.k)

    def contraction(self, n: int) -> float:
        size = min(n, self.chunk)
        return self._contraction_of(min(self.k, size) / size if n else 1.0, self.count(n))

    def gaussian_error(self, n: int) -> float | None:
        """Of chunks that are not short."""
        size = min(n, self.chunk)
        if not size:
            return None
        share = min(self.k, size) / size
        return self._gaussian_error(n, chunk_choice.gaussian_error(size, min(self.k, size)), share)


@register
@dataclass(frozen=True)
class TopKInChunks(InChunks, kept.Kept):
    """The k largest of each chunk. Payload: their uint32 indices in rising order, then their float32 values.

    With other ``values``: the coded positions, then the payload of the values (``kept``).

    Args:
        chunk: neighbours among which k are chosen; the last ones of a tensor are a smaller chunk.
        k: elements of a chunk that are sent; of a smaller chunk all, if it has no more.
        values: "fp32", or "fp16", "int8", "int4", "int2" or "onebit" with coded positions.
    """

    name = "topk_in_chunks"
    examples = ("topk_in_chunks:chunk=50,k=7", "topk_in_chunks:chunk=256,k=16,values=int2")

    def _choice(self, n: int) -> kept.Choice | None:
        return kept.Choice(kept_entries.encode_in_chunks_at, (self.chunk, self.k))

    def _choose_cpu(self, x: np.ndarray, plain: np.ndarray, residual: np.ndarray | None, context: Context) -> None:
        _, indices, sent = self._split(plain)
        left = host.EMPTY if residual is None else residual
        chunk_choice.choose(x, left, indices, sent, self.chunk, self.k)

    def _choose_cuda(self, x: Any, plain: Any, residual: Any, context: Context) -> None:
        from .kernels.cuda import chunk_choice as cuda_chunk_choice

        _, indices, sent = self._split(plain)
        cuda_chunk_choice.choose(x, residual, indices, sent, self.chunk, self.k)
