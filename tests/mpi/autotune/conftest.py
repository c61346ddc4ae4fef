"""What the tests of plans that sessions make for themselves need."""

from __future__ import annotations

import pytest
from mpi4py import MPI

from espresso_mpi.autotune import first_steps
from espresso_mpi.cli.warmup import compile_planner


@pytest.fixture(scope="session", autouse=True)
def _compiled_planner():
    """Within the usual budget, sessions ask the model for plans only if its kernels are compiled."""
    if MPI.COMM_WORLD.rank == 0:
        compile_planner()
    MPI.COMM_WORLD.Barrier()


@pytest.fixture(autouse=True)
def _no_slow_network(monkeypatch):
    """Sessions measure the network, but do not find it slow, which it may be by chance where ranks share cores."""
    measured = first_steps._network_and_codec
    monkeypatch.setattr(first_steps, "_network_and_codec", lambda *given: (0.0, measured(*given)[1]))
