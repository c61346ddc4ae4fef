"""``dct_topk``: the k largest coefficients of the cosine transform of each chunk (DeMo, Peng et al., 2024).

Each chunk of neighbours is transformed (DCT-II, orthonormal), and its k largest coefficients are sent: with positions
in the code of ``kept``, 5 bits for each of 8 in 64, and values as they are or rounded. What moves slowly along a row of
a weight matrix is in few coefficients. The paper cuts matrices into squares and transforms both dimensions; here a
chunk is a piece of the flat tensor, so that tensors can be cut and fused as for every method.

The transform keeps lengths, so this is a contraction with ``δ = k/chunk``, but for rounding. For independent normal
values the coefficients are such values, too: the error is that of ``topk_in_chunks`` with the same arguments.

With rounded values, chunks whose magnitudes are all below 1e-27 may be sent as zeros: coefficients are sent divided by
``2**⌈log₂(chunk)/2⌉``, which keeps those of the largest values in range.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .by_address import Entry, HasAddress, KernelCall, KernelTable
from .checks import check_power_of_two
from .context import Context
from .kernels.cpu import chunk_choice, dct, host, kept_entries, positions
from .registry import register
from .topk_in_chunks import InChunks

_ROUNDING = 2.0**-20
"""What rounding takes of δ at most, and more."""


@register
@dataclass(frozen=True)
class DctTopK(InChunks):
    """The k largest DCT coefficients of each chunk. Payload: their coded positions, zeros up to a multiple of 16; then
    their values divided by ``2**⌈log₂(chunk)/2⌉`` in order of position, as float32 or as the payload of ``values``.

    Args:
        chunk: neighbours that are transformed together: a power of two up to 256. The last ones of a tensor are padded
            with zeros to a power of two.
        k: coefficients of a chunk that are sent; of a smaller chunk all, if it has no more.
        values: "fp32", or "fp16", "int8", "int4", "int2" or "onebit": how coefficients are rounded.
    """

    chunk: int = 64
    k: int = 8
    values: str = "fp32"
    name = "dct_topk"
    powers_of_two = ("chunk",)
    examples = ("dct_topk:chunk=16,k=16", "dct_topk:chunk=32,k=3,values=int4")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_power_of_two(self.name, "chunk", self.chunk, 1, dct.MOST)

    def count(self, n: int) -> int:
        return chunk_choice.count(dct.padded(n, self.chunk), self.chunk, self.k)

    def nbytes(self, n: int) -> int:
        k = self.count(n)
        return self._where(n).nbytes + (4 * k if self.values == "fp32" else self._coder.nbytes(k)) if n else 0

    def contraction(self, n: int) -> float:
        return super().contraction(dct.padded(n, self.chunk)) * (1 - _ROUNDING)

    def gaussian_error(self, n: int) -> float | None:
        return super().gaussian_error(dct.padded(n, self.chunk))

    def _where(self, n: int) -> positions.Layout:
        return positions.layout(dct.padded(n, self.chunk), self.count(n))

    # --- the work ---

    def _encode_cpu(self, x: np.ndarray, payload: np.ndarray, residual: np.ndarray | None, context: Context) -> None:
        coefficients, indices, sent = self._room(x, payload, context)
        forward, _ = dct.tables_of(x.size, self.chunk)
        dct.forward(x, host.EMPTY if residual is None else residual, coefficients, self.chunk, *forward)
        chunk_choice.choose(coefficients, host.EMPTY, indices, sent, self.chunk, self.k)
        where = self._where(x.size)
        positions.write(indices, indices.size, *where.split(payload), where.low)
        if self.values != "fp32":
            self._coder.encode(sent, payload[where.nbytes :], None, context)
        if residual is not None:
            self._back_cpu(payload, residual, dct.SUBTRACT, context)

    def _decode_cpu(self, payload: np.ndarray, out: np.ndarray, add: bool, context: Context) -> None:
        self._back_cpu(payload, out, dct.ADD if add else dct.STORE, context)

    def _back_cpu(self, payload: np.ndarray, out: np.ndarray, how: int, context: Context) -> None:
        where, coefficients = self._where(out.size), self._coefficients(out, context)
        seen = self._seen(payload, out.size, context)
        positions.scatter(*where.split(payload), where.low, seen, coefficients, False, context)
        _, back = dct.tables_of(out.size, self.chunk)
        dct.back(out, coefficients, self.chunk, *back, how)

    # --- by address ---

    def encoder(self, n: int) -> KernelCall | None:
        return self._kernel(kept_entries.encode_coefficients_at, n) if n else None

    def decoder(self, n: int) -> KernelCall | None:
        return self._kernel(kept_entries.decode_coefficients_at, n) if n else None

    def _kernel(self, entry: Entry, n: int) -> KernelCall:
        form, calls = self._form(n)
        length, (forward, back) = dct.padded(n, self.chunk), dct.tables_of(n, self.chunk)
        tables: list[float | HasAddress] = [KernelTable(table) for table in (*forward, *back)]
        parameters = (*form, self.chunk, self.k, length, *tables)
        scratch = kept_entries.scratch_for_coefficients(length, self.count(n), self._where(n).highs)
        return KernelCall(entry, parameters, calls=calls, scratch=scratch)

    # --- on GPUs ---

    def _encode_cuda(self, x: Any, payload: Any, residual: Any, context: Context) -> None:
        from .kernels.cuda import chunk_choice as cuda_chunk_choice
        from .kernels.cuda import dct as cuda_dct
        from .kernels.cuda import positions as cuda_positions

        coefficients, indices, sent = self._room(x, payload, context)
        cuda_dct.forward(x, residual, coefficients, self.chunk)
        cuda_chunk_choice.choose(coefficients, None, indices, sent, self.chunk, self.k)
        where = self._where(x.size)
        cuda_positions.write(indices, None, *where.split(payload), where.low)
        if self.values != "fp32":
            self._coder.encode(sent, payload[where.nbytes :], None, context)
        if residual is not None:
            self._back_cuda(payload, residual, dct.SUBTRACT, context)

    def _decode_cuda(self, payload: Any, out: Any, add: bool, context: Context) -> None:
        self._back_cuda(payload, out, dct.ADD if add else dct.STORE, context)

    def _back_cuda(self, payload: Any, out: Any, how: int, context: Context) -> None:
        from .kernels.cuda import dct as cuda_dct
        from .kernels.cuda import positions as cuda_positions

        where, coefficients = self._where(out.size), self._coefficients(out, context)
        seen = self._seen(payload, out.size, context)
        cuda_positions.scatter(*where.split(payload), where.low, seen, coefficients, False, context)
        cuda_dct.back(out, coefficients, self.chunk, how)

    # --- arrays, on the device of the values ---

    def _coefficients(self, like: Any, context: Context) -> Any:
        return context.scratch("dct-coefficients", dct.padded(like.size, self.chunk), np.float32, like)

    def _room(self, x: Any, payload: Any, context: Context) -> tuple[Any, Any, Any]:
        """Memory for the coefficients, and for the positions and values of those that go."""
        k = self.count(x.size)
        indices = context.scratch("dct-indices", k, np.uint32, x)
        if self.values == "fp32":
            return self._coefficients(x, context), indices, self._seen(payload, x.size, context)
        return self._coefficients(x, context), indices, context.scratch("dct-sent", k, np.float32, x)

    def _seen(self, payload: Any, n: int, context: Context) -> Any:
        """The values that a payload holds; with ``fp32`` a view of it."""
        where = self._where(n)
        if self.values == "fp32":
            return payload[where.nbytes :].view(np.float32)
        return self._decoded(payload, where, self.count(n), context)
