"""The profiler on a simulated device: what kernels and copies take there counts, and not what the host takes."""

from __future__ import annotations

import pytest
from async_gpu import AsyncGpu
from gpu_arrays import foreign_memory  # noqa: F401

from espresso_mpi.autotune.profiling.codecs import Codecs
from espresso_mpi.autotune.profiling.repeating import Repeating
from espresso_mpi.autotune.profiling.request import Request
from espresso_mpi.collectives.messages.transport import Transport, TransportSettings
from espresso_mpi.compressors import get

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(120)]

LASTS = 70.0
"""Seconds of an operation on the device: far longer than the host takes to simulate it."""


def test_operations_are_priced_by_the_clock_of_the_device(world, monkeypatch):
    gpu, sizes = AsyncGpu(monkeypatch), (64, 130)
    gpu.lasts = LASTS
    transport = Transport.open(world, TransportSettings(timeout=60.0, window_bytes=0), lambda notes: None)
    repeating = Repeating(transport, 100.0, lambda share: None)
    codecs = Codecs(repeating, Request({"onebit": get("onebit")}, (256,), sizes, 100.0, ("cpu", "gpu")))
    codecs.warm_up()
    found, copies = codecs.codecs(), codecs.copies()
    for n in sizes:
        # The ranks do not begin at the same time on the host's clock, which tells when each of them began.
        assert found["onebit", "gpu", "encode"](n) == pytest.approx(LASTS, rel=0.02)
        assert found["onebit", "gpu", "decode"](n) in [pytest.approx(k * LASTS / 2, rel=0.02) for k in (2, 3)]
        assert found["onebit", "cpu", "encode"](n) < 1
    assert copies["to_host"](256) == pytest.approx(LASTS, rel=0.02) == copies["to_gpu"](256)
    checks = codecs.checks()
    # A search of eight arrays clears their counts, counts eight times, and copies the counts out.
    each = (8 + 2) / 8 * LASTS
    assert all(checks["gpu"](4 * n) == pytest.approx(each, rel=0.02) and checks["cpu"](4 * n) < 1 for n in sizes)
    encode, decode = codecs.queueing["onebit"]
    assert 0 < encode < 1 and 0 < decode < 1
    transport.close()
