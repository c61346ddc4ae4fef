"""How a session makes a collective call: the arrays are taken, and what is to be done with them is submitted."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np

from ..arrays.buffers import Gradient
from ..arrays.same_memory import is_torch_tensor, of_any, version_of
from ..engine.batches import Batch
from ..engine.calls import Exchange, PendingCall
from ..engine.dense_piggyback import NOTHING
from ..engine.guard import Alone, changed_error
from ..engine.latest_sum import LatestSum
from ..errors import ConfigError
from ..options import Options
from ..state.store import SyncState
from .base import SessionBase
from .copies import Splits
from .exchanges import Taken
from .handles import Handle
from .known_syncs import KnownSyncs, synced
from .repeated import Repeated, RepeatedCalls, key_of

Plain = tuple[Any, Any, Any] | None
"""Of a dense blocking call: x, out, and what tells it apart from others of its kind and name; None: of others."""


def plainly(x: Any, out: Any, told: Any, blocking: bool, compressor: Any, feedback: Any, route: Any = None) -> Plain:
    """The arguments of a call if it is a dense blocking one."""
    return (x, out, told) if blocking and route is None and compressor == feedback == "none" else None


class Calling(SessionBase):
    """A session that makes collective calls."""

    guards_memory: ClassVar[bool] = True
    """Whether a call claims its arrays until it was waited for; see docs/torch.md."""

    _latest: LatestSum | None = None
    """The latest ``sync``, if it may be made again in the quick way."""

    @cached_property
    def _splits(self) -> Splits:
        return Splits()

    @cached_property
    def _repeated(self) -> RepeatedCalls:
        return RepeatedCalls(moves_data=self.shares_memory)

    @cached_property
    def _repeated_syncs(self) -> KnownSyncs:
        return KnownSyncs()

    @cached_property
    def _barrier(self) -> PendingCall:
        return _barrier()

    def _collective(
        self, kind: str, name: str, take: Callable[[], Taken],
        make: Callable[[Sequence[Gradient]], Batch | Exchange], blocking: bool,
        plain: Plain = None,
    ) -> Any:  # fmt: skip
        """Make a call.

        Args:
            take, make: as of ``Intake.collective``.
            plain: see ``plainly``.
        """
        self._engine.require_usable(blocking)
        self._held.release()
        if plain is not None and not self._options.debug:
            x, out, told = plain
            key = key_of(kind, name, told, x)
            known = None if key is None else self._repeated.known.get(key)
            if known is not None:
                repeat = self._repeat if type(x) is np.ndarray else self._repeat_adopted
                found = repeat(known, x, out, lambda: self._made(kind, name, take, make, False))
                if found is not NotImplemented:
                    return found
            elif key is not None:
                call = self._made(kind, name, take, make, self.guards_memory)
                result = self._wait(self._engine.submit(call))
                reads = kind != "reduce" or bool(told[1] == self._transport.rank)
                self._repeated.remember(key, call, result, reads)
                return result
        if not blocking:
            self._transport.require_threads()
        call = self._made(kind, name, take, make, self.guards_memory)
        if blocking:
            return self._wait(self._engine.submit(call))
        self._engine.submit(call, background=True)
        if self.guards_memory:
            self._pending.add(call)
        return Handle(self, call)

    def _made(
        self, kind: str, name: str, take: Callable[[], Taken],
        make: Callable[[Sequence[Gradient]], Batch | Exchange], guarded: bool,
    ) -> PendingCall:  # fmt: skip
        title = f"{kind}({name!r})" if name else kind
        return self._intake.collective((kind, name), take, title, make, self._options.debug, guarded)

    def _repeat_adopted(self, known: Repeated, x: Any, out: Any, ordinary: Callable[[], PendingCall]) -> Any:
        """As ``_repeat``, for arrays of other libraries than numpy."""
        memory, target = of_any(x), known.target(x, out)
        if memory is None or target is NotImplemented:
            return NotImplemented
        into = None if target is None else of_any(target)
        if target is not None and into is None:
            return NotImplemented
        watched = [value for value in (x, target) if is_torch_tensor(value)] if self.guards_memory else []
        versions = [(read, read()) for read in (version_of(tensor)[0] for tensor in watched) if read is not None]
        found = self._repeat(known, memory, into, ordinary)
        if any(read() != before for read, before in versions):
            changed = changed_error("x", known.placeholder.title, "by another thread")
            self._engine.shutdown(str(changed))
            raise changed
        if found is memory:
            return x
        return target if into is not None and found is into else found

    def _repeat(
        self, known: Repeated, x: Any, out: Any, ordinary: Callable[[], PendingCall],
        allowed: Callable[[Any], bool] | None = None,
    ) -> Any:  # fmt: skip
        """The result of a dense call that is made again; ``NotImplemented``: it must take the ordinary path.

        Args:
            ordinary: makes the call if ranks deviate.
            allowed: whether these data may be piggybacked.
        """
        engine = self._engine
        if engine.unfinished:
            return NotImplemented
        result, moves = known.ready(x, out)
        if result is NotImplemented or (allowed is not None and not allowed(moves)):
            return NotImplemented
        placeholder = known.placeholder

        def make() -> PendingCall | None:
            if known.in_place and out is not None:
                np.copyto(out, x)
            return engine.repeat(known.signature, placeholder, moves, ordinary)

        ended = self._by_itself((x, result), placeholder.title, make)
        if ended is None:
            return NotImplemented
        return result if ended is placeholder else ended.result

    def _by_itself(
        self, arrays: Sequence[Any], title: str, make: Callable[[], PendingCall | None]
    ) -> PendingCall | None:
        """Make a call that is the only one: what has ended; None: it must take another way. Raises its error.

        Args:
            arrays: its memory, which it claims; title: in messages.
            make: returns as ``Engine.repeat``.
        """
        claims, start = self._intake.claims, time.perf_counter()
        memory = Alone(arrays, title) if self.guards_memory else None
        if memory is not None and not claims.claim_alone(memory):
            return None
        try:
            ended = make()
        finally:
            if memory is not None:
                claims.drop(memory)
            self._seconds += time.perf_counter() - start
        if ended is not None and ended.error is not None:
            _raise_error_of(ended)
        return ended

    def _repeat_sync(self, grads: Any, title: str) -> Any:
        """``grads`` synchronised as others like them were before; ``NotImplemented``: take the ordinary path."""
        if self._clock is not None or self._options.debug:
            return NotImplemented
        name, x = _only_array(grads)
        if x is not None:
            found = self._repeat_dense(name, x, grads, title)
            if found is not NotImplemented:
                return found
        known, arrays = self._repeated_syncs.find(grads)
        if known is None:
            return NotImplemented
        self._held.release()
        again, sync = self._engine.sync_again, known.sync
        ended = self._by_itself(arrays, title, lambda: again(sync, arrays, title, lambda: known.call(grads, title)))
        return NotImplemented if ended is None else grads

    def _repeat_dense(self, name: str | None, x: np.ndarray, grads: Any, title: str) -> Any:
        """As ``_repeat_sync``, of one array, if it is dense."""
        self._held.release()
        latest, self._latest = self._latest, None
        if latest is not None and latest.fits(name, x) and self._sum_again(latest, x, title):
            return grads
        known = self._repeated.known.get(("sync", "", name, x.shape, x.dtype))
        if known is None:
            return NotImplemented
        engine, batch, placeholder = self._engine, known.batch, known.placeholder
        assert batch is not None

        def allowed(moves: Any) -> bool:
            placeholder.title = title
            moves.check = engine.value_check(batch)
            return moves.check.pending or engine.nonfinite.finds_nothing(batch, moves.x)

        if self._repeat(known, x, None, partial(synced, x, (x,), batch, title), allowed) is NotImplemented:
            return NotImplemented
        if known.again is None or known.again is latest:  # which could not be made again in that way
            known.again = engine.latest_sum(known.signature, placeholder, batch, name, x)
        self._latest = known.again
        return grads

    def _sum_again(self, latest: LatestSum, x: np.ndarray, title: str) -> bool:
        """Make a sync like the latest one once more; False: it must take another way."""
        again, real = self._engine.sum_again, partial(synced, x, (x,), latest.batch, title)
        ended = self._by_itself((x,), title, lambda: again(latest, x, title, real))
        if ended is latest.placeholder:
            self._latest = latest
        return ended is not None

    def _remember_sync(self, grads: Any, call: PendingCall) -> None:
        """A call of ``sync`` has ended well: others like it may run quicker."""
        self._repeated_syncs.remember(grads, call, self._engine.repeated_sync)
        name, x = _only_array(grads)
        if x is not None and x.size:
            self._repeated.remember(("sync", "", name, x.shape, x.dtype), call, x, True)

    def _follow(self, options: Options, sync_state: SyncState | None = None) -> None:
        super()._follow(options, sync_state)
        self._repeated.forget()
        self._repeated_syncs.forget()
        self._latest = None

    def _repeat_barrier(self) -> bool:
        """A barrier that was made before, while nothing else is under way; False: it must take the ordinary path."""
        engine, placeholder = self._engine, self._barrier
        engine.require_usable(waits=True)
        self._held.release()
        ended = None if engine.busy else engine.repeat(placeholder.signature, placeholder, NOTHING, _barrier)
        if ended is None:
            return False
        _raise_error_of(ended)
        return True

    def _check_root(self, kind: str, root: int) -> None:
        if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < self.topology.size:
            raise ConfigError(f"{kind}: root={root!r}; expected a rank, an int from 0 to {self.topology.size - 1}")


def _raise_error_of(call: PendingCall) -> None:
    error, call.error = call.error, None  # a placeholder is used again
    if error is not None:
        raise error


def _only_array(grads: Any) -> tuple[Any, Any]:
    """The numpy array that is all of ``grads``, alone or in a dict, with its name there; else (None, None)."""
    name = None
    if type(grads) is dict and len(grads) == 1:
        name, grads = next(iter(grads.items()))
        if type(name) is not str:
            return None, None
    return (name, grads) if type(grads) is np.ndarray else (None, None)


def _barrier() -> PendingCall:
    return PendingCall(("barrier", ""), action=lambda: None)
