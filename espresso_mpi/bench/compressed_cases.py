"""Compressed collectives as ``bench collectives`` runs them: what they should send, and what should come out."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any, cast

import numpy as np

from ..collectives.data.layout import Dense, Topology
from ..collectives.halves import Half, by_nodes, compile_half, default_half_route
from ..collectives.program import bytes_sent, compile_route, payload_part, segments
from ..collectives.store_keys import BY_NODES, OF_RANK
from ..compressors import Compressor
from ..options import DEFAULT_SEGMENT
from ..types import ALIGN, Route, TensorSpec
from .collective_cases import Case
from .harness.checks import wrong_bits, wrong_together
from .harness.measuring import CHECKED
from .harness.timing import TimedMethod

_HALVES = ("reduce_scatter", "allgather")


class CompressedCase:
    """A collective with a compressor. Collective to make.

    Args:
        case: the collective and its buffers; spec: of the compressor.

    Attributes:
        expected: bytes that all ranks together send, as the sizes of the payloads say; None where they pass through
            other ranks in ways that depend on the nodes.
        method: what is measured.
    """

    def __init__(self, case: Case, spec: str) -> None:
        from ..session import Session

        self._case, self._spec, self._kind = case, spec, case.collective.removesuffix("v")
        session = Session(case.comm, compressor=spec, min_bytes=0, feedback=False)
        session.judge_for(None)
        self._topology = session.topology
        self._route = self._way(session)
        self.expected = self._expected()
        checked = case.nbytes <= CHECKED and self._can_be_checked
        self.method = TimedMethod(
            spec, case.by_session(session, compressor=spec), self._check if checked else None, case.prepare,
            self._route, partial(_payloads_sent, session, self._tensor), close=session.close,
        )  # fmt: skip

    def _way(self, session: Any) -> Route | None:
        """The route; None: it takes none."""
        if self._kind in ("allreduce", "reduce"):
            found: Route = session.strategy(TensorSpec(self._kind, self._case.x.shape, "float32")).route
            return found
        return Route.parse(default_half_route(self._topology)) if self._kind in _HALVES else None

    @property
    def _tensor(self) -> str:
        """The name in statistics."""
        if self._route is None:
            return self._kind + OF_RANK
        return self._kind + (BY_NODES if self._kind in _HALVES and by_nodes(self._route) else "")

    @property
    def _whole(self) -> int:
        """Elements of all parts together."""
        return self._case.x.size * (self._case.comm.size if self._kind == "allgather" else 1)

    @cached_property
    def _compressor(self) -> Compressor:
        from .. import compressors

        shape = (self._whole,) if self._kind in _HALVES else self._case.x.shape
        method = compressors.get(self._spec).shaped(shape)
        return method if self._kind in ("allreduce", "reduce", "reduce_scatter") else method.second_pass()

    # --- bytes --------------------------------------------------------------------------------------------------------

    def _expected(self) -> int | None:
        size, n = self._case.comm.size, self._case.x.size
        if self._kind in ("allreduce", "reduce"):
            assert self._route is not None
            return expected_bytes(self._route, self._topology, self._compressor, n)
        if self._kind in _HALVES:
            half, route, whole = cast(Half, self._kind), self._route, self._whole
            assert route is not None
            return sum(
                bytes_sent(compile_half(half, route, self._topology, whole, "float32", rank, self._compressor).steps)
                for rank in range(size)
            )
        if self._kind == "broadcast":
            return (size - 1) * self._payload(n)
        if 1 < len(self._topology.nodes) < size:
            return None
        if self._kind == "gather":
            return (size - 1) * self._payload(n)
        return sum(
            self._payload(part)
            for source in range(size)
            for target, part in enumerate(self._case.parts_of(source))
            if source != target
        )

    def _payload(self, n: int) -> int:
        """Bytes of a payload as it is sent."""
        return payload_part(Dense(0, n), self._compressor).room

    # --- values -------------------------------------------------------------------------------------------------------

    @property
    def _can_be_checked(self) -> bool:
        """Whether what should come out is known here: the bits of a route, or of payloads without random numbers."""
        if self._kind in ("allreduce", "reduce"):
            return self._route is not None and not self._route.sums_payloads
        one, call = self._case.comm.size == 1, self._compressor.encoder(64)
        flat = self._kind not in _HALVES or len(self._topology.nodes) in (1, self._case.comm.size)
        plain = call is not None and not call.draws and not self._compressor.finalizes
        return flat and not one and plain

    def _values(self, rank: int) -> np.ndarray:
        return np.random.default_rng([rank, 1]).standard_normal(sum(self._case.parts_of(rank)), np.float32)

    def _check(self) -> int:
        """Wrong elements of the first result of a session; of an allreduce or a reduce, of its mean."""
        from ..session import Session

        case, mine = self._case, self._values(self._case.comm.rank)
        before = case.x.copy()
        with Session(case.comm) as session:
            if self._kind in ("allreduce", "reduce"):
                found = getattr(session, self._kind)(mine, compressor=self._spec)
            else:
                np.copyto(case.x, mine)
                case.by_session(session, compressor=self._spec)()
                found = case.result.copy()
        np.copyto(case.x, before)
        if self._kind == "allreduce":
            return wrong_together(case.comm, [found], lambda: self._wrong(found))
        return int(case.comm.allreduce(self._wrong(found)))

    def _wrong(self, found: np.ndarray) -> int:
        size, me, kind = self._case.comm.size, self._case.comm.rank, self._kind
        if me != 0 and kind in ("reduce", "gather"):
            return 0
        if kind in ("allreduce", "reduce"):
            assert self._route is not None
            sources = [self._values(rank) for rank in range(size)]
            return wrong_bits(found, self._route, self._topology, sources, self._spec, kind)
        if kind == "reduce_scatter":
            parts = [self._coded(self._values(rank)[me * found.size : (me + 1) * found.size]) for rank in range(size)]
            total, most = np.sum(parts, axis=0, dtype=np.float64), np.sum(np.abs(parts), axis=0)
            divisor = size if self._case.elements.op == "mean" else 1
            return int(np.count_nonzero(~(np.abs(found * divisor - total) <= most * 2.0**-22)))
        if kind == "broadcast":
            expected = self._coded(self._values(0))
        elif kind in ("allgather", "gather"):
            expected = np.concatenate([self._coded(self._values(rank)) for rank in range(size)])
        else:
            expected = np.concatenate([self._coded(self._block(rank, me)) for rank in range(size)])
        return int(np.count_nonzero(found.view(np.uint32) != expected.view(np.uint32)))

    def _block(self, source: int, target: int) -> np.ndarray:
        """What a rank sends to another one in an alltoall."""
        parts = self._case.parts_of(source)
        return self._values(source)[sum(parts[:target]) : sum(parts[: target + 1])]

    def _coded(self, x: np.ndarray) -> np.ndarray:
        """What a payload holds of some values."""
        out, nbytes = np.empty(x.size, np.float32), self._compressor.nbytes(x.size)
        memory = np.empty(nbytes + ALIGN, np.uint8)
        payload = memory[-memory.ctypes.data % ALIGN :][:nbytes]
        self._compressor.encode(x.copy(), payload, None)
        self._compressor.decode(payload, out)
        return out


def _payloads_sent(session: Any, name: str) -> Mapping[str, int]:
    """Bytes that a session's tensor has sent so far, by level, without those by which ranks agree."""
    known = session.stats().tensors.get(name)
    return {"intra": 0, "inter": 0} if known is None else known.bytes_by_level


def expected_bytes(route: Route, topology: Topology, compressor: Compressor, n: int) -> int:
    """Bytes that all ranks together send for a tensor of n elements: payloads of known sizes along the route."""
    cut = segments(n, compressor.at(None).nbytes(n), topology, 0 if compressor.whole else DEFAULT_SEGMENT)
    return sum(
        bytes_sent(compile_route(route, topology, region, "float32", rank, compressor.at(0)))
        for region in cut
        for rank in range(topology.size)
    )
