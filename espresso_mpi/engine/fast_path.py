"""The fast path for small dense tensors: their data travels with the header of the negotiation round.

Every rank receives the data of all ranks and computes the mean itself, in the order of the route: first within each
node, then over the nodes. The result has the same bits as by the route, and a synchronisation costs one exchange.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..collectives.data import reduction
from ..collectives.data.layout import Topology
from ..collectives.messages.window import SLOT
from ..types import ROUTES, Route
from .batches import Bucket

ROOM = SLOT // 2
"""Maximum bytes of data that travel with a header; between nodes, of all ranks together."""

_LEVELS = {Route.parse(ROUTES["flat"]): ("flat",), Route.parse(ROUTES["hierarchical"]): ("intra", "inter")}
_ALIGN = 64


def fits(bucket: Bucket, topology: Topology) -> bool:
    """Whether a bucket may take the fast path: dense, small, on the host, and by a route that only sums."""
    spec = bucket.members[0][1].spec
    nbytes = sum(item.spec.nbytes for _, item in bucket.members)
    ranks = topology.size if len(topology.nodes) > 1 else 1
    return (
        bucket.compressor is None
        and spec.device == "cpu"
        and nbytes * ranks <= ROOM
        and bucket.strategy.route in _LEVELS
        and topology.size > 1
    )


def packed(header: np.ndarray, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """A header followed by the data, as flat bytes."""
    at = _start(header.size)
    message = np.empty(at + sum(array.nbytes for array in arrays), np.uint8)
    message[: header.size] = header
    for array in arrays:
        message[at : at + array.nbytes] = array.view(np.uint8)
        at += array.nbytes
    return message


def room(header_size: int) -> int:
    """Maximum bytes of a header with data."""
    return _start(header_size) + ROOM


def _start(header_size: int) -> int:
    return -(-header_size // _ALIGN) * _ALIGN


def unpack_mean(
    messages: Sequence[np.ndarray], header_size: int, bucket: Bucket, topology: Topology, arrays: Sequence[np.ndarray]
) -> None:
    """Write the mean of the data of all ranks into this rank's arrays."""
    kind, dtype, start = arrays[0].dtype, bucket.dtype, _start(header_size)
    rows = [message[start:].view(kind) for message in messages]
    levels = _LEVELS[bucket.strategy.route]
    if levels == ("flat",) or len(topology.nodes) == topology.size:
        mean = _mean(rows, topology.size, dtype)
    else:
        intra, inter = topology.divisor("intra"), topology.divisor("inter")
        mean = _mean([_mean([rows[r] for r in ranks], intra, dtype) for ranks in topology.nodes], inter, dtype)
    first = 0
    for array in arrays:
        array[...] = mean[first : first + array.size]
        first += array.size


def _mean(rows: Sequence[np.ndarray], divisor: float, dtype: str) -> np.ndarray:
    stacked = np.empty((len(rows), rows[0].size), rows[0].dtype)
    for to, row in zip(stacked, rows):
        to[:] = row
    out = rows[0].copy()
    reduction.mean_rows(out, stacked, 0, divisor, dtype)
    return out
