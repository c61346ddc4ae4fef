"""``powersgd``: the values as a matrix, and that as a product of two thin ones (Vogels et al., 2019).

``P = M Q`` is summed over the ranks (the agreed summary) and made orthonormal, then ``Q' = Mᵀ P`` is summed: a step of
the power iteration for the leading singular vectors of the mean gradient. Each rank sends P Pᵀ M of its M, and the sum
of these is what the summed Q' stands for. The summed Q' starts the next step, so the approximation improves from
step to step while gradients change slowly. On the wire r·(rows + cols) float32 values instead of rows·cols.

Without such a start Q is random, of independent entries of either sign, and the expected error is at most
``1 - rank/cols`` of ``‖x‖²``: P spans what ``M Q Qᵀ`` does, which holds that share. On independent normal values it is
``1 - rank·(rows + cols - rank)/(rows·cols)``. For a fixed P nothing is guaranteed but that the error is no larger than
x, so it converges only with error feedback.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from .by_address import KernelCall
from .context import Context, Summary
from .families import low_rank
from .families.low_rank import LowRank
from .kernels.cpu import lowrank, matrices
from .kernels.cpu import lowrank_entries as entries
from .optional import Keeps
from .registry import register


@register
@dataclass(frozen=True)
class PowerSGD(LowRank):
    """Low rank, two reductions. Payload: P (rank·rows float32, filled up to 16 bytes), then Q' (rank·cols float32).

    P is the header, as all ranks have it; Q' is summed.

    Args:
        rank: vectors in each factor, up to 256.
        cols: values in a row of the matrix. With 0, or where the factors would be no smaller than the values, the
            matrix is nearly square whatever the tensor's shape.
    """

    name = "powersgd"
    examples = ("powersgd:rank=1", "powersgd:rank=6,cols=50")
    keeps: ClassVar[Keeps] = {"q": "forget"}

    def header(self, n: int) -> int:
        m = self.matrix(n)
        return -(-4 * m.size("p") // 16) * 16

    def nbytes(self, n: int) -> int:
        m = self.matrix(n)
        return self.header(n) + 4 * m.size("q")

    def contraction(self, n: int) -> float:
        m = self.matrix(n)
        return matrices.share(m.rank, m.cols)

    def gaussian_error(self, n: int) -> float | None:
        m = self.matrix(n)
        return (1 - m.rank / m.rows) * (1 - m.rank / m.cols)

    def encode_traffic(self, n: int) -> int:
        """``x`` once, the residual four times, as M is needed again when the ranks have agreed on P; the payload."""
        return 20 * n + self.nbytes(n)

    def summary(self, n: int) -> Summary | None:
        m = self.matrix(n)
        return Summary(m.size("p"), "sum")

    def update_from_aggregate(self, payload: Any, n: int, context: Context) -> None:
        q = self._split(payload, n)[1]
        low_rank.keep(q, context.kept("q", q.size, q))

    def _summarise_cpu(self, x: Any, summary: Any, residual: Any, context: Context) -> None:
        m = self.matrix(x.size)
        q = low_rank.orthonormal("q", context.kept("q", m.size("q"), x), m, m.cols, True, context)
        low_rank.project_rows(x, residual, q, m, summary, lowrank.ADD, False, context)

    def _encode_cpu(self, x: Any, payload: Any, residual: Any, context: Context) -> None:
        m = self.matrix(x.size)
        left, right = self._split(payload, x.size)
        p = low_rank.orthonormal("p", context.summary, m, m.rows, False, context)
        low_rank.write_header(p[: m.size("p")], left)
        low_rank.project_columns(x, residual, p, m, right, lowrank.READY, True, context)

    def _decode_cpu(self, payload: Any, out: Any, add: bool, context: Context) -> None:
        m = self.matrix(out.size)
        left, right = self._split(payload, out.size)
        low_rank.outer(left, right, m, out, add)

    # --- by address ---

    def summariser(self, n: int) -> KernelCall | None:
        learned = ("q", self.matrix(n).size("q"))
        needs: dict[str, Any] = {"shares": True, "summary": self._agreed(n), "states": (learned,)}
        return self._kernel(entries.summarise_at, n, encodes=True, grain=self.matrix(n).cols, **needs)

    def encoder(self, n: int) -> KernelCall | None:
        return self._kernel(entries.encode_at, n, shares=True, summary=self._agreed(n), encodes=True)

    def updater(self, n: int) -> KernelCall | None:
        return self._kernel(entries.update_at, n, states=(("q", self.matrix(n).size("q")),))

    def decoder(self, n: int) -> KernelCall | None:
        return self._kernel(entries.decode_at, n)

    def _agreed(self, n: int) -> int:
        return self.matrix(n).size("p")

    # --- on GPUs ---

    _summarise_cuda = _summarise_cpu
    _encode_cuda = _encode_cpu

    def _decode_cuda(self, payload: Any, out: Any, add: bool, context: Context) -> None:
        from .kernels.cuda import lowrank as cuda_lowrank

        cuda_lowrank.outer(*self._split(payload, out.size), self.matrix(out.size), out, add)

    def _split(self, payload: Any, n: int) -> tuple[Any, Any]:
        """The payload's two parts as float32 views: P with what fills it up, and Q'."""
        head = self.header(n)
        return payload[:head].view(np.float32), payload[head:].view(np.float32)
