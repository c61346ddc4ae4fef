"""Messages that a session sends to measure times: they are no traffic of its calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .transport import Transport


@contextmanager
def uncounted(transport: Transport) -> Iterator[None]:
    """What is sent in the with-block does not count in ``transport.sent``, which other threads may read meanwhile."""
    before = transport.shown = transport.sent
    try:
        yield
    finally:
        for level, after in transport.counted().items():
            transport.posted[level] -= after - before[level]
        transport.shown = None
