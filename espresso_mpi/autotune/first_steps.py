"""How the steps travel that are watched: dense, or compressed if the network is slow."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numba import cuda

from .. import compressors
from ..collectives.executor import Program
from ..collectives.job import Job
from ..collectives.messages.agreement import floats
from ..collectives.messages.transport import Transport
from ..collectives.messages.uncounted import uncounted
from ..collectives.progress import interleave
from ..compressors import Compressor
from ..feedback import NO_FEEDBACK
from ..options import Options, default_route
from ..tracing.recording import Recorder
from ..tuning import Tuning
from ..types import Plan, Route, TensorSpec
from . import autoplan
from .clock import StepClock

_LOG = logging.getLogger("espresso_mpi")

_WAITED = 0.05
"""The share of the least budget that dense steps may wait for messages while they are watched."""

_CLEARLY = 256.0
"""A network is slow if uncompressed sums take so many times as long as to compress and restore as many bytes. By less,
one dense step costs little. And ranks of one machine that share cores are up to 80 times as long (4 of MPICH on two
cores): no network has to be slow for that."""

_ENOUGH = 0.05
"""Seconds of a sum that show the rate of a network: longer than ranks wait for a core in each of several sums."""

_LATENCY, _SIZES = 64, tuple(1 << power for power in (14, 16, 18, 20))
"""Elements of these sums; 64 KiB to 4 MiB. What two of them differ by has no latency, nor the burst that token buckets
of virtual machines let pass."""

_REPEATS = 3
"""Measurements of which the least counts: other work makes them longer, and nothing makes them shorter."""


class FirstSteps:
    """Decides how the watched steps travel. Methods are collective.

    What is watched are gradients, and when they are ready. Both are the same whatever travels.

    Args:
        options: those of now; adopt: goes on by a plan, or without one, on all ranks.

    Attributes:
        slow: whether the network was found to be slow before the first step.
        waited: seconds that the first step waited for messages, if the others are compressed; else 0.
        dense: the same if it had been dense; shrinks: bytes of the tensors over those of their payloads.
    """

    def __init__(
        self, transport: Transport, tuning: Tuning, options: Callable[[], Options],
        adopt: Callable[[Plan | None], None],
    ) -> None:  # fmt: skip
        self._transport, self._tuning, self._options, self._adopt = transport, tuning, options, adopt
        self._seconds_per_byte = 0.0
        self.waited, self.dense, self.shrinks = 0.0, 0.0, 1.0
        self.slow = self._begun = self._ended = False

    def open(self) -> None:
        """Measure the network, and compress already the first step if it is slow.

        Ranks of one node are not on a network. Where a rank has a GPU, tensors may be there, and these travel dense.
        """
        plan = self._before_tensors() if len(self._transport.topology.nodes) > 1 else None
        gpus = floats(self._transport, float(plan is None or cuda.is_available()))
        if plan is None or plan.default is None or gpus.any():
            return
        method = compressors.get(plan.default.compressor)
        with uncounted(self._transport):
            self._seconds_per_byte, codec = _network_and_codec(self._transport, method)
        self.slow = self._begun = self._seconds_per_byte > _CLEARLY * codec
        if self.slow:
            self._adopt(plan)
            if self._transport.rank == 0:
                rate, name = 1e-6 / self._seconds_per_byte, plan.default.compressor
                _LOG.info("the network sums %.3g MB/s: the first steps, which are watched, travel by %s", rate, name)

    def undo(self) -> bool:
        """Send the first step dense after all, if it has not ended. Returns whether that is a change."""
        begun = self._begun and not self._ended
        self._begun = self._begun and self._ended
        if begun:
            self._adopt(None)
        return begun

    def ended(self, clock: StepClock) -> None:
        """The first step has ended: compress the others if dense ones would wait long for messages, and only then.

        The rank that came last waited for messages alone, if its gradients are not computed by a GPU meanwhile.
        """
        waited = float(floats(self._transport, clock.wait).min())
        dense = self._seconds_per_byte * sum(spec.nbytes for spec in clock.specs) if self._begun else waited
        dense = float(floats(self._transport, dense).min())
        to_come = max(1, self._tuning.skip) - 1 + self._tuning.steps
        if dense * to_come < _WAITED * self._tuning.budget_for(0.0):
            self.undo()
            return
        way = self._way(clock.specs, clock.pushed)
        digests = floats(self._transport, 0.0 if way is None else float(int(way.plan.digest[:12], 16)))
        if way is None or digests.min() != digests.max():  # a call may have failed on one rank
            self.undo()
            return
        self.waited, self.dense, self.shrinks, self._ended = waited, dense, way.shrinks, True
        self._adopt(way.plan)

    def costs(self, usual: float, computing: float) -> tuple[float, float]:
        """What the first step waited beyond preparing kernels, and what a dense one would, at most, in seconds.

        Args:
            usual: seconds of the compressed steps, and ``computing`` of them.
        """
        exposed = usual - computing
        dense = min(self.dense, self.shrinks * exposed)
        return (min(self.waited, exposed) if self._begun else dense), dense

    def _before_tensors(self) -> Plan | None:
        """A plan for any tensors on CPUs, by the compressor of ``accurate_way``; None if no compressor is allowed."""
        way = self._way([TensorSpec("any", (_SIZES[-1],), "float32")], pushed=False)
        return None if way is None else Plan(default=way.plan.strategy("any"))

    def _way(self, specs: Sequence[TensorSpec], pushed: bool) -> autoplan.AccurateWay | None:
        without = replace(self._options(), plan=None)
        return autoplan.accurate_way(self._transport.topology, without, self._tuning, specs, pushed)


def _network_and_codec(transport: Transport, method: Compressor) -> tuple[float, float]:
    """Seconds per byte of an uncompressed sum over all ranks, and of encoding and decoding. Collective; agreed."""
    codec = float(floats(transport, _codec_seconds(method, _SIZES[-2])).max()) / (4 * _SIZES[-2])
    per_byte, n_before, before = 0.0, 0, 0.0
    for n in (_LATENCY, *_SIZES):
        seconds = _sum_seconds(transport, n)
        per_byte = (seconds - before) / (4 * (n - n_before))
        if seconds >= _ENOUGH and n > _LATENCY:
            break
        n_before, before = n, seconds
    return per_byte, codec


def _sum_seconds(transport: Transport, n: int) -> float:
    """Of an uncompressed sum on the slowest rank, the least of several. Collective."""
    route = Route.parse(default_route(transport.topology, compressed=False))
    x, program = np.zeros(n, np.float32), Program(transport, route, None, n, "float32")
    job, recorder, times = Job("measuring", {}, NO_FEEDBACK, seed=0, step=0), Recorder(), list[float]()
    while len(times) < _REPEATS:
        floats(transport, 0.0)  # the ranks begin together
        start = time.perf_counter()
        interleave([program.segment(0, x, job, recorder)])
        times.append(float(floats(transport, time.perf_counter() - start).max()))
    return min(times)


def _codec_seconds(method: Compressor, n: int) -> float:
    """Of an encode and a decode, the least of several; before them, kernels are loaded."""
    x, out, payload = np.ones(n, np.float32), np.empty(n, np.float32), np.empty(method.nbytes(n), np.uint8)
    times = []
    for _ in range(1 + _REPEATS):
        start = time.perf_counter()
        method.encode(x, payload)
        method.decode(payload, out)
        times.append(time.perf_counter() - start)
    return min(times[1:])
