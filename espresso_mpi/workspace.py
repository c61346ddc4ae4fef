"""Scratch memory that is allocated once and grows: in the steady state no step allocates."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import device
from .types import DeviceKind

PAYLOAD_ALIGN = 16
"""Payloads begin at multiples of this many bytes, so that kernels may view them as wider types."""

_PINNED = {"staging", "mirror"}
"""Host buffers that a GPU copies from and to; page-locked, or the copies run at half the speed."""


class Workspace:
    """Named scratch buffers, one of each name per device, each as large as its largest use so far."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], Any] = {}

    def take(self, name: str, nbytes: int, where: DeviceKind) -> Any:
        """At least ``nbytes`` of uint8 on a device; the content is lost when the buffer grows."""
        buffer = self._buffers.get((name, where))
        if buffer is None or buffer.size < nbytes:
            room = max(nbytes, PAYLOAD_ALIGN)
            buffer = device.pinned(room) if name in _PINNED else device.empty(room, np.uint8, where)
            self._buffers[name, where] = buffer
        return buffer[:nbytes]

    def array(self, name: str, size: int, dtype: Any, where: DeviceKind) -> Any:
        """``size`` elements of scratch."""
        return self.take(name, size * np.dtype(dtype).itemsize, where).view(dtype)

    def payload(self, nbytes: int, where: DeviceKind) -> Any:
        """A payload buffer to start with."""
        return self.take("payload-0", nbytes, where)

    def other_payload(self, current: Any, nbytes: int) -> Any:
        """The payload buffer that ``current`` does not use, on the same device."""
        where = device.device_of(current)
        first = self._buffers.get(("payload-0", where))
        name = "payload-1" if first is not None and device.address(first) == device.address(current) else "payload-0"
        return self.take(name, nbytes, where)

    def rows(self, like: Any, count: int, size: int) -> Any:
        """``count`` rows of ``size`` elements with the type and device of ``like``."""
        return self.array("rows", count * size, like.dtype, device.device_of(like)).reshape(count, size)
