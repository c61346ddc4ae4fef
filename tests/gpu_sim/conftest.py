"""The GPU path of a session where there is no GPU: numba's simulator runs the kernels, host memory plays the GPU's."""

import cuda_simulator  # chooses the simulator, before numba is imported
import pytest
from rank_outcomes import *  # noqa: F403

from espresso_mpi.engine import payload_buckets

cuda_simulator.install()


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch):
    """A simulated kernel takes some milliseconds for a thousand elements."""
    monkeypatch.setattr(payload_buckets, "_LARGE", 1 << 8)
