"""``MPI_Allreduce`` at its best, for ``bench sync`` to compare with.

- A compiled C callback sums float16, in place, on MPI's 16-bit type. MPI's own half types are slow or missing, and an
  operator written in Python costs more than the sum.
- Some libraries let the caller choose the algorithm: Open MPI's component ``tuned``, by the tool interface MPI_T. All
  algorithms are tried on a communicator each, in place and with a second buffer. The quickest is then measured beside
  the library's own choice, in turns with everything else.

MPI's functions that mpi4py does not offer are called through the library that mpi4py itself has loaded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
from numba import carray

from ..collectives.data.layout import Topology
from ..compressors.kernels.cpu import host
from ..errors import EspressoError
from ..files.compiled import c_function
from ..files.sources import with_digest
from ..types import Route
from .bound import memory_traffic
from .harness.checks import wrong_sum, wrong_together
from .harness.timing import Repetitions, TimedMethod, interleaved, timed

FP32, FP16, TUNED = "mpi-allreduce-fp32", "mpi-allreduce-fp16", "-tuned"
"""Names of the rows; ``TUNED`` is appended where the variant is not the library's own choice."""

_ALGORITHMS = {
    1: "linear",
    2: "reduce and broadcast",
    3: "recursive doubling",
    4: "ring",
    5: "segmented ring",
    6: "Rabenseifner",
}
"""Open MPI's numbers for ``coll_tuned_allreduce_algorithm``; 0 is the component's own choice."""

_RULES, _ALGORITHM = "coll_tuned_use_dynamic_rules", "coll_tuned_allreduce_algorithm"
"""Open MPI's control variables: whether the algorithm is given, and which."""

_HAN = "coll_han_priority"
"""That of the component which would come before ``tuned`` where there are several nodes; from Open MPI 5 on."""

_TRIAL_SECONDS = 0.1
"""How long the library's own choice takes on the array that variants are tried with."""

_TRIAL_LEAST = 1 << 18
"""Bytes of the smallest array that variants are tried with, unless the measured one is smaller."""

FINALISTS = 2
"""Variants that trials leave; which is quicker is seen among all methods, on the whole array."""

_CLEARLY_SLOWER = 2.0
"""A variant that takes more than this many times the quickest in one trial is not tried again."""


@dataclass(frozen=True)
class Variant:
    """One variant of MPI_Allreduce.

    Attributes:
        name: the algorithm; "" for the library's own choice.
        comm: the communicator that it was chosen for.
        in_place: the sum replaces the values, else it goes to another buffer.
    """

    name: str
    comm: Any
    in_place: bool

    @property
    def text(self) -> str:
        """What it does, in words."""
        return (self.name or "MPI's own choice") + (", in place" if self.in_place else ", two buffers")

    def allreduce(self, x: Any, out: Any, op: Any) -> None:
        """The sum over all ranks in ``x``, or in ``out`` if the variant is not in place. Collective."""
        from mpi4py import MPI

        self.comm.Allreduce(MPI.IN_PLACE if self.in_place else x, x if self.in_place else out, op)


# --- the methods ------------------------------------------------------------------------------------------------------


