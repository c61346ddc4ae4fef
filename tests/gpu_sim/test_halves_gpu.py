"""Compressed reduce-scatter and allgather of GPU arrays: the bits of host arrays, also of parts that begin anywhere."""

from __future__ import annotations

import numpy as np
import pytest
from gpu_arrays import GpuArray, foreign_memory, values  # noqa: F401

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]


@pytest.mark.parametrize("route", [None, "encode@gpu/alltoall@flat/decode@cpu/encode@cpu/allgather@flat/decode@gpu"])
def test_gpu_arrays_give_the_bits_of_host_arrays(world, open_session, route):
    host, gpu = open_session(), open_session()
    more = {"compressor": "onebit", "feedback": "plain", "name": "w"}
    for step in range(2):
        x = values(world.rank, step, 37 * world.size, np.float32)
        part = host.reduce_scatter(x, **more)
        whole = host.allgather(part, **more)
        given, found, joined = (GpuArray(array) for array in (x.copy(), np.zeros_like(part), np.zeros_like(whole)))
        assert gpu.reduce_scatter(given, out=found, route=route, **more) is found
        assert gpu.allgather(found, out=joined, route=route, **more) is joined
        assert np.array_equal(found.host, part) and np.array_equal(joined.host, whole) and np.array_equal(given.host, x)
