"""States of sessions on GPU arrays: resharded arrays are split on the GPU as on the host, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from async_gpu import AsyncGpu, Caller
from gpu_arrays import foreign_memory, values
from mpi4py import MPI

__all__ = ["foreign_memory"]

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]

N = 200


@pytest.mark.skipif(MPI.COMM_WORLD.size < 2, reason="needs 2 ranks")
@pytest.mark.parametrize(
    "compressor, options",
    [
        ("onebit", {"route": "flat-allgather"}),
        ("topk:ratio=0.1", {"route": "flat-allgather", "feedback": "ef21"}),
        ("dgc:ratio=0.1", {"route": "flat-allgather"}),
        ("onebit", {"min_bytes": 1 << 20}),  # dense from now on: the residual is added once
    ],
    ids=str,
)
def test_a_state_carried_over_gives_the_same_bits_on_gpu_arrays(world, open_session, monkeypatch, compressor, options):
    caller = Caller(AsyncGpu(monkeypatch), 7)
    route = "flat-alltoall" if "route" in options else None
    old = open_session(compressor=compressor, **{**options, "min_bytes": 0, "route": route})
    for step in range(2):
        old.sync(values(world.rank, step, N, np.float32))
    host, gpu = (open_session(compressor=compressor, **options) for _ in range(2))
    for session in (host, gpu):
        session.load_state_dict(old.state_dict())
    for step in range(2, 4):
        expected = values(world.rank, step, N, np.float32)
        grad = caller.gradient(expected.copy())
        host.sync(expected)
        gpu.sync(grad)
        assert np.array_equal(grad.host, expected)
    ours, theirs = host.state_dict()["arrays"], gpu.state_dict()["arrays"]
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(theirs[key], value) for key, value in ours.items())
