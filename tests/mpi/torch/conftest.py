"""With ``--torch-device cuda``, tensors are made on a GPU of each rank, or on one that they share."""

from __future__ import annotations

import pytest
from mpi4py import MPI


@pytest.fixture(autouse=True, scope="module")
def torch_device(request):
    """Where tensors are made that name no device."""
    wanted = request.config.getoption("torch_device")
    if wanted is None:
        yield None
        return
    torch = pytest.importorskip("torch")
    if wanted == "cuda":
        torch.cuda.set_device(MPI.COMM_WORLD.rank % torch.cuda.device_count())
    torch.set_default_device(wanted)
    yield wanted
    torch.set_default_device(None)
