"""Turns the arguments of callers into pending calls: adopts arrays, claims their memory, finds their strategies."""

from __future__ import annotations

import logging
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..arrays import buffers, device
from ..arrays.any_dtype import adopt_any
from ..arrays.buffers import Gradient
from ..collectives.data.layout import Topology
from ..errors import ConfigError, EspressoError, GradientError
from ..options import Options
from ..types import TensorSpec
from . import guard
from .batches import Batch, Batches, batch_of
from .calls import Exchange, PendingCall
from .diagnostics import CallKey

_LOG = logging.getLogger("espresso_mpi")

Named = Sequence[tuple[str, Any]]
"""The names and arrays of a call, as the caller gave them."""

Flat = Callable[[], Named]
"""Returns those of a call; may raise."""

Noted = Callable[[CallKey, Named | None, "Sequence[Gradient] | None"], None]
"""Called with each call, its arrays and its tensors before they are sent; None: it failed on this rank before these are
known."""


class _Taken(NamedTuple):
    """What a call takes: arrays, claimed memory, their GPU, when it has passed what is queued, or why it cannot."""

    gradients: list[Gradient]
    claimed: guard.Spans
    gpu: int | None
    arrival: device.Arrival | None
    problem: EspressoError | None


class Intake:
    """Makes pending calls; holds the claimed memory of callers, and what is known about their tensors.

    Args:
        prepared: called with every batch of ``sync`` and ``push`` once, when it is prepared.

    Attributes:
        batches: cache of the prepared batches.
        claims: the claimed memory.
    """

    def __init__(self, topology: Topology, prepared: Callable[[Batch], None] = lambda batch: None) -> None:
        self._topology, self._prepared = topology, prepared
        self.batches = Batches()
        self.claims, self._copies, self._lost = guard.Claims(), False, False
        self._gpu: int | None = None

    def pending_call(
        self,
        key: CallKey,
        given: Any,
        flat: Flat,
        title: str,
        priority: float | None,
        options: Callable[[], Options],
        noted: Noted,
    ) -> PendingCall:
        """A pending call over the caller's memory; an error is stored until all ranks know of it."""
        batch, order, arrays = None, 0.0, None

        def adopt() -> list[Gradient]:
            nonlocal order, arrays
            arrays = flat()
            order = 0.0 if priority is None else _checked_priority(priority)
            return [buffers.adopt_gradient(name, value) for name, value in arrays]

        gradients, claimed, gpu, arrival, problem = self._taken(adopt, title, "grads: cannot be read")
        try:
            noted(key, arrays, gradients if problem is None else None)
        except BaseException:  # there will be no call to wait for
            self.claims.drop(claimed)
            raise
        now = options()  # the end of a step may have changed them
        if problem is None:
            batch, problem = self._settled(key, tuple([gradient.spec for gradient in gradients]), now)
        if problem is not None:
            self.claims.drop(claimed)
            return PendingCall(key, given, gradients, batch, problem, order, title=title, gpu=gpu, arrival=arrival)
        self._tell_of_copies(gradients)
        watch = guard.Watch(title, gradients, claimed, now.debug)
        return PendingCall(
            key, given, gradients, batch, None, order, title=title, gpu=gpu, arrival=arrival, watch=watch
        )  # fmt: skip

    def renew(self, call: PendingCall, options: Options) -> None:
        """Prepare a call of gradients that has not begun for other options."""
        if call.batch is not None and call.problem is None:
            call.renew(*self._settled(call.key, call.batch.specs, options))

    def collective(
        self,
        key: CallKey,
        take: Callable[[], tuple[Mapping[str, Any], Any]],
        title: str,
        make: Callable[[Sequence[Gradient]], Batch | Exchange],
        debug: bool,
        guarded: bool,
    ) -> PendingCall:
        """A pending call of a collective; an error is stored until all ranks know of it.

        Args:
            take: returns the arrays by name, of any element type, and what the call returns: one of them or None.
                May raise.
            make: decides what is done with them.
            guarded: claim their memory, and find out whether the caller changes it meanwhile.
        """
        arrays: Mapping[str, Any] = {}
        given, made = None, None

        def adopt() -> list[Gradient]:
            nonlocal arrays, given
            arrays, given = take()
            return [adopt_any(name, value, written=value is given) for name, value in arrays.items()]

        def prepare(gradients: Sequence[Gradient]) -> None:
            nonlocal made
            made = make(gradients)

        taken = self._taken(adopt, title, f"{title}: cannot be done", prepare, guarded)
        gradients, claimed, gpu, arrival, problem = taken
        batch, exchange = (made, None) if isinstance(made, Batch) else (None, made)
        result = [g for g, value in zip(gradients, arrays.values()) if value is given]
        if batch is not None:  # what it reads comes after what it writes, and is never written back
            others = [g for g, value in zip(gradients, arrays.values()) if value is not given]
            result += [g._replace(rebuild=None, source=None, write_back=None, owner=g.array) for g in others]
        watch = guard.Watch(title, gradients, claimed, debug) if guarded and problem is None else None
        return PendingCall(
            key, given, result, batch, problem, title=title, gpu=gpu, arrival=arrival, watch=watch, exchange=exchange
        )  # fmt: skip

    def release(self, call: PendingCall, read: bool = True) -> EspressoError | None:
        """Release the memory of a finished call, and check that the caller has not changed it before.

        Args:
            call: the call.
            read: whether the result is returned to the caller.

        Returns:
            The error if a tensor was changed; it also becomes the error of the call. Else None.
        """
        if call.watch is None:
            return None
        changed = None
        with self.claims.lock:  # several threads may wait for one call
            watch = call.watch
            if watch is None:
                return None
            self.claims.drop(watch.spans)
            if call.error is None:
                try:
                    watch.require_untouched()
                except GradientError as error:
                    call.error = changed = error
            lost = None if read or call.error is not None else watch.lost(call)
            call.watch = None
        if lost is not None and not self._lost:
            self._lost = True
            _LOG.warning("%s", lost)
        return changed

    def _taken(
        self,
        adopt: Callable[[], list[Gradient]],
        title: str,
        unreadable: str,
        prepare: Callable[[Sequence[Gradient]], None] | None = None,
        guarded: bool = True,
    ) -> _Taken:
        """Adopt the arrays of a caller, and claim their memory if they are ``guarded``.

        Args:
            adopt: may raise anything, for an array may be foreign.
            unreadable: how the text of an error begins that is none of this package's.
            prepare: called with the arrays before their memory is claimed; may raise as well.
        """
        gradients = list[Gradient]()
        gpu, arrival = None, None
        try:
            gradients = adopt()
            spans = guard.spans(gradients, title) if guarded else ()
            gpu, arrival = self._queued_before(gradients)
            if prepare is not None:
                prepare(gradients)
            self.claims.claim(spans)
        except EspressoError as error:
            return _Taken(gradients, (), gpu, arrival, error)
        except Exception as error:
            problem = GradientError(f"{unreadable}: {type(error).__name__}: {error}")
            return _Taken(gradients, (), gpu, arrival, problem)
        return _Taken(gradients, spans, gpu, arrival, None)

    def _queued_before(self, gradients: Sequence[Gradient]) -> tuple[int | None, device.Arrival | None]:
        """The GPU of a call, and when it will have passed what the caller has queued so far."""
        streams = buffers.streams_of(gradients)
        if not streams:
            return None, None
        self._gpu = _checked_gpu(device.current_gpu(), self._gpu)
        return self._gpu, device.Arrival(streams)

    def _tell_of_copies(self, gradients: Sequence[Gradient]) -> None:
        if self._copies:
            return
        for gradient in gradients:
            if gradient.source is not None:
                self._copies, name = True, gradient.spec.name
                _LOG.info("%s: its memory is strided, so it travels as a copy, as others may (said once)", name)
                return

    def _settled(
        self, key: CallKey, specs: tuple[TensorSpec, ...], options: Options
    ) -> tuple[Batch | None, EspressoError | None]:
        """The batch of a call, or the error why there is none."""
        try:
            return self.batches.find(key, specs, lambda new: self._new_batch(new, options, key[0] == "sync")), None
        except EspressoError as error:
            return None, error
        except Exception as error:  # a compressor of the user's own may raise anything
            return None, GradientError(f"grads: cannot be synchronised: {type(error).__name__}: {error}")

    def _new_batch(self, specs: tuple[TensorSpec, ...], options: Options, alone: bool) -> Batch:
        batch = batch_of(specs, options, self._topology, alone)
        self._prepared(batch)
        return batch


def checked_name(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise GradientError(f"push: the name is {name!r}; expected text, such as 'layer1.weight'")
    return name


def checked_arrays(grads: Any) -> list[tuple[str, Any]]:
    if not isinstance(grads, Mapping) or not grads:
        got = "an empty mapping" if isinstance(grads, Mapping) else f"a {type(grads).__name__}"
        raise GradientError(f"push_together: got {got}; expected arrays by their names, such as {{'layer1.weight': x}}")
    return [(checked_name(name), grad) for name, grad in grads.items()]


def _checked_gpu(number: int, before: int | None) -> int:
    if before not in (None, number):
        raise GradientError(
            f"grads: this process now works on GPU {number}, but on GPU {before} in former calls of this session; open "
            f"a session for each GPU, or go back with numba.cuda.select_device({before})"
        )
    return number


def _checked_priority(priority: Any) -> float:
    try:
        good = isinstance(priority, numbers.Real) and not isinstance(priority, bool) and math.isfinite(priority)
    except OverflowError:  # a whole number beyond all floats
        good = False
    if not good:
        raise ConfigError(f"push: priority={priority!r}; expected a finite number")
    return float(priority)
