"""What the tests of plans that sessions make for themselves need."""

from __future__ import annotations

import pytest
from mpi4py import MPI


@pytest.fixture(scope="session", autouse=True)
def _compiled_planner():
    """Within the usual budget, sessions ask the model for plans only if its kernels are compiled."""
    from espresso_mpi.planner import TESTBEDS, model_workload, plan

    if MPI.COMM_WORLD.rank == 0:
        plan(model_workload("lstm"), TESTBEDS["pcie-25g"].profile(), ["fp16", "int8"])
    MPI.COMM_WORLD.Barrier()
