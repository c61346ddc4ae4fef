"""How many bytes of data may be piggybacked on the headers of a round by messages: as many as that is quicker for.

With its header, all of a rank's data go to every rank, in one exchange. By the route they take a round and the route's
own exchanges, which move less. Which is quicker depends on latency and bandwidth, so a session measures both, when it
has the first tensor for which the answer is not clear.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from ..collectives.executor import Program
from ..collectives.job import Job
from ..collectives.messages.agreed_nodes import ALIGN
from ..collectives.messages.agreement import floats, gather_small
from ..collectives.messages.transport import Transport
from ..collectives.messages.window_places import SLOT
from ..collectives.progress import interleave
from ..feedback import NO_FEEDBACK
from ..tracing.recording import Recorder
from ..types import Route
from .measured_limits import MeasuredLimits

SURE = 16 << 10
"""Bytes of all ranks together for which one exchange is always quicker."""

_MOST = 512 << 10
"""The same, for which it never is: what is measured ends here."""

_REPEATS = 5

Ways = Callable[[int], tuple[Callable[[], object], Callable[[], object]]]
"""From a number of bytes to two functions, which send them with a header, and by the route after a header."""

_LIMITS = MeasuredLimits("calls of up to %d bytes are piggybacked on their headers (measured)")


def room(transport: Transport) -> int:
    """Maximum bytes of data of one rank in a message; the same on all ranks at the same round."""
    return max([SURE // transport.topology.size, *_LIMITS.known(transport)])


def fits(nbytes: int, transport: Transport, route: Route, ways: Ways) -> bool:
    """Whether so many bytes of each rank are piggybacked. Collective; measures at most once for a route."""
    size = transport.topology.size
    if nbytes * size <= SURE:
        return True
    if nbytes > _most(transport):
        return False
    return nbytes <= _LIMITS.of(transport, route, lambda: _measured(transport, ways))


def ways_of(
    transport: Transport, route: Route, piggyback: Callable[[np.ndarray], object], alone: Callable[[], object]
) -> Ways:
    """The two ways of a route; ``piggyback`` sends an array with a header, ``alone`` a header."""
    job, recorder = Job("measuring", {}, NO_FEEDBACK, seed=0, step=0), Recorder()

    def ways(nbytes: int) -> tuple[Callable[[], object], Callable[[], object]]:
        x = np.zeros(nbytes // 4, np.float32)
        program = Program(transport, route, None, x.size, "float32")

        def apart() -> None:
            alone()
            interleave(program.segment(number, x, job, recorder) for number in range(program.count))

        return lambda: piggyback(x), apart

    return ways


def ways_of_payloads(transport: Transport) -> Ways:
    """The two ways of payloads that all ranks get."""
    header, me, size = np.zeros(ALIGN, np.uint8), transport.rank, transport.topology.size

    def ways(nbytes: int) -> tuple[Callable[[], object], Callable[[], object]]:
        message, rows = np.zeros(ALIGN + nbytes, np.uint8), np.empty((size, nbytes), np.uint8)
        others = [(rank, rows[rank]) for rank in range(size) if rank != me]

        def apart() -> None:
            gather_small(transport, header, header.size)
            transport.exchange([(rank, message[ALIGN:]) for rank, _ in others], others)

        return lambda: gather_small(transport, message, message.size), apart

    return ways


def _most(transport: Transport) -> int:
    """Bytes of one rank beyond which nothing is measured. Inside a node, a message must fit a slot of the window."""
    share = _MOST // transport.topology.size
    return share if max(map(len, transport.topology.nodes)) == 1 else min(share, SLOT * 7 // 8)


def _measured(transport: Transport, ways: Ways) -> int:
    """The largest power of two, as a multiple of what is sure, up to which that is quicker on average."""
    limit = SURE // transport.topology.size
    while 2 * limit <= _most(transport):
        times: list[list[float]] = [[], []]
        both = ways(2 * limit)
        for repeat in range(1 + _REPEATS):
            for way, act in enumerate(both):
                start = time.perf_counter()
                act()
                if repeat:  # the first one also prepares buffers
                    times[way].append(time.perf_counter() - start)
        together, apart = floats(transport, *(sorted(each)[_REPEATS // 2] for each in times)).sum(axis=0)
        if together > apart:
            break
        limit *= 2
    return limit
