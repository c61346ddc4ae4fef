"""The compiled routes of buckets."""

from __future__ import annotations

from typing import Any

from ..collectives.executor import Program
from ..collectives.messages.transport import Transport
from ..collectives.program import segment_of
from ..types import ITEMSIZE
from .batches import Bucket

_PROGRAMS = 4096
"""Size of the cache: which small tensors share a buffer may differ from step to step."""


class Programs:
    """Makes the program of a bucket once, and keeps it.

    Attributes:
        known: the programs by all that they depend on.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.known: dict[tuple[Any, ...], Program] = {}
        self._latest: dict[str, tuple[tuple[Any, ...], Program]] = {}  # by name: to compare is quicker than to hash

    def of(self, bucket: Bucket, step: int, segment_bytes: int, alone: bool = False) -> Program:
        """What runs a bucket in its step of this number.

        Args:
            segment_bytes: about what a segment has on the wire.
            alone: nothing else runs, so that a dense bucket is cut into more segments.
        """
        compressor = bucket.compressor and bucket.compressor.at(step)
        dtype = bucket.dtype if compressor is None else "float32"
        if alone and compressor is None:
            segment_bytes = segment_of(bucket.size * ITEMSIZE[dtype], segment_bytes)
        route, half = bucket.strategy.route, bucket.half
        key = (bucket.compressor, compressor, route, bucket.size, dtype, bucket.total, half, segment_bytes)
        latest = self._latest.get(bucket.name)
        if latest is not None and latest[0] == key:
            return latest[1]
        program = self.known.get(key)
        if program is None:
            final = None if bucket.compressor is None else bucket.compressor.at(None).nbytes(bucket.size)
            program = Program(
                self._transport, route, compressor, bucket.size, dtype, segment_bytes, final, bucket.total, half,
            )  # fmt: skip
            if len(self.known) >= _PROGRAMS:
                self.known.clear()
            self.known[key] = program
        if len(self._latest) >= _PROGRAMS:
            self._latest.clear()
        self._latest[bucket.name] = key, program
        return program
