"""Numbers of bytes that decide how tensors travel, and that a session measures when it needs them first."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping

from ..collectives.messages.transport import Transport
from ..collectives.messages.uncounted import uncounted
from ..types import Route

_LOG = logging.getLogger("espresso_mpi")

_NONE: Mapping[Route, int] = {}


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