class Allreduces:
    """MPI's rows for one array. Collective, as are its methods.

    Args:
        comm: all ranks.
        x: float32; every run replaces or reads what is in it.
        prepare: puts this rank's values into ``x``.
        sources: every rank's values, for the checks.
    """

    def __init__(
        self, comm: Any, x: np.ndarray, prepare: Callable[[], None], sources: Callable[[], list[np.ndarray]]
    ) -> None:
        from .. import compressors

        self.comm, self.x, self.prepare, self.sources = comm, x, prepare, sources
        self.other = np.empty_like(x)
        self.halves, self.other_halves = (np.empty(x.size, np.uint16) for _ in range(2))
        self.cast = compressors.get("fp16")
        self.op = half_sum()
        self.variants = variants(comm)

    def methods(self) -> list[TimedMethod]:
        """The library's own choice and the quickest other variants, those under one name, for both element types."""
        return [
            self._named(kind, variant) for kind in (FP32, FP16) for variant in (self.variants[0], *self._quickest(kind))
        ]

    def close(self) -> None:
        """Give back what they hold."""
        self.op.Free()
        for variant in self.variants:
            if variant.in_place:  # the other variant on the same communicator is not
                variant.comm.Free()

    def _named(self, kind: str, variant: Variant) -> TimedMethod:
        run, check = (self._fp32, self._check_fp32) if kind == FP32 else (self._fp16, self._check_fp16)
        name = kind if variant == self.variants[0] else kind + TUNED
        return TimedMethod(
            name, lambda: run(variant, slice(None)), lambda: check(variant), self.prepare, text=variant.text
        )

    def _quickest(self, kind: str) -> list[Variant]:
        """Of all variants but the first; by trials on a part of the array that takes about as long everywhere."""
        run = self._fp32 if kind == FP32 else self._fp16
        first, *others = self.variants
        seconds = timed(self.comm, lambda: run(first, slice(None)), self.prepare)
        if seconds < 10 * _TRIAL_SECONDS:  # what a first call takes besides may weigh
            seconds = timed(self.comm, lambda: run(first, slice(None)), self.prepare)
        share = min(1.0, max(_TRIAL_SECONDS / seconds, _TRIAL_LEAST / self.x.nbytes))
        part = slice(0, max(1, int(self.x.size * share)))
        return quickest(self.comm, others, lambda variant: run(variant, part), self.prepare)

    # --- what is timed, and its check ---

    def _fp32(self, variant: Variant, part: slice) -> None:
        from mpi4py import MPI

        variant.allreduce(self.x[part], self.other[part], MPI.SUM)

    def _fp16(self, variant: Variant, part: slice) -> None:
        """Cast, sum of halves, cast back."""
        from mpi4py import MPI

        x, halves, other = self.x[part], self.halves[part], self.other_halves[part]
        self.cast.encode(x, halves.view(np.uint8))
        variant.allreduce([halves, MPI.UINT16_T], [other, MPI.UINT16_T], self.op)
        self.cast.decode((halves if variant.in_place else other).view(np.uint8), x)

    def _check_fp32(self, variant: Variant) -> int:
        self.prepare()
        self._fp32(variant, slice(None))
        return wrong_sum(self.comm, self.x if variant.in_place else self.other, self.sources)

    def _check_fp16(self, variant: Variant) -> int:
        self.prepare()
        self._fp16(variant, slice(None))
        return wrong_together(self.comm, [self.x], lambda: _wrong_halves(self.x, self.sources()))


def quickest(
    comm: Any, variants: Sequence[Variant], run: Callable[[Variant], None], prepare: Callable[[], None]
) -> list[Variant]:
    """The ``FINALISTS`` variants with the least median times; clearly slower ones are tried only once. Collective."""
    trials = [TimedMethod(variant.text, partial(run, variant), prepare=prepare) for variant in variants]
    for trial in trials:
        timed(comm, trial.run, prepare)  # opens connections
    once = [timed(comm, trial.run, prepare) for trial in trials]
    bar = max(_CLEARLY_SLOWER * min(once), sorted(once)[:FINALISTS][-1])
    left = [number for number, seconds in enumerate(once) if seconds <= bar]
    times = interleaved(comm, [trials[number] for number in left], Repetitions(20, 3 * _TRIAL_SECONDS))
    return [variants[left[place]] for place in np.argsort(np.median(times, axis=0))[:FINALISTS]]


def _wrong_halves(out: np.ndarray, sources: Sequence[np.ndarray]) -> int:
    """Elements further from the float64 sum than sums of this many float16 values can be."""
    exact, size = np.zeros(out.size), np.zeros(out.size)
    for source in sources:
        exact += source
        size += np.abs(source)
    return int(np.count_nonzero(~(np.abs(out - exact) <= len(sources) * size * 2.0**-11 + 2.0**-24)))


# --- the least that any allreduce must move ---------------------------------------------------------------------------


