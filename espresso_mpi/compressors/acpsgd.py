"""``acpsgd``: low rank with one reduction a step (Zhang et al., 2023): the two factors of ``powersgd`` by turns.

In even steps Q, what the ranks learned in the step before, made orthonormal, and ``P = M Q`` is summed; in odd steps
P is given and ``Q = Mᵀ P`` is summed. Over two steps that is one step of the power iteration, and each step is as
cheap as a step of gradient summation can be: no rank waits for another before it encodes, and r·rows or r·cols float32
values travel instead of rows·cols.

The given factor is the same on all ranks only if they learned the same: they must begin together and miss no step.
Without anything learned it is random, of independent entries of either sign, and the expected error is exactly
``1 - rank/cols`` of ``‖x‖²`` in even steps and ``1 - rank/rows`` in odd ones, for any x. For a given factor nothing is
guaranteed but that the error is no larger than x, so it converges only with error feedback.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from .by_address import KernelCall
from .context import Context
from .families import low_rank
from .families.low_rank import LowRank
from .kernels.cpu import lowrank, matrices
from .kernels.cpu import lowrank_entries as entries
from .kernels.cpu.lowrank_entries import START
from .optional import Keeps
from .registry import register


@register
@dataclass(frozen=True)
class ACPSGD(LowRank):
    """Low rank, one reduction. Payload: 16 bytes that say which factor is given, that factor, then the other one.

    Each factor begins a room for rank·max(rows, cols) float32 that zeros fill, as they fill the header up to a multiple
    of 16 bytes. The header ends after the given factor's room; the other factor is summed.

    Args:
        rank: vectors in each factor, up to 256.
        cols: values in a row of the matrix. With 0, or where the factors would be no smaller than the values, the
            matrix is nearly square whatever the tensor's shape.
    """

    name = "acpsgd"
    examples = ("acpsgd:rank=1", "acpsgd:rank=6,cols=50")
    keeps: ClassVar[Keeps] = {"p": "forget", "q": "forget", "turn": "forget"}

    def header(self, n: int) -> int:
        return 4 * (START + -(-self._room(n) // 4) * 4) if n else 0

    def nbytes(self, n: int) -> int:
        return self.header(n) + 4 * self._room(n)

    def contraction(self, n: int) -> float:
        m = self.matrix(n)
        return matrices.share(m.rank, max(m.rows, m.cols))

    def gaussian_error(self, n: int) -> float | None:
        m = self.matrix(n)
        return 1 - m.rank / m.cols  # in step 0

    def update_from_aggregate(self, payload: Any, n: int, context: Context) -> None:
        m, learned = self.matrix(n), _given(context)  # what was summed now is given in the encode to come
        factor = self._split(payload, n)[2][: m.size(learned)]
        low_rank.keep(factor, context.kept(learned, factor.size, factor))

    def _encode_cpu(self, x: Any, payload: Any, residual: Any, context: Context) -> None:
        m, given = self.matrix(x.size), _given(context)
        size, body = m.size(_OTHER[given]), self._split(payload, x.size)[2]
        start = context.kept(given, m.size(given), x)
        factor = low_rank.orthonormal(given, start, m, m.length(given), True, context)
        head = payload[: self.header(x.size)].view(np.float32)
        low_rank.write_header(factor[: m.size(given)], head, START, float(given == "p"))
        project = low_rank.project_columns if given == "p" else low_rank.project_rows
        project(x, residual, factor, m, body[:size], lowrank.ADD, True, context)
        low_rank.clear(body[size:])
        turn = _turn(context)
        turn[0] = 1 - turn[0]

    def _decode_cpu(self, payload: Any, out: Any, add: bool, context: Context) -> None:
        first, given, other = self._split(payload, out.size)
        p, q = (given, other) if first[0] != 0 else (other, given)
        low_rank.outer(p, q, self.matrix(out.size), out, add)

    # --- by address ---

    def encoder(self, n: int) -> KernelCall | None:
        return self._kernel(entries.encode_by_turns_at, n, shares=True, states=self._states(n), encodes=True)

    def updater(self, n: int) -> KernelCall | None:
        return self._kernel(entries.update_by_turns_at, n, states=self._states(n))

    def decoder(self, n: int) -> KernelCall | None:
        return self._kernel(entries.decode_by_turns_at, n)

    def _states(self, n: int) -> tuple[tuple[str, int], ...]:
        m = self.matrix(n)
        return ("p", m.size("p")), ("q", m.size("q")), ("turn", 1)

    # --- on GPUs ---

    _encode_cuda = _encode_cpu

    def _decode_cuda(self, payload: Any, out: Any, add: bool, context: Context) -> None:
        from .kernels.cuda import lowrank as cuda_lowrank

        cuda_lowrank.outer_by_turns(*self._split(payload, out.size), self.matrix(out.size), out, add)

    def _room(self, n: int) -> int:
        m = self.matrix(n)
        return m.rank * max(m.rows, m.cols)

    def _split(self, payload: Any, n: int) -> tuple[Any, Any, Any]:
        """The payload's parts as float32 views: which factor is given, that one and the other, with what follows."""
        values, head = payload.view(np.float32), self.header(n) // 4
        return values[:START], values[START:head], values[head:]


_OTHER = {"p": "q", "q": "p"}


_HOST = np.empty(0, np.float32)


def _turn(context: Context) -> np.ndarray:
    """1 where P is given in the next encode, else 0; in host memory. Not the step: a tensor may sit steps out."""
    return context.kept("turn", 1, _HOST)


def _given(context: Context) -> str:
    return "p" if _turn(context)[0] else "q"
