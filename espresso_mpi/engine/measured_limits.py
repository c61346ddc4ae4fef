"""Numbers of bytes that decide how tensors travel, and that a session measures when it needs them first."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ..collectives.executor import Program
from ..collectives.job import Job
from ..collectives.messages.transport import Transport
from ..collectives.messages.uncounted import uncounted
from ..collectives.progress import interleave
from ..feedback import NO_FEEDBACK
from ..tracing.recording import Recorder
from ..types import Route

_LOG = logging.getLogger("espresso_mpi")

_NONE: Mapping[Route, int] = {}


def seconds_of(program: Program, arrays: Sequence[Any]) -> float:
    """What a collective of each of these arrays takes on this rank; they overlap. Collective."""
    job, recorder = Job("measuring", {}, NO_FEEDBACK, seed=0, step=0), Recorder()
    start = time.perf_counter()
    interleave(program.segment(0, x, job, recorder) for x in arrays)
    return time.perf_counter() - start


class MeasuredLimits:
    """A limit of each route, measured once for a transport, however many engines use it: plan="auto" opens many.

    Args:
        message: logged after a measurement; ``%d`` stands for the bytes.
    """

    def __init__(self, message: str) -> None:
        self._message = message

    def of(self, transport: Transport, route: Route, measure: Callable[[], int]) -> int:
        """The limit in bytes; ``measure`` is called if it is not known yet. Collective then."""
        known = transport.measured.setdefault(self, {})
        if route not in known:
            with uncounted(transport):
                known[route] = measure()
            if transport.rank == 0:
                _LOG.info(self._message, known[route])
        return known[route]

    def known(self, transport: Transport) -> Collection[int]:
        """The limits that have been measured."""
        return transport.measured.get(self, _NONE).values()
