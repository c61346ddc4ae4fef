"""The processor time of encodes and decodes alone, beside which that of a synchronisation is put."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from ... import compressors
from ...autotune.profiling.inputs import job_of, normal
from ...collectives.executor import Program
from ...collectives.messages.transport import Transport
from ...collectives.program import MoveStep
from ...collectives.progress import at_once
from ...options import Options
from ...session import Session
from ...tracing.recording import Recorder
from ...types import Strategy, TensorSpec

_PASSES = 5

_FEW = 64
"""Elements of a tensor whose encodes and decodes are little but the calls."""


def kernel_seconds(comm: Any, session: Session, arrays: Mapping[str, np.ndarray]) -> float:
    """Seconds of processor time, of all ranks together, that the kernels of one ``sync`` take. Collective.

    Each encode and decode runs by itself, in the order and with the sizes of the session's routes. What the same call
    takes with a few elements counts as the call's, and is left out; so are copies and sums on the way.
    """
    counts = Counter(TensorSpec("x", x.shape, "float32") for x in arrays.values())
    strategies = {spec: session.strategy(spec) for spec in counts}
    compressed = {spec: strategy for spec, strategy in strategies.items() if strategy.route.compressed}
    transport = Transport.open(comm, Options().transport(), lambda notes: None)
    try:
        calls = {strategy: _seconds(transport, strategy, (_FEW,)) for strategy in dict.fromkeys(compressed.values())}
        found = sum(
            counts[spec] * max(_seconds(transport, strategy, spec.shape) - calls[strategy], 0.0)
            for spec, strategy in compressed.items()
        )
    finally:
        transport.close()
    return float(comm.allreduce(found))


def _seconds(transport: Transport, strategy: Strategy, shape: tuple[int, ...]) -> float:
    """What all encodes and decodes of a tensor take on this rank, the median of several passes after a first one."""
    n = int(np.prod(shape))
    method = compressors.get(strategy.compressor).at(None).shaped(shape)
    program = Program(transport, strategy.route, method, n, "float32")
    source, job, times = normal(n, transport.rank), job_of(method, n), []
    x = source.copy()
    for _ in range(1 + _PASSES):
        x[:] = source
        times.append(_one_pass(program, x, job))
    return float(np.median(times[1:]))


def _one_pass(program: Program, x: np.ndarray, job: Any) -> float:
    found = 0.0
    for stage in program.stages(0, x, job, Recorder()):
        start = time.process_time()
        at_once(stage.progress())
        if not isinstance(stage.step, MoveStep):
            found += time.process_time() - start
    return found
