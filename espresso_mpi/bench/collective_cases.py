"""What ``bench collectives`` runs: each collective on buffers of one size, by a session and by MPI, and its result.

The values are small integers with a prime period, another sequence on every rank. Sums are thus exact in every element
type and order, and a block in a wrong place differs from the right one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import numpy as np

from ..errors import ConfigError
from .mpi_own import half_sum

COLLECTIVES = (
    "allreduce", "reduce", "broadcast", "reduce_scatter", "allgather", "gather", "alltoall", "alltoallv", "barrier",
)  # fmt: skip

REDUCING = ("allreduce", "reduce", "reduce_scatter")

_PERIOD = 10007
"""A prime: no cut into chunks or parts moves a block by a multiple of it."""

_OPERATORS: dict[str, Any] = {
    "sum": np.add, "mean": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum,
    "land": np.logical_and, "lor": np.logical_or, "lxor": np.logical_xor,
    "band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor,
}  # fmt: skip


@dataclass(frozen=True)
class Elements:
    """What the arrays hold and how they are reduced.

    Raises:
        ConfigError: no such type or operator.
    """

    dtype: str
    op: str

    def __post_init__(self) -> None:
        try:
            known = np.dtype(self.dtype).kind in "biufc"
        except TypeError:
            known = False
        if not known:
            raise ConfigError(f"--dtype {self.dtype}; expected a type of numpy's numbers, such as float32 or int8")
        if self.op not in _OPERATORS:
            raise ConfigError(f"--op {self.op}; expected one of {', '.join(_OPERATORS)}")

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return np.dtype(self.dtype).itemsize

    def period(self, rank: int, copied: bool) -> np.ndarray:
        """The values of a rank, up to where they begin again; ``copied``: they are not reduced."""
        low, high = (0, 100) if copied else (1, 3) if self.op == "prod" else (0, 5)
        return np.random.default_rng(rank).integers(low, high, _PERIOD).astype(self.dtype)

    def reduced(self, ranks: int) -> np.ndarray:
        """The period of the reduction."""
        result = reduce(_OPERATORS[self.op], [self.period(rank, False) for rank in range(ranks)])
        return (result / ranks if self.op == "mean" else result).astype(self.dtype)


class Case:
    """A collective on buffers of one size. Collective to make.

    Args:
        comm: all ranks.
        collective: one of ``COLLECTIVES``.
        nbytes: of the largest array of a rank, rounded up to whole elements for each rank.
        out_of_place: whether a reduction writes its result to a second array.

    Attributes:
        nbytes: bytes of that array.
        by_session: makes what runs it once by a session.
        by_mpi: runs it once by MPI; None where MPI has nothing for these elements.
    """

    def __init__(self, comm: Any, collective: str, nbytes: int, elements: Elements, out_of_place: bool) -> None:
        self.comm, self.collective, self.elements = comm, collective, elements
        self._shares, count = _shares(collective, comm.size), nbytes // elements.itemsize
        most = 1 if collective in ("allreduce", "reduce", "broadcast") else max(map(sum, self._shares))
        self._unit = unit = max(1, count // most)
        self.nbytes = 0 if collective == "barrier" else unit * most * elements.itemsize
        self.splits = [unit * share for share in self._shares[comm.rank]]
        whole = unit if most == 1 else sum(self.splits)
        mine = unit if collective in ("allgather", "gather") else whole
        self.x = np.resize(elements.period(comm.rank, collective not in REDUCING), mine)
        self.in_place = collective == "broadcast" or (collective in ("allreduce", "reduce") and not out_of_place)
        self._source = self.x.copy() if self.in_place else self.x
        result = {"reduce_scatter": unit, "gather": whole if comm.rank == 0 else 0, "barrier": 0}
        self._other = np.empty(0 if self.in_place else result.get(collective, whole), elements.dtype)
        self._half = half_sum() if elements.dtype == "float16" and elements.op in ("sum", "mean") else None
        self.by_mpi = self._by_mpi()

    @property
    def result(self) -> np.ndarray:
        """The array that has the result."""
        return self.x if self.in_place else self._other

    def parts_of(self, rank: int) -> list[int]:
        """Elements of the parts that a rank has for each other one; as a whole, if it has the same for all."""
        if self.collective.startswith("alltoall"):
            return [self._unit * share for share in self._shares[rank]]
        return [self.x.size]

    def prepare(self) -> None:
        """Put this rank's values in place."""
        if self.in_place:
            np.copyto(self.x, self._source)

    def wrong(self, run: Callable[[], object]) -> int:
        """How many elements of all ranks are wrong after a run. Collective."""
        self.prepare()
        if not self.in_place:
            self._other.view(np.uint8)[:] = 0xFF if self.elements.dtype != "bool" else 0
        run()
        return int(self.comm.allreduce(self._wrong()))

    def close(self) -> None:
        """Free what MPI has made."""
        if self._half is not None:
            self._half.Free()

    # --- what comes out -----------------------------------------------------------------------------------------------

    def _wrong(self) -> int:
        """Elements of this rank's result that are not as expected."""
        me, size, name = self.comm.rank, self.comm.size, self.collective
        if name == "barrier" or (me != 0 and name in ("reduce", "gather")):
            return 0
        if name in REDUCING:
            first = me * self._other.size if name == "reduce_scatter" else 0
            return self._differ(self.result, self.elements.reduced(size), first)
        if name == "broadcast":
            return self._differ(self.x, self.elements.period(0, True), 0)
        if name in ("allgather", "gather"):
            return sum(
                self._differ(part, self.elements.period(rank, True), 0)
                for rank, part in enumerate(np.split(self._other, size))
            )
        parts = np.split(self._other, np.cumsum(self.splits)[:-1])  # as many come as go
        return sum(
            self._differ(part, self.elements.period(rank, True), self._unit * sum(self._shares[rank][:me]))
            for rank, part in enumerate(parts)
        )

    def _differ(self, part: np.ndarray, period: np.ndarray, first: int) -> int:
        """Elements of an array that are not those of a sequence from its element ``first`` on."""
        expected = np.resize(np.roll(period, -(first % period.size)), part.size)
        if self.elements.op == "mean" and self.collective in REDUCING:
            close = np.abs(part - expected) <= np.finfo(self.elements.dtype).eps * np.abs(expected)
            return int(np.count_nonzero(~close))
        return int(np.count_nonzero(part != expected))

    # --- what runs ----------------------------------------------------------------------------------------------------

    def by_session(self, session: Any, **how: Any) -> Callable[[], object]:
        """What runs it once by a session; ``how``: arguments of the call."""
        name, x, out = self.collective, self.x, None if self.in_place else self._other
        if name == "barrier":
            return session.barrier
        if name == "broadcast":
            return partial(session.broadcast, x, **how)
        if name in REDUCING:
            return partial(getattr(session, name), x, self.elements.op, out=out, **how)
        if name == "alltoallv":
            return partial(session.alltoall, x, splits=self.splits, received=self.splits, out=out, **how)
        return partial(getattr(session, name), x, out=out if name != "gather" or self.comm.rank == 0 else None, **how)

    def _by_mpi(self) -> Callable[[], object] | None:
        """MPI's own collective on the same buffers. Elements that MPI lacks are copied as bytes."""
        from mpi4py import MPI

        comm, x, out, name = self.comm, self.x, self._other, self.collective
        if name in REDUCING:
            return self._reduction_by_mpi()
        raw = [self.x.view(np.uint8), MPI.BYTE]
        if name == "broadcast":
            return partial(comm.Bcast, raw)
        if name in ("allgather", "alltoall"):
            call = comm.Allgather if name == "allgather" else comm.Alltoall
            return partial(call, raw, [out.view(np.uint8), MPI.BYTE])
        if name == "gather":
            return partial(comm.Gather, raw, [out.view(np.uint8), MPI.BYTE] if comm.rank == 0 else None)
        if name == "alltoallv":
            counts = [n * x.itemsize for n in self.splits]
            return partial(comm.Alltoallv, [x.view(np.uint8), counts, MPI.BYTE], [out.view(np.uint8), counts, MPI.BYTE])
        return comm.Barrier

    def _reduction_by_mpi(self) -> Callable[[], object] | None:
        from mpi4py import MPI

        comm, op = self.comm, self.elements.op
        operator = MPI.SUM if op == "mean" else getattr(MPI, op.upper())
        if self.elements.dtype == "bool":
            operator = {"sum": MPI.LOR, "max": MPI.LOR, "bor": MPI.LOR, "prod": MPI.LAND, "min": MPI.LAND,
                        "band": MPI.LAND, "bxor": MPI.LXOR}.get(op, operator)  # fmt: skip
        x, out = self._typed(self.x), self._typed(self._other)
        if self.elements.dtype == "float16":
            if self._half is None:
                return None
            operator = self._half
        if self.collective == "reduce_scatter":
            return partial(comm.Reduce_scatter_block, x, out, operator)
        if self.collective == "allreduce":
            return partial(comm.Allreduce, MPI.IN_PLACE if self.in_place else x, x if self.in_place else out, operator)
        if comm.rank == 0:
            return partial(comm.Reduce, MPI.IN_PLACE if self.in_place else x, x if self.in_place else out, operator)
        return partial(comm.Reduce, x, None, operator)

    def _typed(self, array: np.ndarray) -> Any:
        """As MPI takes it; float16 as the 16-bit integers that our operator adds."""
        from mpi4py import MPI

        return [array.view(np.uint16), MPI.UINT16_T] if array.dtype == np.float16 else array


def _shares(collective: str, ranks: int) -> list[list[int]]:
    """Shares of an array that each rank has for each rank: one, of ``alltoallv`` one to three, as many as come back."""
    return [[1 + (a + b) % 3 if collective == "alltoallv" else 1 for b in range(ranks)] for a in range(ranks)]
