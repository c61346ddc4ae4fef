"""The fast path of dense tensors: the data of a call are piggybacked on the header of its negotiation round.

On one node whose ranks share memory, the first chunk of the data is shown beside the header. Ranks that find all
headers equal go on with the sum at once, so the agreement costs nothing of its own, whatever the size. Elsewhere, every
rank receives the small data of all ranks and computes the mean itself, in the order of the route: first within each
node, then over the nodes. In both cases the result has the bits of the route. If the headers differ, no data is used.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from ..collectives.data import reduction
from ..collectives.data.layout import Topology
from ..collectives.messages.agreed import How
from ..collectives.messages.agreed_nodes import ALIGN, Stages, mean_of_rows
from ..collectives.messages.agreement import gather_small
from ..collectives.messages.joint import JointArray
from ..collectives.messages.sum_calls import ValueCheck
from ..collectives.messages.transport import Transport
from ..collectives.messages.window import SharedWindow
from ..state.store import StateStore
from ..types import ROUTES, Route
from . import piggyback_limit
from .batches import Batch, Bucket

_LEVELS = {Route.parse(ROUTES["flat"]): ("flat",), Route.parse(ROUTES["hierarchical"]): ("intra", "inter")}
_ON_HOST = np.empty(0, np.uint8)


class Piggyback:
    """The data of the only call of this rank, in one bucket, which are sent with the header of a round.

    Args:
        arrays: those of the call, by position.

    Attributes:
        met: when this rank saw that all bring the same call. 0: it has not.
        began: when the exchange of headers began, if values were searched before it; else 0.
        saturated: sums of this rank that were cut to the range of their type.
        odd: whether there are values that must not be summed: the arrays are as before.
        unsearched: whether only the sum looks for such values.
    """

    odd = unsearched = False

    def __init__(self, transport: Transport, buckets: Sequence[Bucket], arrays: Sequence[Any]) -> None:
        self._transport, self._buckets = transport, buckets
        self._arrays = [[arrays[item.index] for item in bucket.members] for bucket in buckets]
        self.met, self.saturated, self.began = 0.0, 0, 0.0

    def undo(self) -> None:
        """The headers differ: nothing has changed."""

    def exchange(self, header: np.ndarray, ignored: int) -> Sequence[np.ndarray]:
        """Send header and data; returns the messages of all ranks, or nothing once the ranks have ``met``.

        Args:
            ignored: bits of the first byte of the header that may differ between ranks.
        """
        message = packed(header, self._arrays[0])
        return gather_small(self._transport, message, room(header.size, self._transport))

    def finish(self, messages: Sequence[np.ndarray], header_size: int, before: Mapping[str, int]) -> Iterator[Summed]:
        """Write the means to the arrays.

        Args:
            messages: of all ranks, unless they have ``met``.
            before: bytes sent before the round.
        """
        start, bucket = time.perf_counter(), self._buckets[0]
        topology = self._transport.topology.undivided if bucket.total else self._transport.topology
        route, arrays = bucket.strategy.route, self._arrays[0]
        cut = unpack_mean(messages, header_size, route, bucket.dtype, topology, arrays)
        self.saturated += cut if self._transport.rank == 0 else 0  # all have seen the same ones
        sent = self._transport.sent
        intra, inter = (sent[level] - before[level] for level in ("intra", "inter"))
        yield Summed(bucket, start, time.perf_counter(), intra, inter)


class Summed(NamedTuple):
    """What is reported of a bucket that was summed: when this rank began and ended, and the bytes that it sent."""

    bucket: Bucket
    start: float
    stop: float
    intra: int
    inter: int = 0


class NodePiggyback(Piggyback):
    """As ``Piggyback``, where all ranks share a window: any number of buckets; those of one element type at once.

    Args:
        window: of all ranks.
        check: for values that must not be summed.

    Attributes:
        whole: whether the arrays of this rank are summed as one that lies in memory of all ranks of the node.
    """

    def __init__(
        self,
        transport: Transport,
        window: SharedWindow,
        buckets: Sequence[Bucket],
        arrays: Sequence[Any],
        check: ValueCheck,
    ) -> None:
        super().__init__(transport, buckets, arrays)
        kinds = dict[tuple[str, bool], list[int]]()
        for number, bucket in enumerate(buckets):
            kinds.setdefault((bucket.dtype, bucket.total), []).append(number)
        self._window, self._kinds, self._check, self.unsearched = window, [*kinds.values()], check, check.pending
        first, inside = self._arrays_of(0), [array for array in arrays if array.size]
        joined = window.arrays.joined(inside) if len(kinds) == 1 and len(first) > 1 else None
        self._first: list[Any] = first if joined is None else [joined]
        self.whole = joined is not None

    @property
    def searches(self) -> bool:
        """Whether the sum can search the values of the call: all pass it at once, and none but these."""
        return len(self._kinds) == 1 and not self.whole

    def exchange(self, header: np.ndarray, ignored: int) -> Sequence[np.ndarray]:
        """See ``Piggyback``; once the ranks have met, the buckets of the first type are summed."""
        arrays, how = self._first, self._how(0)
        try:
            if len(arrays) == 1:
                agreed = self._window.agreed_allreduce(header, ignored, arrays[0], how, self._check)
            else:
                with aligned(arrays) as joint:
                    agreed = self._window.agreed_allreduce_joint(header, ignored, joint, how, self._check)
        except BaseException:
            self._transport.outlive(arrays)  # other ranks may still read them
            raise
        self.met, self.saturated, self.odd, self.began = agreed.met, agreed.saturated, agreed.odd, agreed.asked
        return agreed.headers

    def finish(self, messages: Sequence[np.ndarray], header_size: int, before: Mapping[str, int]) -> Iterator[Summed]:
        """See ``Piggyback``."""
        start, sent = self.met, before["intra"]
        for number in range(len(self._kinds)):
            if number > 0:
                with aligned(self._arrays_of(number)) as joint:
                    self.saturated += self._window.allreduce_joint(joint, self._how(number))
            stop, now = time.perf_counter(), self._transport.sent["intra"]
            yield from _shares([self._buckets[one] for one in self._kinds[number]], start, stop, now - sent)
            start, sent = stop, now

    def _how(self, number: int) -> How:
        bucket = self._buckets[self._kinds[number][0]]
        return reduction.arithmetic(1.0 if bucket.total else float(self._transport.topology.size), bucket.dtype)

    def _arrays_of(self, number: int) -> list[Any]:
        """The arrays of all buckets of a type."""
        return [array for bucket in self._kinds[number] for array in self._arrays[bucket]]


@contextmanager
def aligned(arrays: Sequence[np.ndarray]) -> Iterator[JointArray]:
    """Flat arrays as one; copies of them, which are copied back at the end, if some are not aligned."""
    joint = JointArray.of(arrays)
    if joint.aligned:
        yield joint
        return
    copies = [array.copy() for array in arrays]
    yield JointArray.of(copies)
    for array, copied in zip(arrays, copies):
        array[...] = copied


def _shares(buckets: Sequence[Bucket], start: float, stop: float, nbytes: int) -> Iterator[Summed]:
    """The part of the time and of the bytes sent that each of the buckets stands for that were summed at once."""
    sizes = [bucket.size for bucket in buckets]
    each, total = (stop - start) / sum(sizes), sum(sizes)
    for bucket, end in zip(buckets, itertools.accumulate(sizes)):
        begin = end - bucket.size
        intra = nbytes * end // total - nbytes * begin // total
        yield Summed(bucket, start + begin * each, start + end * each, intra)


def allowed(batch: Batch, buckets: Sequence[Bucket], transport: Transport, scheduled: bool) -> bool:
    """Whether a call with these buckets may take the fast path: dense, on the host, by routes that only sum.

    Without a window for all ranks it must be one bucket, and so small that ``piggyback_limit`` allows it. Large data of
    a plan with a schedule go by that schedule. Collective.

    Args:
        scheduled: whether the plan has a schedule.
    """
    if not buckets or transport.topology.size == 1 or any(item.group for item in batch.items):
        return False
    if not all(_sums_on_host(bucket) for bucket in buckets):
        return False
    nbytes = sum(item.spec.nbytes for bucket in buckets for item in bucket.members)
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
        and bucket.members[0].spec.device == "cpu"
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
