"""The CUDA kernels, run by numba's simulator, write what the CPU kernels write."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from espresso_mpi.compressors import Compressor, get, names

SIMULATOR = Path(__file__).parents[2] / "cuda_simulator.py"


@pytest.fixture(scope="module")
def runs(request):
    """What the simulator says of everything that is selected, each in a process of its own, one on every core.

    In processes because the simulator has to be chosen before numba is imported.
    """
    wanted = [item.callspec.params["what"] for item in request.session.items if "runs" in item.fixturenames]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {what: pool.submit(_run, what) for what in wanted}
        pool.shutdown(cancel_futures=True)


def _run(what):
    command = [sys.executable, str(SIMULATOR), what]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("what", [*names(), "collectives"])
def test_same_bytes_as_the_cpu(what, runs):
    run = runs[what].result()
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("name", names(installed=False))
def test_every_method_has_gpu_kernels(name):
    """The base class can go through host memory; that is for methods of users and other packages."""
    cls = type(get(name))
    wanted = ["_encode_cuda", "_decode_cuda"]
    if cls._summarise_cpu is not Compressor._summarise_cpu:
        wanted.append("_summarise_cuda")
    missing = [method for method in wanted if getattr(cls, method) is getattr(Compressor, method)]
    assert not missing, f"{name} does not override {' and '.join(missing)}"
