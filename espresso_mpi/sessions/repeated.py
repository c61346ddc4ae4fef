"""Dense collectives that a rank makes again with arrays like those before, without a pending call.

What is done with the arrays was decided and agreed on when the call was made the first time. So only the addresses are
new. Whatever differs, such as strided arrays or calls that are under way, takes the ordinary path, which has the same
messages: ranks may differ in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..arrays.any_dtype import empty_like
from ..arrays.device import begin_of
from ..collectives.data.reduction import stored
from ..collectives.messages.agreed import Parts
from ..engine.calls import PendingCall
from ..engine.dense_piggyback import Agreeing, Combining, Copying, Scattering, Summing
from ..engine.latest_sum import LatestSum

PLAIN, WRITABLE = 0x1 | 0x100, 0x400
"""numpy's flags of an array that is C-contiguous and aligned, and of one that may be written to."""

IN_PLACE = ("allreduce", "reduce", "broadcast", "sync")
"""Calls whose result is in the array that they are given."""

_KNOWN = 1024
"""Calls that are remembered at a time."""


def key_of(kind: str, name: str, told: Any, x: Any) -> tuple[Any, ...] | None:
    """By what a call is known; None: its arguments cannot be compared, so that they are checked as of a first one.

    Args:
        told: what tells it apart from others of its kind and name; the splits of an alltoall may be lists.
        x: of any library; the types of elements of different ones are never equal.
    """
    try:
        if kind == "alltoall":
            told = tuple(None if rows is None else tuple(rows) for rows in told)
        key = (kind, name, told, x.shape, x.dtype)
        hash(key)
    except (TypeError, AttributeError):
        return None
    return key


class Repeated:
    """A call as it was made before.

    Args:
        call: as it was made on the ordinary path; ``number`` holds.
        shape: of the array that receives the result; None: there is none, or it is ``x``.
        in_place: whether ``x`` receives the result.
        make: makes what travels of ``x`` and of the array that receives the result; or the parts that are copied from
            the one to the other.

    Attributes:
        placeholder: names it while it runs.
        signature, batch: as of ``PendingCall``.
        again: for ``sync``: what makes it again while it is the latest call; None: it is not known, or nothing does.
    """

    def __init__(
        self,
        call: PendingCall,
        shape: tuple[int, ...] | None,
        in_place: bool,
        make: Callable[[Any, Any], Any] | Parts,
    ) -> None:
        self.placeholder, self.signature = PendingCall(call.key, title=call.title), call.signature
        self.batch = call.batch
        self.again: LatestSum | None = None
        self.shape, self.in_place, self._make = shape, in_place, make

    def target(self, x: Any, out: Any) -> Any:
        """What the caller gets of a call with arrays of another library; None: nothing that is not in ``x``."""
        if out is None:
            return None if self.in_place or self.shape is None else empty_like(x, self.shape)
        return out if type(out) is type(x) and out.dtype == x.dtype else NotImplemented

    def ready(self, x: np.ndarray, out: Any) -> tuple[Any, Any]:
        """What receives the result, None if nothing does, ``NotImplemented`` if the arrays do not fit; what travels."""
        result, make = self._result(x, out), self._make
        if result is NotImplemented:
            return result, None
        if not isinstance(make, Parts):
            fits = out is None or not np.may_share_memory(x, out)
            return (result, make(x, result)) if fits else (NotImplemented, None)
        source = begin_of(x) if x.size else 0
        target = source if result is x else begin_of(result) if result is not None and result.size else 0
        if out is not None and source < target + out.nbytes and target < source + x.nbytes:
            return NotImplemented, None
        return result, Copying(x, result, make, (source, target))

    def _result(self, x: np.ndarray, out: Any) -> Any:
        """The array that receives the result, None if there is none; ``NotImplemented`` if the arrays do not fit."""
        if x.flags.num & PLAIN != PLAIN:
            return NotImplemented
        if out is None:
            if self.in_place:
                return x if x.flags.num & WRITABLE else NotImplemented
            return None if self.shape is None else np.empty(self.shape, x.dtype)
        wanted = x.shape if self.in_place else self.shape
        fits = type(out) is np.ndarray and out.shape == wanted and out.dtype == x.dtype and out is not x
        if not fits or out.flags.num & (PLAIN | WRITABLE) != PLAIN | WRITABLE:
            return NotImplemented
        return out


class RepeatedCalls:
    """The calls that a rank has made.

    Args:
        moves_data: whether compiled calls move the data of all collectives.

    Attributes:
        known: them, by ``key_of``.
    """

    def __init__(self, moves_data: bool) -> None:
        self._moves_data = moves_data
        self.known: dict[tuple[Any, ...], Repeated] = {}

    def forget(self) -> None:
        """Other options decide from now on what is done with arrays."""
        self.known.clear()

    def remember(self, key: tuple[Any, ...], call: PendingCall, result: Any, reads: bool) -> None:
        """A call has ended well.

        Args:
            result: what was returned.
            reads: whether this rank has a use for a sum.
        """
        kind = call.key[0]
        in_place = kind in IN_PLACE
        make = _maker(call, reads, self._moves_data)
        if make is None or call.number is None:
            return
        if len(self.known) >= _KNOWN:
            self.known.clear()
        shape = None if in_place or result is None else tuple(result.shape)
        self.known[key] = Repeated(call, shape, in_place, make)


def _maker(call: PendingCall, reads: bool, moves_data: bool) -> Callable[[Any, Any], Any] | Parts | None:
    """As ``make`` of ``Repeated``, for other arrays than those of a call; refers to none of them."""
    if call.exchange is None:
        spec = call.batch.specs[0] if call.batch is not None and len(call.batch.specs) == 1 else None
        if spec is None or spec.device != "cpu" or call.key[0] not in ("allreduce", "reduce", "sync"):
            return None
        items = call.batch.items if call.batch is not None else ()
        if len(items) != 1 or items[0].compressor is not None:  # none: the array is empty
            return None
        bits = stored(str(spec.dtype))
        return lambda x, result: Summing(result.ravel().view(bits), reads)
    moves, over = call.exchange.moves, call.exchange.over
    if moves is not None and over is not None and (call.exchange.follows or not moves_data):
        nothing, in_place = np.empty(0, np.uint8), call.key[0] in IN_PLACE
        early, sizes = call.exchange.early, call.exchange.sizes
        return lambda x, result: Agreeing(
            over(result if in_place else x, nothing if result is None else result), early, sizes
        )
    if isinstance(moves, Copying):
        return moves.parts
    if isinstance(moves, Combining):
        combining, number = moves.over, moves.x.dtype
        return lambda x, result: combining(result.ravel().view(number))
    if isinstance(moves, Scattering):
        over_arrays, kind = moves.over, moves.x.dtype
        return lambda x, result: over_arrays(x.ravel().view(kind), result.ravel().view(kind))
    return None
