"""Samples of gradients on a GPU, which plan="auto" judges compressors by."""

from __future__ import annotations

import numpy as np
from gpu_arrays import foreign_memory  # noqa: F401
from numba import cuda

from espresso_mpi.arrays.buffers import adopt_gradient
from espresso_mpi.autotune import samples


def test_samples_of_gpu_gradients_are_those_of_the_same_values_on_the_host(monkeypatch):
    for name, value in (("SAMPLED", 60), ("LEAST", 1), ("SHORTEST", 7)):
        monkeypatch.setattr(samples, name, value)
    here, there = samples.Samples(), samples.Samples()
    for step in range(2):
        values = {"w": np.arange(200, dtype=np.float32) + step, "b": np.full(5, step, np.float16)}
        here.take([adopt_gradient(name, value) for name, value in values.items()])
        there.take([adopt_gradient(name, cuda.to_device(value)) for name, value in values.items()])
        here.end_step()
        there.end_step()
    for name, size in (("w", 200), ("b", 5)):
        assert np.array_equal(here.of(name, size), there.of(name, size)) and here.of(name, size).size
