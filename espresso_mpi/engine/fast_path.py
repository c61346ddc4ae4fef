"""The fast path of dense tensors: the data of a call are piggybacked on the header of its negotiation round.

On one node whose ranks share memory, the first chunk of the data is shown beside the header. Ranks that find all
headers equal go on with the sum at once, so the agreement costs nothing of its own, whatever the size. Elsewhere, every
rank receives the small data of all ranks and computes the mean itself, in the order of the route: first within each
node, then over the nodes. In both cases the result has the bits of the route. If the headers differ, no data is used.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..arrays import device
from ..collectives.data import reduction
from ..collectives.data.layout import Topology
from ..collectives.messages.agreed_nodes import ALIGN, Stages, mean_of_rows
from ..collectives.messages.agreement import gather_small
from ..collectives.messages.transport import Transport
from ..collectives.messages.window import SharedWindow
from ..state.store import StateStore
from ..types import ROUTES, Route
from . import piggyback_limit
from .batches import Batch, Bucket

_AT_ONCE = 8
"""Buckets of a call that run without a round between them: no more than when they are run as segments."""

_LEVELS = {Route.parse(ROUTES["flat"]): ("flat",), Route.parse(ROUTES["hierarchical"]): ("intra", "inter")}
_ON_HOST = np.empty(0, np.uint8)


class Piggyback:
    """The data of the only call of this rank, which are piggybacked on the header of a round.

    Args:
        window: the shared window of all ranks; None: they send messages.
        arrays: those of the call, by position.

    Attributes:
        met: when this rank saw that all bring the same call; the first bucket has its mean then. 0: it has not.
        began: when the exchange of headers began, if something was done before it; else 0.
        saturated: sums of this rank that were cut to the range of their type.
    """

    def __init__(
        self, transport: Transport, window: SharedWindow | None, buckets: Sequence[Bucket], arrays: Sequence[Any]
    ) -> None:
        self._transport, self._window, self._buckets = transport, window, buckets
        self._arrays = [[arrays[item.index] for _, item in bucket.members] for bucket in buckets]
        self.met, self.saturated, self.began = 0.0, 0, 0.0

    def undo(self) -> None:
        """The headers differ: nothing has changed."""

    def exchange(self, header: np.ndarray, ignored: int) -> Sequence[np.ndarray]:
        """Send header and data; returns the messages of all ranks, or nothing once the ranks have ``met``.

        Args:
            ignored: bits of the first byte of the header that may differ between ranks.
        """
        window = self._window
        if window is None:
            message = packed(header, self._arrays[0])
            return gather_small(self._transport, message, room(header.size, self._transport))
        bucket = self._buckets[0]
        x, workspace = self._joined(0)
        how = reduction.arithmetic(self._divisor(bucket), bucket.dtype)
        agreed = window.agreed_allreduce(header, ignored, x, how)
        self.met, self.saturated = agreed.met, agreed.saturated
        self._part(0, x, workspace, write=agreed.met > 0)
        return agreed.headers

    def finish(self, number: int, messages: Sequence[np.ndarray], header_size: int) -> tuple[float, float]:
        """The mean of a bucket in its arrays; returns when this rank began and ended to work on it."""
        start, bucket = time.perf_counter(), self._buckets[number]
        window = self._window
        if window is None:
            topology = self._transport.topology.undivided if bucket.total else self._transport.topology
            route, arrays = bucket.strategy.route, self._arrays[0]
            cut = unpack_mean(messages, header_size, route, bucket.dtype, topology, arrays)
            self.saturated += cut if self._transport.rank == 0 else 0  # all have seen the same ones
        elif number == 0:
            start = self.met
        else:
            x, workspace = self._joined(number)
            reduce_op = reduction.ReduceOp("sum", self._divisor(bucket))
            self.saturated += window.allreduce(x, bucket.dtype, (0, x.size), reduce_op)
            self._part(number, x, workspace)
        return start, time.perf_counter()

    def _divisor(self, bucket: Bucket) -> float:
        return 1.0 if bucket.total else float(self._transport.topology.size)

    def _joined(self, number: int) -> tuple[Any, Any]:
        """The bucket as one array, and where that is borrowed from, if it is a copy."""
        arrays, bucket = self._arrays[number], self._buckets[number]
        if len(arrays) == 1:
            return arrays[0], None
        workspace = self._transport.borrow()
        x = workspace.array("fused", bucket.size, arrays[0].dtype, "cpu")
        device.join(x, arrays)
        return x, workspace

    def _part(self, number: int, x: Any, workspace: Any, write: bool = True) -> None:
        if workspace is not None:
            if write:
                device.part(x, self._arrays[number])
            self._transport.give_back(workspace)


class WholePiggyback(Piggyback):
    """As ``Piggyback``, of a call whose arrays lie one behind the other where the ranks share memory: as one array.

    Args:
        x: all of them.
    """

    def __init__(self, transport: Transport, window: SharedWindow, buckets: Sequence[Bucket], x: np.ndarray) -> None:
        super().__init__(transport, window, (), ())
        self._buckets, self._arrays = buckets, [[x]]

    def shares(self, start: float, stop: float, nbytes: int) -> Iterator[tuple[Bucket, float, float, int]]:
        """The part of the time and of the bytes sent that each bucket stands for."""
        sizes = [bucket.size for bucket in self._buckets]
        each, total = (stop - start) / sum(sizes), sum(sizes)
        for bucket, end in zip(self._buckets, itertools.accumulate(sizes)):
            begin = end - bucket.size
            yield bucket, start + begin * each, start + end * each, nbytes * end // total - nbytes * begin // total


def joinable(batch: Batch, buckets: Sequence[Bucket], transport: Transport, scheduled: bool) -> bool:
    """Whether a call may be summed as one array: dense, on the host, on one node, of one element type.

    Args:
        scheduled: as of ``allowed``.
    """
    if scheduled or window_of(transport) is None or len(batch.items) < 2 or any(item.group for item in batch.items):
        return False
    kinds = {(bucket.dtype, bucket.total) for bucket in buckets}
    return len(kinds) == 1 and all(_sums_on_host(bucket) for bucket in buckets)


def allowed(batch: Batch, buckets: Sequence[Bucket], transport: Transport, scheduled: bool) -> bool:
    """Whether a call with these buckets may take the fast path: dense, on the host, by routes that only sum.

    Without a window for all ranks it must be one bucket, and so small that ``piggyback_limit`` allows it. Large data of
    a plan with a schedule go by that schedule. Collective.

    Args:
        scheduled: whether the plan has a schedule.
    """
    if not 0 < len(buckets) <= _AT_ONCE or transport.topology.size == 1 or any(item.group for item in batch.items):
        return False
    if not all(_sums_on_host(bucket) for bucket in buckets):
        return False
    nbytes = sum(item.spec.nbytes for bucket in buckets for _, item in bucket.members)
    if scheduled and nbytes * transport.topology.size > piggyback_limit.SURE:
        return False
    if window_of(transport) is not None:
        return True
    route = buckets[0].strategy.route
    return len(buckets) == 1 and piggyback_limit.fits(nbytes, transport, route, _ways(transport, route))


def _ways(transport: Transport, route: Route) -> piggyback_limit.Ways:
    """What ``piggyback_limit`` compares."""
    header = np.zeros(ALIGN, np.uint8)

    def piggyback(x: np.ndarray) -> None:
        messages = gather_small(transport, packed(header, [x]), header.size + x.nbytes)
        unpack_mean(messages, header.size, route, "float32", transport.topology, [x])

    return piggyback_limit.ways_of(transport, route, piggyback, lambda: gather_small(transport, header, header.size))


def adds_residual(batch: Batch, store: StateStore) -> bool:
    """Whether a pending residual is to be added to a tensor first."""
    return store.any_pending and any(store.has_pending(item.spec.name, item.spec.size) for item in batch.items)


def _sums_on_host(bucket: Bucket) -> bool:
    return (
        bucket.compressor is None
        and bucket.half is None
        and bucket.members[0][1].spec.device == "cpu"
        and bucket.strategy.route in _LEVELS
    )


def window_of(transport: Transport) -> SharedWindow | None:
    """The shared window of all ranks, if they are on one node."""
    return transport.window_for(transport.node, _ON_HOST) if len(transport.topology.nodes) == 1 else None


def packed(header: np.ndarray, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """A header followed by the data, as flat bytes."""
    at = start_of(header.size)
    message = np.empty(at + sum(array.nbytes for array in arrays), np.uint8)
    message[: header.size] = header
    for array in arrays:
        message[at : at + array.nbytes] = array.view(np.uint8)
        at += array.nbytes
    return message


def room(header_size: int, transport: Transport) -> int:
    """Maximum bytes of a message: of a header, with data if data travel in it."""
    return header_size if window_of(transport) is not None else start_of(header_size) + piggyback_limit.room(transport)


def start_of(header_size: int) -> int:
    """Where data begin behind a header."""
    return -(-header_size // ALIGN) * ALIGN


def unpack_mean(
    messages: Sequence[np.ndarray],
    header_size: int,
    route: Route,
    dtype: str,
    topology: Topology,
    arrays: Sequence[np.ndarray],
) -> int:
    """Write the mean of the data of all ranks into this rank's arrays; returns how many sums were cut."""
    kind, start, stages = arrays[0].dtype, start_of(header_size), stages_of(route, topology)
    rows = [messages[rank][start:].view(kind) for group in stages.groups for rank in group]
    mean = np.empty(rows[0].size, kind)
    cut = mean_of_rows(mean, np.concatenate(rows), stages, dtype)
    first = 0
    for array in arrays:
        array[...] = mean[first : first + array.size]
        first += array.size
    return cut


def stages_of(route: Route, topology: Topology) -> Stages:
    """The order in which a route sums."""
    if _LEVELS[route] == ("flat",) or len(topology.nodes) == topology.size:
        return Stages((tuple(range(topology.size)),), (topology.divisor("flat"), 1.0))
    return Stages(topology.nodes, (topology.divisor("intra"), topology.divisor("inter")))
