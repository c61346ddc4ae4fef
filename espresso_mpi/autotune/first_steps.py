"""How the steps travel that are watched: dense, or compressed if the network is slow."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from .. import compressors
from ..collectives.executor import Program
from ..collectives.messages.agreement import floats
from ..collectives.messages.transport import Transport
from ..collectives.messages.uncounted import uncounted
from ..compressors import Compressor
from ..engine.measured_limits import seconds_of
from ..options import Options, default_route
from ..tuning import Tuning
from ..types import Plan, Route, Strategy, TensorSpec
from . import autoplan
from .clock import StepClock
from .profiling.request import devices_of_rank

_LOG = logging.getLogger("espresso_mpi")

_WAITED = 0.05
"""The share of the least budget that dense steps may wait for messages while they are watched."""

_KNOWN = 0.02
"""The same if the network was measured: the first step may have waited for other things, too."""

_CLEARLY = 256.0
"""A network is slow if uncompressed sums take so many times as long as to compress and restore as many bytes. By less,
one dense step costs little. And where ranks of one machine share cores, their sums take up to 80 times as long (4 ranks
of MPICH on two cores): no network has to be slow for that."""

_ENOUGH = 0.02
"""Seconds of a sum that show the rate of a network: longer than ranks wait for a core in each of several sums."""

_SURE = 1 << 18
"""Elements from which on a sum shows that a network is not slow, if all of it takes half as long as on a slow one: what
disturbs it only makes it longer, and the bursts of token buckets are over."""

_LATENCY, _SIZES = 64, tuple(1 << power for power in (14, 16, 18, 20))
"""Elements of these sums; 64 KiB to 4 MiB. What two of them differ by has no latency, nor the burst that token buckets
of virtual machines let pass."""

_REPEATS, _LONG = 3, 0.1
"""Measurements of which the least counts: other work makes them longer, and nothing makes them shorter. Two are enough
if the first one takes so many seconds: it disturbs long ones little."""


class FirstSteps:
    """Decides how the watched steps travel. Methods are collective.

    What is watched are gradients, and when they are ready. Both are the same whatever travels.

    Args:
        options: those of now; adopt: goes on by a plan, or without one, on all ranks.

    Attributes:
        slow: whether the network was found to be slow before the first step.
        waiting: how the first step is to travel, until it begins; None: it has begun, or is dense.
        measuring: seconds of measurements, without those in which kernels compiled.
        waited: seconds that the first step waited for messages, if the others are compressed; else 0.
        dense: the same if it had been dense; shrinks: bytes of the tensors over those of their payloads.
    """

    def __init__(
        self, transport: Transport, tuning: Tuning, options: Callable[[], Options],
        adopt: Callable[[Plan | None], None],
    ) -> None:  # fmt: skip
        self._transport, self._tuning, self._options, self._adopt = transport, tuning, options, adopt
        self._seconds_per_byte = self.measuring = self.waited = self.dense = 0.0
        self.shrinks = 1.0
        self.waiting: Strategy | None = None
        self.slow = self._compressed = False

    def open(self) -> None:
        """Measure the network, and decide whether to compress the first step.

        Ranks of one node are not on a network. Where a rank has a GPU, tensors may be there, and these travel dense.
        """
        strategy = self._before_tensors() if len(self._transport.topology.nodes) > 1 else None
        if strategy is None or floats(self._transport, float("gpu" in devices_of_rank())).any():
            return
        method = compressors.get(strategy.compressor)
        with uncounted(self._transport):
            _codec_per_byte(method)
            _sum_seconds(self._transport, _LATENCY)  # kernels are compiled: this is no planning
            start = time.perf_counter()
            self._seconds_per_byte, codec = _network_and_codec(self._transport, method)
        self.slow = self._seconds_per_byte > _CLEARLY * codec
        if self.slow:
            self.waiting = strategy
        self.measuring = float(floats(self._transport, time.perf_counter() - start).max())

    def begin(self) -> None:
        """The first step begins: follow its plan, unless that of an earlier run is followed."""
        strategy, self.waiting = self.waiting, None
        if strategy is None or self._options().plan is not None:
            return
        self._compressed = True
        self._adopt(Plan(default=strategy))
        if self._transport.rank == 0:
            rate, name = 1e-6 / self._seconds_per_byte, strategy.compressor
            _LOG.info("the network sums %.3g MB/s: the first steps, which are watched, travel by %s", rate, name)

    def ended(self, clock: StepClock, momenta: bool) -> None:
        """The first step has ended: compress the others if dense ones would wait long for messages, and only then.

        How long is known by the measured rate if the first step was compressed. Else it is what the first step waited,
        or what it should have waited by this rate, if that is less: it may have waited while kernels compiled.
        Momenta, which change slowly, travel by ``int4`` if it is allowed: it loses less than what they may travel by.
        The rank that came last waited for messages alone, if its gradients are not computed by a GPU meanwhile.
        """
        waited = float(floats(self._transport, clock.wait).min())
        dense, limit = waited, _WAITED
        if self._seconds_per_byte:
            by_rate, limit = self._seconds_per_byte * sum(spec.nbytes for spec in clock.specs), _KNOWN
            dense = by_rate if self._compressed else min(waited, by_rate)
        dense = float(floats(self._transport, dense).min())
        to_come = max(1, self._tuning.skip) - 1 + self._tuning.steps
        way = None
        if dense * to_come >= limit * self._tuning.budget_for(0.0):
            way = self._way(clock.specs, clock.pushed, momenta)
        digests = floats(self._transport, 0.0 if way is None else float(int(way.plan.digest[:12], 16)))
        if way is not None and digests.min() == digests.max():  # a call may have failed on one rank
            self.waited, self.dense, self.shrinks = waited, dense, way.shrinks
            self._adopt(way.plan)
        elif self._compressed:
            self._compressed = False
            self._adopt(None)

    def costs(self, usual: float, computing: float) -> tuple[float, float]:
        """What the first step waited beyond preparing kernels, and what a dense one would, at most, in seconds.

        Args:
            usual: seconds of the compressed steps, and ``computing`` of them.
        """
        exposed = usual - computing
        dense = min(self.dense, self.shrinks * exposed)
        return (min(self.waited, exposed) if self._compressed else dense), dense

    def _before_tensors(self) -> Strategy | None:
        """A strategy for any tensors on CPUs, by the compressor of ``accurate_way``.

        None if no compressor is allowed, or if such tensors are small for ``min_bytes``.
        """
        way = self._way([TensorSpec("any", (_SIZES[-1],), "float32")], pushed=False, momenta=False)
        strategy = None if way is None else way.plan.strategy("any")
        return None if strategy is None or strategy.compressor == "none" else strategy

    def _way(self, specs: Sequence[TensorSpec], pushed: bool, momenta: bool) -> autoplan.AccurateWay | None:
        without = replace(self._options(), plan=None)
        return autoplan.accurate_way(self._transport.topology, without, self._tuning, specs, pushed, momenta)


def _network_and_codec(transport: Transport, method: Compressor) -> tuple[float, float]:
    """Seconds per byte of an uncompressed sum over all ranks, and of encoding and decoding. Collective; agreed."""
    codec = float(floats(transport, _codec_per_byte(method)).max())
    latency = _sum_seconds(transport, _LATENCY)
    per_byte, n_before, before = 0.0, _LATENCY, latency
    for n in _SIZES:
        seconds = _sum_seconds(transport, n)
        per_byte = max(0.0, seconds - before) / (4 * (n - n_before))
        shown = seconds - latency >= _ENOUGH and n > _SIZES[0]
        if shown or (n >= _SURE and 2 * seconds <= _CLEARLY * codec * 4 * n):
            break
        n_before, before = n, seconds
    return per_byte, codec


def _sum_seconds(transport: Transport, n: int) -> float:
    """Of an uncompressed sum on the slowest rank, the least of several. Collective."""
    route = Route.parse(default_route(transport.topology, compressed=False))
    x, program, times = np.zeros(n, np.float32), Program(transport, route, None, n, "float32"), list[float]()
    while len(times) < (2 if sum(times) >= _LONG else _REPEATS):
        floats(transport, 0.0)  # the ranks begin together
        times.append(float(floats(transport, seconds_of(program, [x])).max()))
    return min(times)


def _codec_per_byte(method: Compressor) -> float:
    """Seconds of an encode and a decode, the least of several: in the first one, kernels may be loaded."""
    n = _SIZES[-2]
    x, out, payload = np.ones(n, np.float32), np.empty(n, np.float32), np.empty(method.nbytes(n), np.uint8)
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        method.encode(x, payload)
        method.decode(payload, out)
        times.append(time.perf_counter() - start)
    return min(times) / x.nbytes