def least_sent(topology: Topology, nbytes: int) -> list[int]:
    """Bytes that each rank must send to other nodes, counted at the first of each node: 2(M-1)/M for M nodes.

    Args:
        nbytes: of the array as it travels.
    """
    nodes = len(topology.nodes)
    firsts = {ranks[0] for ranks in topology.nodes}
    return [2 * (nodes - 1) * nbytes // nodes if rank in firsts else 0 for rank in range(topology.size)]


def least_traffic(topology: Topology, n: int, kind: str) -> list[int]:
    """The least bytes that each rank must read and write for an allreduce of n values, by any of two routes."""
    from .. import compressors

    method = compressors.get("fp16").at(None) if kind == FP16 else None
    routes = ["allreduce@flat"]
    if len(topology.nodes) > 1:
        routes.append("reduce_scatter@intra/allreduce@inter/allgather@intra")
    if method is not None:
        routes = [f"encode@cpu/{route}/decode@cpu" for route in routes]
    return min((memory_traffic(Route.parse(route), topology, n, method, False) for route in routes), key=sum)


# --- what mpi4py does not offer ---------------------------------------------------------------------------------------


@cache
def _library() -> ctypes.CDLL:
    """MPI's C functions: those that mpi4py's own module is linked with."""
    from mpi4py import MPI

    return ctypes.CDLL(MPI.__file__)


def half_sum() -> Any:
    """An ``MPI.Op`` that adds float16 values, given as MPI's 16-bit integers; free it after use."""
    from mpi4py import MPI

    # Handles are pointers in Open MPI and integers in MPICH.
    handle: Any = {4: ctypes.c_uint32, 8: ctypes.c_uint64}[MPI._sizeof(MPI.Op)]()
    _call("MPI_Op_create", ctypes.c_void_p(_compiled_sum().address), 1, ctypes.byref(handle))
    return MPI.Op.fromhandle(handle.value)


@cache
def _compiled_sum() -> Any:
    """The C callback; kept for good, as MPI has its address."""
    from numba import types

    halves, count = types.CPointer(types.uint16), types.CPointer(types.int32)
    signature = types.void(halves, halves, count, types.voidptr)
    return c_function(signature, _add_halves)


@with_digest
def _add_halves(source, target, count, datatype):  # type: ignore[no-untyped-def]
    """``target += source``, as MPI calls it."""
    x, total = carray(source, count[0]), carray(target, count[0])
    for i in range(total.size):
        total[i] = host.to_half(host.from_half(x[i]) + host.from_half(total[i]))


def variants(comm: Any) -> list[Variant]:
    """The library's own choice in place, then all other variants that it offers. Collective."""
    found = [("", comm.Dup())]
    if _choosable():
        with _restored(*filter(_known, (_HAN, _RULES, _ALGORITHM))):
            if _known(_HAN):
                _write(_HAN, 0)
            _write(_RULES, 1)
            for number, name in _ALGORITHMS.items():
                _write(_ALGORITHM, number)
                found.append((f"Open MPI's {name}", comm.Dup()))  # a communicator keeps what was set when it was made
    return [Variant(name, own, in_place) for name, own in found for in_place in (True, False)]


@cache
def _choosable() -> bool:
    """Whether algorithms can be chosen while a job runs: in Open MPI, where its component ``tuned`` is loaded."""
    from mpi4py import MPI

    if MPI.get_vendor()[0] != "Open MPI":
        return False
    _call("MPI_T_init_thread", MPI.THREAD_MULTIPLE, ctypes.byref(ctypes.c_int()))
    return _known(_RULES) and _known(_ALGORITHM)


def _known(name: str) -> bool:
    """Whether there is a control variable of this name."""
    return _library().MPI_T_cvar_get_index(name.encode(), ctypes.byref(ctypes.c_int())) == 0


@contextmanager
def _restored(*names: str) -> Iterator[None]:
    """Control variables have afterwards the values that they had before."""
    before = {name: _variable(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            _write(name, value)


def _variable(name: str, value: int | None = None) -> int:
    """An integer control variable; set to ``value`` if one is given."""
    index, count, handle = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    number = ctypes.c_int(0 if value is None else value)
    _call("MPI_T_cvar_get_index", name.encode(), ctypes.byref(index))
    _call("MPI_T_cvar_handle_alloc", index, None, ctypes.byref(handle), ctypes.byref(count))
    _call("MPI_T_cvar_read" if value is None else "MPI_T_cvar_write", handle, ctypes.byref(number))
    _call("MPI_T_cvar_handle_free", ctypes.byref(handle))
    return number.value


def _write(name: str, value: int) -> None:
    _variable(name, value)


def _call(name: str, *arguments: Any) -> None:
    """Call one of MPI's C functions.

    Raises:
        EspressoError: it does not report success.
    """
    status = getattr(_library(), name)(*arguments)
    if status != 0:
        raise EspressoError(f"bench sync: {name} returned {status}; expected 0, success")
