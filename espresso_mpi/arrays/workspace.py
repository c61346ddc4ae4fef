"""Scratch memory that is allocated once and grows; in the steady state, no step allocates."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..types import DeviceKind
from . import device

PAYLOAD_ALIGN = 16
"""Payloads begin at multiples of this many bytes, so that kernels may view them as wider types."""

_PLACES = 64
"""Sets of sizes for which a workspace keeps where its payload buffers are."""

_PAYLOADS = {"payload-0", "payload-1"}


class Staging:
    """A page-locked host buffer between a GPU and MPI.

    The device copies outgoing messages to it, MPI sends and receives, and the device copies the received messages from
    it. The last copy is only queued, so MPI may write to the buffer again when the GPU has passed ``mark``, behind it.
    """

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)
        self._outgrown: list[np.ndarray] = []  # a copy may still read it
        self._queued = self.taken = False
        self.mark: device.Mark | None = None

    def take(self, nbytes: int) -> np.ndarray:
        """The first ``nbytes``. MPI may write to them when they are ``emptied``."""
        self.taken = True
        if self._memory.size < nbytes:
            self._outgrown.append(self._memory)
            self._memory = device.pinned(nbytes)
        if self._outgrown and self.emptied():
            self._outgrown.clear()
        return self._memory[:nbytes]

    def emptied(self) -> bool:
        """Whether the GPU has done the copies from it; does not wait."""
        self._queued = self._queued and self.mark is not None and not self.mark.passed()
        return not self._queued

    def copied(self, queue: device.Queue) -> device.Mark:
        """The last copy from it is queued on a stream; returns the mark behind it."""
        self.mark, self._queued = self.mark or device.Mark(), True
        self.mark.set(queue)
        return self.mark

    def release(self) -> None:
        """MPI has finished with it."""
        self.taken = False


class Workspace:
    """Named scratch buffers, one of each name per device, each as large as its largest use so far.

    Attributes:
        messages: memory for messages (``mpi_calls.Messages``), by how many can be in flight. None are when a borrower
            gives the workspace back.
    """

    def __init__(self) -> None:
        self.messages: dict[int, Any] = {}
        self._buffers: dict[tuple[str, str], Any] = {}
        self._places: dict[tuple[int, ...], list[int]] = {}
        self._staging = [Staging(), Staging()]

    def take(self, name: str, nbytes: int, where: DeviceKind) -> Any:
        """At least ``nbytes`` of uint8 on a device; the content is lost when the buffer grows."""
        buffer = self._buffers.get((name, where))
        if buffer is None or buffer.size < nbytes:
            room = max(nbytes, PAYLOAD_ALIGN)
            buffer = device.pinned(room) if self._locked(name, where) else device.empty(room, np.uint8, where)
            self._buffers[name, where] = buffer
            self._places.clear()
        return buffer[:nbytes]

    def _locked(self, name: str, where: DeviceKind) -> bool:
        """Whether a GPU copies from and to this host buffer; if so, it is page-locked, which doubles the speed.

        A payload is copied if the workspace has a buffer on a GPU; a mirror always belongs to a GPU tensor.
        """
        return name == "mirror" or (
            where == "cpu" and name in _PAYLOADS and any(there == "gpu" for _, there in self._buffers)
        )

    def staging(self) -> Staging:
        """A staging buffer that MPI does not use; there are two, so that the GPU empties one while MPI fills the other.

        Raises:
            RuntimeError: both are in use. An exchange must be finished before the second exchange after it is posted.
        """
        free = next((staging for staging in self._staging if not staging.taken), None)
        if free is None:
            raise RuntimeError("a third exchange of GPU memory was posted in one workspace before the first finished")
        self._staging.remove(free)
        self._staging.append(free)
        return free

    def array(self, name: str, size: int, dtype: Any, where: DeviceKind) -> Any:
        """``size`` elements of scratch."""
        return self.take(name, size * np.dtype(dtype).itemsize, where).view(dtype)

    def payload(self, nbytes: int, where: DeviceKind) -> Any:
        """A payload buffer to start with."""
        return self.take("payload-0", nbytes, where)

    def payload_buffer(self, number: int, nbytes: int) -> Any:
        """A payload buffer in host memory: 0 is that of ``payload``, 1 the other one."""
        return self.take(f"payload-{number}", nbytes, "cpu")

    def payload_places(self, sizes: tuple[int, ...]) -> list[int]:
        """Where the payload buffers of these sizes in bytes begin in host memory, by their numbers."""
        known = self._places.get(sizes)
        if known is None:
            if len(self._places) >= _PLACES:
                self._places.clear()
            buffers = [self.payload_buffer(number, nbytes) for number, nbytes in enumerate(sizes)]
            known = self._places[sizes] = list(map(device.begin_of, buffers))
        return known

    def other_payload(self, current: Any, nbytes: int) -> Any:
        """The payload buffer that ``current`` does not use, on the same device."""
        where = device.device_of(current)
        first = self._buffers.get(("payload-0", where))
        name = "payload-1" if first is not None and device.address(first) == device.address(current) else "payload-0"
        return self.take(name, nbytes, where)
